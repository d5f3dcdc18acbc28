"""A fake engine that is a clock: in every stream a token is due at fixed times, whatever becomes of those before.

Tokens that are due at once come as one event, as vLLM merges what nobody has taken yet. Every event says how many tokens there
are so far (`made`), and when the last of them was due (`due_s`, of this host's monotonic clock).
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from typing_extensions import override

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.serving.engine_replica import RunningEngine, StartEngine
from tests.serve.fakes import EMBEDDING_SIZE, FakeEngine, dimensions_asked, note_request

# As vLLM's events, so that they are as long.
EVENT: dict[str, Any] = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 0, "model": "orthrus"}
CHOICE: dict[str, Any] = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None, "stop_reason": None}


@dataclass
class ClockedEngine(FakeEngine):
    """Reports new work with every look, as an engine at work does."""

    num_looks: int = 0

    @override
    async def remaining(self) -> dict[str, Any]:
        self.num_looks += 1
        return {**await super().remaining(), "totals": {"steps": self.num_looks}}


async def _events(gap_s: float, num_tokens: int) -> AsyncIterator[str]:
    began_s, num_made = time.monotonic(), 0
    while num_made < num_tokens:
        await asyncio.sleep(max(0.0, began_s + (num_made + 1) * gap_s - time.monotonic()))
        num_made = min(num_tokens, max(num_made + 1, int((time.monotonic() - began_s) / gap_s)))
        due_s = began_s + num_made * gap_s
        yield f"data: {json.dumps({**EVENT, 'choices': [CHOICE], 'usage': None, 'made': num_made, 'due_s': due_s})}\n\n"
    yield "data: [DONE]\n\n"


async def _start(gap_s: float, args: AppArgs) -> RunningEngine:
    async def completions(request: Request) -> Response:
        body = await request.json()
        return StreamingResponse(_events(gap_s, body["max_tokens"]), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])
    sizes = dict.fromkeys(args.adapters, EMBEDDING_SIZE)
    return RunningEngine(ClockedEngine(), app, sizes, dimensions_asked, note_request)


def start_clocked(gap_s: float) -> StartEngine:
    """What `EngineReplica` gets in place of a real engine."""
    return partial(_start, gap_s)
