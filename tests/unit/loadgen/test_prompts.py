"""Prompts are unique, share no prefix, and have the lengths that were asked for."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.corpus import BUILT_IN, built_in_corpus, load_corpus
from loadgen.errors import SettingsError
from loadgen.preparation import sizes_of_words
from loadgen.prompts import PromptMaker, table_by_ratio
from tests.unit.loadgen.builders import word_table


@given(wanted=st.integers(8, 900), seed=st.integers(0, 50))
def test_a_prompt_has_exactly_the_wanted_tokens_where_sizes_are_known(wanted: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = replace(word_table(), sizes=rng.choice([1, 1, 2, 3, 5], size=4000))
    text = str(PromptMaker(table, rng).make("embed", wanted)).split()
    sizes = dict(zip(table.words, table.sizes.tolist(), strict=True))
    assert 1 + sum(sizes[word] for word in text[1:]) == wanted


def test_what_the_server_adds_to_a_prompt_is_taken_off() -> None:
    maker = PromptMaker(replace(word_table(), extra={"embed": 3}), np.random.default_rng(0))
    assert len(str(maker.make("embed", 50)).split()) == 47
    assert len(str(maker.make("generate", 50)).split()) == 50


def test_prompts_of_token_ids_have_exactly_the_wanted_length() -> None:
    table = replace(word_table(), ids=np.arange(1000, 1300))
    ids = PromptMaker(table, np.random.default_rng(0)).make("generate", 640)
    assert isinstance(ids, list)
    assert len(ids) == 640
    assert all(isinstance(token, int) for token in ids)


def test_by_a_ratio_the_mean_length_is_right() -> None:
    corpus = built_in_corpus()
    words = tuple(word for passage in corpus.passages for word in passage.text.split())
    maker = PromptMaker(table_by_ratio(words, 1.6, "1.6 tokens per word"), np.random.default_rng(0))
    lengths = [len(str(maker.make("embed", 400)).split()) * 1.6 for _ in range(200)]
    assert np.mean(lengths) == pytest.approx(400, rel=0.02)


@pytest.mark.parametrize("mark", ["Ġ", "▁", " "])
def test_the_sizes_of_words_are_read_from_the_server_s_tokens(mark: str) -> None:
    tokens = ["Or", "thrus", f"{mark}guards", f"{mark}catt", "le", "."]
    assert sizes_of_words("Orthrus guards cattle.", tokens) == [("guards", 1), ("cattle.", 3)]


def test_words_and_tokens_that_do_not_match_up_are_left_out() -> None:
    assert sizes_of_words("one two three", ["one", "Ġtwo"]) == []


def test_without_any_file_text_is_made_from_the_built_in_words() -> None:
    corpus = built_in_corpus()
    assert corpus.name == BUILT_IN
    assert len({passage.text for passage in corpus.passages}) == len(corpus.passages) == 400


def test_a_broken_corpus_line_is_named(tmp_path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"title": "a", "text": "b"}\n{"title": "c"}\n')
    with pytest.raises(SettingsError, match="line 2"):
        load_corpus(file)
