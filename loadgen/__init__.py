"""Load against an Orthrus server, or any server that speaks the OpenAI API. HTTP only; never imports orthrus_serve."""
