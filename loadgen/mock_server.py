"""A scripted OpenAI-compatible server: answers whose times can be worked out by hand, and faults on order. For tests.

Time to first token, gaps between tokens and embedding time are absolute deadlines from the arrival of a request, so they do
not drift. A request beyond `slots` waits for its turn, first come first served. A token is a word: prompts count one token per
word (or per id), answers are `w0 w1 …`. It counts what it sees (peak in flight, repeated prompt prefixes) and publishes that
under vLLM's and Orthrus's metric names. Runs no model and makes no claim about speed.
"""

import asyncio
import base64
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import msgspec
import numpy as np
from aiohttp import web

Fault = Literal["error_event", "empty", "stall", "truncate", "reset", "http_500", "http_503", "wrong_vectors"]

# Prefix blocks of so many tokens are what the counted prefix cache can find again, as in vLLM.
BLOCK_TOKENS = 16
CONSTANT_VECTOR = base64.b64encode(np.ones(8, dtype="<f4").tobytes()).decode()


@dataclass(frozen=True)
class Script:
    """How the server behaves. Times in seconds.

    `faults[i]` is the fault of every request whose number (from 0, per kind) is i modulo `fault_every`.
    `faults_after` tokens come before a fault that needs a stream. `step_fill` is what the step counters say.
    """

    ttft_s: float = 0.0
    itl_s: float = 0.0
    embed_s: float = 0.0
    dimensions: int = 8
    slots: int = 1_000_000
    fault_every: int = 1
    embed_faults: dict[int, Fault] = field(default_factory=dict[int, Fault])
    generate_faults: dict[int, Fault] = field(default_factory=dict[int, Fault])
    faults_after: int = 2
    slow_requests: dict[int, float] = field(default_factory=dict[int, float])  # number of a generation → extra seconds
    step_fill: float = 0.95
    trivial: bool = False  # answer generations with one event and no waiting: for measuring the client


@dataclass
class Seen:
    """What the server has seen so far."""

    in_flight: int = 0
    peak_in_flight: int = 0
    embeds: int = 0
    generations: int = 0
    prompts: list[str] = field(default_factory=list[str])
    blocks: set[bytes] = field(default_factory=set[bytes])
    prefix_queries: int = 0
    prefix_hits: int = 0
    tokens: Counter[str] = field(default_factory=Counter[str])


