"""Decides when a stage stops sending. Pure. Leaves out what happens to requests in flight then.

A stage always ends: the one rule that cannot be switched off is that something limits it.
"""

from dataclasses import dataclass
from typing import Literal

StopReason = Literal["requests", "time", "errors", "schedule ended"]


@dataclass(frozen=True)
class StopRule:
    """Limits of one worker's share of a stage; None is no limit.

    `max_error_ratio` acts once 20 requests have ended: before that a ratio says nothing.
    """

    max_requests: int | None = None
    max_duration_s: float | None = None
    max_error_ratio: float | None = None


@dataclass(frozen=True)
class Progress:
    """What a stage has done so far: requests started and ended, errors among the ended, seconds since its start."""

    started: int
    ended: int
    errors: int
    elapsed_s: float


ENOUGH_TO_JUDGE = 20


def reason_to_stop(rule: StopRule, progress: Progress) -> StopReason | None:
    """Why no further request may start, or None."""
    if rule.max_requests is not None and progress.started >= rule.max_requests:
        return "requests"
    if rule.max_duration_s is not None and progress.elapsed_s >= rule.max_duration_s:
        return "time"
    judged = rule.max_error_ratio is not None and progress.ended >= ENOUGH_TO_JUDGE
    if judged and progress.errors > (rule.max_error_ratio or 0.0) * progress.ended:
        return "errors"
    return None
