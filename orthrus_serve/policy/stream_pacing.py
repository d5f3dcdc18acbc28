"""How often the streams of one replica may send: all of them together so many chunks a second. Arithmetic only.

A chunk costs proxy, Front and replica the same whether it has one token or ten, and nothing on its way holds back a replica
that sends more of them than can be passed on: they would wait in memory, and each token would come later than the one before
it. So where many streams are open, tokens that follow soon after each other go together.
Guards: a stream's first chunk waits for nothing, and in the long run all streams together send no more than that, first and
last chunks besides.
Leaves out the waiting itself, and that the end of a stream waits for nothing either (`serving/tunnel.py`).
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

# What each passes on in a second without being full: a node's Python proxy, a Front without and with Ray's throughput switch,
# and what a replica sends beside its engine's work. Between half and nine tenths of a core of the machine of docs/benchmarks,
# 2026-12-01-streams. HAProxy passes more than Fronts send.
PROXY_CHUNKS_PER_S = 2000.0
FRONT_CHUNKS_PER_S = 2000.0
FAST_FRONT_CHUNKS_PER_S = 5000.0
REPLICA_CHUNKS_PER_S = 5000.0

# A Front that is well answers within some milliseconds. While all of the last answers took longer than this, fewer chunks are
# sent. A single late one says nothing: a collected heap, or a large body, is as long, and fewer chunks do not help against it.
LATE_S = 0.05
NUM_LATE = 3
SLOWER, FASTER = 0.8, 1.05
LEAST_CHUNKS_PER_S = 250.0


@dataclass(frozen=True)
class Sharers:
    """Who shares the way: so many Fronts, and the engine replicas of all arms."""

    num_fronts: int
    num_replicas: int


def usual_chunks_per_s(sharers: Sharers, *, has_haproxy: bool, is_throughput_optimized: bool) -> float:
    """What one replica may send where the configuration names no number: its share of what the Fronts and one proxy pass on.

    That all clients speak to one node's proxy is assumed (with several, more would pass), and that all replicas stream alike.
    """
    of_fronts = sharers.num_fronts * (FAST_FRONT_CHUNKS_PER_S if is_throughput_optimized else FRONT_CHUNKS_PER_S)
    of_all = of_fronts if has_haproxy else min(of_fronts, PROXY_CHUNKS_PER_S)
    return min(of_all / max(1, sharers.num_replicas), REPLICA_CHUNKS_PER_S)


class StreamPacer:
    """The same gap for every stream: as many as are sending, over the chunks per second that there are for all.

    That rate falls while Fronts answer late, and rises again, up to the most, while they answer in time.
    """

    def __init__(self, most_per_s: Callable[[], float]) -> None:
        """`most_per_s` may change with time. Infinity lets every token go at once, whatever becomes of it."""
        self._most_per_s = most_per_s
        self._per_s = most_per_s()
        self._took_s: deque[float] = deque(maxlen=NUM_LATE)
        self.num_sending = 0

    @property
    def gap_s(self) -> float:
        """Between two chunks of a stream, at least."""
        return self.num_sending / self._per_s

    def answered(self, took_s: float) -> None:
        """The Fronts answered a message after so long: chunks wait there, or in this process, behind what it waited for."""
        self._took_s.append(took_s)
        is_late = len(self._took_s) == NUM_LATE and min(self._took_s) > LATE_S
        wanted = self._per_s * (SLOWER if is_late else FASTER)
        self._per_s = min(self._most_per_s(), max(LEAST_CHUNKS_PER_S, wanted))

    @contextlib.contextmanager
    def stream(self) -> Generator["Sending"]:
        """One stream, from before its first chunk to its end. While it has not sent any, it counts for nothing."""
        sending = Sending(self)
        try:
            yield sending
        finally:
            self.num_sending -= sending.has_begun


class Sending:
    """One stream of a pacer."""

    def __init__(self, pacer: StreamPacer) -> None:
        self._pacer = pacer
        self.has_begun = False

    def sent(self) -> float:
        """A chunk was sent. Returns after how many seconds the next one may be."""
        if not self.has_begun:
            self.has_begun = True
            self._pacer.num_sending += 1
        return self._pacer.gap_s


UNPACED = StreamPacer(lambda: math.inf)
