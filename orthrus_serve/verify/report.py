"""A table and a verdict from what was found. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from orthrus_serve.verify.compare import Finding, Tolerance

HEADINGS = ("case", "model", "compared", "worst", "verdict")


@dataclass(frozen=True)
class Row:
    """All findings of one case under one model's name. `problem` is the first deviation, None when there is none."""

    case: str
    model: str
    compared: str
    worst: str
    problem: str | None


def make_row(case: str, model: str, findings: Sequence[Finding]) -> Row:
    """What the findings come to."""
    cosines = [finding.cosine for finding in findings if finding.cosine is not None]
    num_tokens = sum(finding.num_tokens for finding in findings)
    num_ties = sum(finding.num_ties for finding in findings)
    parts = [f"{len(cosines)} vector{'s' * (len(cosines) != 1)}"] if cosines else []
    num_rounded = sum(finding.is_rounded for finding in findings)
    parts += [f"{num_rounded} by its rounding"] if num_rounded else []
    parts += [f"{num_tokens} tokens"] if num_tokens else []
    worst = [f"cosine {min(cosines):.7f}"] if cosines else []
    worst += [f"{num_ties} near tie{'s' * (num_ties != 1)}"] if num_tokens else []
    problems = [finding.problem for finding in findings if finding.problem is not None]
    return Row(case, model, ", ".join(parts) or "status", ", ".join(worst) or "-", problems[0] if problems else None)


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines of text, columns aligned."""
    cells = [HEADINGS, *((row.case, row.model, row.compared, row.worst, _verdict(row)) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS) - 1)]
    return [
        "  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[-1]]) for line in cells
    ]


def verdict(rows: Sequence[Row], tolerance: Tolerance) -> str:
    """One sentence."""
    num_wrong = sum(row.problem is not None for row in rows)
    allowed = f"cosine at least {1 - tolerance.cosine:g}, near ties up to a logit of {tolerance.logit:g}"
    if num_wrong:
        return f"DEVIATES: {num_wrong} of {len(rows)} rows ({allowed})"
    return f"EQUALS THE REFERENCE in all {len(rows)} rows ({allowed})"


def _verdict(row: Row) -> str:
    return "equal" if row.problem is None else f"DEVIATES: {row.problem}"
