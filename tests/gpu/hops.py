"""Iter-RetGen on an engine in this process: sessions that embed, then generate, hop after hop. Closed loop over sessions.

A hop embeds its query and, in the heavier of the two variants, the documents that were retrieved; then it generates with them.
The next hop of a session starts when this one's text is there. Retrieval itself takes no time here. Prompts are random tokens.
"""

import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from tests.engine.harness import Engine
from tests.gpu.engines import token_ids


@dataclass(frozen=True)
class HopLoad:
    """Shapes in tokens. `documents` 0 embeds the query only; `seconds` is the measured window."""

    sessions: int = 320
    warm_s: float = 14.0
    seconds: float = 32.0
    hops: int = 3
    query: int = 60
    prompt: int = 500
    output: int = 300
    documents: int = 5
    document: int = 120


@dataclass
class _Session:
    rng: random.Random
    began_s: float
    hop_began_s: float = 0.0
    hop: int = 0
    open_ids: set[str] = field(default_factory=set)
    stage: str = "embed"


def run_hops(engine: Engine, load: HopLoad, vocabulary: int) -> dict[str, Any]:
    """Runs the sessions; sessions and hops per second, the latency of a hop, and step fill, in the measured window."""
    begin_s = time.perf_counter()
    sessions = [_Session(random.Random(i), begin_s) for i in range(load.sessions)]
    owner: dict[str, _Session] = {}
    count = 0

    def send(session: _Session, kind: str, length: int) -> None:
        nonlocal count
        count += 1
        request_id = f"hop{count}"
        prompt = token_ids(session.rng, length, vocabulary)
        if kind == "embed":
            engine.embed(request_id, prompt, "last")
        else:
            engine.generate(request_id, prompt, load.output, temperature=0.7)
        owner[request_id] = session
        session.open_ids.add(request_id)

    def embed(session: _Session) -> None:
        session.stage = "embed"
        session.hop_began_s = time.perf_counter()
        send(session, "embed", load.query)
        for _ in range(load.documents):
            send(session, "embed", load.document)

    for index, session in enumerate(sessions):
        session.hop = index % load.hops  # out of step from the start
        embed(session)
    ended: list[float] = []
    hop_s: list[float] = []
    before: dict[str, float] | None = None
    while (now_s := time.perf_counter() - begin_s) < load.warm_s + load.seconds:
        if before is None and now_s >= load.warm_s:
            before, window_s = engine.totals(), time.perf_counter()
            ended.clear()
            hop_s.clear()
        engine.step()
        for request_id in engine.finish_order:
            session = owner.pop(request_id)
            session.open_ids.discard(request_id)
            if session.open_ids:
                continue
            if session.stage == "embed":
                session.stage = "generate"
                send(session, "generate", load.prompt)
                continue
            session.hop += 1
            hop_s.append(time.perf_counter() - session.hop_began_s)
            if session.hop == load.hops:
                ended.append(time.perf_counter() - session.began_s)
                session.hop, session.began_s = 0, time.perf_counter()
            embed(session)
        engine.finish_order.clear()
        engine.results.clear()
    assert before is not None
    window_s = time.perf_counter() - window_s
    delta = {name: value - before[name] for name, value in engine.totals().items() if name != "durations"}
    scheduled = delta["decode_tokens"] + delta["prefill_tokens"] + delta["embed_tokens"]
    hop_s.sort()
    return {
        **vars(load),
        "window_s": round(window_s, 2),
        "sessions_per_s": round(len(ended) / window_s, 3),
        "hops_per_s": round(len(hop_s) / window_s, 2),
        "hop_p50_s": round(statistics.median(hop_s), 2) if hop_s else None,
        "hop_p99_s": round(hop_s[int(0.99 * (len(hop_s) - 1))], 2) if hop_s else None,
        "tokens_per_s": round(scheduled / window_s),
        "embed_tokens_per_s": round(delta["embed_tokens"] / window_s),
        "decode_tokens_per_s": round(delta["decode_tokens"] / window_s),
        "fill": round(scheduled / max(1, delta["budget_tokens"]), 4),
        "step_ms": round(1e3 * window_s / max(1, delta["steps"]), 2),
    }
