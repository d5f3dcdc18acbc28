"""Makes prompts: realistic, each different from every other, of a wanted number of tokens. Pure: randomness as an argument.

A prompt begins with a few words drawn one by one from the whole corpus, so that no two prompts share a prefix long enough for a
prefix cache (16 tokens), and goes on with running text from a random place. Its length is exact where the sizes of the words in
tokens are known; otherwise it follows a ratio, and `PromptTable.sizing` says so for the report.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from loadgen.records import Kind

HEAD = 8  # words, or ids, drawn one by one: 8 of some 20,000 words never come twice by chance


@dataclass(frozen=True)
class PromptTable:
    """The text that prompts are cut from, and how long its words are. Made once per run, sent to every worker.

    `words[i]` takes `sizes[i]` tokens when a space comes before it. `first_words` may open a prompt and take `first_sizes`
    tokens there, special tokens included. `extra[kind]` is what the server counts on top (a template, an end token).
    `ids` is the same text as token ids, if prompts are sent so. `sizing` is a sentence for the report.
    """

    words: tuple[str, ...]
    sizes: NDArray[np.int64]
    first_words: tuple[str, ...]
    first_sizes: NDArray[np.int64]
    extra: dict[Kind, int]
    sizing: str
    ids: NDArray[np.int64] | None = None

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """`ends[i]` = tokens in the first i words."""
        return np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), self.sizes]), dtype=np.int64)

    @cached_property
    def one_token_words(self) -> NDArray[np.int64]:
        """Places of the words of one token (of the smallest size, if none has one): they fill a prompt up exactly."""
        return np.flatnonzero(self.sizes == self.sizes.min())


class PromptMaker:
    """Makes the prompts of one worker. Two workers need two generators with independent seeds."""

    def __init__(self, table: PromptTable, rng: np.random.Generator) -> None:
        self._table = table
        self._rng = rng

    def make(self, kind: Kind, num_tokens: int) -> str | list[int]:
        """A prompt that the server should count as `num_tokens` (at least a few: the server's own tokens come on top)."""
        wanted = max(num_tokens - self._table.extra.get(kind, 0), 1)
        return self._text(wanted) if self._table.ids is None else self._ids(self._table.ids, wanted)

    def _ids(self, ids: NDArray[np.int64], wanted: int) -> list[int]:
        rng = self._rng
        head = ids[rng.integers(0, len(ids), size=min(HEAD, wanted))]
        return [*head.tolist(), *_run(ids, int(rng.integers(0, len(ids))), wanted - len(head))]

    def _text(self, wanted: int) -> str:
        table, rng = self._table, self._rng
        first = int(rng.integers(0, len(table.first_words)))
        parts = [table.first_words[first]]
        left = wanted - int(table.first_sizes[first])
        places: list[int] = rng.integers(0, len(table.words), size=HEAD - 1).tolist()
        for place in places:
            if int(table.sizes[place]) <= left:
                parts.append(table.words[place])
                left -= int(table.sizes[place])
        while left > 0 and (taken := self._running_text(left)):
            parts.extend(taken[0])
            left -= taken[1]
        unit = int(table.sizes[table.one_token_words[0]])
        fill: list[int] = rng.choice(table.one_token_words, size=max(left, 0) // unit).tolist()
        return " ".join([*parts, *(table.words[place] for place in fill)])

    def _running_text(self, left: int) -> tuple[list[str], int] | None:
        """Words from a random place that take at most `left` tokens, and what they take; None if not one word fits."""
        table = self._table
        begin = int(self._rng.integers(0, len(table.words)))
        end = int(np.searchsorted(table.ends, int(table.ends[begin]) + left, side="right")) - 1
        if end <= begin:
            return None
        return list(table.words[begin:end]), int(table.ends[end] - table.ends[begin])


def table_by_ratio(words: tuple[str, ...], tokens_per_word: float, sizing: str) -> PromptTable:
    """A table for servers that do not tell how they tokenise: every word counts as `tokens_per_word` on average."""
    whole = np.full(len(words), int(tokens_per_word), dtype=np.int64)
    # Spread the fraction evenly, so that any stretch of words adds up to the ratio within one token.
    steps = np.floor(np.arange(1, len(words) + 1) * (tokens_per_word - int(tokens_per_word)))
    sizes = whole + np.diff(steps, prepend=0.0).astype(np.int64)
    first = words[:64]
    return PromptTable(
        words=words,
        sizes=np.maximum(sizes, 1),
        first_words=first,
        first_sizes=np.ones(len(first), dtype=np.int64),
        extra={},
        sizing=sizing,
    )


def _run(ids: NDArray[np.int64], begin: int, length: int) -> list[int]:
    """`length` ids from `begin` on, going round at the end."""
    places = (begin + np.arange(max(length, 0))) % len(ids)
    return ids[places].tolist()
