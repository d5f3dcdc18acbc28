"""The model in Transformers and its adapters in peft: what the engine's vectors and tokens are held against."""
