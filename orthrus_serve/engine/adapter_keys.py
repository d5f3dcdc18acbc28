"""Renames LoRA keys that were saved from a headless model, so that a generate engine finds their modules.

An embedding adapter is usually trained on the backbone alone (`AutoModel`), so its keys read `base_model.model.layers.*`; with
the language-model head around it the same module is `base_model.model.model.layers.*`. vLLM loads the former without a word
and applies nothing. Whether all keys then find a module is checked in the worker (`lora_check.py`).
"""

import hashlib
import re
import shutil
import tempfile
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
        AdapterError: there are no LoRA keys at all, or a module is there under both names.
    """
    renamed = {key: _HEADLESS.sub("base_model.model.model.", key) for key in keys}
    if not any(".lora_A." in key or ".lora_B." in key for key in renamed):
        raise AdapterError("no key is a LoRA weight (…lora_A… or …lora_B…)")
    if len(set(renamed.values())) < len(renamed):
        raise AdapterError("a module is there twice, with and without the language-model head's prefix")
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
    """Replicas may do this at once, so each writes a folder of its own; the first rename wins and the others are dropped."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{copy.name}.", suffix=".part", dir=copy.parent))
    try:
        tensors = safetensors.torch.load_file(folder / _WEIGHTS)
        renamed = {names[old]: tensor for old, tensor in tensors.items()}
        safetensors.torch.save_file(renamed, part / _WEIGHTS, {"format": "pt"})
        shutil.copyfile(folder / "adapter_config.json", part / "adapter_config.json")
        (part / _WEIGHTS).chmod(0o644)  # safetensors writes 0600, mkdtemp makes 0700: other users' replicas read it too
        part.chmod(0o755)
        part.rename(copy)
    except OSError:
        if not copy.is_dir():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
