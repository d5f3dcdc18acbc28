"""A dense head over all hidden states of an input: loaded once per worker, applied when the input is complete.

Source of the layout: a linear layer as PyTorch and sentence-transformers save it (`weight` `[out, in]`, `bias` `[out]`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from orthrus_serve.config.schema import AdapterSpec
from orthrus_serve.engine.settings import HeadSettings
from orthrus_serve.errors import AdapterError
from orthrus_serve.types import Activation, Reduction

_ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda rows: rows,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
}
_REDUCTIONS: Mapping[Reduction, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.amax(0),
    "last": lambda rows: rows[-1],
}


class DenseHead:
    """`reduction(activation(states · weightᵀ + bias))` in fp32.

    Args:
        settings: where the layer lies and how its rows become one vector.
        hidden_size: size of the model's hidden states; the layer must take it.
        device: where the states are.

    Raises:
        AdapterError: the file is not such a layer, or of another size.
    """

    def __init__(self, settings: HeadSettings, hidden_size: int, device: torch.device) -> None:
        weight, bias = _read(settings.path)
        if weight.dim() != 2 or weight.shape[1] != hidden_size:
            raise AdapterError(f"head {settings.path}: weight is {tuple(weight.shape)}, expected [out, {hidden_size}]")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise AdapterError(f"head {settings.path}: bias is {tuple(bias.shape)}, expected [{weight.shape[0]}]")
        self._weight = weight.float().to(device)
        self._bias = None if bias is None else bias.float().to(device)
        self._activate = _ACTIVATIONS[settings.activation]
        self._reduce = _REDUCTIONS[settings.reduction]

    @property
    def size(self) -> int:
        """Length of the vectors."""
        return self._weight.shape[0]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Hidden states `[n, hidden size]` → one fp32 vector `[out]`."""
        return self._reduce(self._activate(torch.nn.functional.linear(states.float(), self._weight, self._bias)))


def head_size(path: str) -> int:
    """Length of the vectors that the head in this file makes, without reading its weights.

    Raises:
        AdapterError: the file is not such a layer.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            return int(opened.get_slice("weight").get_shape()[0])
    except (OSError, safetensors.SafetensorError) as error:
        raise AdapterError(f"head {path}: {error}") from error


def vector_sizes(adapters: Mapping[str, AdapterSpec], hidden_size: int) -> dict[str, int]:
    """Full length of each adapter's vectors: its head's, or the model's hidden size.

    Raises:
        AdapterError: a head that cannot be read.
    """
    return {name: head_size(spec.head.path) if spec.head else hidden_size for name, spec in adapters.items()}


def _read(path: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    try:
        tensors = safetensors.torch.load_file(Path(path))
    except (OSError, safetensors.SafetensorError) as error:
        raise AdapterError(f"head {path}: {error}") from error
    if "weight" not in tensors:
        raise AdapterError(f"head {path}: there is no 'weight' in it, only {sorted(tensors)[:5]}")
    return tensors["weight"], tensors.get("bias")
