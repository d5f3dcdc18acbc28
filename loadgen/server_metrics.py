"""Reads a server's Prometheus page while the load runs: what only the server knows (prefix cache hits, step fill, queues).

The names are text here: vLLM's, Orthrus's, each with any prefix that an exporter puts before them (`ray_`, `vllm_`).
A server without such a page is no error: the report then says "not published".
"""

import re
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass

POLL_S = 2.0  # a page costs a busy server some milliseconds of the cores that it computes with
TIMEOUT_S = 5.0
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")

# What we keep, by the end of the published name.
ENDINGS = {
    "prefix_cache_queries_total": "prefix_queries",
    "prefix_cache_hits_total": "prefix_hits",
    "orthrus_engine_step_tokens_total": "step_tokens",
    "orthrus_engine_step_budget_tokens_total": "step_budget_tokens",
    "orthrus_engine_steps_total": "steps",
    "orthrus_engine_mixed_steps_total": "mixed_steps",
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
}


@dataclass(frozen=True)
class Reading:
    """What the pages said at one time, by our names and then by series (page, published name and labels)."""

    at_s: float
    values: dict[str, dict[str, float]]


@dataclass(frozen=True)
class ServerWindow:
    """What the server counted between two times; None where it does not publish that."""

    prefix_hit_ratio: float | None = None
    step_fill: float | None = None
    mixed_step_ratio: float | None = None
    mean_running: float | None = None
    mean_waiting: float | None = None


def parse_page(text: str, page: str = "") -> dict[str, dict[str, float]]:
    """The samples that we keep, by our names and then by series. `page` tells series of several pages apart."""
    kept: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        ours = next((own for ending, own in ENDINGS.items() if _ends(name, ending)), None)
        # External caches (KV connectors) count their queries under a name with the same ending.
        if ours is None or "external" in name or "mm_cache" in name or "by_reason" in name:
            continue
        try:
            kept.setdefault(ours, {})[f"{page} {name}{{{labels or ''}}}"] = float(value)
        except ValueError:
            continue
    return kept


def window(readings: Sequence[Reading], begin_s: float, end_s: float) -> ServerWindow:
    """What happened between the last reading before `begin_s` and the first after `end_s` (or the nearest there are).

    Series by series: a page may lack a replica that did not answer in time, and all that it ever counted is not what it
    counted meanwhile.
    """
    inside = [reading for reading in readings if begin_s <= reading.at_s <= end_s]

    def grown(name: str) -> float | None:
        samples: dict[str, list[tuple[float, float]]] = {}
        for reading in readings:
            for series, value in reading.values.get(name, {}).items():
                samples.setdefault(series, []).append((reading.at_s, value))
        return sum(_grown(of_one, begin_s, end_s) for of_one in samples.values()) if samples else None

    def mean(name: str) -> float | None:
        return _mean([sum(reading.values[name].values()) for reading in inside if name in reading.values])

    return ServerWindow(
        prefix_hit_ratio=_ratio(grown("prefix_hits"), grown("prefix_queries")),
        step_fill=_ratio(grown("step_tokens"), grown("step_budget_tokens")),
        mixed_step_ratio=_ratio(grown("mixed_steps"), grown("steps")),
        mean_running=mean("running"),
        mean_waiting=mean("waiting"),
    )


def _grown(samples: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """By how much one counter grew; `samples` are times and values in their order, at least one."""
    first = next((value for at_s, value in reversed(samples) if at_s <= begin_s), samples[0][1])
    last = next((value for at_s, value in samples if at_s >= end_s), samples[-1][1])
    return last - first


class Poller:
    """Reads the pages every two seconds from a thread of the parent process, which sends no load itself."""

    def __init__(self, urls: Sequence[str], now: Callable[[], float]) -> None:
        self._urls = urls
        self._now = now
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-metrics", daemon=True)
        self.readings: list[Reading] = []

    def start(self) -> None:
        """Begins reading; the first reading is taken before this returns."""
        self.read()
        self._thread.start()

    def stop(self) -> None:
        """Takes a last reading and ends."""
        self._stop.set()
        self._thread.join(timeout=2 * TIMEOUT_S)
        self.read()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self.read()

    def read(self) -> None:
        """Takes a reading now; also the thread's step. Pages that cannot be read are left out."""
        values: dict[str, dict[str, float]] = {}
        at_s = self._now()
        for url in self._urls:
            for name, series in parse_page(_fetch(url), url).items():
                values.setdefault(name, {}).update(series)
        if values:
            self.readings.append(Reading(at_s, values))


def _fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return response.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith((f":{ending}", f"_{ending}"))


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def monotonic_since(zero_s: float) -> Callable[[], float]:
    """The run's clock: seconds since `zero_s`, the same in all processes of this machine."""
    return lambda: time.monotonic() - zero_s
