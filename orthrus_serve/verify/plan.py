"""What to ask a server: a case for each kind of mistake that batches, chunks, caches, adapters and encodings can make. Pure.

The tokenizer comes as two functions. Leaves out what one case is (`cases.py`).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from orthrus_serve.config.schema import AdapterSpec, AppArgs
from orthrus_serve.verify.cases import NUM_NEW_TOKENS, Ask, EmbedAsk, GenerateAsk, Input, RefusedAsk

# Of the answer to a prompt that is to fill all the rest of the context.
NUM_LAST_TOKENS = 4
NUM_MIXED_TOKENS = 24
MIXED_EMBEDDINGS, MIXED_GENERATIONS = 6, 3
# Several KV blocks of any usual size, so that a repeated prompt can be read from the prefix cache.
CACHED_TOKENS = 150


@dataclass(frozen=True)
class Server:
    """What is known of a server.

    Attributes:
        args: its names, adapters and their pooling.
        max_model_len: most tokens of a prompt and its answer.
        token_budget: most tokens of a step; longer prompts are chunked.
        eos_id: the end-of-sequence token; None when no adapter appends it.
        max_tokens: longer inputs are not to be asked, though the server takes them.
    """

    args: AppArgs
    max_model_len: int
    token_budget: int
    eos_id: int | None
    max_tokens: int | None = None

    def limit(self, spec: AdapterSpec) -> int:
        """Most tokens of an input of that adapter, the end-of-sequence token included."""
        return min(self.max_model_len - 1, spec.head.max_input_tokens if spec.head else self.max_model_len)

    def to_ask(self, limit: int) -> int:
        """The longest that is to be asked where `limit` would be answered."""
        return limit if self.max_tokens is None else min(limit, self.max_tokens)


class Prompts:
    """Random words of a vocabulary, as ids and as text."""

    def __init__(
        self,
        words: Sequence[int],
        to_text: Callable[[Sequence[int]], str],
        to_ids: Callable[[str], Sequence[int]],
        seed: int,
    ) -> None:
        self._words = words
        self._to_text, self._to_ids = to_text, to_ids
        self._random = random.Random(seed)

    def ids(self, length: int) -> tuple[int, ...]:
        """So many tokens."""
        return tuple(self._random.choices(self._words, k=length))

    def text(self, length: int) -> Input:
        """A text of about so many tokens, and how the tokenizer reads it."""
        text = self._to_text(self.ids(length))
        return Input(text, tuple(self._to_ids(text)))

    def length(self, most: int) -> int:
        """From 1 to `most`, short ones as likely as long ones."""
        return max(1, min(most, round(most ** self._random.random())))

    def shuffle(self, asks: list[Ask]) -> None:
        """Puts them in another order, in place."""
        self._random.shuffle(asks)


@dataclass(frozen=True)
class Embeds:
    """A name that embeds, and what its model takes.

    Attributes:
        server: with the longest context of the model that embeds.
        prompts: of that model's vocabulary.
        closing: tokens that its tokenizer puts at the end of every text, also of one that is cut.
    """

    name: str
    spec: AdapterSpec
    server: Server
    prompts: Prompts
    closing: tuple[int, ...] = ()


def plan(server: Server, prompts: Prompts, own: Sequence[Embeds] = ()) -> list[list[Ask]]:
    """Everything to be asked: each entry is sent at once, one entry after the other. `own` embeds with a model of its own,
    beside the adapters."""
    embeds = [*(Embeds(name, spec, server, prompts) for name, spec in server.args.adapters.items()), *own]
    generators = [(server.args.model.name, None), *((name, name) for name in server.args.generate_adapters)]
    alone: list[Ask] = []
    for one in embeds:
        alone += _Embeddings(one).alone()
    for name, adapter in generators:
        alone += _generations(server, name, adapter, prompts)
    mixed = _mixed(server, generators, prompts, embeds)
    again = [replace(ask, case="mixed, repeated") for ask in mixed]  # prefixes are cached now
    last = [GenerateAsk("alone, afterwards", name, adapter, _ids(prompts.ids(20))) for name, adapter in generators]
    return [*([ask] for ask in alone), mixed, again, *([ask] for ask in last)]


class _Embeddings:
    """The cases of one name that embeds."""

    def __init__(self, one: Embeds) -> None:
        self._server, self._name, self._spec, self._prompts = one.server, one.name, one.spec, one.prompts
        self._closing = one.closing
        self._room = int(one.spec.append_eos)
        self._limit = one.server.limit(one.spec)
        self._longest = one.server.to_ask(self._limit)

    def alone(self) -> Iterator[Ask]:
        """Everything that is asked while nothing else runs."""
        prompts, spec = self._prompts, self._spec
        for one in (prompts.text(12), _ids(prompts.ids(1)), _ids(self._up_to(40))):
            yield self._ask("alone", one)
        if self._server.args.base_name_adapter == self._name:
            yield replace(self._ask("under the model's name", prompts.text(9)), model=self._server.args.model.name)
        one = prompts.text(15)
        for encoding in (None, "float", "base64"):
            yield self._ask("float and base64", one, encoding_format=encoding)
        asked = replace(self._ask("normalised or not", one), normalize=not spec.normalize)
        yield replace(asked, options={"use_activation": asked.normalize})
        for dimensions in spec.dimensions:
            yield replace(self._ask("dimensions", prompts.text(10)), dimensions=dimensions)
        yield self._list()
        yield from self._long()
        yield from self._truncated()
        yield from self._repeated()

    def mixed(self) -> Iterator[Ask]:
        """What is asked beside everything else."""
        for _ in range(MIXED_EMBEDDINGS):
            yield self._ask("mixed", _ids(self._up_to(self._prompts.length(3 * self._server.token_budget))))
        yield self._ask("mixed", self._prompts.text(7), encoding_format="base64")

    def _list(self) -> EmbedAsk:
        """One request of many inputs: a short one before one that is cut to the very limit, and the reverse."""
        cut = self._cut(self._prompts.ids(self._longest + 20), self._longest)
        short = [_ids(self._up_to(length)) for length in (1, 3, 30)]
        asked = self._ask("many inputs", short[0], truncate_prompt_tokens=self._longest)
        return replace(asked, inputs=tuple(self._seen(one) for one in (short[0], cut, short[1], cut, short[2])))

    def _long(self) -> Iterator[Ask]:
        if self._longest > self._server.token_budget + 1:
            yield self._ask("in chunks", _ids(self._up_to(5 * self._server.token_budget // 2)))
        if self._longest < self._limit:
            return
        longest = self._prompts.ids(self._longest - self._room)
        yield self._ask("exactly the longest", _ids(longest))
        yield RefusedAsk("one token too long", self._name, (*longest, longest[0]), self._limit)

    def _truncated(self) -> Iterator[Ask]:
        if self._longest == self._limit:
            one = self._cut(self._prompts.ids(self._longest + 30), self._longest)
            yield self._ask("truncated", one, truncate_prompt_tokens=-1)
        for kept in (max(2, self._longest // 2), 1 + self._room):
            one = self._cut(self._prompts.ids(self._longest + 30), kept)
            yield self._ask("truncated", one, truncate_prompt_tokens=kept)
        text = self._prompts.text(min(60, self._longest))
        kept = max(2, len(text.token_ids) // 2)
        first = (*self._first(text.token_ids, kept - len(self._closing)), *self._closing)
        yield self._ask("truncated", Input(text.sent, first), truncate_prompt_tokens=kept)

    def _repeated(self) -> Iterator[Ask]:
        """Read from the prefix cache where that is right, computed anew where it is not."""
        first = self._up_to(CACHED_TOKENS)
        kept = max(1, len(first) - 5)
        for ids in (first, first, (*first[:kept], *self._prompts.ids(len(first) - kept))):
            yield self._ask("repeated, shared prefix", _ids(ids))

    def _ask(self, case: str, one: Input, **options: object) -> EmbedAsk:
        return EmbedAsk(case, self._name, self._name, (self._seen(one),), self._spec.normalize, None, options)

    def _up_to(self, length: int) -> tuple[int, ...]:
        return self._prompts.ids(max(1, min(length, self._longest - self._room)))

    def _cut(self, ids: tuple[int, ...], kept: int) -> Input:
        return Input(ids, self._first(ids, kept))

    def _first(self, ids: tuple[int, ...], kept: int) -> tuple[int, ...]:
        """The first tokens of an input that is cut to `kept`, with room for the end-of-sequence token."""
        return ids[: kept - self._room]

    def _seen(self, one: Input) -> Input:
        eos_id = self._server.eos_id
        if not self._spec.append_eos or eos_id is None or one.token_ids[-1:] == (eos_id,):
            return one
        return Input(one.sent, (*one.token_ids, eos_id))


def _generations(server: Server, name: str, adapter: str | None, prompts: Prompts) -> Iterator[Ask]:
    for one in (prompts.text(12), _ids(prompts.ids(1)), _ids(prompts.ids(40))):
        yield GenerateAsk("alone", name, adapter, one)
    limit = server.max_model_len - NUM_LAST_TOKENS
    longest = server.to_ask(limit)
    in_chunks = min(server.to_ask(server.max_model_len - NUM_NEW_TOKENS), 5 * server.token_budget // 2)
    if in_chunks > server.token_budget + 1:
        yield GenerateAsk("in chunks", name, adapter, _ids(prompts.ids(in_chunks)))
    if longest == limit:
        yield GenerateAsk("exactly the longest", name, adapter, _ids(prompts.ids(longest)), NUM_LAST_TOKENS)
    first = prompts.ids(min(CACHED_TOKENS, longest))
    for ids in (first, first, (*first[: len(first) - 5], *prompts.ids(5))):
        yield GenerateAsk("repeated, shared prefix", name, adapter, _ids(ids), NUM_LAST_TOKENS)


def _mixed(
    server: Server, generators: Sequence[tuple[str, str | None]], prompts: Prompts, embeds: Sequence[Embeds]
) -> list[Ask]:
    asks: list[Ask] = []
    for one in embeds:
        asks += _Embeddings(one).mixed()
    longest = server.to_ask(min(3 * server.token_budget, server.max_model_len - NUM_MIXED_TOKENS))
    for name, adapter in generators:
        for _ in range(MIXED_GENERATIONS):
            asks.append(
                GenerateAsk("mixed", name, adapter, _ids(prompts.ids(prompts.length(longest))), NUM_MIXED_TOKENS)
            )
    prompts.shuffle(asks)
    return asks


def _ids(token_ids: tuple[int, ...]) -> Input:
    return Input(token_ids, token_ids)
