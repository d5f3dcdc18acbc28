"""Renames LoRA keys that were saved from a headless model, so that a generate engine finds their modules.

An embedding adapter is usually trained on the backbone alone (`AutoModel`), so its keys read `base_model.model.layers.*`; with
the language-model head around it the same module is `base_model.model.model.layers.*`. vLLM loads the former without a word
and applies nothing. Whether all keys then find a module is checked in the worker (`lora_check.py`).
"""

import hashlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import safetensors
import safetensors.torch

from orthrus_serve.errors import AdapterError

_HEADLESS = re.compile(r"^base_model\.model\.(?=(layers|embed_tokens|norm|decoder|h)\.)")
_WEIGHTS = "adapter_model.safetensors"


def rename_keys(keys: Iterable[str]) -> dict[str, str]:
    """Each key and the key that a generate engine expects; unchanged where it is that already.

    Raises:
        AdapterError: there are no LoRA keys at all.
    """
    renamed = {key: _HEADLESS.sub("base_model.model.model.", key) for key in keys}
    if not any(".lora_A." in key or ".lora_B." in key for key in renamed):
        raise AdapterError("no key is a LoRA weight (…lora_A… or …lora_B…)")
    return renamed


def prepare_adapter(path: str | Path, cache: Path | None = None) -> Path:
    """The folder to load for an adapter: its own, or a copy with renamed keys.

    Args:
        path: folder with `adapter_config.json` and `adapter_model.safetensors`.
        cache: where copies go; by default in the user's cache folder. A copy is made once per content.

    Raises:
        AdapterError: files are missing or hold no LoRA weights.
    """
    folder = Path(path)
    weights = folder / _WEIGHTS
    for file in (weights, folder / "adapter_config.json"):
        if not file.is_file():
            raise AdapterError(f"adapter {folder}: {file.name} is missing")
    try:
        with safetensors.safe_open(weights, framework="pt") as opened:
            names = rename_keys(opened.keys())
    except (AdapterError, safetensors.SafetensorError) as error:
        raise AdapterError(f"adapter {folder}: {error}") from error
    if all(old == new for old, new in names.items()):
        return folder
    root = cache or Path.home() / ".cache" / "orthrus_serve" / "adapters"
    copy = root / hashlib.sha256(weights.read_bytes()).hexdigest()[:32]
    if not copy.is_dir():
        _write_copy(folder, names, copy)
    return copy


def _write_copy(folder: Path, names: dict[str, str], copy: Path) -> None:
    part = copy.with_name(f"{copy.name}.{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tensors = safetensors.torch.load_file(folder / _WEIGHTS)
    safetensors.torch.save_file({names[old]: tensor for old, tensor in tensors.items()}, part / _WEIGHTS, {"format": "pt"})
    shutil.copyfile(folder / "adapter_config.json", part / "adapter_config.json")
    try:
        part.rename(copy)
    except OSError:  # another replica was faster
        shutil.rmtree(part, ignore_errors=True)
