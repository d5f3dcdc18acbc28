"""Two engines on one card: shares by remaining tokens against static halves and against two that know nothing of each other.

A tool, not a test. Run: `python -m tests.engine.separate_speed --json FILE` (`--help` for models, seconds and load). One pair
of engines serves all arms, switched live round by round in another order each time, so that ratios hold although the machine's
speed does not. On CPU both engines are bound to one core, which stands for the card; on CUDA they share the first GPU. Requests
are token ids given to the engines in this process: no HTTP.
"""

import argparse
import asyncio
import gzip
import json
import os
import platform
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ARMS = ("remaining", "static", "whole")
SHAPES = Path(__file__).parents[1] / "gpu" / "shapes"
DEMO = Path("~/.cache/orthrus_serve/demo").expanduser()


@dataclass(frozen=True)
class Load:
    """Closed-loop generations, and embeddings in batches: closed loop too, or a burst every so often."""

    generators: int
    embedders: int
    batch: int
    every_s: float | None = None

    def times(self, factor: int) -> "Load":
        """So many times as many generations at once, and as many inputs in a batch."""
        return replace(self, generators=self.generators * factor, batch=self.batch * factor)


LOADS = {
    "both busy": Load(generators=8, embedders=2, batch=16),
    "bursts of embeddings": Load(generators=8, embedders=1, batch=64, every_s=8.0),
    "one generation beside a flood": Load(generators=1, embedders=4, batch=16),
}
PROMPT, INPUT = (100, 300), (60, 140)


@dataclass
class Round:
    """What happened in one arm's turn; times in seconds."""

    arm: str
    load: str
    seconds: float = 0.0
    cpu_s: float = 0.0
    tokens: dict[str, float] = field(default_factory=dict)
    generation_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    between_tokens_s: list[float] = field(default_factory=list)
    batch_s: list[float] = field(default_factory=list)


class Bench:
    """The engines, and clients that keep them busy."""

    def __init__(self, engines: Any, seed: int, num_output: int, loads: dict[str, Load]) -> None:
        self.engines = engines
        self.loads = loads
        self.num_output = num_output
        self.rng = random.Random(seed)
        self.number = 0

    def ids(self, length: int, vocab_size: int) -> list[int]:
        return [self.rng.randrange(1000, vocab_size - 1000) for _ in range(length)]

    async def generate(self, now: Callable[[], Round]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.number += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self.num_output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"type": "token", "prompt_token_ids": self.ids(self.rng.randint(*PROMPT), self.engines.vocab_size)}
        began_s = last_s = time.monotonic()
        async for _ in self.engines.generator.generate(prompt, params, f"g{self.number}"):
            now_s = time.monotonic()
            into = now()  # a generation may outlast the warm-up that it began in
            (into.first_token_s if last_s == began_s else into.between_tokens_s).append(now_s - last_s)
            last_s = now_s
        now().generation_s.append(last_s - began_s)

    async def embed(self, now: Callable[[], Round], batch: int) -> None:
        began_s = time.monotonic()
        await asyncio.gather(*[self._embed_one() for _ in range(batch)])
        now().batch_s.append(time.monotonic() - began_s)

    async def _embed_one(self) -> None:
        from vllm import PoolingParams

        self.number += 1
        embedder = self.engines.embedder
        ids = self.ids(self.rng.randint(*INPUT), embedder.vocab_size)
        prompt = {"type": "token", "prompt_token_ids": ids}
        async for _ in embedder.encode(prompt, PoolingParams(task="embed"), f"e{self.number}"):
            pass

    async def run(self, arm: str, name: str, seconds: float, warm_s: float) -> Round:
        load, thrown_away, kept = self.loads[name], Round(arm, name), Round(arm, name)
        answer = await self.engines.channel.set({"card_share": arm})
        assert answer["refused"] is None, answer
        current = [thrown_away]
        clients = [
            asyncio.create_task(_for_ever(lambda: self.generate(lambda: current[0]))) for _ in range(load.generators)
        ]
        embeds = [
            _for_ever(lambda: self.embed(lambda: current[0], load.batch), load.every_s) for _ in range(load.embedders)
        ]
        clients += [asyncio.create_task(task) for task in embeds]
        await asyncio.sleep(warm_s)
        before, cpu_s, began_s = (await self.engines.channel.remaining())["totals"], cpu_seconds(), time.monotonic()
        current[0] = kept
        await asyncio.sleep(seconds)
        after, kept.seconds, kept.cpu_s = (
            (await self.engines.channel.remaining())["totals"],
            time.monotonic() - began_s,
            cpu_seconds() - cpu_s,
        )
        kept.tokens = {
            key: after[key] - before[key] for key in ("decode_tokens", "prefill_tokens", "embed_tokens", "steps")
        }
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        while (await self.engines.channel.remaining())["requests"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return kept


async def _for_ever(work: Callable[[], Awaitable[None]], every_s: float | None = None) -> None:
    while True:
        began_s = time.monotonic()
        await work()
        if every_s is not None:
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began_s)))


