"""What each arm did, by kind and by slice of time: counts, tokens, sketches of its latencies. Mergeable over Fronts. Pure.

A slice is named by its age, since Fronts share no clock: 1 is the last whole slice. Guards: memory is bounded by the last hour;
merging is associative. Leaves out what the numbers say (`ab_report.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orthrus_serve.policy.sketch import QuantileSketch, merged
from orthrus_serve.types import RequestKind

SLICE_S = 10.0
MAX_SLICES = 360
# A page holds at most so many slices: longer times are told in longer slices.
MAX_TOLD = 60

Key = tuple[str, RequestKind]


@dataclass
class Cell:
    """One arm and kind in one slice.

    Attributes:
        ok: requests answered whole; latencies and tokens are theirs.
        failed: requests that the server refused for want of room, failed, or cut.
        mirrored: of `ok`, the copies whose answer nobody got.
        tokens: prompt and output tokens.
        ttft: seconds to the first token, of streams only.
        e2e: seconds from arrival to the last byte.
    """

    ok: int = 0
    failed: int = 0
    mirrored: int = 0
    tokens: int = 0
    ttft: QuantileSketch = field(default_factory=QuantileSketch)
    e2e: QuantileSketch = field(default_factory=QuantileSketch)


@dataclass(frozen=True)
class Ended:
    """A request that ended, well (`ok`) or by the server's fault."""

    arm: str
    kind: RequestKind
    began_s: float
    ended_s: float
    is_ok: bool
    ttft_s: float | None = None
    num_tokens: int = 0
    is_mirrored: bool = False


Slices = dict[int, dict[Key, Cell]]


class SliceLog:
    """The slices of one Front. Starts anew whenever what is compared changes."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._slices: Slices = {}

    def restart(self, now_s: float) -> None:
        """What was counted belongs to another comparison; so do requests that are open now."""
        self._since_s = now_s
        self._slices = {}

    def since_s(self, now_s: float) -> float:
        """For how long this comparison has been going on."""
        return now_s - self._since_s

    def add(self, ended: Ended) -> None:
        """Take in a request, unless it began before this comparison did."""
        if ended.began_s < self._since_s:
            return
        index = int(ended.ended_s // SLICE_S)
        if index not in self._slices:
            self._slices = {number: cells for number, cells in self._slices.items() if number > index - MAX_SLICES}
        cell = self._slices.setdefault(index, {}).setdefault((ended.arm, ended.kind), Cell())
        if not ended.is_ok:
            cell.failed += 1
            return
        cell.ok += 1
        cell.mirrored += ended.is_mirrored
        cell.tokens += ended.num_tokens
        cell.e2e.add(ended.ended_s - ended.began_s)
        if ended.ttft_s is not None:
            cell.ttft.add(ended.ttft_s)

    def told(self, now_s: float) -> dict[str, Any]:
        """All whole slices of this comparison, as plain data; see `read_told`."""
        current = int(now_s // SLICE_S)
        first = int(self._since_s // SLICE_S) + 1  # the slice in which it began is not whole
        first = max(first, current - MAX_SLICES)
        by_age = {current - index: cells for index, cells in self._slices.items() if first <= index < current}
        return {
            "since_s": self.since_s(now_s),
            "num_slices": max(0, current - first),
            "slices": [
                [age, arm, kind, cell.ok, cell.failed, cell.mirrored, cell.tokens, cell.ttft.buckets, cell.e2e.buckets]
                for age, cells in by_age.items()
                for (arm, kind), cell in cells.items()
            ],
        }


@dataclass(frozen=True)
class Told:
    """Slices of one or several Fronts, from the oldest to the youngest, each `slice_s` long; empty ones too."""

    slice_s: float
    since_s: float
    slices: tuple[Mapping[Key, Cell], ...]


def merge_told(tellings: Iterable[Mapping[str, Any]]) -> Told:
    """What several Fronts told, as one; the time is that which all of them saw."""
    known = list(tellings)
    num_slices = min((int(one["num_slices"]) for one in known), default=0)
    since_s = min((float(one["since_s"]) for one in known), default=0.0)
    by_age: dict[int, dict[Key, list[Cell]]] = {}
    for age, arm, kind, ok, failed, mirrored, tokens, ttft, e2e in (row for one in known for row in one["slices"]):
        if 1 <= age <= num_slices:
            cell = Cell(ok, failed, mirrored, tokens, QuantileSketch(ttft), QuantileSketch(e2e))
            by_age.setdefault(age, {}).setdefault((arm, kind), []).append(cell)
    slices = [
        {key: merge_cells(cells) for key, cells in by_age.get(age, {}).items()} for age in range(num_slices, 0, -1)
    ]
    return Told(SLICE_S, since_s, tuple(slices))


def coarsened(told: Told, max_slices: int = MAX_TOLD) -> Told:
    """The same in at most so many longer slices; the oldest ones that fill no longer slice are left out."""
    factor = -(-len(told.slices) // max_slices)
    if factor <= 1:
        return told
    left_out = len(told.slices) % factor
    return Told(
        told.slice_s * factor,
        told.since_s,
        tuple(merge_slices(told.slices[at : at + factor]) for at in range(left_out, len(told.slices), factor)),
    )


def merge_slices(slices: Sequence[Mapping[Key, Cell]]) -> dict[Key, Cell]:
    """One slice of several."""
    keys = dict.fromkeys(key for cells in slices for key in cells)
    return {key: merge_cells([cells[key] for cells in slices if key in cells]) for key in keys}


def merge_cells(cells: Sequence[Cell]) -> Cell:
    """One cell of several; of none, an empty one."""
    return Cell(
        sum(cell.ok for cell in cells),
        sum(cell.failed for cell in cells),
        sum(cell.mirrored for cell in cells),
        sum(cell.tokens for cell in cells),
        merged(cell.ttft for cell in cells),
        merged(cell.e2e for cell in cells),
    )


def to_page(told: Told) -> dict[str, Any]:
    """As JSON-able data, for `GET /ab`."""
    return {
        "slice_s": told.slice_s,
        "since_s": told.since_s,
        "slices": [
            [
                {
                    "arm": arm,
                    "kind": kind,
                    "ok": cell.ok,
                    "failed": cell.failed,
                    "mirrored": cell.mirrored,
                    "tokens": cell.tokens,
                    "ttft": sorted(cell.ttft.buckets.items()),
                    "e2e": sorted(cell.e2e.buckets.items()),
                }
                for (arm, kind), cell in cells.items()
            ]
            for cells in told.slices
        ],
    }


def from_page(page: Mapping[str, Any]) -> Told:
    """The inverse of `to_page`.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    slices: list[dict[Key, Cell]] = []
    for rows in page["slices"]:
        cells: dict[Key, Cell] = {}
        for row in rows:
            ok, failed, mirrored, tokens = (int(row[name]) for name in ("ok", "failed", "mirrored", "tokens"))
            sketches = (QuantileSketch(dict(row[name])) for name in ("ttft", "e2e"))
            cells[row["arm"], row["kind"]] = Cell(ok, failed, mirrored, tokens, *sketches)
        slices.append(cells)
    return Told(float(page["slice_s"]), float(page["since_s"]), tuple(slices))
