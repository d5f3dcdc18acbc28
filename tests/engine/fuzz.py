"""Random arrivals, lengths, poolings, aborts, resubmissions and preemptions on a tiny KV cache, over policies and switches.

Run small by `test_fuzz.py`, long by `make fuzz` (`python -m tests.engine.fuzz --rounds N --seed S`, and for the V2 runner
`python -m tests.engine.triton_interpreter tests.engine.fuzz ...`). A round depends on its seed alone. Each checks that no
request is lost, nothing leaks, every vector equals Transformers with peft, and every greedy token is the one that they choose.
"""

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

import tests.engine.conftest  # noqa: F401  sets vLLM's switches before anything imports it
from tests.engine.harness import POOLINGS, Engine, TinyModel, add_tiny_adapter, make_tiny_model, token_ids

POLICIES = ("orthrus", "hetero_fcfs", "unified_homo")
LENGTHS = (1, 2, 5, 20, 33, 64, 100, 150, 250)
MIN_COSINE = 0.9999
MAX_LOGIT_GAP = 1e-3  # a token may miss the reference's best logit by this much: rounding decides between equals
# (policy, prefix caching, async scheduling), in an order that mixes them.
COMBINATIONS = [list(itertools.product(POLICIES, (False, True), (False, True)))[i * 5 % 12] for i in range(12)]
SMALLER = {"v1": 1, "v2": 2}  # a step on the interpreted V2 runner takes ten times as long


def runner_in_use() -> str:
    """The model runner of this process, v1 or v2."""
    return "v2" if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1" else "v1"


@dataclass(frozen=True)
class Models:
    """The tiny model with either of two adapters."""

    first: TinyModel
    second: TinyModel

    @classmethod
    def make(cls, folder: Path) -> "Models":
        first = make_tiny_model(folder)
        base = LlamaForCausalLM.from_pretrained(first.model)
        return cls(first, TinyModel(first.model, add_tiny_adapter(base, folder / "second", 2)))


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
    mixed_steps: int = 0
    embeddings: int = 0
    generations: int = 0
    aborted: int = 0
    preemptions: int = 0
    switches: int = 0
    worst_cosine: float = 1.0
    worst_gap: float = 0.0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """A request to be: `pooling` None for a generation of `max_tokens`. `adapter` is 0 (none), 1 or 2."""

    request_id: str
    prompt: list[int]
    pooling: str | None
    max_tokens: int
    adapter: int


def run_round(models: Models, setting: Setting, folder: Path) -> Round:
    """One round on an engine of its own."""
    rng = random.Random(setting.seed)
    engine = Engine(
        models.first,
        folder / f"{setting.seed}.jsonl",
        policy=setting.policy,
        budget=rng.choice([18, 24, 40, 64]),
        async_scheduling=setting.async_scheduling,
        live={"target_tpot_ms": rng.choice([None, 5.0]), "max_wait_steps": rng.choice([4, 64])},
        max_model_len=384,
        num_gpu_blocks_override=rng.choice([16, 20, 26]),
        max_num_seqs=rng.choice([6, 12]),
        max_loras=rng.choice([1, 2]),
        enable_prefix_caching=setting.prefix_caching,
    )
    result = Round(setting)
    try:
        done = _Driver(engine, models, list(_requests(rng, setting.num_requests)), rng, result).run()
        _check_vectors(engine, models, done, result)
        _check_tokens(engine, models, done, result)
        leaks = {name: count for name, count in engine.leaks().items() if count}
        if leaks:
            result.wrong.append(f"leaked {leaks}")
        over = [
            step["step"] for step in engine.steps() if step["decode"] + step["prefill"] + step["embed"] > step["budget"]
        ]
        if over:
            result.wrong.append(f"over budget in steps {over[:5]}")
        result.preemptions, result.mixed_steps = (engine.totals()[name] for name in ("preemptions", "mixed_steps"))
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
        name, adapter = f"{'e' if embeds else 'g'}{i}", rng.choice([1, 1, 2] if embeds else [0, 0, 2])
        yield Request(name, prompt if embeds else prompt[:200], pooling, rng.randrange(1, 60), adapter)