def cpu_seconds() -> float:
    """CPU time of all processes below this one: cores and workers, not the clients."""
    import psutil

    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(t.user + t.system for t in times)


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def summary(rounds: list[Round]) -> dict[str, float]:
    """Rates over all rounds of an arm together; latencies over all their requests. A generation counts by its tokens."""
    seconds, cpu_s = sum(r.seconds for r in rounds), sum(r.cpu_s for r in rounds)
    tokens = {key: sum(r.tokens[key] for r in rounds) for key in rounds[0].tokens}
    flat = {
        name: [v for r in rounds for v in getattr(r, name)] for name in ("generation_s", "batch_s", "first_token_s")
    }
    gaps = [v for r in rounds for v in r.between_tokens_s]
    return {
        "output_tokens_per_s": tokens["decode_tokens"] / seconds,
        "embeddings_per_s": tokens["embed_tokens"] / (sum(INPUT) / 2) / seconds,
        "tokens_per_s": (sum(tokens.values()) - tokens["steps"]) / seconds,
        "tokens_per_cpu_s": (sum(tokens.values()) - tokens["steps"]) / cpu_s,
        "generation_p50_s": quantile(flat["generation_s"], 0.5),
        "generation_p95_s": quantile(flat["generation_s"], 0.95),
        "first_token_p95_s": quantile(flat["first_token_s"], 0.95),
        "between_tokens_p95_s": quantile(gaps, 0.95),
        "batch_p50_s": quantile(flat["batch_s"], 0.5),
        "batch_p95_s": quantile(flat["batch_s"], 0.95),
        "cores_used": cpu_s / seconds,
    }


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    on_cpu = options.device == "cpu"
    embedder_vllm: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 64, "max_num_batched_tokens": options.budget}
    generator_vllm: dict[str, Any] = {**embedder_vllm, "max_model_len": 1024}
    if on_cpu:
        embedder_vllm["kv_cache_memory_bytes"], generator_vllm["kv_cache_memory_bytes"] = 2**24, 2**29
    else:
        embedder_vllm["gpu_memory_utilization"], generator_vllm["gpu_memory_utilization"] = 0.25, 0.6
        for section in (embedder_vllm, generator_vllm):
            section |= json.loads(options.vllm)
    if options.shapes:
        for section in (embedder_vllm, generator_vllm):
            section |= {"load_format": "dummy", "tokenizer": str(DEMO / "smollm2-135m-instruct")}
    return {
        "topology": "separate_models",
        "model": {"path": str(options.generator)},
        "embedder": {"path": str(options.embedder), "vllm": embedder_vllm},
        "num_gpus_per_replica": 0 if on_cpu else 1,
        "engine": {"min_share": options.min_share},
        "vllm": generator_vllm,
    }


