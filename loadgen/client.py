"""Speaks HTTP with one server: one call, one answer with its times. Decides nothing: `answer.py` says what an answer is worth.

The connection pool is unlimited, so no request waits in the client for a connection. Idle connections are closed after four
seconds, before the five after which uvicorn closes them: a request must not meet a connection that is being closed.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import aiohttp
import msgspec

from loadgen.answer import Answer, StreamReader, Vectors, read_vectors, read_whole, short_reason

Prompt = str | list[int]
KEEP_ALIVE_S = 4.0
NETWORK_ERRORS = (aiohttp.ClientError, OSError, ValueError)


@dataclass(frozen=True)
class Target:
    """One server to load, or a pair: embeddings and generations may live at different addresses.

    `api` is the generation route: plain completions (exact prompt lengths, token ids allowed) or chat.
    """

    name: str
    embeddings_url: str
    generation_url: str
    metrics_urls: tuple[str, ...]
    embed_model: str
    generate_model: str
    api: Literal["completions", "chat"] = "completions"
    api_key: str | None = None
    prepare: str | None = None  # a shell command, run before each of this target's turns in a comparison


@dataclass(frozen=True)
class Sampling:
    """How generations are asked for. `extra_body` is merged into every generation request as it is."""

    temperature: float
    ignore_eos: bool
    stream: bool
    extra_body: Mapping[str, object]


def make_session() -> aiohttp.ClientSession:
    """A session without any limit of its own: timeouts are per request."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=300)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity", "User-Agent": "loadgen"},
        skip_auto_headers=("Accept",),
        read_bufsize=2**20,
    )


class Client:
    """Calls of one worker process to one target. `now` is the run's clock, in seconds."""

    def __init__(
        self, target: Target, sampling: Sampling, session: aiohttp.ClientSession, now: Callable[[], float]
    ) -> None:
        self._target = target
        self._sampling = sampling
        self._session = session
        self._now = now
        self._headers = {"Content-Type": "application/json"}
        if target.api_key is not None:
            self._headers["Authorization"] = f"Bearer {target.api_key}"
        self._embed_url = f"{target.embeddings_url}/v1/embeddings"
        route = "completions" if target.api == "completions" else "chat/completions"
        self._generate_url = f"{target.generation_url}/v1/{route}"

    async def embed(self, inputs: Sequence[Prompt], timeout_s: float) -> Vectors:
        """Vectors for `inputs`, asked for as base64. Never raises for what the server or the network did."""
        body = {"model": self._target.embed_model, "input": inputs, "encoding_format": "base64"}
        try:
            async with asyncio.timeout(timeout_s):
                async with self._post(self._embed_url, body) as response:
                    data = await response.read()
                    if response.status != 200:
                        return Vectors(error=f"HTTP {response.status}: {short_reason(data)}")
            return read_vectors(data, len(inputs))
        except TimeoutError:
            return Vectors(error=f"timeout of {timeout_s:g} s")
        except NETWORK_ERRORS as error:
            return Vectors(error=_network_error(error))

    async def generate(self, prompt: Prompt, max_tokens: int, timeout_s: float) -> Answer:
        """The answer to `prompt`, with token times on the run's clock. Never raises for what the server or the network did."""
        reader = StreamReader()
        try:
            async with asyncio.timeout(timeout_s):
                async with self._post(self._generate_url, self._generate_body(prompt, max_tokens)) as response:
                    if response.status != 200:
                        return Answer(error=f"HTTP {response.status}: {short_reason(await response.read())}")
                    if not self._sampling.stream:
                        return read_whole(await response.read())
                    async for chunk in response.content.iter_any():
                        reader.feed(chunk, self._now())
            return reader.end(self._now())
        except TimeoutError:
            return reader.end(self._now(), cut=f"timeout of {timeout_s:g} s")
        except NETWORK_ERRORS as error:
            return reader.end(self._now(), cut=_network_error(error))

    def _post(self, url: str, body: object) -> "aiohttp.client._RequestContextManager":  # pyright: ignore[reportPrivateUsage]
        return self._session.post(url, data=msgspec.json.encode(body), headers=self._headers)

    def _generate_body(self, prompt: Prompt, max_tokens: int) -> dict[str, object]:
        sampling = self._sampling
        body: dict[str, object] = {
            "model": self._target.generate_model,
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "stream": sampling.stream,
        }
        if self._target.api == "completions":
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}]
        if sampling.stream:
            body["stream_options"] = {"include_usage": True}
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **sampling.extra_body}


def _network_error(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160] if text else type(error).__name__
