"""What `orthrus-serve top` shows, from two scrapes of `/metrics` and the page `/status`. Pure.

Guards: a replica that is new, or that began anew between the scrapes, has no rate rather than a wrong one. Leaves out how pages
are fetched and drawn (`top.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PARTS = {"generate": ("decode", "prefill"), "embed": ("embed",)}
_STEP_TOKENS = "orthrus_engine_step_tokens_total"
_TPOT = "vllm:request_time_per_output_token_seconds"


@dataclass(frozen=True)
class Scrape:
    """One answer of `/metrics`: every sample by its name, with its labels; and when it came (any clock in seconds)."""

    at_s: float
    samples: Mapping[str, list[tuple[Mapping[str, str], float]]]

    def sum(self, name: str, **labels: str) -> float | None:
        """The sum of the samples with these labels; None when there is none."""
        found = [value for has, value in self.samples.get(name, ()) if labels.items() <= has.items()]
        return sum(found) if found else None


def parse_scrape(text: str, at_s: float) -> Scrape:
    """A scrape from its Prometheus text."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith(("orthrus_", _TPOT)):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return Scrape(at_s, samples)


@dataclass(frozen=True)
class Row:
    """One kind on one replica. What is not known, or is not of a kind, is None.

    Attributes:
        held: requests waiting or running; `oldest_s` is how long the oldest waits for its first step.
        left: remaining tokens.
        rates: tokens a second by part of the step.
        share: of all tokens that the replica computed between the scrapes, 0 to 1.
        tpot_s: mean time per output token of the generations that finished between the scrapes.
        fill: tokens computed over tokens that the steps could have held, both kinds together.
        kv: share of the KV cache in use.
    """

    arm: str
    replica: str
    kind: str
    state: str
    held: float | None = None
    oldest_s: float | None = None
    left: float | None = None
    rates: Mapping[str, float | None] | None = None
    share: float | None = None
    tpot_s: float | None = None
    fill: float | None = None
    kv: float | None = None


@dataclass(frozen=True)
class Summary:
    """Requests a second of all Fronts, by outcome, between the scrapes."""

    requests: Mapping[str, float]

    @property
    def line(self) -> str:
        """In words."""
        told = [f"{rate:.1f} {outcome}" for outcome, rate in self.requests.items() if rate or outcome == "ok"]
        return "requests a second: " + ", ".join(told)


def summary(before: Scrape, after: Scrape) -> Summary:
    """How requests ended."""
    name = "orthrus_requests_total"
    outcomes = sorted(
        {labels["outcome"] for labels, _ in after.samples.get(name, ())}, key=lambda one: (one != "ok", one)
    )
    return Summary({outcome: rate(before, after, name, outcome=outcome) or 0.0 for outcome in outcomes})


def rows(before: Scrape, after: Scrape, status: Mapping[str, Any]) -> list[Row]:
    """A row for each kind of each replica, in the order of the status page."""
    return [
        _row(before, after, arm, engine, kind)
        for arm, engine in _engines(status)
        for kind in ("generate", "embed")
        if not engine.get("kinds") or kind in engine["kinds"]
    ]


def rate(before: Scrape, after: Scrape, name: str, **labels: str) -> float | None:
    """A counter's increase a second; None when it is not in both scrapes, or fell."""
    grown = _grown(before, after, name, **labels)
    return None if grown is None or after.at_s <= before.at_s else grown / (after.at_s - before.at_s)


def _grown(before: Scrape, after: Scrape, name: str, **labels: str) -> float | None:
    then, now = before.sum(name, **labels), after.sum(name, **labels)
    return None if then is None or now is None or now < then else now - then


def _over(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _engines(status: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    by_arm = status.get("arms", {"": status})
    for arm, page in by_arm.items():
        for engine in page["engines"]:
            yield arm, engine


def _state(engine: Mapping[str, Any]) -> str:
    if not engine["answered"]:
        return "silent"
    if engine["quarantined"]:
        return "quarantined"
    return str(engine["policy"]) if engine["listed"] else "leaving"


def _row(before: Scrape, after: Scrape, arm: str, engine: Mapping[str, Any], kind: str) -> Row:
    replica = engine["replica"]
    all_tokens = _grown(before, after, _STEP_TOKENS, replica=replica)
    tokens = [_grown(before, after, _STEP_TOKENS, replica=replica, part=part) for part in PARTS[kind]]
    of_kind = None if None in tokens else sum(one for one in tokens if one is not None)
    is_first = kind == "generate" or "generate" not in (engine.get("kinds") or ("generate",))
    budget = _grown(before, after, "orthrus_engine_step_budget_tokens_total", replica=replica)
    tpot_s = _over(
        _grown(before, after, f"{_TPOT}_sum", replica=replica), _grown(before, after, f"{_TPOT}_count", replica=replica)
    )
    return Row(
        arm=arm,
        replica=replica,
        kind=kind,
        state=_state(engine),
        held=after.sum("orthrus_engine_held_requests", replica=replica, kind=kind),
        oldest_s=after.sum("orthrus_engine_oldest_wait_seconds", replica=replica, kind=kind),
        left=after.sum("orthrus_engine_remaining_tokens", replica=replica, kind=kind),
        rates={part: rate(before, after, _STEP_TOKENS, replica=replica, part=part) for part in PARTS[kind]},
        share=_over(of_kind, all_tokens),
        tpot_s=tpot_s if kind == "generate" else None,
        fill=_over(all_tokens, budget) if is_first else None,
        kv=after.sum("orthrus_engine_kv_cache_usage_ratio", replica=replica) if is_first else None,
    )
