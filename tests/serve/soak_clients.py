"""Clients of a soak: each asks one thing after the other, right and wrong ones, and notes how every request ended.

Whoever is answered with 200 compares: vectors with those that the calm server gave, texts with those of the calm server. Some
clients misbehave: they leave, read slowly, half-close their connection, or send what cannot be served.
"""

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from tests.engine.harness import token_ids

# How a request ended for its client: the right answer · a wrong one · refused as it should be · told to come back · a stream
# cut with an error event · given up by the client itself · an end that is none of these (the proxy's 500, a closed connection),
# which only the clients of a killed Front should meet · no end at all, which nobody may meet.
End = Literal["right", "wrong", "refused", "unavailable", "cut", "left", "broken", "none"]
EMBED, COMPLETE, CHAT = "/v1/embeddings", "/v1/completions", "/v1/chat/completions"
LEAST_COSINE = 0.9999
SLOWEST_S = 240.0
NUM_KNOWN = 24

BAD: tuple[tuple[str, Any, int], ...] = (
    (EMBED, {"input": []}, 400),
    (EMBED, {"input": [[-1, 10**7]]}, 400),
    (EMBED, {"input": "w3", "model": "nobody"}, 404),
    (COMPLETE, {"prompt": [3] * 5000}, 400),
    (COMPLETE, {"prompt": "w3", "temperature": "hot"}, 400),
    (CHAT, {"messages": "hello"}, 400),
    ("/v1/nothing", {}, 404),
)


@dataclass(frozen=True)
class Known:
    """A request with its right answer: a text, or vectors."""

    path: str
    body: dict[str, Any]
    answer: Any = None

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass
class Ended:
    """How one request ended, when it began, and when it was over."""

    at_s: float
    ended_s: float
    what: str
    end: End
    detail: str = ""


@dataclass
class Notes:
    """What all clients saw."""

    ended: list[Ended] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        return dict(Counter(one.end for one in self.ended))

    def by_what(self) -> dict[str, dict[str, int]]:
        """How those of each kind of client, or of request, ended."""
        found: dict[str, Counter[str]] = {}
        for one in self.ended:
            found.setdefault(one.what.partition(" {")[0], Counter())[one.end] += 1
        return {what: dict(ends) for what, ends in found.items()}

    def of(self, *ends: End) -> list[Ended]:
        return [one for one in self.ended if one.end in ends]


