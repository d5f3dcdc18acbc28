"""Iterative retrieval and generation over a handful of passages: embed the query, retrieve, generate, embed the new query.

Pure but for the two functions that it is given (`embed`, `generate`). Each hop reads the best passage not read before, because
a small model reads one passage better than three; the next query is the question with the text just generated. Leaves out
HTTP, the passages' source and printing (`demo.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Embed = Callable[[str], Vectors]
Generate = Callable[[str], str]
Clock = Callable[[], float]

# The second line of an example is what the next hop's query is made of: name what is known, then the answer or what is missing.
EXAMPLES = """\
Passage: Sugarloaf Mountain is a peak in Rio de Janeiro, Brazil, at the mouth of Guanabara Bay.
Question: Which city is the capital of the country where Sugarloaf Mountain stands?
Thought: Sugarloaf Mountain is in Brazil. The capital of Brazil is not in the passage.

Passage: Turkey is a country in West Asia and Southeast Europe. Its largest city is Istanbul. Ankara is the capital.
Question: Which city is the capital of the country where Hagia Sophia stands?
Thought: Hagia Sophia is in Turkey. The capital of Turkey is Ankara.

Passage: France is a country in Western Europe. It borders Spain, Germany and Italy. Its capital and largest city is Paris.
Question: Which city is the capital of the country where the Eiffel Tower stands?
Thought: The Eiffel Tower is in France. The capital of France is Paris.

"""


@dataclass(frozen=True)
class Passage:
    """A paragraph and what it is about."""

    title: str
    text: str

    @property
    def full_text(self) -> str:
        """What is embedded and read: the title as a sentence, then the text."""
        return f"{self.title}. {self.text}"


@dataclass(frozen=True)
class Found:
    """A retrieved passage and its cosine to the query."""

    passage: Passage
    score: float


@dataclass(frozen=True)
class Hop:
    """One round. `found` is best first; `read` is the one that the generator got."""

    query: str
    found: tuple[Found, ...]
    read: Passage
    text: str
    embed_s: float
    retrieve_s: float
    generate_s: float


class PassageIndex:
    """Passages and their vectors, searched exhaustively."""

    def __init__(self, passages: Sequence[Passage], vectors: Vectors) -> None:
        """`vectors` is [passages, dimensions]; rows are scaled to length one here."""
        if len(passages) != len(vectors):
            raise ValueError(f"{len(passages)} passages and {len(vectors)} vectors")
        self._passages = tuple(passages)
        self._vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def search(self, query: Vectors) -> list[Found]:
        """All passages, the nearest to `query` [dimensions] first."""
        scores = self._vectors @ (query / np.linalg.norm(query))
        return [Found(self._passages[i], float(scores[i])) for i in np.argsort(-scores, kind="stable")]


def prompt_for(question: str, passage: Passage) -> str:
    """A completion prompt; the model is to continue with one line."""
    return f"{EXAMPLES}Passage: {passage.full_text}\nQuestion: {question}\nThought:"


def run_hops(
    question: str,
    num_hops: int,
    index: PassageIndex,
    embed: Embed,
    generate: Generate,
    clock: Clock,
    num_shown: int = 4,
) -> Iterator[Hop]:
    """Yields each hop as it ends. `clock` gives seconds."""
    query, read = question, set[str]()
    for _ in range(num_hops):
        began_s = clock()
        vector = embed(query)
        embedded_s = clock()
        found = index.search(vector)
        unread = next((item.passage for item in found if item.passage.title not in read), None)
        if unread is None:
            return
        read.add(unread.title)
        retrieved_s = clock()
        text = generate(prompt_for(question, unread)).strip()
        hop = Hop(
            query=query,
            found=tuple(found[:num_shown]),
            read=unread,
            text=text,
            embed_s=embedded_s - began_s,
            retrieve_s=retrieved_s - embedded_s,
            generate_s=clock() - retrieved_s,
        )
        yield hop
        query = f"{question} {text}"


def choose_passages(corpus: Sequence[Passage], wanted: Sequence[str], num_others: int) -> list[Passage]:
    """The passages with the wanted titles, and `num_others` more at equal distances through the corpus."""
    by_title = {passage.title: passage for passage in corpus}
    chosen = {title: by_title[title] for title in wanted if title in by_title}
    stride = max(1, len(corpus) // num_others) if num_others else len(corpus) + 1
    for passage in corpus[::stride][:num_others]:
        chosen.setdefault(passage.title, passage)
    return list(chosen.values())


def shorten(text: str, max_chars: int) -> str:
    """Whole sentences of `text`, at most `max_chars` characters; cut hard when the first sentence is longer than that."""
    if len(text) <= max_chars:
        return text
    cut = text[:max_chars]
    end = cut.rfind(". ")
    return cut[: end + 1] if end > 0 else cut
