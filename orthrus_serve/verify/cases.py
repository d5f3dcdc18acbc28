"""One thing that a server is asked, and what the model must see for it. Pure data.

Leaves out what is worth asking (`plan.py`), how answers are obtained (`client.py`) and what is near enough (`compare.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NUM_NEW_TOKENS = 16


@dataclass(frozen=True)
class Input:
    """What is sent, text or token ids, and the ids that the model must see for it."""

    sent: str | tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class EmbedAsk:
    """One embedding request. `model` is what the body says, `adapter` what must answer."""

    case: str
    model: str
    adapter: str
    inputs: tuple[Input, ...]
    normalize: bool
    dimensions: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The body of `POST /v1/embeddings`."""
        sent = [one.sent if isinstance(one.sent, str) else list(one.sent) for one in self.inputs]
        cut = {} if self.dimensions is None else {"dimensions": self.dimensions}
        return {"model": self.model, "input": sent[0] if len(sent) == 1 else sent, **cut, **self.options}


@dataclass(frozen=True)
class GenerateAsk:
    """One greedy completion. `adapter` None is the bare model."""

    case: str
    model: str
    adapter: str | None
    prompt: Input
    num_tokens: int = NUM_NEW_TOKENS

    def body(self) -> dict[str, Any]:
        """The body of `POST /v1/completions`. The end-of-sequence token is a token like any other here."""
        sent = self.prompt.sent if isinstance(self.prompt.sent, str) else list(self.prompt.sent)
        greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": self.num_tokens}
        return {"model": self.model, "prompt": sent, **greedy}


@dataclass(frozen=True)
class RefusedAsk:
    """An embedding request that must be refused with a 400 that names the limit."""

    case: str
    model: str
    token_ids: tuple[int, ...]
    limit: int

    def body(self) -> dict[str, Any]:
        """The body of `POST /v1/embeddings`."""
        return {"model": self.model, "input": list(self.token_ids)}


Ask = EmbedAsk | GenerateAsk | RefusedAsk
