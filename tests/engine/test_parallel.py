"""One engine over several workers: tensor parallel and pipeline parallel, on CPU."""

import asyncio
import random
from typing import Any

import pytest
import torch

from tests.engine.harness import TinyModel, token_ids
from tests.engine.test_llm import EOS, Running, app_args

SIZES = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}


@pytest.mark.parametrize("kind", SIZES)
def test_both_kinds_come_out_right_from_two_workers(
    tiny: TinyModel, rng: random.Random, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM wants a NUMA node for each worker otherwise
    running = Running(tiny, app_args(tiny, **SIZES[kind]))
    prompts = [token_ids(rng, n) for n in (30, 90, 7)]
    inputs = [token_ids(rng, n) for n in (5, 64, 200, 400)]

    async def both() -> tuple[list[Any], list[Any]]:
        generations = [asyncio.ensure_future(running.generate(p, f"g{i}", 20)) for i, p in enumerate(prompts)]
        embeddings = [asyncio.ensure_future(running.embed(t, f"e{i}")) for i, t in enumerate(inputs)]
        return await asyncio.gather(*generations), await asyncio.gather(*embeddings)

    try:
        tokens, vectors = running.run(both())
        report = running.run(running.engine.channel.watch())
    finally:
        running.close()
    assert report["totals"]["mixed_steps"] > 0
    assert tokens == [tiny.greedy(prompt, 20) for prompt in prompts]
    for ids, output in zip(inputs, vectors, strict=True):
        reference = tiny.vector([*ids, EOS], "last")
        assert float(torch.nn.functional.cosine_similarity(output.outputs.data.float(), reference, dim=0)) > 0.99999
