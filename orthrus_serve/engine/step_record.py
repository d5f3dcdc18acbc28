"""What each step held: one JSON line per step for those who look closely, and running totals for everyone. No decisions."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass
class StepTotals:
    """Totals since the engine started.

    Tokens are scheduled tokens. `budget_tokens` is what the steps could have held: fill is scheduled ÷ budget. `wasted_tokens`
    could have been computed within the budget and were not. `busy_s` is time with a step running. A step is mixed when it held
    tokens of both kinds.
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

    def as_dict(self) -> dict[str, float]:
        """The totals by name."""
        return asdict(self)


class StepRecorder:
    """Adds each step to the totals and, where a path is given, to a JSON-lines file."""

    def __init__(self, path: str | None) -> None:
        self.totals = StepTotals()
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
        for part, _, count in rows.values():
            tokens[part] += count
        totals = self.totals
        totals.preemptions += len(facts.get("preempted", ()))
        if rows:
            totals.steps += 1
            totals.mixed_steps += tokens["embed"] > 0 and tokens["decode"] + tokens["prefill"] > 0
            totals.decode_tokens += tokens["decode"]
            totals.prefill_tokens += tokens["prefill"]
            totals.embed_tokens += tokens["embed"]
            totals.budget_tokens += budget
        wasted = max(0, min(budget, usable) - sum(tokens.values()))
        totals.wasted_tokens += wasted
        if self._file is not None and (rows or facts.get("preempted")):
            line = {"step": totals.steps, **tokens, "budget": budget, "wasted": wasted, "rows": rows, **facts}
            self._file.write(json.dumps(line) + "\n")