class MockServer:
    """The routes of one scripted server. `seen` may be read at any time."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen = Seen()
        self._slots = asyncio.Semaphore(script.slots)

    def make_app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/embeddings", self.embeddings)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.completions)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        return app

    async def health(self, request: web.Request) -> web.Response:
        del request
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        del request
        return _json(
            {"object": "list", "data": [{"id": "mock", "object": "model"}, {"id": "mock-embed", "object": "model"}]}
        )

    async def tokenize(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        text = body["prompt"] if "prompt" in body else " ".join(message["content"] for message in body["messages"])
        words = text.split()
        # The first word has no space before it: strings as a byte-level tokenizer gives them.
        strings = [word if index == 0 else f"Ġ{word}" for index, word in enumerate(words)]
        return _json({"tokens": [_id_of(word) for word in words], "count": len(words), "token_strs": strings})

    async def metrics(self, request: web.Request) -> web.Response:
        del request
        seen, total = self.seen, sum(self.seen.tokens.values())
        lines = [
            f'vllm:prefix_cache_queries_total{{engine="0"}} {float(seen.prefix_queries)}',
            f'vllm:prefix_cache_hits_total{{engine="0"}} {float(seen.prefix_hits)}',
            *(f'orthrus_engine_step_tokens_total{{part="{part}"}} {n}' for part, n in sorted(seen.tokens.items())),
            f"orthrus_engine_step_budget_tokens_total {total / self.script.step_fill}",
            f"mock_peak_in_flight {seen.peak_in_flight}",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def embeddings(self, request: web.Request) -> web.Response:
        arrived_s = asyncio.get_running_loop().time()
        body = msgspec.json.decode(await request.read())
        inputs = _inputs_of(body["input"])
        number, self.seen.embeds = self.seen.embeds, self.seen.embeds + 1
        counts = [self._see_prompt(text, "embed") for text in inputs]
        fault = self.script.embed_faults.get(number % self.script.fault_every)
        with self._in_flight():
            async with self._slots:
                await _until(arrived_s + self.script.embed_s)
        if fault == "stall":
            await asyncio.sleep(3600)
        if (refusal := _refusal(fault)) is not None:
            return refusal
        width = 0 if fault == "wrong_vectors" else self.script.dimensions
        vectors = [CONSTANT_VECTOR if self.script.trivial else vector_of(text, width) for text in inputs]
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
        return _json({"object": "list", "data": data, "usage": {"prompt_tokens": sum(counts)}})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        arrived_s = asyncio.get_running_loop().time()
        body = msgspec.json.decode(await request.read())
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        number, self.seen.generations = self.seen.generations, self.seen.generations + 1
        num_prompt = self._see_prompt(prompt, "prefill")
        fault = self.script.generate_faults.get(number % self.script.fault_every)
        if (refusal := _refusal(fault)) is not None:
            return refusal
        with self._in_flight():
            async with self._slots:
                started_s = arrived_s if self.script.slots >= 1_000_000 else asyncio.get_running_loop().time()
                started_s += self.script.slow_requests.get(number, 0.0)
                plan = _Plan(num_prompt, int(body.get("max_tokens") or 16), chat, fault, started_s)
                self.seen.tokens["decode"] += plan.num_output
                if not body.get("stream"):
                    return await self._whole(plan)
                return await self._stream(request, plan)

    async def _whole(self, plan: "_Plan") -> web.Response:
        await _until(plan.started_s + self.script.ttft_s + self.script.itl_s * (plan.num_output - 1))
        text = "" if plan.fault == "empty" else " ".join(f"w{i}" for i in range(plan.num_output))
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        if plan.chat:
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        return _json({"choices": [choice], "usage": plan.usage()})

    async def _stream(self, request: web.Request, plan: "_Plan") -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.script.trivial:
            await response.write(_event(plan.choice("w0", "length")) + _event(plan.last()) + b"data: [DONE]\n\n")
            return response
        if plan.chat:  # as OpenAI and vLLM do: the role comes at once, and is no token
            await response.write(_event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        await self._tokens(request, response, plan)
        return response

    async def _tokens(self, request: web.Request, response: web.StreamResponse, plan: "_Plan") -> None:
        for index in range(0 if plan.fault == "empty" else plan.num_output):
            if plan.fault not in (None, "empty") and index == self.script.faults_after:
                await _break_stream(request, response, plan.fault)
                return
            await _until(plan.started_s + self.script.ttft_s + self.script.itl_s * index)
            await response.write(_event(plan.choice(f"w{index} ", None)))
        await response.write(_event(plan.choice("", "length")))
        await response.write(_event(plan.last()) + b"data: [DONE]\n\n")

    def _see_prompt(self, prompt: Any, part: str) -> int:
        tokens = _tokens_of(prompt)
        self.seen.tokens[part] += len(tokens)
        if self.script.trivial:
            return len(tokens)
        self.seen.prompts.append(" ".join(tokens))
        self.seen.prefix_queries += len(tokens)
        chain = b""
        for begin in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            chain = hashlib.blake2b(chain + " ".join(tokens[begin : begin + BLOCK_TOKENS]).encode()).digest()
            if chain in self.seen.blocks:
                self.seen.prefix_hits += BLOCK_TOKENS
            self.seen.blocks.add(chain)
        return len(tokens)

    def _in_flight(self) -> "_InFlight":
        return _InFlight(self.seen)


class _InFlight:
    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def __enter__(self) -> None:
        self._seen.in_flight += 1
        self._seen.peak_in_flight = max(self._seen.peak_in_flight, self._seen.in_flight)

    def __exit__(self, *error: object) -> None:
        self._seen.in_flight -= 1


@dataclass(frozen=True)
class _Plan:
    num_prompt: int
    num_output: int
    chat: bool
    fault: Fault | None
    started_s: float

    def usage(self) -> dict[str, int]:
        num_output = 0 if self.fault == "empty" else self.num_output
        return {"prompt_tokens": self.num_prompt, "completion_tokens": num_output}

    def choice(self, text: str, finish: str | None) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        return {"choices": [{"index": 0, "finish_reason": finish, **content}]}

    def last(self) -> dict[str, Any]:
        return {"choices": [], "usage": self.usage()}


async def _break_stream(request: web.Request, response: web.StreamResponse, fault: Fault | None) -> None:
    if fault == "error_event":
        await response.write(_event({"error": {"message": "engine died", "code": 500}}) + b"data: [DONE]\n\n")
    elif fault == "stall":
        await asyncio.sleep(3600)
    elif fault == "reset" and request.transport is not None:
        request.transport.abort()
    # truncate: a clean end of the body, without finish reason, usage or [DONE]


def _refusal(fault: Fault | None) -> web.Response | None:
    if fault not in ("http_500", "http_503"):
        return None
    status = int(fault[5:])
    return _json({"error": {"message": "scripted refusal", "type": "server_error", "code": status}}, status)


async def _until(deadline_s: float) -> None:
    delay_s = deadline_s - asyncio.get_running_loop().time()
    if delay_s > 0:
        await asyncio.sleep(delay_s)


def vector_of(text: Any, width: int) -> str:
    """A unit vector as base64 of float32: the sum of a fixed random direction per word, so texts with shared words are near."""
    if width == 0:
        return ""
    total = np.zeros(width, dtype=np.float32)
    for word in _tokens_of(text):
        total += np.random.default_rng(_id_of(word)).standard_normal(width, dtype=np.float32)
    total /= float(np.linalg.norm(total)) or 1.0
    return base64.b64encode(total.astype("<f4").tobytes()).decode()


def _inputs_of(value: Any) -> list[Any]:
    if not isinstance(value, list):
        return [value]
    items = cast(list[Any], value)
    return [items] if items and isinstance(items[0], int) else items


def _tokens_of(prompt: Any) -> list[str]:
    if isinstance(prompt, list):
        return [str(token) for token in cast(list[Any], prompt)]
    return str(prompt).lower().split()


def _id_of(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "little") % 30_000


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def start(script: Script, port: int = 0) -> tuple[MockServer, web.AppRunner, str]:
    """Starts a server on a free port of this machine; returns it, what to `cleanup()` at the end, and its address."""
    server = MockServer(script)
    runner = web.AppRunner(server.make_app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=4096)
    await site.start()
    host, bound_port = runner.addresses[0][:2]
    return server, runner, f"http://{host}:{bound_port}"
