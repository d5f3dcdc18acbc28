"""One engine over several workers: tensor parallel and pipeline parallel, on CPU. The scheduler is in this process.

Workers wait for one another by turning, so that a step takes long where there are fewer cores than processes: few steps here.
"""

import random
from collections.abc import Callable

import pytest

from tests.engine.harness import POOLINGS, Engine, token_ids


@pytest.mark.parametrize("kind", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_both_kinds_come_out_right_from_two_workers(
    make_engine: Callable[..., Engine], rng: random.Random, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM wants a NUMA node for each worker otherwise
    engine = make_engine(**{kind: 2, "distributed_executor_backend": "mp", "budget": 128})
    prompts = [token_ids(rng, n) for n in (30, 90, 7)]
    inputs = [token_ids(rng, n) for n in (5, 64, 200, 150)]
    for i, prompt in enumerate(prompts):
        engine.generate(f"g{i}", prompt, 5)
    for i, tokens in enumerate(inputs):
        engine.embed(f"e{i}", tokens, POOLINGS[i])
    engine.run()
    assert engine.totals()["mixed_steps"] > 0
    assert [engine.tokens(f"g{i}") for i in range(3)] == [engine.tiny.greedy(prompt, 5) for prompt in prompts]
    for i, tokens in enumerate(inputs):
        assert engine.cosine(f"e{i}", tokens, POOLINGS[i]) > 0.99999
