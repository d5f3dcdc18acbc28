"""An engine and an OpenAI app whose answers can be worked out by hand, for tests of everything around the engine.

* An embedding of a text is `[its length, 1.0]`, a completion of `max_tokens=n` is `t0 t1 …` with one token a chunk.
* `usage` counts one token a character. Every answer names its process (`pid`).
* `"fake": {…}` in a body asks for trouble: see `Trouble`.
"""

import asyncio
import contextvars
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ray.serve import Application
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from orthrus_serve.app import compose
from orthrus_serve.config.load import parse_args
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.serving.engine_replica import RunningEngine

VOCAB_SIZE, MAX_MODEL_LEN, EMBEDDING_SIZE = 1000, 512, 8

note_request: contextvars.ContextVar[Callable[[str], None] | None] = contextvars.ContextVar(
    "note_request", default=None
)
dimensions_asked: contextvars.ContextVar[int | None] = contextvars.ContextVar("dimensions_asked", default=None)


@dataclass(frozen=True)
class Trouble:
    """What a request may ask of the fake engine. `after` counts tokens that come out well before it happens."""

    delay_s: float = 0.0  # before anything
    gap_s: float = 0.0  # before each token
    after: int = 0
    what: str = ""  # "raise" in the app, "exit" the process, "lose_core" of the engine
    sick_s: float = 0.0  # afterwards the engine fails every request for so long
    hang: bool = False  # afterwards the engine answers nothing any more, and neither does its channel


@dataclass
class FakeEngine:
    """Stands for the engine and for its channel."""

    policy: str = "orthrus"
    errored: bool = False
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = MAX_MODEL_LEN
    sick_until_s: float = 0.0
    well: asyncio.Event = field(default_factory=asyncio.Event)
    open: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)  # as the channel reports them
    counts: dict[str, int] = field(default_factory=lambda: {"begun": 0, "finished": 0, "aborted": 0})

    def __post_init__(self) -> None:
        self.well.set()

    @property
    def channel(self) -> "FakeEngine":
        return self

    async def set(self, wanted: dict[str, Any]) -> dict[str, Any]:
        refused = "step_tokens 12 is not known" if wanted.get("step_tokens") == 12 else None
        if wanted.get("step_tokens") == 13:
            raise RuntimeError("a failed utility call")
        if refused is None:
            self.policy = wanted.get("policy", self.policy)
        return {"applied": {"policy": self.policy}, "refused": refused}

    async def watch(self) -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return await self.remaining()

    async def remaining(self) -> dict[str, Any]:
        await self.well.wait()
        if self.errored:
            raise RuntimeError("EngineDeadError")
        requests = {str(number): progress for number, progress in self.open.items()}
        return {
            "policy": self.policy,
            "requests": requests,
            "totals": {"steps": 1000, "embed_tokens": 7},
            **self.counts,
        }

    async def check_health(self) -> None:
        if self.errored:
            raise RuntimeError("EngineDeadError")

    def shutdown(self) -> None:
        pass

    async def tokens(self, count: int, trouble: Trouble) -> AsyncIterator[int]:
        """Numbers 0 to `count`, as an engine's output: closing it early is an abort."""
        self.counts["begun"] += 1
        number = self.counts["begun"]
        self.open[number] = (0, 0, 0, count)
        if (note := note_request.get()) is not None:
            note(str(number))
        is_done = False
        try:
            await asyncio.sleep(trouble.delay_s)
            await self.well.wait()
            if time.monotonic() < self.sick_until_s:
                raise RuntimeError("the fake is sick")
            for token in range(count):
                if trouble.what and token == trouble.after:
                    self._make(trouble.what)
                await asyncio.sleep(trouble.gap_s)
                await self.well.wait()
                self.open[number] = (0, 0, token + 1, count)
                yield token
            is_done = True
            if trouble.sick_s:
                self.sick_until_s = time.monotonic() + trouble.sick_s
            if trouble.hang:
                self.well.clear()
        finally:
            self.open.pop(number, None)
            self.counts["finished" if is_done else "aborted"] += 1

    def _make(self, what: str) -> None:
        if what == "exit":
            os._exit(1)
        self.errored = what == "lose_core"
        raise RuntimeError(f"the fake was told to {what}")


def fake_app(engine: FakeEngine) -> Starlette:
    """The OpenAI app over a fake engine, as far as tests need it."""

    async def embeddings(request: Request) -> Response:
        body = await request.json()
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        async for _ in engine.tokens(1, Trouble(**body.get("fake", {}))):
            pass
        data = [{"object": "embedding", "index": i, "embedding": [float(len(t)), 1.0]} for i, t in enumerate(texts)]
        extra = {
            "pid": os.getpid(),
            "dimensions": dimensions_asked.get(),
            "request_id": request.headers["x-request-id"],
        }
        return JSONResponse({"object": "list", "model": body["model"], "data": data, "usage": _usage(texts), **extra})

    async def completions(request: Request) -> Response:
        body = await request.json()
        tokens = engine.tokens(body.get("max_tokens", 3), Trouble(**body.get("fake", {})))
        if body.get("stream"):
            return StreamingResponse(_events(tokens), media_type="text/event-stream")
        text = " ".join([f"t{token}" async for token in tokens])
        choices = [{"index": 0, "text": text, "finish_reason": "length"}]
        return JSONResponse(
            {"object": "text_completion", "model": body["model"], "choices": choices, "pid": os.getpid()}
        )

    async def models(_: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": [{"id": "orthrus"}, {"id": "orthrus-embed"}], "pid": os.getpid()}
        )

    async def vllm_error(_: Request) -> Response:
        return JSONResponse({"error": {"message": "no", "type": "BadRequestError", "param": "x", "code": 400}}, 400)

    routes = [
        Route("/v1/embeddings", until_disconnect(embeddings), methods=["POST"]),
        Route("/v1/completions", until_disconnect(completions), methods=["POST"]),
        Route("/v1/models", models),
        Route("/tokenize", vllm_error, methods=["POST"]),
    ]
    return Starlette(routes=routes)


def until_disconnect(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """As vLLM's `with_cancellation`: the handler runs in a task of its own, which a disconnect cancels."""

    async def endpoint(request: Request) -> Response:
        await request.body()
        handling = asyncio.create_task(handler(request))
        leaving = asyncio.create_task(request.receive())
        await asyncio.wait({handling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        (leaving if handling.done() else handling).cancel()
        return handling.result() if handling.done() else Response()

    return endpoint


async def _events(tokens: AsyncIterator[int]) -> AsyncIterator[str]:
    async for token in tokens:
        yield f"data: {json.dumps({'choices': [{'index': 0, 'text': f't{token}'}], 'pid': os.getpid()})}\n\n"
    yield "data: [DONE]\n\n"


def _usage(texts: list[str]) -> dict[str, int]:
    count = sum(len(text) for text in texts)
    return {"prompt_tokens": count, "total_tokens": count}


async def start_fake(args: AppArgs) -> RunningEngine:
    """What `EngineReplica` gets in place of a real engine."""
    engine = FakeEngine()
    return RunningEngine(
        engine, fake_app(engine), dict.fromkeys(args.adapters, EMBEDDING_SIZE), dimensions_asked, note_request
    )


async def never_start(args: AppArgs) -> RunningEngine:
    """An engine that loads for ever."""
    await asyncio.Event().wait()
    raise AssertionError("this is a bug in asyncio")


def build_fake(args: dict[str, Any]) -> Application:
    """A builder as a Serve file names it, over fake engines."""
    return compose(parse_args(args), start_fake)