class _Driver:
    """Feeds, aborts, preempts and switches until all is over."""

    def __init__(self, engine: Engine, models: Models, todo: list[Request], rng: random.Random, result: Round) -> None:
        self.engine, self.models, self.todo, self.rng, self.result = engine, models, todo, rng, result
        self.arrivals = sorted(rng.randrange(0, 2 * len(todo)) for _ in todo)
        self.live: dict[str, Request] = {}
        self.expected: dict[str, Request] = {}

    def run(self) -> list[Request]:
        """Returns the requests that have finished; all that were not aborted must have."""
        engine, result = self.engine, self.result
        while self.todo or engine.llm.has_unfinished_requests():
            while self.todo and self.arrivals[0] <= result.steps:
                self.arrivals.pop(0)
                self._add(self.todo.pop(0))
            self._disturb()
            engine.step()
            result.steps += 1
            if result.steps > 5000:
                result.wrong.append(f"no end after {result.steps} steps: {sorted(self.live)}")
                return []
        lost = sorted(set(self.expected) - set(engine.results))
        if lost:
            result.wrong.append(f"lost {lost}")
        while engine.scheduler.has_requests():
            engine.step()
        return [request for request in self.expected.values() if request.request_id in engine.results]

    def _disturb(self) -> None:
        rng, engine = self.rng, self.engine
        for request_id in [r for r in self.live if r in engine.results]:
            del self.live[request_id]
        if self.live and rng.random() < 0.04:
            self._abort(rng.choice(sorted(self.live)))
        if rng.random() < 0.04:
            engine.llm.reset_prefix_cache(reset_running_requests=True)  # preempts everything that runs
        if rng.random() < 0.05:
            engine.scheduler.answer("set", {"policy": rng.choice(POLICIES)})
            self.result.switches += 1

    def _abort(self, victim: str) -> None:
        self.engine.llm.abort_request([victim])
        request = self.live.pop(victim)
        del self.expected[victim]
        self.result.aborted += 1
        if self.rng.random() < 0.5:  # the same id at once, with another prompt
            self._add(replace(request, prompt=token_ids(self.rng, 30), max_tokens=5))

    def _add(self, request: Request) -> None:
        self.live[request.request_id] = self.expected[request.request_id] = request
        second = self.models.second.adapter if request.adapter == 2 else None
        if request.pooling is not None:
            self.engine.embed(request.request_id, request.prompt, request.pooling, adapter=second)
        else:
            self.engine.generate(request.request_id, request.prompt, request.max_tokens, adapter=second)


def _check_vectors(engine: Engine, models: Models, done: list[Request], result: Round) -> None:
    for request in done:
        if request.pooling is None:
            continue
        result.embeddings += 1
        reference = (models.second if request.adapter == 2 else models.first).vector(request.prompt, request.pooling)
        cosine = float(torch.nn.functional.cosine_similarity(engine.vector(request.request_id), reference, dim=0))
        result.worst_cosine = min(result.worst_cosine, cosine)
        if not cosine > MIN_COSINE:
            result.wrong.append(f"{request}: cosine {cosine}")


def logit_gap(models: Models, prompt: list[int], tokens: list[int], *, adapted: bool) -> float:
    """How far the reference's logit of a token lies below its best one, at most, with the second adapter or none."""
    logits = models.second.next_logits(prompt, tokens, adapted=adapted)
    return float((logits.amax(-1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]).max())


def _check_tokens(engine: Engine, models: Models, done: list[Request], result: Round) -> None:
    for request in done:
        if request.pooling is not None:
            continue
        result.generations += 1
        tokens = engine.tokens(request.request_id)
        if len(tokens) != request.max_tokens:
            result.wrong.append(f"{request}: {len(tokens)} tokens")
            continue
        gap = logit_gap(models, request.prompt, tokens, adapted=request.adapter == 2)
        result.worst_gap = max(result.worst_gap, gap)
        if not gap < MAX_LOGIT_GAP:
            result.wrong.append(f"{request}: a token {gap} below the reference's best")


def settings(rounds: int, seed: int) -> Iterator[Setting]:
    """Rounds that walk through policies, prefix caching and async scheduling."""
    requests = 60 // SMALLER[runner_in_use()]
    for number in range(seed, seed + rounds):
        policy, prefix_caching, async_scheduling = COMBINATIONS[number % len(COMBINATIONS)]
        yield Setting(number, policy, prefix_caching, async_scheduling, requests)


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
    counts = ("steps", "mixed_steps", "embeddings", "generations", "aborted", "preemptions", "switches")
    totals = dict.fromkeys(("rounds", "wrong_rounds", *counts), 0)
    worst = {"worst_cosine": 1.0, "worst_gap": 0.0}
    with tempfile.TemporaryDirectory() as name:
        models = Models.make(Path(name))
        for setting in settings(options.rounds, options.seed):
            result = run_round(models, setting, Path(name))
            found = vars(result) | {"setting": vars(setting)}
            say(found)
            totals["rounds"] += 1
            totals["wrong_rounds"] += bool(result.wrong)
            for count in counts:
                totals[count] += found[count]
            worst["worst_cosine"] = min(worst["worst_cosine"], result.worst_cosine)
            worst["worst_gap"] = max(worst["worst_gap"], result.worst_gap)
    say({"runner": runner_in_use(), "seed": options.seed, **totals, **worst})
    return 1 if totals["wrong_rounds"] else 0


if __name__ == "__main__":
    sys.exit(main())
