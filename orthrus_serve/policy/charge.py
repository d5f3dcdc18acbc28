"""Estimates the remaining tokens of a request for a Front that never tokenises. Pure, bounded memory.

remaining tokens = prompt tokens + outputs x min(max_tokens, running 70th percentile of this generator's output lengths)

Prompt tokens are the body's bytes over a ratio that is fitted per kind from true counts; a prompt given as token ids is
counted. Guards: whatever JSON a body holds, the estimate is a finite whole number of at least 1. Leaves out whether the
body is valid (the Front and vLLM answer that) and the true count (the engine's report, `ledger.correct`).
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from orthrus_serve.policy.remaining import output_left
from orthrus_serve.types import RequestKind

# Bytes of JSON body per token: English text with a subword tokenizer, with some room for the JSON around it.
FIRST_BYTES_PER_TOKEN = 4.0
MIN_BYTES_PER_TOKEN, MAX_BYTES_PER_TOKEN = 0.25, 64.0
# The first ratio counts as much as one request of 1,000 tokens, and a request is half forgotten after about 70 more.
FIRST_WEIGHT_TOKENS = 1000.0
KEEP_RATIO = 0.99

NUM_OUTPUTS_REMEMBERED = 512
MIN_OUTPUTS_TO_TRUST = 8
OUTPUT_PERCENTILE = 0.7
FIRST_OUTPUT_TOKENS = 256

# No request is larger than this, whatever its body says: keeps sums small and hostile numbers harmless.
MAX_CHARGE_TOKENS = 2**40


@dataclass(frozen=True)
class RequestShape:
    """What the Front knows of a request without tokenising it.

    Attributes:
        body_bytes: length of the HTTP body.
        num_prompt_ids: number of token ids when the whole prompt is given as ids, None when any of it is text.
        num_prompts: independent inputs in the body, at least 1.
        num_outputs: sequences to generate (prompts x `n`); 0 for an embedding.
        max_tokens: the client's limit per output, None without one.
    """

    kind: RequestKind
    body_bytes: int
    num_prompt_ids: int | None = None
    num_prompts: int = 1
    num_outputs: int = 0
    max_tokens: int | None = None


def shape_of(
    kind: RequestKind, body: Mapping[str, Any], body_bytes: int, default_max_tokens: int | None = None
) -> RequestShape:
    """Read the shape off a parsed body of `/v1/embeddings`, `/v1/completions` or `/v1/chat/completions`.

    Never raises: a field of the wrong type counts as absent, since somebody else answers it with a 400.

    Args:
        default_max_tokens: what the route takes when the body names no limit (16 for `/v1/completions`, else None).
    """
    # Messages are text, whatever else stands in the body: a stray list of ids must not make a long chat look short.
    prompt: Any = None if "messages" in body else body.get("input" if kind == "embed" else "prompt")
    entries = cast(list[Any], prompt) if isinstance(prompt, list) else []
    num_prompts = len(entries) if _is_batch(entries) else 1
    ids = _count_ids(entries)
    if kind == "embed":
        return RequestShape(kind, body_bytes, ids, num_prompts)
    limits = (_count(body.get("max_completion_tokens")), _count(body.get("max_tokens")), default_max_tokens)
    max_tokens = next((limit for limit in limits if limit is not None), None)
    num_outputs = num_prompts * max(1, _count(body.get("n")) or 1)
    return RequestShape(kind, body_bytes, ids, num_prompts, num_outputs, max_tokens)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_batch(entries: list[Any]) -> bool:
    """A list of texts or of lists of ids; a flat list of ids is one prompt."""
    return bool(entries) and not _is_id(entries[0])


def _count_ids(entries: list[Any]) -> int | None:
    """Token ids in a prompt that is all ids, else None. Looks at the first entry of a list only: exact for valid bodies."""
    if not _is_batch(entries):
        return len(entries) or None
    num_ids = 0
    for entry in entries:
        if not isinstance(entry, list) or _is_batch(prompt := cast(list[Any], entry)) or not prompt:
            return None
        num_ids += len(prompt)
    return num_ids


def _count(value: Any) -> int | None:
    return min(value, MAX_CHARGE_TOKENS) if _is_id(value) and value >= 0 else None


class BytesPerToken:
    """A ratio of sums, with old requests fading out: two floats, whatever the traffic."""

    def __init__(self) -> None:
        self._bytes = FIRST_BYTES_PER_TOKEN * FIRST_WEIGHT_TOKENS
        self._tokens = FIRST_WEIGHT_TOKENS

    def observe(self, body_bytes: int, num_tokens: int) -> None:
        """Learn from one request whose prompt was text. Counts that cannot be (zero, negative) are ignored."""
        if body_bytes < 1 or num_tokens < 1:
            return
        self._bytes = self._bytes * KEEP_RATIO + min(body_bytes, MAX_CHARGE_TOKENS)
        self._tokens = self._tokens * KEEP_RATIO + min(num_tokens, MAX_CHARGE_TOKENS)

    @property
    def ratio(self) -> float:
        """Bytes of body for each prompt token, within fixed bounds."""
        return min(max(self._bytes / self._tokens, MIN_BYTES_PER_TOKEN), MAX_BYTES_PER_TOKEN)


class OutputLengths:
    """The running 70th percentile of the last output lengths of one generator."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, num_tokens: int) -> None:
        """Learn the length of one finished output; a negative length is ignored."""
        if num_tokens < 0:
            return
        num_tokens = min(num_tokens, MAX_CHARGE_TOKENS)
        if len(self._recent) == NUM_OUTPUTS_REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)

    @property
    def expected(self) -> int:
        """Tokens that an output is charged when its own limit is not lower."""
        if len(self._sorted) < MIN_OUTPUTS_TO_TRUST:
            return FIRST_OUTPUT_TOKENS
        return self._sorted[int(OUTPUT_PERCENTILE * (len(self._sorted) - 1))]


