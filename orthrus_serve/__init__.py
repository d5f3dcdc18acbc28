"""Orthrus serves text generation and text embedding from one engine per GPU, in the same forward pass.

The embedding model is a LoRA adapter on the generator's backbone. `docs/architecture.md` says which package holds what.
"""

__version__ = "0.1.0"
