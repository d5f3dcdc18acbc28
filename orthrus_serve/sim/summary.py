"""Numbers of one run: percentiles and how evenly the work was spread. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from orthrus_serve.sim.cluster import Answer, Played


def percentile(values: Iterable[float], share: float) -> float:
    """The value that so large a share (0 to 1) does not exceed, between neighbours in proportion; nan without values."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def skew(by_engine: Sequence[float]) -> float:
    """What the busiest engine computed, over the mean."""
    total = sum(by_engine)
    return max(by_engine) * len(by_engine) / total if total else 1.0


def latencies(answers: Iterable[Answer], from_s: float, until_s: float) -> list[float]:
    """Of requests that arrived in that time."""
    return [answer.latency_s for answer in answers if from_s <= answer.at_s < until_s]


def summary(played: Played, from_s: float, until_s: float) -> dict[str, Any]:
    """Mean, p50, p99 in ms by kind and of all, of requests that arrived in that time; the skew of the whole run."""
    found: dict[str, Any] = {"skew": round(skew(played.by_engine), 3), "retried": played.num_retried}
    for kind in ("all", "generate", "embed"):
        answers = [answer for answer in played.answers if kind in ("all", answer.kind)]
        values = latencies(answers, from_s, until_s)
        if values:
            found[kind] = {
                "requests": len(values),
                "mean_ms": round(1e3 * sum(values) / len(values), 1),
                "p50_ms": round(1e3 * percentile(values, 0.5), 1),
                "p99_ms": round(1e3 * percentile(values, 0.99), 1),
            }
    chains = [answer.chain_s for answer in played.answers if answer.is_last and from_s <= answer.since_s < until_s]
    if any(not answer.is_last for answer in played.answers):
        found["session"] = {
            "p50_ms": round(1e3 * percentile(chains, 0.5)),
            "p99_ms": round(1e3 * percentile(chains, 0.99)),
        }
    return found
