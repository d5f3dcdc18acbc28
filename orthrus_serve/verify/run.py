"""`orthrus-serve verify`: asks a running server, holds its answers against the reference, prints a table and a verdict.

Guards: a server that does not serve the names of the configuration is not verified at all. Leaves out starting servers.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from orthrus_serve.config.load import parse_args, read_serve_file
from orthrus_serve.config.schema import AdapterSpec, AppArgs
from orthrus_serve.errors import ConfigError
from orthrus_serve.reference.decoder import ReferenceDecoder
from orthrus_serve.reference.embedder import ReferenceEmbedder, how_it_pools
from orthrus_serve.verify.cases import Ask
from orthrus_serve.verify.client import Answer, Client, NotVerifiableError
from orthrus_serve.verify.compare import TOLERANCES, Tolerance
from orthrus_serve.verify.judge import Judge
from orthrus_serve.verify.plan import Embeds, Prompts, Server, plan
from orthrus_serve.verify.report import Row, make_row, table, verdict

EXIT_EQUAL, EXIT_DEVIATES = 0, 1
# Where the configuration does not say it: vLLM's own default on most devices, and large enough to chunk nothing that is short.
DEFAULT_TOKEN_BUDGET = 2048


@dataclass(frozen=True)
class VerifySettings:
    """One verification. `dtype` is what the server computes in; `max_tokens` bounds the inputs where the context is longer than
    there is patience for; `arm` None means every arm, one after the other."""

    url: str
    args: AppArgs
    tolerance: Tolerance
    device: str = "cpu"
    seed: int = 1
    max_tokens: int | None = None
    api_key: str | None = None
    arm: str | None = None
    dtype: str = "float32"


def main(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Runs with the command line's options; returns 0, or 1 for a deviation.

    Raises:
        ConfigError: the options, or the file that they name, are wrong.
        NotVerifiableError: the server cannot be asked, or serves other names.
    """
    settings = settings_of(options)
    rows = verify(settings, say)
    say("\n".join([*table(rows), "", verdict(rows, settings.tolerance)]))
    if options.json is not None:
        report = {"url": settings.url, "tolerance": asdict(settings.tolerance), "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return EXIT_DEVIATES if any(row.problem is not None for row in rows) else EXIT_EQUAL


def settings_of(options: argparse.Namespace) -> VerifySettings:
    """What the command line asks for.

    Raises:
        ConfigError: what cannot be.
    """
    args = _app_args(options)
    dtype = options.dtype or _dtype_of(args)
    tolerance = TOLERANCES[dtype]
    if options.tolerance is not None:
        tolerance = replace(tolerance, cosine=options.tolerance)
    if options.logit_tolerance is not None:
        tolerance = replace(tolerance, logit=options.logit_tolerance)
    key = None
    if options.api_key_file is not None:
        try:
            key = Path(options.api_key_file).expanduser().read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"--api-key-file: {options.api_key_file}: {error.strerror}") from error
    return VerifySettings(
        options.url, args, tolerance, options.device, options.seed, options.max_tokens, key, options.arm, dtype
    )


def verify(settings: VerifySettings, say: Callable[[str], None]) -> list[Row]:
    """Asks everything, of every arm where there are arms, then computes what the answers should have been. One row for each
    case and name.

    Raises:
        ConfigError: no such arm; an embedder that does not say how it pools.
        NotVerifiableError: the server cannot be asked, or serves other names.
    """
    by_arm = settings.args.by_arm
    if settings.arm is not None:
        if settings.arm not in settings.args.arms:
            raise ConfigError(f"--arm: {settings.arm!r} is none of the file's arms ({', '.join(settings.args.arms)})")
        by_arm = {settings.arm: by_arm[settings.arm]}
    embedders = {arm: _embedder(args, settings.device) for arm, args in by_arm.items()}
    answered = asyncio.run(_ask_all(settings, by_arm, embedders, say))
    say("computing the reference")
    specs = {**settings.args.adapters, **settings.args.generate_adapters}
    folders = {name: spec.path for name, spec in specs.items()}
    load = partial(ReferenceDecoder.load, settings.args.model.path, folders, device=settings.device)
    reference = load()
    load_rounded = None if settings.dtype == "float32" else partial(load, dtype=getattr(torch, settings.dtype))
    rows: list[Row] = []
    for arm, args in by_arm.items():
        judge = Judge(reference, args.adapters, settings.tolerance, embedders[arm], load_rounded)
        rows += rows_of(judge, answered[arm], arm)
    return rows


def compared_lines(args: AppArgs) -> list[str]:
    """What each name is held against, one line each."""
    lines = [f"{args.model.name}: the model in {args.model.path}"]
    for name, spec in args.adapters.items():
        lines.append(f"{name}: that model with the adapter in {spec.path}, pooling {spec.pooling}")
    lines += [f"{name}: that model with the adapter in {spec.path}" for name, spec in args.generate_adapters.items()]
    if args.embedder is not None:
        pooling, _ = how_it_pools(args.embedder)
        lines.append(f"{args.embedder.name}: another model, in {args.embedder.path}, pooling {pooling}")
    return lines


def rows_of(judge: Judge, answered: Sequence[tuple[Ask, Answer]], arm: str = "") -> list[Row]:
    """One row for each case and name, in the order in which they were asked first. Names tell their arm, where it has one."""
    found: dict[tuple[str, str], list[Any]] = {}
    for ask, answer in answered:
        found.setdefault((ask.case, ask.model), []).extend(judge.judge(ask, answer))
    of_arm = f" (arm {arm})" if arm else ""
    return [make_row(case, model + of_arm, findings) for (case, model), findings in found.items()]


