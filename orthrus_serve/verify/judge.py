"""Holds each answer against the reference: what the model must have counted, the vector, the tokens.

Asks the reference once for each vector, however many answers are held against it.
"""

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np

from orthrus_serve.config.schema import AdapterSpec
from orthrus_serve.reference.decoder import ReferenceDecoder
from orthrus_serve.reference.embedder import ReferenceEmbedder
from orthrus_serve.verify.cases import Ask, EmbedAsk, GenerateAsk, RefusedAsk
from orthrus_serve.verify.client import Answer, Refusal, Tokens, Vectors
from orthrus_serve.verify.compare import Finding, Floats, Tolerance, compare_tokens, compare_vector


class Judge:
    """Knows the reference and what is near enough."""

    def __init__(
        self,
        reference: ReferenceDecoder,
        adapters: Mapping[str, AdapterSpec],
        tolerance: Tolerance,
        embedder: ReferenceEmbedder | None = None,
        load_rounded: Callable[[], ReferenceDecoder] | None = None,
    ) -> None:
        """`embedder` answers for every name that embeds and is no adapter. `load_rounded` gives the reference in the server's
        own number format, where that is not float32; it is called only when a vector is not near without."""
        self._reference, self._adapters, self._tolerance = reference, adapters, tolerance
        self._embedder = embedder
        self._load_rounded = load_rounded
        self._known: dict[tuple[object, ...], Floats] = {}

    def judge(self, ask: Ask, answer: Answer) -> list[Finding]:
        """The findings of one answer: one for each vector, or one for a completion or an error."""
        if isinstance(ask, RefusedAsk):
            return [_refused(answer, ask.limit)]
        if isinstance(answer, Refusal):
            return [Finding(f"status {answer.status}: {answer.message}")]
        if isinstance(ask, EmbedAsk) and isinstance(answer, Vectors):
            return self._vectors(ask, answer)
        assert isinstance(ask, GenerateAsk)
        assert isinstance(answer, Tokens)
        return [self._tokens(ask, answer)]

    def _vectors(self, ask: EmbedAsk, answer: Vectors) -> list[Finding]:
        wanted = sum(len(one.token_ids) for one in ask.inputs)
        if len(answer.vectors) != len(ask.inputs):
            return [Finding(f"{len(answer.vectors)} vectors for {len(ask.inputs)} inputs")]
        pairs = zip(answer.vectors, ask.inputs, strict=True)
        found = [
            compare_vector(got, self._vector(ask, one.token_ids), self._tolerance, self._rounding(ask, one.token_ids))
            for got, one in pairs
        ]
        if answer.num_tokens != wanted:
            found.append(Finding(f"usage counts {answer.num_tokens} tokens, expected {wanted}"))
        return found

    def _vector(self, ask: EmbedAsk, token_ids: tuple[int, ...]) -> Floats:
        key = (ask.adapter, token_ids, ask.normalize, ask.dimensions)
        if key not in self._known and ask.adapter not in self._adapters:
            assert self._embedder is not None
            whole = self._embedder.vector(token_ids, normalize=ask.normalize, dimensions=ask.dimensions)
            self._known[key] = whole.numpy()
        elif key not in self._known:
            self._known[key] = self._adapted(self._reference, ask, token_ids)
        return self._known[key]

    def _rounding(self, ask: EmbedAsk, token_ids: tuple[int, ...]) -> Callable[[], Floats] | None:
        if self._load_rounded is None or ask.adapter not in self._adapters:
            return None
        return lambda: self._adapted(self._rounded, ask, token_ids)

    @cached_property
    def _rounded(self) -> ReferenceDecoder:
        assert self._load_rounded is not None
        return self._load_rounded()

    def _adapted(self, reference: ReferenceDecoder, ask: EmbedAsk, token_ids: tuple[int, ...]) -> Floats:
        spec = self._adapters[ask.adapter]
        vector = reference.vector(
            token_ids, ask.adapter, pooling=spec.pooling, normalize=ask.normalize,
            dimensions=ask.dimensions, head=spec.head,
        )  # fmt: skip
        return vector.float().numpy()

    def _tokens(self, ask: GenerateAsk, answer: Tokens) -> Finding:
        if answer.prompt_token_ids != ask.prompt.token_ids:
            return Finding(f"the prompt was read as {len(answer.prompt_token_ids)} other tokens")
        got = list(answer.token_ids)
        if not got:
            return Finding("no token")
        size = self._reference.decoder.config.vocab_size
        known = [token if 0 <= token < size else 0 for token in got]
        logits: Floats = (
            self._reference.next_logits(ask.prompt.token_ids, known, ask.adapter).numpy().astype(np.float32)
        )
        return compare_tokens(got, logits, ask.num_tokens, self._tolerance)


def _refused(answer: Answer, limit: int) -> Finding:
    if not isinstance(answer, Refusal):
        return Finding("answered, expected 400")
    if answer.status != 400 or str(limit) not in answer.message:
        return Finding(f"status {answer.status}, expected 400 that names {limit}: {answer.message}")
    return Finding()
