"""Decides what an answer was worth: which stream events are tokens, when the first one came, whether it is a success.

Pure: bytes and times as arguments. A token is an event with content; role-only, usage-only and `[DONE]` events are none.
A success has content, a proper end and no error anywhere, whatever the HTTP status said.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import msgspec

from loadgen.sse import Event, EventParser

FAILED_FINISHES = ("error", "abort", "abort_error")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Reply(msgspec.Struct):
    """One stream event, or a whole body that was not streamed. Fields that nobody here needs are skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None
    shape: str | None = msgspec.field(name="object", default=None)
    message: str | None = None


class _Vector(msgspec.Struct):
    embedding: str | list[float]
    index: int = 0


class _Vectors(msgspec.Struct):
    data: list[_Vector] = []
    usage: _Usage | None = None
    error: object = None


_reply: msgspec.json.Decoder[_Reply] = msgspec.json.Decoder(_Reply)
_vectors: msgspec.json.Decoder[_Vectors] = msgspec.json.Decoder(_Vectors)


@dataclass(frozen=True)
class Answer:
    """What a generation gave. `error` is None for a success only."""

    error: str | None
    text: str = ""
    first_token_s: float | None = None
    last_token_s: float | None = None
    gaps_s: list[float] = field(default_factory=list[float])
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    output_counted_by: Literal["usage", "events"] | None = None


@dataclass(frozen=True)
class Vectors:
    """What an embedding request gave: one entry per input, in order; base64 (little-endian float32) or numbers."""

    error: str | None
    data: list[str | list[float]] = field(default_factory=list[str | list[float]])
    prompt_tokens: int | None = None


class StreamReader:
    """Feed it the bytes of a streamed answer with the time they came; ask for the verdict when the stream has ended."""

    def __init__(self) -> None:
        self._parser = EventParser()
        self._texts: list[str] = []
        self._times: list[float] = []
        self._usage: _Usage | None = None
        self._finish: str | None = None
        self._done = False
        self._error: str | None = None

    def feed(self, chunk: bytes, now_s: float) -> None:
        """Takes what the network gave at `now_s`."""
        for event in self._parser.feed(chunk):
            self._take(event, now_s)

    def end(self, now_s: float, cut: str | None = None) -> Answer:
        """The verdict. `cut` says why the client stopped reading, if it was the client or the network that stopped."""
        for event in self._parser.flush():
            self._take(event, now_s)
        return self._answer(self._verdict(cut))

    def _take(self, event: Event, now_s: float) -> None:
        if event.data == b"[DONE]":
            self._done = True
            return
        try:
            reply = _reply.decode(event.data)
        except msgspec.MsgspecError as error:
            self._fail(f"not a completion event: {error}")
            return
        if event.name == "error" or _is_error(reply):
            self._fail(f"error in the stream: {_message(reply)}")
            return
        if reply.usage is not None:
            self._usage = reply.usage
        for choice in reply.choices:
            text = _text(choice)
            if text or choice.token_ids or _has_tool_call(choice):
                self._texts.append(text)
                self._times.append(now_s)
            self._finish = choice.finish_reason or self._finish

    def _fail(self, error: str) -> None:
        self._error = self._error or error

    def _verdict(self, cut: str | None) -> str | None:
        if self._error is not None:
            return self._error
        if cut is not None:
            return f"{cut} after {len(self._times)} content events"
        if not self._done and self._finish is None:
            return f"stream ended early, after {len(self._times)} content events"
        return _fault_of(self._finish, has_content=bool(self._times))

    def _answer(self, error: str | None) -> Answer:
        times = self._times
        usage = self._usage or _Usage()
        counted = usage.completion_tokens is not None
        return Answer(
            error=error,
            text="".join(self._texts),
            first_token_s=times[0] if times else None,
            last_token_s=times[-1] if times else None,
            gaps_s=[later - earlier for earlier, later in pairwise(times)],
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens if counted else len(times),
            output_counted_by="usage" if counted else "events",
        )


def read_whole(body: bytes) -> Answer:
    """The verdict on an answer that was not streamed: no TTFT, no gaps."""
    try:
        reply = _reply.decode(body)
    except msgspec.MsgspecError as error:
        return Answer(error=f"not a completion: {error}")
    if _is_error(reply):
        return Answer(error=f"error in a 200 answer: {_message(reply)}")
    usage = reply.usage or _Usage()
    text = "".join(_text(choice) for choice in reply.choices)
    has_content = bool(text) or any(_has_tool_call(choice) or choice.token_ids for choice in reply.choices)
    finish = reply.choices[0].finish_reason if reply.choices else None
    return Answer(
        error=_fault_of(finish, has_content=has_content),
        text=text,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        output_counted_by=None if usage.completion_tokens is None else "usage",
    )


def read_vectors(body: bytes, num_inputs: int) -> Vectors:
    """The verdict on an embeddings answer: one vector per input, none of them empty."""
    try:
        reply = _vectors.decode(body)
    except msgspec.MsgspecError as error:
        return Vectors(error=f"not an embeddings answer: {error}")
    refusal = reply.error
    if refusal is not None:
        return Vectors(error=f"error in a 200 answer: {refusal}")
    if len(reply.data) != num_inputs:
        return Vectors(error=f"{len(reply.data)} vectors for {num_inputs} inputs")
    data = [item.embedding for item in sorted(reply.data, key=lambda item: item.index)]
    if not all(data):
        return Vectors(error="empty answer: a vector without numbers")
    return Vectors(error=None, data=data, prompt_tokens=reply.usage.prompt_tokens if reply.usage else None)


def short_reason(body: bytes, limit: int = 160) -> str:
    """The message of an error body, in OpenAI shape or not, cut to `limit` characters."""
    try:
        reply = _reply.decode(body)
        text = _message(reply) if _is_error(reply) else body.decode("utf-8", "replace")
    except msgspec.MsgspecError:
        text = body.decode("utf-8", "replace")
    return " ".join(text.split())[:limit]


def _is_error(reply: _Reply) -> bool:
    refusal = reply.error
    return refusal is not None or reply.shape == "error"


def _message(reply: _Reply) -> str:
    if isinstance(reply.error, dict):
        return str(reply.error.get("message") or reply.error)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return str(reply.error or reply.message or "no message")


def _fault_of(finish: str | None, *, has_content: bool) -> str | None:
    if finish in FAILED_FINISHES:
        return f"finished with {finish!r}"
    return None if has_content else "empty answer"


def _text(choice: _Choice) -> str:
    if choice.text:
        return choice.text
    part = choice.delta or choice.message
    if part is None:
        return ""
    return part.content or part.reasoning_content or part.reasoning or ""


def _has_tool_call(choice: _Choice) -> bool:
    part = choice.delta or choice.message
    return part is not None and bool(part.tool_calls)
