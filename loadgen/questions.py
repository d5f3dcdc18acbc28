"""The questions of Iter-RetGen sessions: 2WikiMultihopQA's JSON lines by path, or questions about the corpus's own titles."""

from pathlib import Path

import msgspec
import numpy as np

from loadgen.corpus import Corpus, Passage, load_corpus, read_jsonl
from loadgen.errors import SettingsError


class Question(msgspec.Struct, frozen=True):
    """A question. `answer` is None where none is known; then only retrieval is scored."""

    id: str
    question: str
    answer: str | None = None
    gold_titles: list[str] = []
    context: list[Passage] = []


def load_questions(path: Path | None, corpus: Corpus, seed: int) -> tuple[Question, ...]:
    """Questions in a random order.

    Without a path one question per passage of `corpus`, which should find that passage again.

    Raises:
        SettingsError: the file cannot be read or a line does not fit.
    """
    questions = _about(corpus) if path is None else read_jsonl(path.expanduser(), Question)
    if not questions:
        raise SettingsError(f"questions: {path} has none")
    order: list[int] = np.random.default_rng([seed, 7]).permutation(len(questions)).tolist()
    return tuple(questions[place] for place in order)


def corpus_for(path: Path | None, questions_path: Path | None, max_passages: int | None) -> Corpus:
    """The corpus to retrieve from, at most `max_passages`.

    Without a path of its own, questions that bring their paragraphs are asked over the union of those paragraphs; the gold ones
    come first, so that a limit keeps the questions answerable as long as it can.
    """
    if path is None and questions_path is not None:
        questions = read_jsonl(questions_path.expanduser(), Question)
        if any(question.context for question in questions):
            return Corpus(f"paragraphs of {questions_path.name}", tuple(_union(questions)[:max_passages]))
    corpus = load_corpus(path, max_passages)
    return Corpus(corpus.name, corpus.passages[:max_passages])


def answerable(questions: tuple[Question, ...], corpus: Corpus) -> tuple[Question, ...]:
    """The questions whose gold documents are all in the corpus; all of them if none has gold documents there."""
    titles = {passage.title for passage in corpus.passages}
    kept = tuple(question for question in questions if question.gold_titles and titles.issuperset(question.gold_titles))
    return kept or questions


def _union(questions: list[Question]) -> list[Passage]:
    gold: dict[tuple[str, str], Passage] = {}
    other: dict[tuple[str, str], Passage] = {}
    for question in questions:
        for passage in question.context:
            into = gold if passage.title in question.gold_titles else other
            into[passage.title, passage.text] = passage
    return [*gold.values(), *(passage for key, passage in other.items() if key not in gold)]


def _about(corpus: Corpus) -> list[Question]:
    return [
        Question(id=f"title-{number}", question=f"What is known about {passage.title}?", gold_titles=[passage.title])
        for number, passage in enumerate(corpus.passages)
    ]
