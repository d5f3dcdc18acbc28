"""A causal language model in Transformers with its LoRA adapters in peft, one input at a time, whole and unbatched.

Guards: an adapter of which a weight finds no place is refused, for peft would only warn. Leaves out tokenising, and what the
end-of-sequence token has to do with an input: callers give the ids that the model is to see.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import safetensors
import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM

from orthrus_serve.config.schema import HeadSpec
from orthrus_serve.errors import AdapterError
from orthrus_serve.reference.pooling import apply_head, finish, pool
from orthrus_serve.types import PoolingKind

_PREFIX = "base_model.model."


class ReferenceDecoder:
    """The generator with its adapters. `adapter` None is the model without any."""

    def __init__(self, decoder: Any, adapted: PeftModel | None, names: Mapping[str, str]) -> None:
        """`adapted` wraps the layers of `decoder` in place; `names` gives peft's name of each adapter."""
        self.decoder = decoder
        self._adapted = adapted
        self._names = dict(names)

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        adapters: Mapping[str, str | Path],
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Reads a model's folder and those of its adapters.

        Raises:
            AdapterError: a weight of an adapter that is none of the model's.
        """
        decoder = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        adapted: PeftModel | None = None
        names = {name: f"adapter{index}" for index, name in enumerate(adapters)}  # peft allows no dots
        for name, path in adapters.items():
            folder, known = Path(path), names[name]
            mapping = _key_mapping(decoder if adapted is None else adapted.get_base_model(), folder)
            options: dict[str, Any] = {"key_mapping": mapping, "autocast_adapter_dtype": False}
            if adapted is None:
                adapted = PeftModel.from_pretrained(decoder, str(folder), adapter_name=known, **options)
            else:
                adapted.load_adapter(str(folder), adapter_name=known, **options)
            _require_whole(adapted, known, folder)
        whole: Any = decoder if adapted is None else adapted
        whole.to(device, dtype).eval()
        return cls(decoder, adapted, names)

    @contextlib.contextmanager
    def under(self, adapter: str | None) -> Iterator[None]:
        """Within it the layers of `decoder` apply that adapter, or none."""
        if self._adapted is None:
            yield
        elif adapter is None:
            with self._adapted.disable_adapter():
                yield
        else:
            self._adapted.set_adapter(self._names[adapter])
            yield

    @torch.no_grad()
    def states(self, token_ids: Sequence[int], adapter: str | None) -> Tensor:
        """The last layer's states of one input [tokens, width]."""
        with self.under(adapter):
            return self.decoder.base_model(input_ids=self._batch(token_ids)).last_hidden_state[0]

    def vector(
        self,
        token_ids: Sequence[int],
        adapter: str | None,
        *,
        pooling: PoolingKind,
        normalize: bool = True,
        dimensions: int | None = None,
        head: HeadSpec | None = None,
    ) -> Tensor:
        """The embedding of one input, float32 on the CPU [`dimensions`, or the head's or the model's width]."""
        states = self.states(token_ids, adapter)
        if head is not None:
            vector = apply_head(states, head)
        else:
            vector = pool(states[None], torch.tensor([len(token_ids)], device=states.device), pooling)[0]
        return finish(vector.cpu(), normalize=normalize, dimensions=dimensions)

    @torch.no_grad()
    def next_logits(self, token_ids: Sequence[int], following: Sequence[int], adapter: str | None) -> Tensor:
        """Logits before each token of `following`, when they follow `token_ids` [following, vocabulary], float32 on the CPU."""
        ids = self._batch([*token_ids, *following[:-1]])
        with self.under(adapter):
            return self.decoder(input_ids=ids, logits_to_keep=len(following)).logits[0].float().cpu()

    def greedy(self, token_ids: Sequence[int], count: int, adapter: str | None) -> list[int]:
        """The likeliest `count` tokens, one after the other, end-of-sequence tokens included."""
        made: list[int] = []
        for _ in range(count):
            made.append(int(self.next_logits([*token_ids, *made], [0], adapter)[-1].argmax()))
        return made

    def _batch(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(token_ids)], device=self.decoder.device)


def _key_mapping(decoder: Any, folder: Path) -> dict[str, str]:
    """peft's mapping of weight names: adapters saved from a model without its head lack a part of every module's name."""
    modules = {name for name, _ in decoder.named_modules()}
    module = next(iter(sorted(_module_names(folder))), "")
    is_headless = module not in modules and f"{decoder.base_model_prefix}.{module}" in modules
    return {"^": f"{decoder.base_model_prefix}."} if is_headless else {}


def _module_names(folder: Path) -> set[str]:
    return {key.removeprefix(_PREFIX).partition(".lora_")[0] for key in _keys(folder)}


def _keys(folder: Path) -> list[str]:
    file = folder / "adapter_model.safetensors"
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, safetensors.SafetensorError) as error:
        raise AdapterError(f"adapter {folder}: {error}") from error


def _require_whole(adapted: PeftModel, name: str, folder: Path) -> None:
    held = {key.removeprefix(_PREFIX) for key in get_peft_model_state_dict(adapted, adapter_name=name)}
    prefix = f"{adapted.get_base_model().base_model_prefix}."
    given = {key.removeprefix(_PREFIX) for key in _keys(folder)}
    lost = [key for key in sorted(given) if key not in held and prefix + key not in held]
    if lost or not given:
        first = ", ".join(lost[:3]) or "it holds none"
        raise AdapterError(f"adapter {folder}: {len(lost)} weights find no place in the model (first: {first})")
