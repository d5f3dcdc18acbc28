"""Random arrivals, lengths, poolings, aborts, resubmissions and preemptions on a tiny KV cache, over policies and switches.

Run small by `test_fuzz.py`, long by `make fuzz` (`python -m tests.engine.fuzz --rounds N --seed S`). Every round checks that no
request is lost, nothing leaks, every vector equals Transformers with peft, and every greedy token equals the same prompt alone.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tests.engine.conftest  # noqa: F401  sets vLLM's switches before anything imports it
from tests.engine.harness import POOLINGS, Engine, TinyModel, make_tiny_model, token_ids

POLICIES = ("orthrus", "hetero_fcfs", "unified_homo")
LENGTHS = (1, 2, 5, 20, 33, 64, 100, 150, 250)
MIN_COSINE = 0.9999


@dataclass(frozen=True)
class Setting:
    """What one round runs on."""

    seed: int
    policy: str
    prefix_caching: bool
    async_scheduling: bool
    num_requests: int = 60


@dataclass
class Round:
    """What a round did, and what went wrong (nothing, hopefully)."""

    setting: Setting
    steps: int = 0
    embeddings: int = 0
    generations: int = 0
    aborted: int = 0
    preemptions: int = 0
    switches: int = 0
    worst_cosine: float = 1.0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """A request to be: `pooling` None for a generation of `max_tokens`."""

    request_id: str
    prompt: list[int]
    pooling: str | None
    max_tokens: int


def run_round(tiny: TinyModel, setting: Setting, folder: Path) -> Round:
    """One round on an engine of its own."""
    rng = random.Random(setting.seed)
    engine = Engine(
        tiny,
        folder / f"{setting.seed}.jsonl",
        policy=setting.policy,
        budget=rng.choice([18, 24, 40, 64]),
        async_scheduling=setting.async_scheduling,
        live={"target_tpot_ms": rng.choice([None, 5.0]), "max_wait_steps": rng.choice([4, 64])},
        max_model_len=384,
        num_gpu_blocks_override=rng.choice([16, 20, 26]),
        max_num_seqs=rng.choice([6, 12]),
        enable_prefix_caching=setting.prefix_caching,
    )
    result = Round(setting)
    try:
        done = _drive(engine, list(_requests(rng, setting.num_requests)), rng, result)
        _check_vectors(engine, done, result)
        _check_tokens(engine, done, result)
        leaks = {name: count for name, count in engine.leaks().items() if count}
        if leaks:
            result.wrong.append(f"leaked {leaks}")
        over = [
            step["step"] for step in engine.steps() if step["decode"] + step["prefill"] + step["embed"] > step["budget"]
        ]
        if over:
            result.wrong.append(f"over budget in steps {over[:5]}")
        result.preemptions = engine.totals()["preemptions"]
    finally:
        engine.close()
    return result


def _requests(rng: random.Random, count: int) -> Iterator[Request]:
    stem = token_ids(rng, 96)
    for i in range(count):
        prompt = token_ids(rng, rng.choice(LENGTHS))
        if rng.random() < 0.3:
            prompt = stem + prompt[:200]
        embeds = rng.random() < 0.6
        pooling = rng.choice(POOLINGS) if embeds else None
        yield Request(f"{'e' if embeds else 'g'}{i}", prompt if embeds else prompt[:200], pooling, rng.randrange(1, 60))


def _drive(engine: Engine, todo: list[Request], rng: random.Random, result: Round) -> list[Request]:
    """Feeds, aborts, preempts and switches until all is over. Returns the requests that must have finished."""
    arrivals = sorted(rng.randrange(0, 2 * len(todo)) for _ in todo)
    live: dict[str, Request] = {}
    expected: dict[str, Request] = {}
    while todo or engine.llm.has_unfinished_requests():
        while todo and arrivals[0] <= result.steps:
            arrivals.pop(0)
            request = todo.pop(0)
            live[request.request_id] = expected[request.request_id] = request
            _add(engine, request)
        for request_id in [r for r in live if r in engine.results]:
            del live[request_id]
        if live and rng.random() < 0.04:
            victim = rng.choice(sorted(live))
            engine.llm.abort_request([victim])
            request = live.pop(victim)
            del expected[victim]
            result.aborted += 1
            if rng.random() < 0.5:  # the same id at once, with another prompt
                again = Request(victim, token_ids(rng, 30), request.pooling, 5)
                live[victim] = expected[victim] = again
                _add(engine, again)
        if rng.random() < 0.04:
            engine.llm.reset_prefix_cache(reset_running_requests=True)  # preempts everything that runs
        if rng.random() < 0.05:
            engine.scheduler.answer("set", {"policy": rng.choice(POLICIES)})
            result.switches += 1
        engine.step()
        result.steps += 1
        if result.steps > 5000:
            result.wrong.append(f"no end after {result.steps} steps: {sorted(live)}")
            return []
    lost = sorted(set(expected) - set(engine.results))
    if lost:
        result.wrong.append(f"lost {lost}")
    while engine.scheduler.has_requests():
        engine.step()
    return [request for request in expected.values() if request.request_id in engine.results]


def _add(engine: Engine, request: Request) -> None:
    if request.pooling is not None:
        engine.embed(request.request_id, request.prompt, request.pooling)
    else:
        engine.generate(request.request_id, request.prompt, request.max_tokens)


def _check_vectors(engine: Engine, done: list[Request], result: Round) -> None:
    for request in done:
        if request.pooling is None:
            continue
        result.embeddings += 1
        cosine = engine.cosine(request.request_id, request.prompt, request.pooling)
        result.worst_cosine = min(result.worst_cosine, cosine)
        if not cosine > MIN_COSINE:
            result.wrong.append(
                f"{request.request_id} {request.pooling} of {len(request.prompt)} tokens: cosine {cosine}"
            )


def _check_tokens(engine: Engine, done: list[Request], result: Round) -> None:
    for request in done:
        if request.pooling is not None:
            continue
        result.generations += 1
        engine.generate(f"alone-{request.request_id}", request.prompt, request.max_tokens)
        engine.run()
        if engine.tokens(request.request_id) != engine.tokens(f"alone-{request.request_id}"):
            result.wrong.append(f"{request.request_id}: other tokens than alone")


def settings(rounds: int, seed: int) -> Iterator[Setting]:
    """Rounds that walk through policies, prefix caching and async scheduling."""
    for i in range(rounds):
        yield Setting(seed + i, POLICIES[i % 3], prefix_caching=bool(i // 3 % 2), async_scheduling=bool(i // 6 % 2))


def say(line: dict[str, Any]) -> None:
    """One JSON line on standard output."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Runs many rounds; prints one line each and a summary; exit code 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    totals: dict[str, Any] = {
        "rounds": 0,
        "requests": 0,
        "steps": 0,
        "preemptions": 0,
        "aborted": 0,
        "worst_cosine": 1.0,
    }
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        tiny = make_tiny_model(Path(name))
        for setting in settings(options.rounds, options.seed):
            result = run_round(tiny, setting, Path(name))
            wrong += bool(result.wrong)
            totals["rounds"] += 1
            totals["requests"] += result.embeddings + result.generations + result.aborted
            totals["steps"] += result.steps
            totals["preemptions"] += result.preemptions
            totals["aborted"] += result.aborted
            totals["worst_cosine"] = min(totals["worst_cosine"], result.worst_cosine)
            line = {**vars(setting), "steps": result.steps, "preemptions": result.preemptions}
            say({**line, "worst_cosine": round(result.worst_cosine, 8), "wrong": result.wrong})
    say(totals)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
