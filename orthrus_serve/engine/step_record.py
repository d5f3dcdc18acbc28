"""What each step held: one JSON line per step for those who look closely, and running totals for everyone. No decisions."""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from orthrus_serve.engine.model_flops import NO_FLOPS, FlopCounts
from orthrus_serve.telemetry.catalog import STEP_BUCKETS_S, step_bucket_keys

_BUCKET_KEYS = {decodes: step_bucket_keys(decodes) for decodes in ("with", "without")}


def _no_durations() -> dict[str, list[int]]:
    return {decodes: [0] * len(keys) for decodes, keys in _BUCKET_KEYS.items()}


@dataclass
class StepTotals:
    """Totals since the engine started.

    Tokens are scheduled tokens. `budget_tokens` is what the steps could have held: fill is scheduled ÷ budget. `wasted_tokens`
    could have been computed within the budget and were not. `busy_s` is time with a step running. A step is mixed when it held
    tokens of both kinds, and late when it held decodes and took longer than the time target. `model_flops` are those of one
    device. `durations` counts steps with and without decodes by the bucket of their duration, not cumulated.
    """

    steps: int = 0
    mixed_steps: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    embed_tokens: int = 0
    budget_tokens: int = 0
    wasted_tokens: int = 0
    busy_s: float = 0.0
    preemptions: int = 0
    late_steps: int = 0
    model_flops: float = 0.0
    busy_with_decodes_s: float = 0.0
    durations: dict[str, list[int]] = field(default_factory=_no_durations)

    def took(self, duration_s: float, *, has_decodes: bool, target_s: float | None) -> None:
        """A step ended."""
        self.busy_s += duration_s
        if has_decodes:
            self.busy_with_decodes_s += duration_s
            self.late_steps += target_s is not None and duration_s > target_s
        self.durations["with" if has_decodes else "without"][bisect_left(STEP_BUCKETS_S, duration_s)] += 1

    def as_dict(self) -> dict[str, float]:
        """The totals by name; the buckets of `durations` by `catalog.step_bucket_keys`."""
        totals = dict(vars(self))
        for decodes, counts in totals.pop("durations").items():
            totals.update(zip(_BUCKET_KEYS[decodes], counts, strict=True))
        return totals


class StepRecorder:
    """Adds each step to the totals and, where a path is given, to a JSON-lines file."""

    def __init__(self, path: str | None, flops: FlopCounts = NO_FLOPS) -> None:
        """`flops` are those of a forward pass on one device."""
        self.totals = StepTotals()
        self._flops = flops
        self._file: TextIO | None = Path(path).open("a", buffering=1) if path else None  # noqa: SIM115  lives with the engine

    def record(
        self, rows: Mapping[str, tuple[str, int, int]], budget: int, usable: int, facts: Mapping[str, Any]
    ) -> None:
        """Records one step.

        Args:
            rows: request id → (part, first position, tokens); part is "decode", "prefill" or "embed".
            budget: tokens that the step could have held.
            usable: tokens of work that could have been computed in it, without regard to the budget.
            facts: anything else for the log line (policy, preempted ids, ...).
        """
        tokens = {"decode": 0, "prefill": 0, "embed": 0}
        num_attended = 0
        for part, start, count in rows.values():
            tokens[part] += count
            num_attended += count * (2 * start + count + 1)
        totals = self.totals
        totals.preemptions += len(facts.get("preempted", ()))
        if rows:
            totals.steps += 1
            totals.mixed_steps += tokens["embed"] > 0 and tokens["decode"] + tokens["prefill"] > 0
            totals.decode_tokens += tokens["decode"]
            totals.prefill_tokens += tokens["prefill"]
            totals.embed_tokens += tokens["embed"]
            totals.budget_tokens += budget
            totals.model_flops += self._flops.of_step(sum(tokens.values()), num_attended // 2, len(rows))
        wasted = max(0, min(budget, usable) - sum(tokens.values()))
        totals.wasted_tokens += wasted
        if self._file is not None and (rows or facts.get("preempted")):
            line = {"step": totals.steps, **tokens, "budget": budget, "wasted": wasted, "rows": rows, **facts}
            self._file.write(json.dumps(line) + "\n")
