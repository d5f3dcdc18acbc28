"""The `embedder` of topology `separate_models`: a model of its own that embeds, in a second engine on the generator's card.

Guards: an embedder without its topology, or the topology without one; two engines that want more memory than a card has, as far
as the file says how much. Leaves out whether folders exist (`check.py`) and what vLLM makes of the model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from orthrus_serve.config.section import Section
from orthrus_serve.types import CardShare, TopologyName

TOPOLOGY: TopologyName = "separate_models"
# What two engines may take of a card together: each also holds a CUDA context and what it allocates beside.
MAX_CARD_MEMORY = 0.95
GPU_KEY, CPU_KEY = "gpu_memory_utilization", "kv_cache_memory_bytes"


class EmbedderSpec(Section):
    """A model that embeds, under a name of its own. `vllm` are the arguments of its engine, as in the generator's section.

    `pooling` and `normalize` None are as the model's own files say (`modules.json`, as sentence-transformers writes it).
    `dimensions` lists the lengths that a client may ask for besides the full one (Matryoshka); cut, then normalised.
    """

    path: str = Field(min_length=1)
    name: str = Field(default="orthrus-embed", min_length=1)
    pooling: Literal["mean", "cls", "last"] | None = None
    normalize: bool | None = None
    dimensions: tuple[int, ...] = ()
    vllm: dict[str, Any] = Field(default_factory=dict)

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return str(Path(value).expanduser().absolute())

    @field_validator("dimensions")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(n < 1 for n in value):
            raise ValueError("every entry must be at least 1")
        return value


def embedder_problem(
    topology: TopologyName, embedder: EmbedderSpec | None, adapters: Mapping[str, Any], card_share: CardShare | None
) -> str | None:
    """What is wrong with the things that embed, as a sentence that begins with the key; None when nothing is."""
    if topology != TOPOLOGY:
        if embedder is not None:
            return f"embedder: goes with topology {TOPOLOGY}; in topology {topology} adapters embed"
        if card_share is not None:
            return f"engine.card_share: goes with topology {TOPOLOGY}, where two engines share a card"
        return None if adapters else "adapters: name at least one embedding adapter"
    if adapters:
        return f"adapters: in topology {TOPOLOGY} the embedder embeds; leave them out"
    return (
        None if embedder is not None else f"embedder: missing; topology {TOPOLOGY} has a model of its own that embeds"
    )


def name_problem(names: list[str]) -> str | None:
    """What is wrong with the names of everything that answers; None when nothing is."""
    if "" in names:
        return "adapters: an adapter needs a name"
    twice = sorted({name for name in names if names.count(name) > 1})
    if not twice:
        return None
    return f"adapters: {twice[0]!r} names two things; the generator and all adapters need names of their own"


def switch_problem(running: TopologyName, wanted: TopologyName | None) -> str | None:
    """Why a running application cannot be switched from one topology to the other, as a sentence; None when it can."""
    if wanted is None or (running == TOPOLOGY) == (wanted == TOPOLOGY):
        return None
    return (
        f"topology {wanted} runs other engines, with other weights, than {running}; write it into the file, and start the "
        "application from that"
    )


def card_memory_problems(
    num_gpus: float, generator: Mapping[str, Any], embedder: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """What is wrong with how two engines split the memory of their card, one sentence each. `prefix` stands before both keys.

    A share that is not written is left to the start, where vLLM has put in its default; a size on CPU must be written, since
    vLLM's default is a part of the whole machine for each.
    """
    sections = {f"{prefix}vllm": generator, f"{prefix}embedder.vllm": embedder}
    if num_gpus == 0:
        lacking = [f"{path}.{CPU_KEY}" for path, section in sections.items() if section.get(CPU_KEY) is None]
        return [
            f"{key}: missing; on CPU each of two engines must say how much memory its cache takes" for key in lacking
        ]
    shares = {f"{path}.{GPU_KEY}": section.get(GPU_KEY) for path, section in sections.items()}
    if any(not isinstance(share, int | float) or isinstance(share, bool) for share in shares.values()):
        return []
    return memory_sum_problems({key: float(share) for key, share in shares.items() if share is not None})


def memory_sum_problems(shares: Mapping[str, float]) -> list[str]:
    """As `card_memory_problems`, for shares of a GPU's memory by the key that sets each."""
    total = sum(shares.values())
    if total <= MAX_CARD_MEMORY + 1e-9:
        return []
    largest = max(shares, key=lambda key: shares[key])
    fits = shares[largest] - (total - MAX_CARD_MEMORY)
    told = " + ".join(f"{key} {share:g}" for key, share in shares.items())
    return [
        f"{told} is {total:g} of one card, above {MAX_CARD_MEMORY:g}; lower {largest} to {max(fits, 0):.2f} or less"
    ]
