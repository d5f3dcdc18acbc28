"""Looks at what a Serve file names: model and adapter folders, ranks, vLLM's keys. Needs no GPU, no Ray and no vLLM import.

Guards: what would fail only after minutes of starting replicas fails here in a second. Leaves out the weights (the engine
refuses an adapter that binds nowhere) and values that vLLM judges with the model in hand.
"""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from orthrus_serve.config.api_keys import read_digests
from orthrus_serve.config.complaint import join
from orthrus_serve.config.load import Application, ServeFile
from orthrus_serve.config.resources import resource_problems
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.config.vllm_keys import check_vllm_keys, installed_vllm_keys
from orthrus_serve.errors import ConfigError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
LARGEST_RANK = 512
# vLLM keys that let a model do without weights or a tokenizer of its own beside them.
ELSEWHERE = ("load_format", "tokenizer", "skip_tokenizer_init")


@dataclass(frozen=True)
class Checked:
    """What was looked at, and what could not be: one sentence each."""

    lines: tuple[str, ...]
    notes: tuple[str, ...] = ()


def check_serve_file(file: ServeFile) -> Checked:
    """Look at everything that the file names.

    Raises:
        ConfigError: one line per problem, each naming the file and the key.
    """
    known = installed_vllm_keys()
    problems: list[str] = []
    for application in file.applications:
        problems += _problems(application, known)
    if problems:
        raise ConfigError("\n".join(f"{file.source}: {line}" for line in problems))
    lines = [f"{app.name}: {_summary(app.args)}" for app in file.applications]
    lines.append(f"answers at http://{file.host}:{file.port}")
    notes = () if known is not None else ("vllm: keys were not compared with vLLM's, since none is installed",)
    return Checked(lines=tuple(lines), notes=notes)


def _summary(args: AppArgs) -> str:
    arms = " against ".join(f"{name} ({arm.topology})" for name, arm in args.arms.items())
    names = [*([args.embedder.name] if args.embedder is not None else []), *args.adapters]
    embeds = f"{', '.join(names)} embed{'s' * (len(names) == 1)}"
    return f"{arms or args.topology}, {args.model.name} generates, {embeds}"


def _problems(application: Application, known: frozenset[str] | None) -> list[str]:
    args, path = application.args, (*application.path, "args")
    problems = _model_problems(args.model.path, args.vllm, "model fetch", join((*path, "model", "path")))
    model = _read_json(Path(args.model.path) / "config.json")
    hidden_size = model.get("hidden_size")
    for name, spec in args.generate_adapters.items():
        where = join((*path, "generate_adapters", name))
        problems += _adapter_problems(spec.path, args.vllm.get("max_lora_rank"), where)
    for name, spec in args.adapters.items():
        problems += _adapter_problems(spec.path, args.vllm.get("max_lora_rank"), join((*path, "adapters", name)))
        if spec.head is not None and not Path(spec.head.path).is_file():
            problems.append(f"{join((*path, 'adapters', name, 'head', 'path'))}: {spec.head.path} is not a file")
        too_long = [n for n in spec.dimensions if isinstance(hidden_size, int) and n > hidden_size]
        if too_long:
            where = join((*path, "adapters", name, "dimensions"))
            problems.append(f"{where}: {too_long[0]} is above the model's hidden size, {hidden_size}")
    sections = {"vllm": args.vllm, **{f"arms.{name}.vllm": arm.vllm for name, arm in args.arms.items()}}
    if args.embedder is not None:
        sections["embedder.vllm"] = args.embedder.vllm
        where = join((*path, "embedder", "path"))
        problems += _model_problems(args.embedder.path, args.embedder.vllm, "model fetch --with-embedder", where)
    for name, arm in args.by_arm.items():
        where = join((*path, *(("arms", name) if name else ()), "vllm"))
        problems += resource_problems(arm.vllm, model, where)
    if args.api_keys is not None:
        try:
            read_digests(args.api_keys)
        except ConfigError as error:
            problems.append(f"{join(path)}.{error}")
    if known is not None:
        problems += _connector_problems(args, join((*path, "kv_connector")))
        for key, section in sections.items():
            try:
                check_vllm_keys(section, known, join((*path, key)))
            except ConfigError as error:
                problems += str(error).splitlines()
    return problems


def _connector_problems(args: AppArgs, where: str) -> list[str]:
    """Looked at where vLLM is installed only: elsewhere nothing of it will run."""
    if args.kv_connector is None or importlib.util.find_spec(args.kv_connector) is not None:
        return []
    return [f"{where}: the package {args.kv_connector} is not installed; see docs/topologies.md"]


def _model_problems(path: str, vllm: Mapping[str, Any], fetch: str, where: str) -> list[str]:
    folder = Path(path)
    if not folder.is_dir():
        demo = f"; `orthrus-serve {fetch}` makes the demo model" if "orthrus_serve" in folder.parts else ""
        return [f"{where}: {folder} is not a folder{demo}"]
    if not _read_json(folder / "config.json"):
        return [f"{where}: {folder} has no readable config.json, so it is not a model folder"]
    if any(key in vllm for key in ELSEWHERE):
        return []
    problems: list[str] = []
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        problems.append(f"{where}: {folder} has no weights (*.safetensors)")
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("tekken.json")):
        problems.append(f"{where}: {folder} has no tokenizer (tokenizer.json)")
    return problems


def _adapter_problems(adapter: str, max_rank: Any, where: str) -> list[str]:
    folder, path = Path(adapter), f"{where}.path"
    if not folder.is_dir():
        demo = "; `orthrus-serve model fetch` puts the demo adapter there" if "orthrus_serve" in folder.parts else ""
        return [f"{path}: {folder} is not a folder{demo}"]
    lora = _read_json(folder / "adapter_config.json")
    if not lora:
        return [f"{path}: {folder} has no readable adapter_config.json, so it is not a LoRA adapter"]
    if str(lora.get("peft_type", "LORA")).upper() != "LORA":
        return [f"{path}: {folder} is a {lora['peft_type']} adapter; only LORA can be served"]
    if not any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
        return [f"{path}: {folder} has no {ADAPTER_WEIGHTS[0]}"]
    rank = _largest_rank(lora)
    if rank is None:
        return [f"{path}: {folder / 'adapter_config.json'} gives no rank (r)"]
    if isinstance(max_rank, int) and rank > max_rank:
        return [f"{path}: the adapter's rank {rank} is above vllm.max_lora_rank {max_rank}; raise max_lora_rank"]
    if rank > LARGEST_RANK:
        return [f"{path}: the adapter's rank {rank} is above {LARGEST_RANK}, the largest that vLLM serves"]
    return []


def _largest_rank(lora: dict[str, Any]) -> int | None:
    """The largest rank of any module: `r`, or an entry of `rank_pattern`."""
    pattern = lora.get("rank_pattern")
    ranks = [lora.get("r"), *(cast(dict[str, Any], pattern).values() if isinstance(pattern, dict) else ())]
    whole = [rank for rank in ranks if isinstance(rank, int) and rank > 0]
    return max(whole) if len(whole) == len(ranks) else None


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when there is none to be read."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], data) if isinstance(data, dict) else {}
