"""A tiny model with random weights, its adapter and a tokenizer, made once; an engine in this process to drive by steps.

The in-process engine runs the real scheduler, worker, runner and forward of vLLM on CPU. References come from Transformers and
peft (vectors) and from stock vLLM (tokens).
"""

import os

os.environ.setdefault(
    "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
)  # LLMEngine in this process; AsyncLLM spawns its core anyway
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as replicas on CPU run (config/environment.py)

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.harness import Engine, TinyModel, make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The tiny model's folders and its Transformers reference."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_engine(tiny: TinyModel, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines over the tiny model; all are shut down when the test ends."""
    engines: list[Engine] = []

    def make(**overrides: object) -> Engine:
        engines.append(Engine(tiny, tmp_path / f"steps-{len(engines)}.jsonl", **overrides))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Randomness with a seed of the test's own: prompts shared between tests would be prefix-cache hits."""
    return random.Random(request.node.name)