async def measure(options: argparse.Namespace) -> list[Round]:
    from orthrus_serve.config.load import parse_args
    from orthrus_serve.engine.separate import start_separate

    if options.shapes:
        # OPT-1.3B, and an encoder of 0.56 billion parameters in place of GTR-T5-XL (1.24), which vLLM cannot run.
        options.generator, options.embedder = SHAPES / "opt-1.3b", SHAPES / "xlm-roberta-large"
    models = await start_separate(parse_args(config_of(options)))
    loads = {name: load.times(options.times) for name, load in LOADS.items()}
    bench, rounds = Bench(models.engines, options.seed, options.output, loads), []
    order = random.Random(options.seed)
    while options.after and not options.after.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    try:
        for number in range(options.rounds):
            for name in options.loads:
                for arm in order.sample(ARMS, len(ARMS)):
                    rounds.append(await bench.run(arm, name, options.seconds, options.warm))
                    told = summary(rounds[-1:])
                    sys.stderr.write(
                        f"round {number + 1}, {name}, {arm}: {told['embeddings_per_s']:.1f} embeddings/s, "
                        f"{told['output_tokens_per_s']:.2f} output tokens/s\n"
                    )
    finally:
        models.engines.shutdown()
    return rounds


def report(rounds: list[Round]) -> dict[str, Any]:
    """By load: each arm's numbers, and those of `remaining` and `static` over those of `whole`, of all rounds and of each."""
    told: dict[str, Any] = {}
    for name in dict.fromkeys(one.load for one in rounds):
        arms = {arm: [r for r in rounds if (r.load, r.arm) == (name, arm)] for arm in ARMS}
        rows = {arm: summary(of_arm) for arm, of_arm in arms.items()}
        single = {arm: [summary([r]) for r in of_arm] for arm, of_arm in arms.items()}
        ratios = {
            arm: {
                key: {
                    "all": rows[arm][key] / rows["whole"][key],
                    "rounds": [one[key] / base[key] for one, base in zip(single[arm], single["whole"], strict=True)],
                }
                for key in rows[arm]
            }
            for arm in ("remaining", "static")
        }
        told[name] = {"arms": rows, "ratios": ratios}
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--generator", type=Path, default=DEMO / "smollm2-135m-instruct")
    parser.add_argument("--embedder", type=Path, default=DEMO / "all-minilm-l6-v2")
    parser.add_argument("--vllm", default="{}", help="on CUDA: more engine arguments for both, as JSON")
    parser.add_argument("--budget", type=int, default=512, help="largest step of each, in tokens")
    parser.add_argument("--after", type=Path, help="start measuring once this file is there")
    parser.add_argument("--times", type=int, default=1, help="so many times the load: a GPU takes more")
    parser.add_argument("--shapes", action="store_true", help="OPT-1.3B and XLM-RoBERTa large with random weights")
    parser.add_argument("--min-share", type=float, default=0.125)
    parser.add_argument("--seconds", type=float, default=14.0)
    parser.add_argument("--warm", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    switches = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if options.device == "cpu":
        # One core for both engines: the card.
        switches |= {"VLLM_CPU_OMP_THREADS_BIND": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    os.environ.update(switches)
    rounds = asyncio.run(measure(options))
    result = {
        "command": " ".join(["python -m tests.engine.separate_speed", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": version("vllm-cpu" if options.device == "cpu" else "vllm"),
        "load_average": os.getloadavg(),
        "loads": {name: asdict(load.times(options.times)) for name, load in LOADS.items()},
        "report": report(rounds),
        "rounds": [asdict(one) for one in rounds],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(options.json, "wt") as file:
        json.dump(result, file)
    for name, told in result["report"].items():
        sys.stdout.write(f"\n{name}\n")
        for arm, row in told["arms"].items():
            sys.stdout.write(f"  {arm:10s} " + "  ".join(f"{key} {value:.3g}" for key, value in row.items()) + "\n")
        for arm, row in told["ratios"].items():
            sys.stdout.write(f"  {arm:10s} ÷ whole: " + "  ".join(f"{k} {v['all']:.3f}" for k, v in row.items()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
