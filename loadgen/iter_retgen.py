"""One Iter-RetGen session: embed the query, retrieve, generate with what was found, make the next query from the text; again.

Each hop waits for the one before it. Retrieval is timed apart from the server's work, in a thread of its own. A failed request
ends the session as failed. Two variants: the query alone is embedded, or also the documents that were found.
"""

import asyncio
import base64
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from loadgen.client import Client
from loadgen.corpus import Passage
from loadgen.quality import contains, exact_match, f1, recall, short_answer
from loadgen.questions import Question
from loadgen.records import UNFINISHED, SessionRecord
from loadgen.requester import Label, Recorder
from loadgen.stages import AnyWork, SessionWork
from loadgen.vector_index import VectorIndex

QUERY_WORDS = 60  # of the generated text go into the next query, as in Iter-RetGen: the text, then the question


@dataclass(frozen=True)
class Library:
    """What sessions search and ask: passages with their index, questions, and how texts are written for the embedder."""

    passages: Sequence[Passage]
    index: VectorIndex
    questions: Sequence[Question]
    query_prefix: str
    passage_prefix: str
    document_words: int
    embed_documents: bool


@dataclass
class _Course:
    """How far a session has come."""

    started_s: float
    hops: int = 0
    retrieval_s: list[float] = field(default_factory=list[float])
    embed_s: float = 0.0
    generate_s: float = 0.0
    text: str = ""
    titles: list[list[str]] = field(default_factory=list[list[str]])
    error: str | None = UNFINISHED


@dataclass(frozen=True)
class RetGenSessions:
    """Executes `SessionWork`, recording requests in `recorder` and sessions in `sessions`."""

    client: Client
    recorder: Recorder
    library: Library
    searcher: Executor
    timeout_s: float
    sessions: list[SessionRecord]

    async def __call__(self, work: AnyWork, scheduled_s: float | None) -> bool:
        """True if every hop was answered."""
        if not isinstance(work, SessionWork):
            raise TypeError(f"not a session: {work}")
        question = self.library.questions[work.number % len(self.library.questions)]
        course = _Course(self.recorder.now())
        try:
            await self._hops(work, question, course, scheduled_s)
        finally:
            self.sessions.append(self._record(work, question, course, scheduled_s))
        return course.error is None

    async def _hops(self, work: SessionWork, question: Question, course: _Course, scheduled_s: float | None) -> None:
        for hop in range(work.hops):
            query = next_query(self.library.query_prefix, course.text, question.question)
            label = Label(scheduled_s if hop == 0 else None, work.number, hop, "query")
            vectors = await self._embed([query], course, label)
            if vectors is None:
                return
            found = await self._retrieve(vectors[0], work.documents[hop], course)
            documents = [self._written(passage) for passage in found]
            if self.library.embed_documents:
                inputs = [f"{self.library.passage_prefix}{document}" for document in documents]
                if await self._embed(inputs, course, Label(None, work.number, hop, "documents")) is None:
                    return
            prompt = answer_prompt(documents, question.question)
            before_s = self.recorder.now()
            label = Label(None, work.number, hop, "answer")
            answer = await self.recorder.generate(
                self.client, prompt, work.output_tokens[hop], self.timeout_s, label, None
            )
            course.generate_s += self.recorder.now() - before_s
            if answer.error is not None:
                course.error = f"hop {hop + 1}, answer: {answer.error}"
                return
            course.text = answer.text
            course.hops += 1
        course.error = None

    async def _embed(self, inputs: list[str], course: _Course, label: Label) -> list[NDArray[np.float32]] | None:
        before_s = self.recorder.now()
        vectors = await self.recorder.embed(self.client, inputs, self.timeout_s, label, None)
        course.embed_s += self.recorder.now() - before_s
        if vectors.error is not None:
            course.error = f"hop {(label.hop or 0) + 1}, {label.role}: {vectors.error}"
            return None
        return [as_array(vector) for vector in vectors.data]

    async def _retrieve(self, vector: NDArray[np.float32], k: int, course: _Course) -> list[Passage]:
        before_s = self.recorder.now()
        search = partial(self.library.index.nearest, vector, k)
        places = await asyncio.get_running_loop().run_in_executor(self.searcher, search)
        course.retrieval_s.append(self.recorder.now() - before_s)
        found = [self.library.passages[place] for place in places]
        course.titles.append([passage.title for passage in found])
        return found

    def _written(self, passage: Passage) -> str:
        words = passage.text.split()[: self.library.document_words]
        return f"{passage.title}: {' '.join(words)}"

    def _record(
        self, work: SessionWork, question: Question, course: _Course, scheduled_s: float | None
    ) -> SessionRecord:
        gold = question.answer if course.error is None else None
        recalls = [recall(titles, question.gold_titles) for titles in course.titles]
        any_hop = recall((title for titles in course.titles for title in titles), question.gold_titles)
        scored = course.error is None and bool(question.gold_titles)
        return SessionRecord(
            stage=self.recorder.stage,
            worker=self.recorder.worker,
            session=work.number,
            question_id=question.id,
            scheduled_s=scheduled_s,
            started_s=course.started_s,
            ended_s=self.recorder.now(),
            hops=course.hops,
            asked_hops=work.hops,
            retrieval_s=course.retrieval_s,
            embed_s=course.embed_s,
            generate_s=course.generate_s,
            error=course.error,
            exact_match=None if gold is None else exact_match(short_answer(course.text), gold),
            f1=None if gold is None else f1(short_answer(course.text), gold),
            contains_answer=None if gold is None else contains(course.text, gold),
            recall_first_hop=recalls[0] if scored else None,
            recall_any_hop=any_hop if scored else None,
        )


def next_query(prefix: str, text: str, question: str) -> str:
    """The query of a hop: what was generated last (its first words), then the question."""
    words = text.split()[:QUERY_WORDS]
    return f"{prefix}{' '.join([*words, question])}"


def answer_prompt(documents: Sequence[str], question: str) -> str:
    """Documents first, so that two sessions share no prefix; then the question."""
    return "\n\n".join([*documents, f"Question: {question}\nAnswer:"])


def as_array(vector: str | list[float]) -> NDArray[np.float32]:
    """A vector of an embeddings answer, in either encoding."""
    if isinstance(vector, str):
        return np.frombuffer(base64.b64decode(vector), dtype="<f4")
    return np.asarray(vector, dtype=np.float32)