class ChargeEstimator:
    """Charges for one application: one generator, any number of embedding adapters."""

    def __init__(self, max_prompt_tokens: int | None = None) -> None:
        """`max_prompt_tokens` is the engine's longest prompt: no input is charged more, since a longer one is refused."""
        self._max_prompt_tokens = MAX_CHARGE_TOKENS if max_prompt_tokens is None else max_prompt_tokens
        self._ratios: dict[RequestKind, BytesPerToken] = {"generate": BytesPerToken(), "embed": BytesPerToken()}
        self._outputs = OutputLengths()

    def estimate(self, shape: RequestShape) -> int:
        """Remaining tokens to charge, at least 1. Grows with the body, and with every count in the shape."""
        prompt = min(self._prompt_tokens(shape), max(1, shape.num_prompts) * self._max_prompt_tokens)
        return min(max(1, prompt + max(0, shape.num_outputs) * self.expected_output(shape)), MAX_CHARGE_TOKENS)

    def expected_output(self, shape: RequestShape) -> int:
        """Tokens expected of each output; 0 for an embedding."""
        if shape.num_outputs < 1:
            return 0
        return output_left(self._outputs.expected, shape.max_tokens)

    def learn_prompt(self, shape: RequestShape, num_prompt_tokens: int) -> None:
        """Take in the true prompt length (`usage.prompt_tokens`, or the engine's report) of a request."""
        if shape.num_prompt_ids is None:
            self._ratios[shape.kind].observe(shape.body_bytes, num_prompt_tokens)

    def learn_output(self, num_output_tokens: int) -> None:
        """Take in the length of one finished output."""
        self._outputs.observe(num_output_tokens)

    def _prompt_tokens(self, shape: RequestShape) -> int:
        if shape.num_prompt_ids is not None:
            return max(0, shape.num_prompt_ids)
        return int(min(max(0, shape.body_bytes), MAX_CHARGE_TOKENS) / self._ratios[shape.kind].ratio)
