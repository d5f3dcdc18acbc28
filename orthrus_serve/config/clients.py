"""The parts of the configuration that say who is let in: keys, what each may use, goals. Parsed values only.

Leaves out the decisions (`policy/admission.py`, `policy/key_limits.py`) and reading a file of keys (`api_keys.py`).
"""

import math
import re
from collections.abc import Callable
from typing import Self

from pydantic import Field, field_validator, model_validator

from orthrus_serve.config.section import Section, expand


class GoalSpec(Section):
    """Within what time a request of one kind is to have its first token, and to be complete. None is no goal."""

    ttft_ms: float | None = Field(default=None, gt=0)
    e2e_ms: float | None = Field(default=None, gt=0)


class HeadroomSpec(Section):
    """What share of its goal a request may be predicted to take, by its priority: the smaller, the earlier it is refused."""

    high: float = Field(default=0.9, gt=0, le=1)
    normal: float = Field(default=0.8, gt=0, le=1)
    low: float = Field(default=0.6, gt=0, le=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.high >= self.normal >= self.low:
            raise ValueError("high: must not be below normal, nor normal below low")
        return self


class StreamSpec(Section):
    """How often one replica may send to its clients: all its streams together `chunks_per_s`, beyond which tokens that follow
    soon after each other go together. None is its share of what Fronts and proxy pass on (`policy/stream_pacing.py`). With
    `is_bounded` off, every token goes at once."""

    chunks_per_s: float | None = Field(default=None, gt=0)
    is_bounded: bool = True

    def most_per_s(self, usual: Callable[[], float]) -> float:
        """What it comes to, with `usual` where nothing is said; infinity without a bound."""
        return (self.chunks_per_s or usual()) if self.is_bounded else math.inf


class KeyLimitSpec(Section):
    """What one key may use, all Fronts together; None is no limit."""

    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)
    max_in_flight_tokens: float | None = Field(default=None, gt=0)


class AdmissionSpec(Section):
    """Who is let in. Without this section, everybody.

    `generate` and `embed` are the goals of requests that name none of their own. `each_key` limits every client, told apart by
    the `Authorization` header; `keys` gives single ones other limits, by the SHA-256 (in hex) of what follows `Bearer `.
    """

    generate: GoalSpec = GoalSpec()
    embed: GoalSpec = GoalSpec()
    headroom: HeadroomSpec = HeadroomSpec()
    each_key: KeyLimitSpec = KeyLimitSpec()
    keys: dict[str, KeyLimitSpec] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _hashed(self) -> Self:
        if any(not re.fullmatch("[0-9a-f]{64}", name) for name in self.keys):
            raise ValueError("keys: a key is named by its SHA-256, 64 lower-case hex digits, never by itself")
        return self


class ApiKeysSpec(Section):
    """Who may ask at all: those with a key of which the SHA-256 is listed here, or in a file with one a line (read when a Front
    starts). Keys themselves are never written down."""

    digests: tuple[str, ...] = ()
    file: str | None = None

    @field_validator("file")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return None if value is None else expand(value)

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.digests and self.file is None:
            raise ValueError("digests: name at least one key by its SHA-256, or a file")
        if any(not re.fullmatch("[0-9a-f]{64}", digest) for digest in self.digests):
            raise ValueError("digests: a key is named by its SHA-256, 64 lower-case hex digits, never by itself")
        return self
