"""Asks a server over HTTP and reads its answers into plain values.

An answer that is an error, or cannot be read, is an answer too: `Refusal`. A server that is busy and says when to come back is
asked again. Leaves out whether an answer is right.
"""

import asyncio
import base64
import json
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from orthrus_serve.errors import OrthrusError
from orthrus_serve.verify.cases import Ask, EmbedAsk, GenerateAsk
from orthrus_serve.verify.compare import Floats

MAX_TRIES = 6
MAX_WAIT_S = 30.0
TIMEOUT_S = 600.0


class NotVerifiableError(OrthrusError):
    """The server cannot be asked at all, or is not the one that the configuration describes."""


@dataclass(frozen=True)
class Vectors:
    """Vectors of one embedding request, in the order of its inputs, and the tokens that `usage` counts."""

    vectors: tuple[Floats, ...]
    num_tokens: int


@dataclass(frozen=True)
class Tokens:
    """Tokens of one completion, and the prompt's tokens as the server counts them."""

    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Refusal:
    """An error, or an answer that is none. `status` 0: there was no answer."""

    status: int
    message: str


Answer = Vectors | Tokens | Refusal


class Client:
    """Asks one server, or one arm of it."""

    def __init__(self, url: str, api_key: str | None = None, arm: str = "") -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        if arm:
            headers["x-orthrus-arm"] = arm
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, timeout=TIMEOUT_S, limits=limits)

    async def close(self) -> None:
        """Closes its connections."""
        await self._http.aclose()

    async def models(self) -> dict[str, int | None]:
        """Names that the server serves, each with its longest context where the server tells.

        Raises:
            NotVerifiableError: nobody answers there, or not as an OpenAI server does.
        """
        try:
            answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            return {row["id"]: row.get("max_model_len") for row in answer.json()["data"]}
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise NotVerifiableError(f"{self._http.base_url}: /v1/models: {error or type(error).__name__}") from error

    async def ask(self, ask: Ask) -> Answer:
        """One request, and its answer whatever it is."""
        path = "/v1/completions" if isinstance(ask, GenerateAsk) else "/v1/embeddings"
        try:
            answer = await self._post(path, ask.body())
        except httpx.HTTPError as error:
            return Refusal(0, f"{type(error).__name__}: {error}")
        if answer.status_code != 200:
            return _refusal(answer)
        try:
            return _tokens(answer.json()) if isinstance(ask, GenerateAsk) else _vectors(answer.json(), ask)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            return Refusal(200, f"cannot be read: {type(error).__name__}: {error}")

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        for _ in range(MAX_TRIES - 1):
            answer = await self._http.post(path, json=body)
            wait = answer.headers.get("retry-after", "")
            if answer.status_code not in (429, 503) or not wait.isdigit():
                return answer
            await asyncio.sleep(min(float(wait), MAX_WAIT_S))
        return await self._http.post(path, json=body)


def _refusal(answer: httpx.Response) -> Refusal:
    try:
        return Refusal(answer.status_code, str(answer.json()["error"]["message"])[:200])
    except (ValueError, KeyError, TypeError):
        return Refusal(answer.status_code, answer.text[:200])


def _vectors(answer: dict[str, Any], ask: Ask) -> Vectors:
    rows = sorted(answer["data"], key=lambda row: row["index"])
    wanted = ask.body().get("encoding_format")
    if isinstance(ask, EmbedAsk) and any(isinstance(row["embedding"], str) != (wanted == "base64") for row in rows):
        raise ValueError(f"not in the encoding that was asked for ({json.dumps(wanted)})")
    return Vectors(tuple(_floats(row["embedding"]) for row in rows), int(answer["usage"]["prompt_tokens"]))


def _floats(embedding: str | list[float]) -> Floats:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), dtype="<f4").astype(np.float32)
    return np.asarray(embedding, dtype=np.float32)


def _tokens(answer: dict[str, Any]) -> Tokens:
    choice = answer["choices"][0]
    return Tokens(tuple(choice["token_ids"]), tuple(choice["prompt_token_ids"]))
