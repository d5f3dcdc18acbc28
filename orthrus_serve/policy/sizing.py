"""How much of a model fits on a GPU, and about how fast it computes: arithmetic on shapes, no measurement. Pure.

    weights    = parameters × 2 bytes (bf16)
    KV         = 2 × layers × KV heads × head size × 2 bytes, for each token
    KV tokens  = (memory × utilisation − weights − adapters − workspace) / KV
    tokens/s   = ratio × the card's matrix rate / (2 × parameters of the layers)

Guards: what is assumed is a named constant here. Leaves out quantisation, sliding windows, and all that a run would show.
"""

from dataclasses import dataclass

BYTES_PER_WEIGHT = BYTES_PER_KV_NUMBER = 2  # bf16
# Activations of a step, CUDA graphs, the libraries' own memory. Assumed; vLLM measures it at its start and prints what is left.
WORKSPACE_BYTES = 4 * 10**9
# What of a card's nominal matrix rate a step of embeddings reached on an H200: 551 of 989 TFLOP/s with Mistral-7B shapes.
# docs/benchmarks/2026-11-30-gpu-steps.md
REACHED_RATIO = 551 / 989


@dataclass(frozen=True)
class ModelShape:
    """What a model's `config.json` says of its size. `head_size` is the length of one attention head."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    ties_embeddings: bool

    @property
    def layer_parameters(self) -> int:
        """Weights of all decoder layers: attention and a gated MLP."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_size
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def parameters(self) -> int:
        """All weights, with the input embeddings and, unless it is the same, the output matrix."""
        return self.layer_parameters + self.vocab_size * self.hidden_size * (1 if self.ties_embeddings else 2)

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return self.parameters * BYTES_PER_WEIGHT

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that one token keeps as long as its request runs."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * BYTES_PER_KV_NUMBER

    def adapter_bytes(self, rank: int) -> int:
        """Memory of one LoRA adapter of that rank on all linear layers."""
        heads = (self.num_heads + self.num_kv_heads) * self.head_size
        attention = 2 * (2 * self.hidden_size + heads)
        mlp = 3 * (self.hidden_size + self.intermediate_size)
        return self.num_layers * rank * (attention + mlp) * BYTES_PER_WEIGHT


@dataclass(frozen=True)
class Gpu:
    """A card: its memory, and its dense bf16 matrix rate, both as its vendor states them."""

    name: str
    memory_bytes: int
    flops: float


@dataclass(frozen=True)
class Fit:
    """What one engine of a model has on one card. Numbers are 0 where the weights do not fit.

    Attributes:
        kv_tokens: tokens of all open requests together.
        requests: how many requests of the size asked for that is.
        tokens_per_s: prompt tokens and embedding tokens a second, when steps are full.
    """

    kv_tokens: int
    requests: int
    tokens_per_s: int


def fit(shape: ModelShape, gpu: Gpu, *, request_tokens: int, utilization: float = 0.9, rank: int = 16) -> Fit:
    """One engine with one embedding adapter on one card.

    Args:
        request_tokens: prompt and output of one request.
        utilization: vLLM's `gpu_memory_utilization`.
        rank: of the adapter.
    """
    used = shape.weight_bytes + shape.adapter_bytes(rank) + WORKSPACE_BYTES
    kv_tokens = int(gpu.memory_bytes * utilization - used) // shape.kv_bytes_per_token
    if kv_tokens < request_tokens:
        return Fit(0, 0, 0)
    rate = REACHED_RATIO * gpu.flops / (2 * shape.layer_parameters)
    return Fit(kv_tokens, kv_tokens // request_tokens, int(rate))
