"""What a replica really has left, told to every Front: the calls open here, what is left of each, and when that is sent.

A Front charges by estimate and cannot see its requests progress, nor those of other Fronts. The replica can: its engine's
core reports the facts of each request, and the engine notes which requests belong to which tunnelled call.

Guards: a call counts from its arrival to its end, once; sending neither blocks nor fails whoever has news; at most one
message is under way, at most one every 100 ms, and fewer where many replicas would keep the Fronts busy; the last report
always arrives, unless the Front is gone.
Leaves out the arithmetic (`policy/remaining.py`) and what a Front makes of it (`router_state.py`).
"""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from orthrus_serve.policy.remaining import Progress, remaining_tokens
from orthrus_serve.policy.service_rate import Done
from orthrus_serve.telemetry.log import event_log

log = event_log(__name__)

REPORT_GAP_S = 0.1
# Most reports that a Front wants in a second, all replicas together: each takes about a millisecond of its CPU.
MAX_REPORTS_PER_S = 80
# After a message that did not arrive (no Front is up yet, or one is going).
RETRY_GAP_S = 1.0

# Front → request id → remaining tokens.
Calls = dict[str, dict[str, int]]


@dataclass(frozen=True)
class ReplicaReport:
    """What a replica tells every Front.

    Attributes:
        calls: remaining tokens of every call open there, by the Front that it came from and the id of its request.
        done: what its engine has computed since it started.
        number: grows with every message of that replica: an old one may arrive late.
    """

    replica: str
    calls: Calls
    done: Done = field(default_factory=Done)
    number: int = 0

    def own(self, front: str) -> Mapping[str, int]:
        """Remaining tokens by request, of that Front's calls."""
        return self.calls.get(front, {})

    def num_other_tokens(self, front: str) -> int:
        """Remaining tokens of everyone else's calls."""
        return self._num_tokens - sum(self.own(front).values())

    def num_other_open(self, front: str) -> int:
        """How many calls everyone else has open there."""
        return self._num_open - len(self.own(front))

    @functools.cached_property
    def _num_tokens(self) -> int:
        return sum(sum(calls.values()) for calls in self.calls.values())

    @functools.cached_property
    def _num_open(self) -> int:
        return sum(map(len, self.calls.values()))


@dataclass
class OpenCall:
    """A tunnelled call that this replica works on. `remaining` starts as its charge; `left` is set when nobody waits for it."""

    front: str
    request_id: str
    expected_output: int
    remaining: int
    noted: dict[str, int] = field(default_factory=dict)  # the engine's request id → its number in order of notes
    left: asyncio.Event = field(default_factory=asyncio.Event)


class OpenCalls:
    """The calls open at one replica. One event loop owns it."""

    def __init__(self) -> None:
        self._calls: dict[int, OpenCall] = {}
        self._num_noted = 0

    def begin(self, front: str, request_id: str, charge: int, expected_output: int) -> OpenCall:
        """A call arrived; until the engine has it, what is left is its charge."""
        call = OpenCall(front, request_id, expected_output, max(0, charge))
        self._calls[id(call)] = call
        return call

    def end(self, call: OpenCall) -> None:
        """The call is over, however it ended."""
        self._calls.pop(id(call), None)

    def note(self, call: OpenCall, engine_id: str) -> None:
        """The engine has taken a request of that call."""
        call.noted[engine_id] = self._num_noted
        self._num_noted += 1

    @property
    def fronts(self) -> set[str]:
        """Whose calls are open."""
        return {call.front for call in self._calls.values()}

    def leave(self, front: str) -> int:
        """Nobody waits any more for what that Front was relaying. Returns how many calls that is."""
        calls = [call for call in self._calls.values() if call.front == front]
        for call in calls:
            call.left.set()
        return len(calls)

    @property
    def mark(self) -> int:
        """To be taken before a report is asked for: that report knows all requests noted until now, or they are finished."""
        return self._num_noted

    def follow(self, requests: Mapping[str, Any], mark: int) -> None:
        """Take in the engine's report.

        A call of which the engine has taken nothing keeps its charge, and so does one with a request noted since `mark`
        that the report does not name.

        Args:
            requests: as the channel reports them: (lane, prompt tokens left, output tokens made, most output tokens) by id.
        """
        for call in self._calls.values():
            known = [Progress(*requests[engine_id][1:]) for engine_id in call.noted if engine_id in requests]
            is_young = any(number >= mark for engine_id, number in call.noted.items() if engine_id not in requests)
            if call.noted and not is_young:
                call.remaining = remaining_tokens(known, call.expected_output)

    @property
    def num_remaining_tokens(self) -> int:
        """What is left of all of them together."""
        return sum(call.remaining for call in self._calls.values())

    def by_front(self) -> Calls:
        """What is left of every call."""
        calls: Calls = {}
        for call in self._calls.values():
            of_front = calls.setdefault(call.front, {})
            of_front[call.request_id] = of_front.get(call.request_id, 0) + call.remaining
        return calls


def report_gap_s(num_replicas: int) -> float:
    """How long a replica of so many waits between two reports."""
    return max(REPORT_GAP_S, num_replicas / MAX_REPORTS_PER_S)


class ReportSender:
    """Sends the newest report whenever there is news, without letting anybody wait for it."""

    def __init__(
        self,
        report: Callable[[], ReplicaReport],
        send: Callable[[ReplicaReport], Awaitable[float]],
        retry_gap_s: float = RETRY_GAP_S,
        answered: Callable[[float], None] = lambda _: None,
    ) -> None:
        """
        Args:
            report: the report as of now.
            send: returns after how many seconds the next one is welcome; raises if this one may not have arrived everywhere.
            answered: told after how many seconds all Fronts had answered. A message that failed says nothing of that.
        """
        self._report = report
        self._send = send
        self._retry_gap_s = retry_gap_s
        self._answered = answered
        self._news = asyncio.Event()
        self.num_sent = 0

    def wake(self) -> None:
        """There may be news. Never waits, never raises."""
        self._news.set()

    async def run(self) -> NoReturn:
        """Until cancelled."""
        arrived: ReplicaReport | None = self._report()
        while True:
            await self._news.wait()
            self._news.clear()
            report = self._report()
            if report == arrived:
                continue
            self.num_sent += 1
            sent_s = time.monotonic()
            try:
                gap_s = await self._send(replace(report, number=self.num_sent))
                arrived = report
                self._answered(time.monotonic() - sent_s)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is sent again
                if arrived is not None:  # the first of a row
                    log.warning("report_not_sent", cause=repr(error)[:300])
                arrived, gap_s = None, self._retry_gap_s
                self._news.set()
            await asyncio.sleep(gap_s)


def done_by(totals: Mapping[str, float]) -> Done:
    """What an engine has done, from the totals of its core's report; zero where it does not say."""
    generated = totals.get("prefill_tokens", 0) + totals.get("decode_tokens", 0)
    return Done(
        {"generate": int(generated), "embed": int(totals.get("embed_tokens", 0))},
        int(totals.get("steps", 0)),
        # Two engines on one card keep it busy once.
        float(totals.get("card_busy_s", totals.get("busy_s", 0.0))),
    )
