"""The engine: vLLM with embeddings and generations mixed in every step. Knows nothing of Ray or HTTP routing."""
