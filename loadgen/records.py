"""What is kept of every request and session: plain values that cross process borders and land in the JSON report.

All times are seconds on one clock, from the start of the run. Leaves out any statistics (`measures.py`).
"""

from typing import Literal

import msgspec

Kind = Literal["embed", "generate"]
Role = Literal["query", "documents", "answer"]  # what a request of a session was for

# Errors that begin so are not the server's: the run ended before the answer did.
UNFINISHED = "unfinished"


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request. `error` is None for a success and a short sentence otherwise; nothing is both.

    `scheduled_s` is None in closed loops. `gaps_s` are the times between content events after the first. Token counts are the
    server's own (`usage`); `output_tokens` falls back to the number of content events, and `output_counted_by` says so.
    """

    stage: str
    kind: Kind
    worker: int
    sent_s: float
    ended_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    gaps_s: list[float] = []
    error: str | None = None
    asked_prompt_tokens: int | None = None
    prompt_tokens: int | None = None
    asked_output_tokens: int | None = None
    output_tokens: int | None = None
    output_counted_by: Literal["usage", "events"] | None = None
    session: int | None = None
    hop: int | None = None
    role: Role | None = None

    @property
    def ok(self) -> bool:
        """Answered in full."""
        return self.error is None

    @property
    def unfinished(self) -> bool:
        """Still open when the run stopped waiting: neither a success nor the server's error."""
        return self.error is not None and self.error.startswith(UNFINISHED)

    @property
    def e2e_s(self) -> float:
        """From sending to the last byte."""
        return self.ended_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first content event; None without a stream."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for answers of one token or without a stream."""
        if self.first_token_s is None or self.last_token_s is None or (self.output_tokens or 0) < 2:
            return None
        return (self.last_token_s - self.first_token_s) / ((self.output_tokens or 0) - 1)


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One Iter-RetGen session. Quality fields are None where the question has no known answer or documents."""

    stage: str
    worker: int
    session: int
    question_id: str
    started_s: float
    ended_s: float
    hops: int
    asked_hops: int
    scheduled_s: float | None = None
    retrieval_s: list[float] = []
    embed_s: float = 0.0
    generate_s: float = 0.0
    error: str | None = None
    exact_match: float | None = None
    f1: float | None = None
    contains_answer: float | None = None
    recall_first_hop: float | None = None
    recall_any_hop: float | None = None

    @property
    def ok(self) -> bool:
        """All hops answered."""
        return self.error is None

    @property
    def unfinished(self) -> bool:
        """Still running when the run stopped waiting."""
        return self.error is not None and self.error.startswith(UNFINISHED)

    @property
    def e2e_s(self) -> float:
        """From the start of the session to its last answer."""
        return self.ended_s - self.started_s


class ClientHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How well one worker kept up with itself during one stage."""

    worker: int
    schedule_lag_s: list[float] = []  # actual minus planned start, one per open-loop arrival
    loop_lag_s: list[float] = []  # how late the event loop woke a sleeper, sampled all through the stage
    turnaround_s: list[float] = []  # closed loop: from the end of an answer to the sending of the next request
    cpu_ratio: float = 0.0  # CPU seconds of this process per second of the stage
    peak_in_flight: int = 0


class StageResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker has to say about one stage."""

    stage: str
    worker: int
    started_s: float
    cut_off_s: float  # when the last request was allowed to start
    ended_s: float  # when the last answer was in, or the wait for it was given up
    stop_reason: str
    in_flight_at_cut_off: int
    health: ClientHealth
    records: list[Record]
    sessions: list[SessionRecord] = []
