"""Holds a running server against Transformers and peft, over HTTP, as its clients meet it."""
