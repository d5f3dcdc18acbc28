"""The cases of `test_v2_runner.py`, run one after the other in a process of their own that interprets Triton.

Writes one JSON object to a file: case → None, or the traceback of its failure. One synchronous engine
serves most cases, since starting one takes longer than they do.
"""

import json
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from orthrus_serve.engine.vllm_compat import V2_RUNNER_HOOKS, verify_hooks
from tests.engine.harness import POOLINGS, Engine, TinyModel, make_tiny_model, token_ids

CASES: dict[str, Callable[["Bench"], None]] = {}
LENGTHS = ((5, 90), (40, 1), (100, 30), (17, 65))  # (prompt, input): shorter and longer than a step


def case(run: Callable[["Bench"], None]) -> Callable[["Bench"], None]:
    CASES[run.__name__] = run
    return run


class Bench:
    """The tiny model and an engine that cases share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tiny: TinyModel = make_tiny_model(folder / "tiny")
        self._shared: Engine | None = None

    @property
    def shared(self) -> Engine:
        if self._shared is None:
            self._shared = self.start()
        self._shared.results.clear()
        return self._shared

    def give_up_shared(self) -> None:
        """The next case gets a new one: a step that failed leaves requests behind."""
        self._shared = None

    def start(self, **overrides: Any) -> Engine:
        """Engines share the process's communication groups, so none is closed before the process ends."""
        return Engine(self.tiny, self.folder / f"steps-{time.monotonic_ns()}.jsonl", **overrides)


def check_mix(engine: Engine, tag: str, *, num_tokens: int = 8, **sampling: Any) -> None:
    """Prompts and inputs together, all poolings; tokens as Transformers' (greedy) or as alone (otherwise)."""
    rng = random.Random(tag)
    jobs = [(token_ids(rng, prompt), token_ids(rng, length)) for prompt, length in LENGTHS]
    alone = [expected(engine, f"{tag}-alone{i}", prompt, num_tokens, sampling) for i, (prompt, _) in enumerate(jobs)]
    for i, (prompt, tokens) in enumerate(jobs):
        engine.generate(f"{tag}-g{i}", prompt, num_tokens, **sampling)
        for pooling in POOLINGS:
            engine.embed(f"{tag}-{pooling}{i}", tokens, pooling)
    engine.run()
    for i, (_, tokens) in enumerate(jobs):
        assert engine.tokens(f"{tag}-g{i}") == alone[i]
        for pooling in POOLINGS:
            assert engine.cosine(f"{tag}-{pooling}{i}", tokens, pooling) > 0.99999, (pooling, i)
    assert not any(engine.leaks().values()), engine.leaks()


def expected(
    engine: Engine, request_id: str, prompt: list[int], num_tokens: int, sampling: dict[str, Any]
) -> list[int]:
    if not sampling:
        return engine.tiny.greedy(prompt, num_tokens)
    engine.generate(request_id, prompt, num_tokens, **sampling)
    engine.run()
    return engine.tokens(request_id)


@case
def the_v2_runner_runs_and_has_every_hook(bench: Bench) -> None:
    verify_hooks(V2_RUNNER_HOOKS)
    assert "vllm.v1.worker.cpu.model_runner" in str(type(bench.shared.runner).__mro__)


@case
def a_budget_of_64_keeps_tokens_and_vectors_right(bench: Bench) -> None:
    check_mix(bench.shared, "b64")


@case
def a_budget_of_16_keeps_tokens_and_vectors_right(bench: Bench) -> None:
    engine = bench.shared
    engine.scheduler.answer("set", {"step_tokens": 16})
    check_mix(engine, "b16")
    engine.scheduler.answer("set", {"step_tokens": 64})
    steps = engine.steps()
    assert any(step["embed"] and step["decode"] for step in steps)
    assert any(0 < step["decode"] + step["prefill"] + step["embed"] <= 16 for step in steps)


@case
def every_policy_keeps_tokens_and_vectors_right(bench: Bench) -> None:
    for policy in ("hetero_fcfs", "unified_homo", "orthrus"):
        bench.shared.scheduler.answer("set", {"policy": policy})
        check_mix(bench.shared, policy, num_tokens=4)


@case
def seeds_and_penalties_are_as_alone(bench: Bench) -> None:
    check_mix(bench.shared, "seeded", temperature=1.0, seed=7)  # top_p and top_k: their kernel cannot be interpreted
    check_mix(bench.shared, "penalised", repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=3, logprobs=2)


