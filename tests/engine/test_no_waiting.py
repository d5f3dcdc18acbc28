"""Pooling never makes the host wait for the device: no operation that reads a device value or makes a shape of one.

On CPU such operations are seen by their names. `tests/gpu` lets CUDA itself refuse them.
"""

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from orthrus_serve.engine.pooling import ChunkRows, FinishedVectors, ProgressivePooler
from orthrus_serve.engine.settings import HeadSettings, PoolingSpec
from orthrus_serve.engine.transfer import HostCopy, to_device

SIZE = 8
WAITING = {
    "aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount",
}  # fmt: skip


class NoWaiting(TorchDispatchMode):
    """Fails on operations for which the host would wait on CUDA."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name().partition(".")[0], kwargs or {}
        assert name not in WAITING, f"{name} waits for the device"
        assert name != "aten::segment_reduce" or kwargs.get("unsafe"), "segment_reduce reads its lengths back"
        indices = args[1] if name in ("aten::index", "aten::index_put_", "aten::index_put") else ()
        assert not any(index is not None and index.dtype == torch.bool for index in indices), "a mask makes a shape"
        return func(*args, **kwargs)


@pytest.fixture
def specs(tmp_path: Path) -> dict[str, PoolingSpec]:
    """A request of each kind, with and without normalisation, cut, and with a head longer and shorter than the states."""
    made = {
        f"{pooling}-{normalize}-{cut}": PoolingSpec(pooling, normalize=normalize, dimensions=cut)
        for pooling in ("last", "cls", "mean", "weighted_mean")
        for normalize in (True, False)
        for cut in (None, 3)
    }
    for out in (5, 12):
        path = tmp_path / f"head-{out}.safetensors"
        safetensors.torch.save_file({"weight": torch.randn(out, SIZE), "bias": torch.randn(out)}, path)
        head = HeadSettings(path=str(path), activation="tanh", reduction="mean")
        made[f"all-{out}"] = PoolingSpec("all", head=head)
        made[f"mean-beside-a-head-of-{out}"] = PoolingSpec("mean", head=head)
    return made


def run_in_chunks(
    specs: dict[str, PoolingSpec], states: torch.Tensor, chunk: int, *, watched: bool = False
) -> dict[str, torch.Tensor]:
    """Every request has the same states, and each step holds a chunk of each, in random order."""
    rng, pooler = random.Random(chunk), ProgressivePooler(2)
    for name, spec in specs.items():
        if spec.head is not None:
            pooler.load_head(spec.head, SIZE, states.device)
        pooler.add(name, spec, len(states))
    vectors: dict[str, torch.Tensor] = {}
    for start in range(0, len(states), chunk):
        part = states[start : start + chunk]
        names = rng.sample(sorted(specs), len(specs))
        rows = [ChunkRows(name, i * len(part), (i + 1) * len(part), start) for i, name in enumerate(names)]
        hidden = part.repeat(len(names), 1)
        with NoWaiting() if watched else nullcontext():
            finished = pooler.step(hidden, rows)
        if finished is not None:
            vectors |= finished.on_host(HostCopy(finished.vectors, None).wait())
    return vectors


def test_pooling_of_every_kind_reads_nothing_back(specs: dict[str, PoolingSpec]) -> None:
    vectors = run_in_chunks(specs, torch.randn(11, SIZE), 4, watched=True)
    assert set(vectors) == set(specs)


def test_the_check_sees_what_waits() -> None:
    values = torch.arange(4.0)
    for wait in (
        lambda: values.sum().item(),
        lambda: values[values > 1],
        lambda: values.nonzero(),
        lambda: torch.segment_reduce(values, "sum", lengths=torch.tensor([2, 2])),
    ):
        with NoWaiting(), pytest.raises(AssertionError):
            wait()


def test_vectors_of_a_step_are_as_computed_one_by_one(specs: dict[str, PoolingSpec]) -> None:
    states = torch.randn(11, SIZE)
    weights = torch.arange(1, 12).float()
    full = {
        "last": states[-1],
        "cls": states[0],
        "mean": states.mean(0),
        "weighted_mean": (weights @ states) / weights.sum(),
    }
    for chunk in (1, 4, 11):
        vectors = run_in_chunks(specs, states, chunk)
        for name, spec in specs.items():
            if spec.pooling == "all":
                continue
            expected = full[spec.pooling][: spec.dimensions or SIZE]
            expected = torch.nn.functional.normalize(expected, dim=0) if spec.normalize else expected
            assert torch.allclose(vectors[name], expected, atol=1e-6), (name, chunk)
        assert [vectors[f"all-{out}"].shape[0] for out in (5, 12)] == [5, 12]


def test_arrays_sent_as_one_block_come_out_as_they_were() -> None:
    arrays = [np.arange(3), np.empty(0, dtype=np.int64), np.asarray([7, -1])]
    assert [part.tolist() for part in to_device(arrays, torch.device("cpu"))] == [[0, 1, 2], [], [7, -1]]
    narrow = to_device(arrays, torch.device("cpu"), torch.int32)
    assert {part.dtype for part in narrow} == {torch.int32}


def test_vectors_do_not_share_memory_with_the_copy() -> None:
    vectors = torch.ones(2, 4)
    first = FinishedVectors(("a", "b"), (4, 2), vectors).on_host(HostCopy(vectors, None).wait())
    vectors.zero_()
    assert first["a"].tolist() == [1, 1, 1, 1]
    assert first["b"].tolist() == [1, 1]
