"""Scores an embedder by retrieval: multi-hop questions against their own paragraphs, pooled into one corpus.

Pure but for reading the file: how texts become vectors is the caller's function, so the same scores come from
Transformers, from the engine, or through HTTP. The file holds one JSON object a line, with the fields of
2WikiMultihopQA: `question`, `gold_titles`, `context` (a list of `{"title", "text"}`).
"""

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
EmbedFn = Callable[[list[str]], Any]
"""Texts → an array or nested list of shape [texts, dimensions], one row a text, in order."""

QUERY_PREFIX = "query: "
PASSAGE_PREFIX = "passage: "
CUTOFFS = (2, 5, 10)


@dataclass(frozen=True)
class RetrievalTask:
    """Questions, the pooled passages (`title. text`), and for each question the indices of its gold passages."""

    questions: tuple[str, ...]
    passages: tuple[str, ...]
    gold: tuple[tuple[int, ...], ...]


def load_task(path: Path, num_questions: int | None, seed: int) -> RetrievalTask:
    """A sample of `num_questions` (None: all, in file order) with the union of their paragraphs, duplicates removed."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if num_questions is not None and num_questions < len(rows):
        rows = random.Random(seed).sample(rows, num_questions)
    index: dict[tuple[str, str], int] = {}
    gold: list[tuple[int, ...]] = []
    for row in rows:
        places = [(index.setdefault((c["title"], c["text"]), len(index)), c["title"]) for c in row["context"]]
        gold.append(tuple(sorted({i for i, title in places if title in set(row["gold_titles"])})))
    passages = tuple(f"{title}. {text}" for title, text in index)
    return RetrievalTask(tuple(row["question"] for row in rows), passages, tuple(gold))


def rank(similarities: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """Similarities [questions, passages] → passage indices, best first; ties keep the passages' order."""
    return np.argsort(-similarities, axis=1, kind="stable")


def scores(ranking: NDArray[np.int64], gold: Sequence[Sequence[int]]) -> dict[str, float]:
    """hit@1 (a gold passage comes first), MRR of the best gold passage, R@k (share of gold passages in the first k)."""
    positions = [np.flatnonzero(np.isin(row, answer)) for row, answer in zip(ranking, gold, strict=True)]
    result = {
        "hit@1": float(np.mean([place.min() == 0 for place in positions])),
        "mrr": float(np.mean([1 / (1 + place.min()) for place in positions])),
    }
    for cutoff in CUTOFFS:
        result[f"R@{cutoff}"] = float(np.mean([np.mean(place < cutoff) for place in positions]))
    return result


def evaluate(
    embed_fn: EmbedFn,
    questions_path: str | Path,
    n: int | None = 60,
    seed: int = 1,
    *,
    query_prefix: str = QUERY_PREFIX,
    passage_prefix: str = PASSAGE_PREFIX,
) -> dict[str, Any]:
    """Embeds a sample and scores it by cosine.

    Returns the keys of `scores`, the counts `questions` and `passages`, and `top1`, the index of each question's first
    passage, by which two servings of one model can be compared question by question.
    """
    task = load_task(Path(questions_path), n, seed)
    queries = unit_rows(embed_fn([query_prefix + question for question in task.questions]))
    passages = unit_rows(embed_fn([passage_prefix + passage for passage in task.passages]))
    ranking = rank(queries @ passages.T)
    counts = {"questions": len(task.questions), "passages": len(task.passages)}
    return {**counts, **scores(ranking, task.gold), "top1": ranking[:, 0].tolist()}


def unit_rows(vectors: Any) -> Vectors:
    """Rows of length one, float32, so that a product of rows is a cosine."""
    array = np.asarray(vectors, dtype=np.float32)
    return array / np.maximum(np.linalg.norm(array, axis=1, keepdims=True), 1e-12)


def bm25_similarities(questions: Sequence[str], passages: Sequence[str]) -> NDArray[np.float64]:
    """BM25 (k1 1.2, b 0.75) of every question with every passage: what word matching alone reaches."""
    counts = [Counter(re.findall(r"\w+", passage.lower())) for passage in passages]
    lengths = np.array([sum(count.values()) for count in counts], dtype=np.float64)
    norm = 1.2 * (0.25 + 0.75 * lengths / lengths.mean())
    frequency = Counter(word for count in counts for word in count)
    result = np.zeros((len(questions), len(passages)))
    for i, question in enumerate(questions):
        for word in set(re.findall(r"\w+", question.lower())) & frequency.keys():
            inverse = math.log(1 + (len(passages) - frequency[word] + 0.5) / (frequency[word] + 0.5))
            found = np.array([count[word] for count in counts], dtype=np.float64)
            result[i] += inverse * found * 2.2 / (found + norm)
    return result
