"""Progressive pooling: consumes hidden states chunk by chunk and keeps O(hidden size) per request.

One gather, one segment reduction and one finish per step for all rows, whatever their pooling; what they look up goes to the
device as one block, and the host waits for nothing. Knows torch and nothing of vLLM. Leaves out where rows come from
(`runner.py`) and when the result is copied to the host.

A chunk of positions [start, end) of an input of n tokens, hidden size d:

    last           keep  h[n-1]                              known with the last chunk
    cls            keep  h[0]                                known with the first chunk; a copy, graph buffers are reused
    mean           add   sum h[start:end]                    divided by n at the end
    weighted_mean  add   sum (i+1) h[i], i in [start, end)   divided by n(n+1)/2 at the end
    all            keep  h[start:end]                        a dense head makes one vector of all n at the end; O(n·d),
                                                             bounded by the head's max_input_tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from orthrus_serve.engine.pooling_head import DenseHead
from orthrus_serve.engine.settings import HeadSettings, PoolingSpec
from orthrus_serve.engine.transfer import to_device


@dataclass(frozen=True)
class ChunkRows:
    """One request's chunk in this step: rows [first_row, last_row) of the hidden states, from prompt position `start` on."""

    request_id: str
    first_row: int
    last_row: int
    start: int

    @property
    def end(self) -> int:
        """Prompt position after the chunk."""
        return self.start + self.last_row - self.first_row


@dataclass
class _Progress:
    spec: PoolingSpec
    num_tokens: int
    slot: int
    next_position: int = 0
    broken: bool = False
    states: list[torch.Tensor] = field(default_factory=list)  # pooling `all` only


