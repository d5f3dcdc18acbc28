"""A fake engine whose timing can be worked out by hand: it computes so many tokens a second, one request after the other.

* A request of `p` prompt tokens and `o` output tokens takes `(p + o) / tokens_per_s`, from the moment when everybody before it
  is done. Its output tokens come out as they are made.
* Prompts are lists of token ids. `max_tokens` is what the client allows; `"fake": {"output": o}` is what really comes out.
* It reports real progress through `watch`, as the channel does, and counts the tokens that it has computed.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.serving.engine_replica import RunningEngine, StartEngine
from tests.serve.fakes import EMBEDDING_SIZE, VOCAB_SIZE, dimensions_asked, note_request, until_disconnect

MAX_MODEL_LEN = 100_000
EMBED, GENERATE = 1, 0
TICK_S = 0.02


@dataclass
class Work:
    """One request inside the engine."""

    lane: int
    num_prompt: int
    num_output: int
    max_output: int
    begun_s: float | None = None  # when its computing began
    num_yielded: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output


@dataclass
class MeteredEngine:
    """Stands for the engine and for its channel."""

    tokens_per_s: float
    errored: bool = False
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = MAX_MODEL_LEN
    open: dict[str, Work] = field(default_factory=dict)
    num_begun: int = 0
    num_computed: int = 0  # tokens, of requests that are over
    _free_s: float = 0.0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def channel(self) -> "MeteredEngine":
        return self

    async def set(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return {"applied": {**wanted, "step": 0}, "refused": None}

    async def watch(self) -> dict[str, Any]:
        return await self.remaining(TICK_S)

    async def remaining(self, gap_s: float = 0.0) -> dict[str, Any]:
        await asyncio.sleep(gap_s)
        requests = {engine_id: self._progress(work) for engine_id, work in self.open.items()}
        computed = self.num_computed + sum(self._num_done(work) for work in self.open.values())
        totals = {"steps": computed, "prefill_tokens": computed, "busy_s": computed / self.tokens_per_s}
        return {"policy": "orthrus", "requests": requests, "totals": totals, "computed": computed}

    async def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    async def tokens(self, work: Work) -> AsyncGenerator[int]:
        """Numbers 0 to `num_output` as they are made; returns when all is computed. Closing it early is an abort."""
        arrived_s, engine_id = time.monotonic(), f"e{self.num_begun}"
        self.num_begun += 1
        self.open[engine_id] = work
        if (note := note_request.get()) is not None:
            note(engine_id)
        try:
            async with self._turn:  # in order of arrival
                work.begun_s = max(arrived_s, self._free_s)
                try:
                    while work.num_yielded < work.num_output or self._num_done(work) < work.num_tokens:
                        left_s = work.begun_s + work.num_tokens / self.tokens_per_s - time.monotonic()
                        await asyncio.sleep(max(0.0, min(TICK_S, left_s)))
                        for token in range(work.num_yielded, self._num_made(work)):
                            work.num_yielded = token + 1
                            yield token
                    # To the dot, however late this loop was: the next one begins when this one was done.
                    self._free_s = work.begun_s + work.num_tokens / self.tokens_per_s
                except BaseException:
                    self._free_s = time.monotonic()
                    raise
        finally:
            self.num_computed += self._num_done(work)
            del self.open[engine_id]

    def _num_done(self, work: Work) -> int:
        if work.begun_s is None:
            return 0
        return min(work.num_tokens, max(0, int((time.monotonic() - work.begun_s) * self.tokens_per_s + 1e-6)))

    def _num_made(self, work: Work) -> int:
        return max(0, self._num_done(work) - work.num_prompt)

    def _progress(self, work: Work) -> tuple[int, int, int, int]:
        left = max(0, work.num_prompt - self._num_done(work))
        return work.lane, left, self._num_made(work), work.max_output


def metered_app(engine: MeteredEngine) -> Starlette:
    """The two routes that have work."""

    async def embeddings(request: Request) -> Response:
        body = await request.json()
        num_tokens = sum(len(ids) for ids in body["input"])
        async for _ in engine.tokens(Work(EMBED, num_tokens, 0, 0)):
            pass
        data = [{"object": "embedding", "index": i, "embedding": [1.0]} for i in range(len(body["input"]))]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return JSONResponse({"object": "list", "data": data, "usage": usage, "pid": os.getpid()})

    async def completions(request: Request) -> Response:
        body = await request.json()
        num_output = body.get("fake", {}).get("output", body["max_tokens"])
        work = Work(GENERATE, len(body["prompt"]), num_output, body["max_tokens"])
        tokens = engine.tokens(work)
        if body.get("stream"):
            return StreamingResponse(_events(tokens), media_type="text/event-stream")
        async for _ in tokens:
            pass
        choices = [{"index": 0, "text": "", "finish_reason": "length"}]
        usage = {"prompt_tokens": work.num_prompt, "completion_tokens": num_output}
        return JSONResponse({"choices": choices, "usage": usage, "pid": os.getpid()})

    routes = [
        Route("/v1/embeddings", until_disconnect(embeddings), methods=["POST"]),
        Route("/v1/completions", until_disconnect(completions), methods=["POST"]),
    ]
    return Starlette(routes=routes)


async def _events(tokens: AsyncGenerator[int]) -> AsyncIterator[str]:
    async with contextlib.aclosing(tokens):
        async for token in tokens:
            yield f"data: {json.dumps({'choices': [{'index': 0, 'text': f't{token}'}], 'pid': os.getpid()})}\n\n"
    yield "data: [DONE]\n\n"


async def _start(tokens_per_s: float, args: AppArgs) -> RunningEngine:
    engine = MeteredEngine(tokens_per_s)
    sizes = dict.fromkeys(args.adapters, EMBEDDING_SIZE)
    return RunningEngine(engine, metered_app(engine), sizes, dimensions_asked, note_request)


def start_metered(tokens_per_s: float) -> StartEngine:
    """What `EngineReplica` gets in place of a real engine."""
    return partial(_start, tokens_per_s)
