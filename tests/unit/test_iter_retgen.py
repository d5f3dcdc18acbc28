"""Iterative retrieval over hand-made vectors: what is read, what is asked next, and when it ends."""

from itertools import count

import numpy as np
import pytest

from orthrus_serve.ops.iter_retgen import Passage, PassageIndex, choose_passages, prompt_for, run_hops, shorten

PERU = Passage("Peru", "Its capital is Lima.")
RUIN = Passage("Machu Picchu", "A citadel in Peru.")
SEA = Passage("Sea", "Salt water.")
VECTORS = {"Peru": [0.0, 2.0, 0.0], "Machu Picchu": [1.0, 0.5, 0.0], "Sea": [0.0, 0.0, 1.0]}
QUESTION = "Which city is the capital there?"


def make_index(*passages: Passage) -> PassageIndex:
    return PassageIndex(passages, np.array([VECTORS[passage.title] for passage in passages], dtype=np.float32))


def embed(text: str) -> np.ndarray:
    """The question points at the ruin; with "Peru" in it, at Peru."""
    return np.array([0.2, 1.0, 0.0] if "Peru" in text else [1.0, 0.0, 0.0], dtype=np.float32)


def generate(prompt: str) -> str:
    """Reads the last passage of the prompt."""
    passage = prompt.rsplit("Passage: ", 1)[1]
    return " The capital is Lima.\n" if passage.startswith("Peru.") else " It is in Peru."


def hops(num_hops: int, *passages: Passage):
    ticks = count()
    return list(run_hops(QUESTION, num_hops, make_index(*passages), embed, generate, lambda: float(next(ticks))))


def test_search_ranks_by_cosine_and_not_by_length():
    found = make_index(PERU, RUIN, SEA).search(np.array([3.0, 0.1, 0.0], dtype=np.float32))
    assert [item.passage.title for item in found] == ["Machu Picchu", "Peru", "Sea"]
    assert found[0].score == pytest.approx(0.909, abs=1e-3)


def test_the_second_hop_finds_what_only_the_first_hops_text_names():
    first, second = hops(2, PERU, RUIN, SEA)
    assert (first.query, first.read, first.text) == (QUESTION, RUIN, "It is in Peru.")
    assert second.query == f"{QUESTION} It is in Peru."
    assert (second.read, second.text) == (PERU, "The capital is Lima.")


def test_no_passage_is_read_twice_and_hops_end_with_the_passages():
    assert [hop.read.title for hop in hops(9, RUIN, SEA)] == ["Machu Picchu", "Sea"]


def test_each_part_of_a_hop_is_timed():
    (hop,) = hops(1, PERU)
    assert (hop.embed_s, hop.retrieve_s, hop.generate_s) == (1.0, 1.0, 1.0)


def test_passages_and_vectors_must_match():
    with pytest.raises(ValueError, match="2 passages and 1 vectors"):
        PassageIndex([PERU, RUIN], np.ones((1, 3), dtype=np.float32))


def test_the_prompt_ends_where_the_model_is_to_go_on():
    prompt = prompt_for(QUESTION, PERU)
    assert prompt.endswith(f"\n\nPassage: Peru. Its capital is Lima.\nQuestion: {QUESTION}\nThought:")


def test_wanted_passages_come_with_others_from_the_whole_corpus():
    corpus = [Passage(str(i), "") for i in range(100)]
    chosen = [passage.title for passage in choose_passages(corpus, ["7", "absent", "50"], num_others=4)]
    assert chosen == ["7", "50", "0", "25", "75"]
    assert [passage.title for passage in choose_passages(corpus, ["7"], num_others=0)] == ["7"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Short.", "Short."),
        ("One sentence. Another sentence.", "One sentence."),
        ("Without any full stop at all", "Without any full sto"),
    ],
)
def test_texts_are_cut_between_sentences(text, expected):
    assert shorten(text, 20) == expected
