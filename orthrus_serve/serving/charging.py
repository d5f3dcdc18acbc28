"""What the Front charges a request before it is routed, and what it learns from the reply. Adapter to `policy/charge.py`.

The Front never tokenises and never builds an answer: it reads counts off the request's JSON, and usage off the last bytes of
the reply. Guards: neither raises, whatever the bytes are. Leaves out the arithmetic.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from orthrus_serve.policy.charge import ChargeEstimator, RequestShape, shape_of
from orthrus_serve.serving.error_shape import has_failure_event, has_our_error_event
from orthrus_serve.types import RequestKind

# Route → kind, and the `max_tokens` that the route takes when the body names none.
CHARGED_ROUTES: dict[str, tuple[RequestKind, int | None]] = {
    "/v1/embeddings": ("embed", None),
    "/v1/completions": ("generate", 16),
    "/v1/chat/completions": ("generate", None),
}
# A larger body is charged by its length alone: parsing it would hold up every stream of this Front.
MAX_PARSED_BYTES = 2**20
TAIL_BYTES = 1024

_USAGE = re.compile(rb'"(prompt_tokens|completion_tokens)":\s*(\d{1,9})')
_EVENT = b"data: "


def shape_of_request(path: str, body: bytes) -> RequestShape | None:
    """What is to be charged for this request; None for routes without a forward pass (they are charged 1)."""
    if path not in CHARGED_ROUTES:
        return None
    kind, default_max_tokens = CHARGED_ROUTES[path]
    if len(body) > MAX_PARSED_BYTES:
        # As if every byte were an input: then the estimate is not capped by the longest prompt.
        return RequestShape(kind, len(body), num_prompts=len(body), num_outputs=0 if kind == "embed" else 1)
    return shape_of(kind, _object_or_empty(body), len(body), default_max_tokens)


def _object_or_empty(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


@dataclass
class ReplyMeter:
    """Follows one reply as it passes, in constant memory: its last bytes, how many events it had, if one was an error, and if
    that was the server's."""

    num_events: int = 0
    has_error: bool = False
    has_failure: bool = False
    tail: bytes = b""

    def see(self, chunk: bytes) -> None:
        """Take in the next chunk."""
        self.num_events += chunk.count(_EVENT)
        if has_our_error_event(chunk):
            self.has_error = True
            self.has_failure = self.has_failure or has_failure_event(chunk)
        self.tail = (self.tail + chunk)[-TAIL_BYTES:] if len(chunk) < TAIL_BYTES else chunk[-TAIL_BYTES:]

    def usage(self) -> dict[str, int]:
        """`prompt_tokens` and `completion_tokens` as the end of the reply names them; empty when it does not."""
        return {name.decode(): int(count) for name, count in _USAGE.findall(self.tail)}


def learn(estimator: ChargeEstimator, shape: RequestShape, meter: ReplyMeter) -> None:
    """Teaches the estimator from a reply that ended well. A stream without usage counts its events, one per token."""
    usage = meter.usage()
    if "prompt_tokens" in usage:
        estimator.learn_prompt(shape, usage["prompt_tokens"])
    if shape.num_outputs:
        num_tokens = usage.get("completion_tokens", meter.num_events)
        if num_tokens:
            estimator.learn_output(num_tokens // shape.num_outputs)


def num_tokens_of(estimator: ChargeEstimator, shape: RequestShape, meter: ReplyMeter) -> int:
    """Prompt and output tokens of a request that was answered: as its usage says, else estimated and counted by events."""
    usage = meter.usage()
    estimated = estimator.estimate(shape) - shape.num_outputs * estimator.expected_output(shape)
    num_output = usage.get("completion_tokens", meter.num_events) if shape.num_outputs else 0
    return max(0, usage.get("prompt_tokens", estimated)) + num_output