@case
def an_embedding_aborted_mid_chunk_leaves_nothing(bench: Bench) -> None:
    engine, rng = bench.shared, random.Random("abort")
    doomed, kept = token_ids(rng, 200), token_ids(rng, 120)
    engine.embed("doomed", doomed, "mean")
    engine.embed("kept", kept, "mean")
    engine.step()
    engine.step()
    assert len(engine.runner.pooler_progress) >= 1
    engine.llm.abort_request(["doomed"])
    engine.run()
    assert set(engine.results) == {"kept"}
    assert engine.cosine("kept", kept, "mean") > 0.99999
    assert not any(engine.leaks().values())
    engine.embed("doomed", kept[:50], "mean")
    engine.run()
    assert engine.cosine("doomed", kept[:50], "mean") > 0.99999


@case
def preempted_requests_come_out_right(bench: Bench) -> None:
    engine, rng = bench.shared, random.Random("preempt")
    before = engine.totals()["preemptions"]
    prompts, inputs = [token_ids(rng, 40) for _ in range(3)], [token_ids(rng, n) for n in (130, 90, 150, 60)]
    for i, prompt in enumerate(prompts):
        engine.generate(f"g{i}", prompt, 16)
    for i, tokens in enumerate(inputs):
        engine.embed(f"e{i}", tokens, POOLINGS[i])
    for step in range(60):
        if step in (2, 5, 9):
            engine.llm.reset_prefix_cache(reset_running_requests=True)  # preempts everything that runs
        engine.step()
    engine.run()
    assert engine.totals()["preemptions"] - before >= 6
    assert [engine.tokens(f"g{i}") for i in range(3)] == [engine.tiny.greedy(prompt, 16) for prompt in prompts]
    for i, tokens in enumerate(inputs):
        assert engine.cosine(f"e{i}", tokens, POOLINGS[i]) > 0.99999, i
    assert not any(engine.leaks().values())


@case
def async_scheduling_with_a_prefix_cache_keeps_tokens_and_vectors_right(bench: Bench) -> None:
    engine = bench.start(async_scheduling=True, enable_prefix_caching=True, budget=48)
    assert engine.llm.vllm_config.scheduler_config.async_scheduling
    check_mix(engine, "async")
    stem = token_ids(random.Random("stem"), 128)
    for i, pooling in enumerate(POOLINGS * 2):
        tokens = [*stem, 10 + i, 20 + i]
        engine.embed(f"{pooling}{i}", tokens, pooling)
        engine.run()
        assert engine.cosine(f"{pooling}{i}", tokens, pooling) > 0.99999, pooling
    assert engine.results["last4"].num_cached_tokens >= 96
    assert engine.results["mean5"].num_cached_tokens == 0


@case
def lora_part_by_part_adds_to_the_rows_of_each_adapter_and_to_no_other(bench: Bench) -> None:
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    from orthrus_serve.engine.lora_expand import expand_parts

    rank, sizes, first_column = 16, (64, 32, 32), 16
    slots = torch.tensor([1, 1, -1, 0, -1, 0, 1, -1], dtype=torch.int32)
    torch.manual_seed(0)
    low = torch.randn(len(sizes), len(slots), rank)
    weights = [torch.randn(2, 1, size, rank).half() for size in sizes]
    output = torch.randn(len(slots), first_column + sum(sizes)).half()
    wanted = output.float().clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            parts = [low[i, row].half().float() @ w[slot, 0].float().T for i, w in enumerate(weights)]
            wanted[row, first_column:] += torch.cat(parts)
    meta = LoRAKernelMeta.make(2, len(slots), "cpu")
    meta.prepare_tensors(slots)
    expand_parts(low, weights, output, *meta.meta_args(len(slots), False), first_column, True)
    torch.testing.assert_close(
        output.float(), wanted, atol=0.02, rtol=0.002
    )  # sums in fp16: the interpreter knows no bf16
    assert torch.equal(output[slots < 0].float(), wanted[slots < 0])


def main(out: Path) -> None:
    failures: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for name, run in CASES.items():
            try:
                run(bench)
                failures[name] = None
            except Exception:  # noqa: BLE001  told by the other process
                failures[name] = traceback.format_exc()
                bench.give_up_shared()
            out.write_text(json.dumps(failures))
