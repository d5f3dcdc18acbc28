"""From hidden states to a vector, by the plain formulas. Written apart from the engine's pooling, which is held against it."""

from collections.abc import Callable, Mapping, Sequence

import safetensors.torch
import torch
from torch import Tensor, nn

from orthrus_serve.config.schema import HeadSpec
from orthrus_serve.types import Activation, PoolingKind, Reduction

_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda rows: rows,
    "tanh": torch.tanh,
    "gelu": nn.functional.gelu,
    "relu": torch.relu,
}
_REDUCTIONS: Mapping[Reduction, Callable[[Tensor], Tensor]] = {
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.max(0).values,
    "last": lambda rows: rows[-1],
}


def pad(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Token ids of unequal length → ids [rows, longest], padded on the right, and their lengths [rows]."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), pad_id)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.as_tensor(row)
    return ids.to(device), lengths.to(device)


def pool(hidden: Tensor, lengths: Tensor, pooling: PoolingKind) -> Tensor:
    """Hidden states [rows, tokens, width] of right-padded rows → one vector for each [rows, width], float32, not normalised.

    Raises:
        ValueError: pooling `all`, which is a head's work (`apply_head`).
    """
    hidden = hidden.float()
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    if pooling == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
    if pooling == "cls":
        return hidden[:, 0]
    if pooling not in ("mean", "weighted_mean"):
        raise ValueError(f"pooling {pooling!r} makes no single vector")
    weights = (positions + 1.0) if pooling == "weighted_mean" else torch.ones_like(positions, dtype=torch.float32)
    weights = weights[None] * (positions[None] < lengths[:, None])
    return (hidden * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def apply_head(states: Tensor, head: HeadSpec) -> Tensor:
    """Hidden states [tokens, width] of one input → the vector that a dense head makes of them [out], float32."""
    tensors = safetensors.torch.load_file(head.path)
    bias = tensors.get("bias")
    rows = states.float().cpu() @ tensors["weight"].float().T
    return _REDUCTIONS[head.reduction](_ACTIVATIONS[head.activation](rows if bias is None else rows + bias.float()))


def finish(vector: Tensor, *, normalize: bool, dimensions: int | None) -> Tensor:
    """Cut to the first `dimensions` numbers, then scaled to length 1, where each is wanted."""
    vector = vector[:dimensions] if dimensions is not None else vector
    return nn.functional.normalize(vector, dim=-1) if normalize else vector
