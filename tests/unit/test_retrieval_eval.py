"""Retrieval scores: what hit@1, MRR and recall mean here, and that any way of embedding can be scored."""

import json
from pathlib import Path

import numpy as np
import pytest

from orthrus_serve.model.retrieval_eval import bm25_similarities, evaluate, load_task, rank, scores, unit_rows


def row(question: str, gold: list[str], context: dict[str, str]) -> dict[str, object]:
    paragraphs = [{"title": title, "text": text} for title, text in context.items()]
    return {"question": question, "gold_titles": gold, "context": paragraphs}


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [
        row("red", ["A"], {"A": "red", "B": "blue"}),
        row("green", ["C", "A"], {"C": "green", "A": "red"}),
        row("blue", ["B"], {"B": "blue", "D": "black"}),
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n", encoding="utf-8")
    return path


def test_paragraphs_of_all_questions_are_pooled_once(questions: Path) -> None:
    task = load_task(questions, None, seed=0)
    assert task.passages == ("A. red", "B. blue", "C. green", "D. black")
    assert task.gold == ((0,), (0, 2), (1,))


def test_a_sample_is_the_same_for_the_same_seed(questions: Path) -> None:
    assert load_task(questions, 2, seed=1) == load_task(questions, 2, seed=1)
    assert len(load_task(questions, 2, seed=1).questions) == 2
    assert load_task(questions, 99, seed=1) == load_task(questions, None, seed=1)


def test_scores_of_a_ranking_by_hand() -> None:
    ranking = np.array([[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]])
    found = scores(ranking, [[0, 5], [4]])
    assert found["hit@1"] == 0.5
    assert found["mrr"] == 0.75
    assert found["R@2"] == 0.75
    assert found["R@5"] == 0.75
    assert found["R@10"] == 1.0


def test_ties_keep_the_order_of_the_passages() -> None:
    assert rank(np.array([[0.5, 0.9, 0.5]])).tolist() == [[1, 0, 2]]


def test_an_embedder_that_knows_the_words_hits_every_time(questions: Path) -> None:
    words = ["red", "blue", "green", "black"]
    seen: list[str] = []

    def embed(texts: list[str]) -> list[list[float]]:
        seen.extend(texts)
        return [[float(word in text) for word in words] for text in texts]

    found = evaluate(embed, questions, n=None)
    assert found["hit@1"] == 1.0
    assert found["top1"] == [0, 2, 1]
    assert (found["questions"], found["passages"]) == (3, 4)
    assert {text.split(": ")[0] for text in seen} == {"query", "passage"}


def test_length_does_not_count() -> None:
    assert unit_rows([[3, 4], [0, 0]]).tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0, 0]]


def test_word_matching_prefers_the_rare_word() -> None:
    similarity = bm25_similarities(["the cat"], ["the the dog", "the cat", "the bird"])
    assert rank(similarity)[0, 0] == 1