def make_known(rng: random.Random) -> list[Known]:
    """Requests of both kinds, short and chunked, whole and streamed, without their answers."""
    found: list[Known] = []
    for number in range(NUM_KNOWN):
        length = rng.choice([3, 20, 100, 300])
        if number % 2:
            inputs = [token_ids(rng, max(1, length // 2 + one)) for one in range(rng.choice([1, 1, 4]))]
            found.append(Known(EMBED, {"model": "orthrus-embed", "input": inputs}))
            continue
        body = {"model": "orthrus", "max_tokens": rng.choice([1, 8, 40]), "temperature": 0, "ignore_eos": True}
        is_stream = number % 4 == 0
        found.append(Known(COMPLETE, {**body, "prompt": token_ids(rng, length), "stream": is_stream}))
    return found


async def learn_answers(url: str, known: list[Known]) -> list[Known]:
    """Each with its answer, asked one after the other of a server that does nothing else."""
    async with aiohttp.ClientSession() as session:
        answers = [await _answer(session, url, one) for one in known]
    assert all(end == "right" for end, _ in answers), answers
    return [Known(one.path, one.body, answer) for one, (_, answer) in zip(known, answers, strict=True)]


async def _answer(session: aiohttp.ClientSession, url: str, known: Known) -> tuple[End, Any]:
    """How it ended, and the answer or what went wrong."""
    async with session.post(url + known.path, json=known.body) as response:
        if response.status == 503 and "Retry-After" in response.headers:
            return "unavailable", await response.text()
        if response.status != 200:
            return "broken", f"{response.status}: {(await response.text())[:300]}"
        if not known.is_stream:
            return "right", _content(await response.json())
        texts: list[str] = []
        async for raw in response.content:
            line = raw.decode().strip()
            if line == "event: error":
                return "cut", line
            if line == "data: [DONE]":
                return "right", "".join(texts)
            if line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    return "cut", line[:300]
                texts.append(event["choices"][0]["text"])
        return "broken", "a stream without an end"


def _content(answer: dict[str, Any]) -> Any:
    if "data" in answer:
        return [row["embedding"] for row in answer["data"]]
    return answer["choices"][0]["text"]


def is_same(answer: Any, right: Any) -> bool:
    """Equal texts; vectors of the same direction."""
    if isinstance(right, str):
        return answer == right
    return len(answer) == len(right) and all(
        _cosine(one, other) >= LEAST_COSINE for one, other in zip(answer, right, strict=True)
    )


def _cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))


class Clients:
    """All clients of a soak. Run until told to stop; then each finishes what it asked."""

    def __init__(self, url: str, known: list[Known], seed: int, think_s: float) -> None:
        """A client thinks for up to twice `think_s` before its next request."""
        self._url = url
        self._known = known
        self._seed = seed
        self._think_s = think_s
        self._stopping = False
        self.notes = Notes()

    def stop(self) -> None:
        """No new requests."""
        self._stopping = True

    async def run(self, num_usual: int, num_odd: int) -> None:
        """`num_usual` clients ask and wait; `num_odd` misbehave between their requests."""
        timeout = aiohttp.ClientTimeout(total=SLOWEST_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            odd: list[Callable[[aiohttp.ClientSession, random.Random], Awaitable[None]]] = [
                self._leaves, self._reads_slowly, self._half_closes, self._sends_rubbish, self._vanishes,
            ]  # fmt: skip
            usual = [self._loop(session, number, [self._asks]) for number in range(num_usual)]
            await asyncio.gather(*usual, *[self._loop(session, 1000 + number, odd) for number in range(num_odd)])

    async def _loop(
        self,
        session: aiohttp.ClientSession,
        number: int,
        what: list[Callable[[aiohttp.ClientSession, random.Random], Awaitable[None]]],
    ) -> None:
        rng = random.Random(self._seed * 10_000 + number)
        while not self._stopping:
            act = rng.choice(what)
            began_s = time.monotonic()
            try:
                await act(session, rng)
            except TimeoutError as error:
                self._note(began_s, act.__name__, "none", repr(error))
            except (aiohttp.ClientError, OSError, EOFError) as error:
                self._note(began_s, act.__name__, "broken", repr(error))
            # A server that is refilling its pool answers at once; nobody asks it a thousand times a second.
            is_turned_away = bool(self.notes.ended) and self.notes.ended[-1].end in ("unavailable", "broken")
            await asyncio.sleep(rng.uniform(0, 2 * self._think_s) + (1.0 if is_turned_away else 0.0))

    def _note(self, began_s: float, what: str, end: End, detail: Any = "") -> None:
        self.notes.ended.append(Ended(began_s, time.monotonic(), what, end, str(detail)[:300]))

    async def _asks(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        known, began_s = rng.choice(self._known), time.monotonic()
        end, answer = await _answer(session, self._url, known)
        if end == "right" and not is_same(answer, known.answer):
            end = "wrong"
        self._note(began_s, known.path, end, "" if end == "right" else answer)

    async def _leaves(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        began_s = time.monotonic()
        asking = asyncio.create_task(self._asks(session, rng))
        await asyncio.wait({asking}, timeout=rng.uniform(0, 0.5))
        if asking.done():
            asking.result()
            return
        asking.cancel()
        await asyncio.wait({asking})
        if asking.cancelled():
            self._note(began_s, "leaves", "left")

    async def _sends_rubbish(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        began_s = time.monotonic()
        path, body, status = rng.choice(BAD)
        async with session.post(self._url + path, json=body) as response:
            await response.read()
            is_refused = response.status == status
            end: End = "refused" if is_refused else "unavailable" if response.status == 503 else "broken"
            self._note(began_s, f"{path} {str(body)[:60]}", end, "" if is_refused else response.status)

    async def _reads_slowly(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        began_s = time.monotonic()
        body = {"model": "orthrus", "prompt": token_ids(rng, 10), "max_tokens": 30, "ignore_eos": True, "stream": True}
        async with session.post(self._url + COMPLETE, json=body) as response:
            text = b""
            while chunk := await response.content.read(200):
                text += chunk
                await asyncio.sleep(0.02)
            is_cut = b"event: error" in text
            is_whole = response.status == 200 and text.rstrip().endswith(b"[DONE]")
            end: End = (
                "right" if is_whole else "cut" if is_cut else "unavailable" if response.status == 503 else "broken"
            )
            self._note(began_s, "reads slowly", end, "" if is_whole else text[-200:])

    async def _raw(self, known: Known) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self._url)
        assert parts.hostname
        assert parts.port
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        body = json.dumps(known.body).encode()
        head = (
            f"POST {parts.path}{known.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer

    async def _half_closes(self, _session: aiohttp.ClientSession, rng: random.Random) -> None:
        """A client that says that it will send no more. Whether that means that it left is not settled among servers: it gets
        an answer or a closed connection, and either way its request ends."""
        began_s = time.monotonic()
        reader, writer = await self._raw(rng.choice(self._known))
        writer.write_eof()
        async with asyncio.timeout(SLOWEST_S):
            await reader.read()
        writer.close()
        self._note(began_s, "half-closes", "left")

    async def _vanishes(self, _session: aiohttp.ClientSession, rng: random.Random) -> None:
        """Ends its connection with a reset, in the middle of its body or of its answer."""
        began_s = time.monotonic()
        _reader, writer = await self._raw(rng.choice(self._known))
        await asyncio.sleep(rng.uniform(0, 0.3))
        writer.transport.abort()
        self._note(began_s, "vanishes", "left")
