"""A model of its own that embeds, in Transformers, one input at a time: for the second engine of `separate_models`.

Pools as the Serve file says, else as the model's own files say (those that sentence-transformers writes). Guards: a folder that
does not say how to pool is refused, never guessed. Leaves out tokenising: callers give the ids that the model is to see.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModel

from orthrus_serve.config.embedder import EmbedderSpec
from orthrus_serve.errors import ConfigError
from orthrus_serve.reference.pooling import finish, pool
from orthrus_serve.types import PoolingKind

# By the keys of `1_Pooling/config.json`; other modes are none of ours.
_MODES: dict[str, PoolingKind] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


class ReferenceEmbedder:
    """The embedder of a configuration. `normalizes` is what it does unless a request says otherwise."""

    def __init__(self, model: Any, pooling: PoolingKind, *, normalizes: bool) -> None:
        self._model = model
        self._pooling: PoolingKind = pooling
        self.normalizes = normalizes

    @classmethod
    def load(cls, spec: EmbedderSpec, *, device: str = "cpu") -> Self:
        """Reads its folder; computes in float32.

        Raises:
            ConfigError: neither the file nor the folder says how it pools.
        """
        pooling, normalizes = how_it_pools(spec)
        model: Any = AutoModel.from_pretrained(spec.path, dtype=torch.float32)
        return cls(model.to(device).eval(), pooling, normalizes=normalizes)

    @torch.no_grad()
    def vector(self, token_ids: Sequence[int], *, normalize: bool = True, dimensions: int | None = None) -> Tensor:
        """The embedding of one input, float32 on the CPU [`dimensions`, or the model's width]."""
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        states = self._model(input_ids=ids).last_hidden_state
        vector = pool(states, torch.tensor([len(token_ids)], device=states.device), self._pooling)[0]
        return finish(vector.cpu(), normalize=normalize, dimensions=dimensions)


def how_it_pools(spec: EmbedderSpec) -> tuple[PoolingKind, bool]:
    """How hidden states become a vector, and whether it is normalised.

    Raises:
        ConfigError: neither the file nor the folder says it.
    """
    folder = Path(spec.path)
    modules: list[dict[str, Any]] = _read(folder / "modules.json") or []
    steps = {str(module["type"]).rpartition(".")[2]: folder / module["path"] for module in modules}
    pooling = spec.pooling
    if pooling is None:
        said: dict[str, Any] = _read(steps["Pooling"] / "config.json") or {} if "Pooling" in steps else {}
        modes = [key for key, value in said.items() if key.startswith("pooling_mode_") and value is True]
        pooling = _MODES.get(modes[0]) if len(modes) == 1 else None
        if pooling is None:
            raise ConfigError(
                f"embedder.pooling: {folder} does not say how it pools (or by more than one mode); say it"
            )
    by_folder = "Normalize" in steps if modules else True  # vLLM's own rule where nothing is said
    return pooling, by_folder if spec.normalize is None else spec.normalize


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
