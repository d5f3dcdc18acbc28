"""What a replica serves, as plain values: names, vocabulary, lengths and limits. Pure data, read once after the start."""

from collections.abc import Mapping
from dataclasses import dataclass

from orthrus_serve.errors import RequestError


@dataclass(frozen=True)
class ServedAdapter:
    """An embedding adapter: the `dimensions` that clients may ask for besides the full length, and whether the engine appends
    the end-of-sequence token, which counts as one of an input's tokens."""

    dimensions: tuple[int, ...] = ()
    appends_eos: bool = True


@dataclass(frozen=True)
class Served:
    """Facts that a request is checked against.

    Attributes:
        base_name: the name that generates.
        adapters: embedding adapter → what its requests may ask for.
        base_name_adapter: the adapter that answers `/v1/embeddings` under `base_name`, or None.
        vocab_size: token ids are 0 up to this, exclusive.
        max_model_len: most tokens of a prompt and its output together.
        embedding_size: full length of a vector.
        max_inputs: most inputs, prompts, messages or output sequences of one request.
        max_n: most answers to one prompt.
        max_logprobs: most alternatives reported for each token.
    """

    base_name: str
    adapters: Mapping[str, ServedAdapter]
    base_name_adapter: str | None
    vocab_size: int
    max_model_len: int
    embedding_size: int
    max_inputs: int
    max_n: int
    max_logprobs: int

    @property
    def longest_prompt(self) -> int:
        """Most tokens of one input: an answer needs room for one token, and the core refuses a full context for vectors too."""
        return self.max_model_len - 1


def refuse(field: str | None, message: str, *, code: str | None = None) -> RequestError:
    """A 400 that names the field; to be raised by the caller."""
    return RequestError(400, message, param=field, code=code)