def _embedder(args: AppArgs, device: str) -> ReferenceEmbedder | None:
    return None if args.embedder is None else ReferenceEmbedder.load(args.embedder, device=device)


async def _ask_all(
    settings: VerifySettings,
    by_arm: Mapping[str, AppArgs],
    embedders: Mapping[str, ReferenceEmbedder | None],
    say: Callable[[str], None],
) -> dict[str, list[tuple[Ask, Answer]]]:
    answered: dict[str, list[tuple[Ask, Answer]]] = {}
    for arm, args in by_arm.items():
        client = Client(settings.url, settings.api_key, arm)
        try:
            stages = await _prepare(client, settings, args, embedders[arm])
            of_arm = f" of arm {arm}" if arm else ""
            say(f"asking {settings.url} {sum(len(stage) for stage in stages)} requests{of_arm}")
            say("\n".join(f"  {line}" for line in compared_lines(args)))
            answered[arm] = []
            for stage in stages:
                answers = await asyncio.gather(*(client.ask(ask) for ask in stage))
                answered[arm] += zip(stage, answers, strict=True)
        finally:
            await client.close()
    return answered


async def _prepare(
    client: Client, settings: VerifySettings, args: AppArgs, embedder: ReferenceEmbedder | None
) -> list[list[Ask]]:
    served = await client.models()
    own = [] if args.embedder is None else [args.embedder.name]
    wanted = [args.model.name, *args.adapters, *own, *args.generate_adapters]
    missing = [name for name in wanted if name not in served]
    if missing:
        raise NotVerifiableError(f"{settings.url} serves {', '.join(served)}, and not {', '.join(missing)}")
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model.path)
    budget = args.vllm.get("max_num_batched_tokens", DEFAULT_TOKEN_BUDGET)
    longest = _longest(args.model.name, served, args.vllm, settings.url)
    server = Server(args, longest, budget, tokenizer.eos_token_id, settings.max_tokens)
    embeds = [] if embedder is None else [_own_embedder(server, embedder, served, settings)]
    return plan(server, _prompts(tokenizer, settings.seed), embeds)


def _own_embedder(
    server: Server, embedder: ReferenceEmbedder, served: Mapping[str, int | None], settings: VerifySettings
) -> Embeds:
    spec = server.args.embedder
    assert spec is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(spec.path)
    longest = _longest(spec.name, served, spec.vllm, settings.url)
    # It embeds up to its whole context, and nothing is computed in chunks.
    of_its_own = replace(server, max_model_len=longest + 1, token_budget=longest, eos_id=None)
    asked = AdapterSpec(
        path=spec.path, normalize=embedder.normalizes, append_eos=False, dimensions=spec.dimensions, pooling="mean"
    )
    closing = tokenizer("a").input_ids[-1:] if tokenizer("").input_ids else []
    closing = tuple(token for token in closing if token in tokenizer.all_special_ids)
    return Embeds(spec.name, asked, of_its_own, _prompts(tokenizer, settings.seed), closing)


def _longest(name: str, served: Mapping[str, int | None], vllm: Mapping[str, Any], url: str) -> int:
    longest = served[name] or vllm.get("max_model_len")
    if not isinstance(longest, int):
        raise NotVerifiableError(f"{url} does not tell the max_model_len of {name}; put it into its vllm section")
    return longest


def _prompts(tokenizer: Any, seed: int) -> Prompts:
    return Prompts(_words(tokenizer), tokenizer.decode, lambda text: tokenizer(text).input_ids, seed)


def _words(tokenizer: Any) -> list[int]:
    """Tokens that are plain words or parts of them: any row of them is text that the tokenizer can read."""
    special = set(tokenizer.all_special_ids)
    candidates = [token for token in range(len(tokenizer)) if token not in special]
    texts = tokenizer.batch_decode([[token] for token in candidates])
    return [token for token, text in zip(candidates, texts, strict=True) if text.strip().isalnum() and text.isascii()]


def _dtype_of(args: AppArgs) -> str:
    dtype = args.vllm.get("dtype", "auto")
    if dtype == "auto":
        config: Any = AutoConfig.from_pretrained(args.model.path)
        dtype = str(getattr(config, "dtype", None) or "float16").removeprefix("torch.")
        dtype = "float16" if dtype == "float32" else dtype  # vLLM's own rule
    known = {"half": "float16", "float": "float32", **{name: name for name in TOLERANCES}}
    if dtype not in known:
        raise ConfigError(f"--dtype: say what the server computes in: one of {', '.join(TOLERANCES)}")
    return known[dtype]


def _app_args(options: argparse.Namespace) -> AppArgs:
    if options.config is not None:
        if options.model or options.adapter:
            raise ConfigError("--config: names the model and the adapters; leave --model and --adapter out")
        return read_serve_file(options.config).applications[0].args
    if not options.model or not options.adapter:
        raise ConfigError("verify: name what the server serves, by --config FILE or by --model and --adapter")
    name, path = _named(options.model, "orthrus")
    adapters = dict(_named(adapter, "orthrus-embed") for adapter in options.adapter)
    return parse_args({
        "topology": "orthrus",
        "model": {"name": name, "path": path},
        "adapters": {name: {"path": path} for name, path in adapters.items()},
    })  # fmt: skip


def _named(text: str, default: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    return (name, path) if equals else (default, text)
