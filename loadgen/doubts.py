"""Decides what a reader must be warned of before trusting a stage's numbers. Pure."""

from collections.abc import Sequence

from loadgen.records import Record
from loadgen.summary import ServerSummary, SessionSummary

ENOUGH_WINDOW = 3.0  # times the slowest request
MAX_DRIFT = 0.15  # between the two halves of the window
MAX_PREFIX_HITS = 0.02
FULL_STEPS = 0.9
MAX_LENGTH_ERROR = 0.02
MIN_SAMPLES = 100


def doubts_about(
    steady: bool,
    window_s: tuple[float, float],
    records: Sequence[Record],
    server: ServerSummary,
    sessions: SessionSummary | None,
) -> list[str]:
    """One sentence per doubt, the gravest first."""
    ok = [record for record in records if record.ok]
    return [
        *_failures(records),
        *(_steadiness(window_s, ok) if steady else []),
        *_lengths(ok),
        *_streams(ok),
        *_server(server),
        *_questions(sessions),
    ]


def _failures(records: Sequence[Record]) -> list[str]:
    errors = sum(not record.ok and not record.unfinished for record in records)
    unfinished = sum(record.unfinished for record in records)
    lines: list[str] = []
    if errors:
        lines.append(f"{errors} of {len(records)} requests failed; they are in no rate and no latency")
    if unfinished:
        lines.append(
            f"{unfinished} requests were still open when the run stopped waiting: the slowest are missing from the latencies"
        )
    if not any(record.ok for record in records):
        lines.append("no request succeeded")
    return lines


def _steadiness(window_s: tuple[float, float], ok: Sequence[Record]) -> list[str]:
    begin_s, end_s = window_s
    inside = [record for record in ok if begin_s <= record.ended_s < end_s]
    slowest_s = max((record.e2e_s for record in inside), default=0.0)
    lines: list[str] = []
    if slowest_s > 0 and end_s - begin_s < ENOUGH_WINDOW * slowest_s:
        lines.append(
            f"measured for {end_s - begin_s:.1f} s, less than {ENOUGH_WINDOW:g} times the slowest request ({slowest_s:.1f} s)"
        )
    middle_s = (begin_s + end_s) / 2
    first = sum(record.ended_s < middle_s for record in inside)
    second = len(inside) - first
    if len(inside) >= MIN_SAMPLES and abs(first - second) > MAX_DRIFT * len(inside) / 2:
        lines.append(f"not steady: {first} requests ended in the first half of the window, {second} in the second")
    return lines


def _lengths(ok: Sequence[Record]) -> list[str]:
    lines: list[str] = []
    sized = [r for r in ok if r.asked_prompt_tokens is not None and r.prompt_tokens is not None]
    if sized:
        asked = sum(record.asked_prompt_tokens or 0 for record in sized)
        got = sum(record.prompt_tokens or 0 for record in sized)
        if abs(got - asked) > MAX_LENGTH_ERROR * asked:
            lines.append(
                f"prompts had {got / len(sized):.1f} tokens on average, {asked / len(sized):.1f} were asked for"
            )
    answered = [r for r in ok if r.asked_output_tokens is not None and r.output_tokens is not None]
    short = sum((record.output_tokens or 0) < (record.asked_output_tokens or 0) for record in answered)
    if short:
        lines.append(
            f"{short} of {len(answered)} answers were shorter than asked for: the output length is not controlled"
        )
    return lines


def _streams(ok: Sequence[Record]) -> list[str]:
    streamed = [record for record in ok if record.first_token_s is not None]
    if not streamed:
        return []
    lines: list[str] = []
    if any(record.output_counted_by == "events" for record in streamed):
        lines.append("the server sent no usage: output tokens are counted by stream events")
    events = sum(len(record.gaps_s) + 1 for record in streamed)
    tokens = sum(record.output_tokens or 0 for record in streamed)
    if tokens > 1.1 * events:
        lines.append(f"a stream event carries {tokens / events:.1f} tokens on average: ITL is the time between events")
    return lines


def _server(server: ServerSummary) -> list[str]:
    lines: list[str] = []
    if server.prefix_hit_ratio is not None and server.prefix_hit_ratio > MAX_PREFIX_HITS:
        lines.append(
            f"{server.prefix_hit_ratio:.1%} of the prompt tokens came from the server's prefix cache: "
            "part of this measures the cache"
        )
    if server.step_fill is not None and server.step_fill < FULL_STEPS:
        lines.append(
            f"steps were {server.step_fill:.0%} full: scheduler policies cannot differ below {FULL_STEPS:.0%}, "
            "do not compare them here"
        )
    return lines


def _questions(sessions: SessionSummary | None) -> list[str]:
    if sessions is None:
        return []
    total = sessions.completed + sessions.errors + sessions.unfinished
    if total > sessions.distinct_questions:
        return [
            f"{total} sessions asked only {sessions.distinct_questions} different questions: some prompts came twice"
        ]
    return []