@dataclass(frozen=True)
class FinishedVectors:
    """Vectors that a step completed: fp32 `[len(request_ids), d]` on the model's device.

    `dimensions` cuts each row; 0 marks a request whose hidden states had a gap, which must be answered with an error.
    """

    request_ids: tuple[str, ...]
    dimensions: tuple[int, ...]
    vectors: torch.Tensor

    def on_host(self, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Request id → its own fp32 vector, from a host copy of `vectors`. An empty vector stands for an error."""
        rows = zip(self.request_ids, self.dimensions, vectors, strict=True)
        return {request_id: row[:length].clone() for request_id, length, row in rows}


class ProgressivePooler:
    """Pooling state of all embedding requests of one model runner.

    Args:
        num_slots: requests to make room for; grows when more are in progress.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = max(1, num_slots)
        self._progress: dict[str, _Progress] = {}
        self._free = list(range(self._num_slots))
        self._heads: dict[HeadSettings, DenseHead] = {}
        self._sums: torch.Tensor | None = None  # [slots, d] fp32: a running sum, or the one row that is kept

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._progress

    def __len__(self) -> int:
        return len(self._progress)

    def add(self, request_id: str, spec: PoolingSpec, num_tokens: int) -> None:
        """Begins a request of `num_tokens` prompt tokens. Adding it again begins it anew (preempted and resumed)."""
        self.remove(request_id)
        if not self._free:
            self._grow()
        self._progress[request_id] = _Progress(spec, num_tokens, self._free.pop())

    def remove(self, request_id: str) -> None:
        """Forgets a request, whether it finished, was aborted or preempted. Unknown ids are ignored."""
        progress = self._progress.pop(request_id, None)
        if progress is not None:
            self._free.append(progress.slot)

    def load_head(self, settings: HeadSettings, hidden_size: int, device: torch.device) -> None:
        """Loads a head before the first request needs it.

        Raises:
            AdapterError: it does not fit the model.
        """
        if settings not in self._heads:
            self._heads[settings] = DenseHead(settings, hidden_size, device)

    def drop_states(self, request_id: str) -> None:
        """Frees what a preempted request of pooling `all` has kept: it starts again from its first position."""
        progress = self._progress.get(request_id)
        if progress is not None:
            progress.states.clear()

    def step(self, hidden: torch.Tensor, chunks: Sequence[ChunkRows]) -> FinishedVectors | None:
        """Consumes one step's rows.

        Args:
            hidden: hidden states `[rows, d]` after the model's final norm; read, never kept.
            chunks: the rows of each embedding request in this step.

        Returns:
            The vectors that are complete now, or None.
        """
        if self._sums is None:
            self._sums = torch.zeros(self._num_slots, hidden.shape[-1], dtype=torch.float32, device=hidden.device)
        advanced = [(self._progress[chunk.request_id], chunk) for chunk in chunks]
        for progress, chunk in advanced:
            self._advance(progress, chunk)
        done = [(p, c.request_id) for p, c in advanced if c.end >= p.num_tokens]
        sizes = [self._vector_size(p, hidden.shape[-1]) for p, _ in done]
        dimensions = [0 if p.broken else min(p.spec.dimensions or n, n) for (p, _), n in zip(done, sizes, strict=True)]
        looked_up = [*_kept_rows(advanced), *_summed_rows(advanced), *_finished_rows(done, dimensions)]
        keep_slots, keep_rows, fresh, slots, lengths, rows, weights, done_slots, totals, cuts, flags = to_device(
            looked_up, hidden.device
        )
        self._keep_single_rows(hidden, keep_slots, keep_rows)
        self._add_sums(hidden, fresh, slots, lengths, rows, weights)
        for progress, chunk in advanced:
            if progress.spec.pooling == "all":
                progress.states.append(hidden[chunk.first_row : chunk.last_row].clone())
        if not done:
            return None
        vectors = self._finish(done_slots, totals, [p for p, _ in done], max(sizes))
        _normalize_(vectors, dimensions, [p.spec.normalize for p, _ in done], cuts, flags)
        return FinishedVectors(tuple(request_id for _, request_id in done), tuple(dimensions), vectors)

    @staticmethod
    def _advance(progress: _Progress, chunk: ChunkRows) -> None:
        if chunk.start == 0:
            progress.broken = False
            progress.states.clear()
        elif chunk.start != progress.next_position and progress.spec.needs_every_state:
            progress.broken = True  # a gap: the vector would be wrong, so there will be none
        progress.next_position = chunk.end

    def _vector_size(self, progress: _Progress, hidden_size: int) -> int:
        spec = progress.spec  # a head belongs to an adapter, and a request may ask for another pooling than `all`
        return self._heads[spec.head].size if spec.pooling == "all" and spec.head is not None else hidden_size

    def _keep_single_rows(self, hidden: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        if len(slots):
            assert self._sums is not None
            self._sums.index_copy_(0, slots, hidden.index_select(0, rows).float())

    def _add_sums(
        self,
        hidden: torch.Tensor,
        fresh: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        if not len(slots):
            return
        assert self._sums is not None
        if len(fresh):
            self._sums.index_fill_(0, fresh, 0.0)
        states = hidden.index_select(0, rows).float().mul_(weights.unsqueeze(1))
        # segment_reduce, not index_add_ over rows: its order of summation is fixed, so vectors repeat to the bit. `unsafe`
        # leaves out its checks of the lengths, for which the host waits.
        sums = torch.segment_reduce(states, "sum", lengths=lengths, axis=0, unsafe=True)
        self._sums.index_add_(0, slots, sums)

    def _finish(
        self, slots: torch.Tensor, totals: torch.Tensor, done: Sequence[_Progress], longest: int
    ) -> torch.Tensor:
        """The vectors `[len(done), longest]` before normalisation; heads may make longer ones than the model."""
        assert self._sums is not None
        vectors = self._sums.index_select(0, slots).mul_(totals.view(torch.float64).reciprocal().float().unsqueeze(1))
        if longest > vectors.shape[1]:
            vectors = torch.nn.functional.pad(vectors, (0, longest - vectors.shape[1]))
        for row, progress in enumerate(done):
            if progress.spec.pooling == "all" and not progress.broken:
                assert progress.spec.head is not None
                vector = self._heads[progress.spec.head](torch.cat(progress.states))
                vectors[row, : vector.shape[0]] = vector
                vectors[row, vector.shape[0] :] = 0.0
        return vectors

    def _grow(self) -> None:
        old = self._num_slots
        self._num_slots = 2 * old
        self._free.extend(range(old, self._num_slots))
        if self._sums is not None:
            self._sums = torch.cat([self._sums, torch.zeros_like(self._sums)])


def _kept_rows(advanced: Sequence[tuple[_Progress, ChunkRows]]) -> tuple[np.ndarray, ...]:
    """Slots, and rows of the hidden states to keep there: the last ones and first ones that come in this step."""
    slots, rows = [], []
    for progress, chunk in advanced:
        if progress.spec.pooling == "last" and chunk.end >= progress.num_tokens:
            slots.append(progress.slot)
            rows.append(chunk.first_row + progress.num_tokens - 1 - chunk.start)
        elif progress.spec.pooling == "cls" and chunk.start == 0:
            slots.append(progress.slot)
            rows.append(chunk.first_row)
    return _int64(slots), _int64(rows)


def _summed_rows(advanced: Sequence[tuple[_Progress, ChunkRows]]) -> tuple[np.ndarray, ...]:
    """Slots that begin anew; slots to add to, how many rows each gets, these rows one after the other, and their weights."""
    summed = [(p, c) for p, c in advanced if p.spec.pooling in ("mean", "weighted_mean")]
    fresh = _int64([p.slot for p, c in summed if c.start == 0])
    slots, lengths = _int64([p.slot for p, _ in summed]), _int64([c.last_row - c.first_row for _, c in summed])
    rows = [np.arange(c.first_row, c.last_row, dtype=np.int64) for _, c in summed]
    weights = [_weights(p.spec, c) for p, c in summed]
    return fresh, slots, lengths, np.concatenate([_int64([]), *rows]), np.concatenate([_int64([]), *weights])


def _finished_rows(done: Sequence[tuple[_Progress, str]], dimensions: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Slots of complete vectors, the total weight of each (float64 by its bits), its dimensions, whether it is normalised."""
    totals = np.asarray([_total_weight(p.spec, p.num_tokens) for p, _ in done], dtype=np.float64).view(np.int64)
    return _int64([p.slot for p, _ in done]), totals, _int64(dimensions), _int64([p.spec.normalize for p, _ in done])


def _int64(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def _weights(spec: PoolingSpec, chunk: ChunkRows) -> np.ndarray:
    if spec.pooling == "mean":
        return np.ones(chunk.last_row - chunk.first_row, dtype=np.int64)
    return np.arange(chunk.start + 1, chunk.end + 1, dtype=np.int64)


def _total_weight(spec: PoolingSpec, num_tokens: int) -> float:
    if spec.pooling == "mean":
        return float(num_tokens)
    if spec.pooling == "weighted_mean":
        return num_tokens * (num_tokens + 1) / 2
    return 1.0


def _normalize_(
    vectors: torch.Tensor,
    dimensions: Sequence[int],
    normalize: Sequence[bool],
    cuts: torch.Tensor,
    flags: torch.Tensor,
) -> None:
    """Divides each row that asks for it by the L2 norm of its first `dimensions` entries, in place.

    `cuts` and `flags` are the same two lists on the device.
    """
    if not any(normalize):
        return
    size = vectors.shape[1]
    counted = vectors
    if any(n < size for n in dimensions):
        kept = torch.arange(size, device=vectors.device).unsqueeze(0) < cuts.unsqueeze(1)
        counted = vectors * kept
    norms = torch.linalg.vector_norm(counted, dim=1, keepdim=True).clamp_min_(1e-12)
    if not all(normalize):
        norms.masked_fill_((flags == 0).unsqueeze(1), 1.0)
    vectors.div_(norms)
