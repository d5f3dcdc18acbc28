"""Closed-loop mixed load on an engine in this process: policies compared on one card, switched live, on the same engine.

Coin form: each client sends an embedding or a generation by a coin, one after the other; every prompt is different. Throughput
and latencies count requests that end in the measured window; step fill comes from the engine's own totals. In-process: no HTTP.
"""

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from tests.engine.harness import Engine
from tests.gpu.engines import token_ids


@dataclass(frozen=True)
class Load:
    """What the clients send. `embed_share` is the coin; lengths are tokens; durations are seconds."""

    clients: int
    embed_share: float
    prompt_tokens: int = 640
    output_tokens: int = 150
    warm_s: float = 12.0
    measured_s: float = 40.0
    vocabulary: int = 32000


class ClosedLoop:
    """Drives one engine. A client's next request is added when its last one ended."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._count = 0
        engine.finish_order.clear()

    def run(self, load: Load, settings: dict[str, Any]) -> dict[str, Any]:
        """One arm: switches the settings, warms up, measures, drains. Returns rates, percentiles and step fill.

        Empty `settings` mean a stock engine: nothing is switched, and rates and percentiles are all that is known.
        """
        is_stock = not settings
        refused = None if is_stock else self._engine.scheduler.answer("set", settings)["refused"]
        if refused:
            raise ValueError(refused)
        rngs = [random.Random(self._count * 7919 + i) for i in range(load.clients)]
        started: dict[str, tuple[int, str, float]] = {}
        ended: list[tuple[str, float]] = []
        step_ms: list[float] = []
        for client, rng in enumerate(rngs):
            self._send(load, rng, client, started)
        start_s = time.perf_counter()
        before: dict[str, float] | None = None
        while (now_s := time.perf_counter() - start_s) < load.warm_s + load.measured_s:
            if before is None and now_s >= load.warm_s:
                before, window_s = {} if is_stock else self._engine.totals(), time.perf_counter()
                ended.clear()
                step_ms.clear()
            step_began_s = time.perf_counter()
            self._engine.step()
            step_ms.append(1e3 * (time.perf_counter() - step_began_s))
            for request_id in self._engine.finish_order:
                client, kind, sent_s = started.pop(request_id)
                ended.append((kind, time.perf_counter() - sent_s))
                self._send(load, rngs[client], client, started)
            self._engine.finish_order.clear()
            self._engine.results.clear()
        assert before is not None
        result = self._summary(ended, before, time.perf_counter() - window_s)
        self._engine.llm.abort_request(list(started))
        self._engine.run()
        self._engine.finish_order.clear()
        # A decode gets a token a step: where steps hold decodes, these are the times between tokens.
        step_ms.sort()
        times = {f"step_p{q}_ms": round(_quantile(step_ms, q / 100), 2) for q in (50, 95, 99)}
        return {**vars(load), **settings, **result, **times}

    def _send(self, load: Load, rng: random.Random, client: int, started: dict[str, tuple[int, str, float]]) -> None:
        self._count += 1
        prompt = token_ids(rng, load.prompt_tokens, load.vocabulary)
        kind = "embed" if rng.random() < load.embed_share else "generate"
        request_id = f"{kind}-{self._count}"
        started[request_id] = (client, kind, time.perf_counter())
        if kind == "embed":
            self._engine.embed(request_id, prompt, "last")
        else:
            self._engine.generate(request_id, prompt, load.output_tokens, temperature=0.7)

    def _summary(self, ended: list[tuple[str, float]], before: dict[str, float], window_s: float) -> dict[str, Any]:
        result: dict[str, Any] = {"window_s": round(window_s, 2)} | (
            _steps(before, self._engine, window_s) if before else {}
        )
        for kind in ("embed", "generate"):
            latencies = sorted(latency for k, latency in ended if k == kind)
            result[f"{kind}_per_s"] = round(len(latencies) / window_s, 2)
            if len(latencies) > 1:
                result[f"{kind}_p50_s"] = round(statistics.median(latencies), 3)
                result[f"{kind}_p99_s"] = round(_quantile(latencies, 0.99), 3)
        return result


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


def _steps(before: dict[str, float], engine: Engine, window_s: float) -> dict[str, Any]:
    """What the engine's steps held since `before`."""
    after = engine.totals()
    delta = {name: after[name] - before[name] for name in after if name != "durations"}
    scheduled = delta["decode_tokens"] + delta["prefill_tokens"] + delta["embed_tokens"]
    return {
        "fill": round(scheduled / max(1, delta["budget_tokens"]), 4),
        "wasted": round(delta["wasted_tokens"] / max(1, delta["budget_tokens"]), 4),
        "mixed_steps": round(delta["mixed_steps"] / max(1, delta["steps"]), 4),
        "step_ms": round(1e3 * window_s / max(1, delta["steps"]), 2),
        "tokens_per_s": round(scheduled / window_s),
        "preemptions": delta["preemptions"],
    }
