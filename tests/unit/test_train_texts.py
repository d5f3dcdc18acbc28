"""Training texts: the same seed gives the same file, evaluation titles stay out, every passage has a query."""

import json
import random
from pathlib import Path

import pytest

from orthrus_serve.model.question_templates import PAIR, SINGLE, pair_question, plain_title, single_question
from orthrus_serve.model.train_texts import (
    Article,
    article_passages,
    build_passages,
    main,
    read_articles,
    split_sentences,
    without_titles,
)
from orthrus_serve.model.wordnet import Synset, parse_synset, parse_synsets, read_wordnet

PERSON_LINE = (
    "11052299 18 n 04 Hitchcock 0 Alfred_Hitchcock 0 Sir_Alfred_Hitchcock 0 Alfred_Joseph_Hitchcock 0 001 @i 10088200 n 0000"
    " | English film director noted for his skill in creating suspense (1899-1980)  \n"
)
VERB_LINE = (
    "00597385 31 v 02 master 0 control 0 002 * 00588888 v 0000 @ 00595935 v 0000 02 + 08 00 + 22 00 | have a firm "
    'understanding or knowledge of; be on top of; "Do you control these data?"  \n'
)
ADJECTIVE_LINE = '00003131 00 a 01 afloat(p) 0 000 | borne on the water; "the ship was afloat again"  \n'
LICENCE_LINE = "  1 This software and database is being provided to you, the LICENSEE, by  \n"

WIKI = {
    "Alan Turing": {
        "title": "Alan Turing",
        "extract": "Alan Turing was an English mathematician and computer scientist. He worked at Bletchley Park in "
        "the Second World War. The Turing Award is named after this man of science.",
        "description": "English computer scientist",
        "topic": "People",
    },
    "Vertigo (film)": {
        "title": "Vertigo (film)",
        "extract": "Vertigo is a 1958 American thriller directed by Alfred Hitchcock. It stars James Stewart.",
        "description": "1958 film by Alfred Hitchcock",
        "topic": "Arts",
    },
    "Ada Lovelace": {
        "title": "Ada Lovelace",
        "extract": "Ada Lovelace was an English mathematician and writer in London.",
        "description": "",
        "topic": "People",
    },
}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "wiki.json").write_text(json.dumps(WIKI), encoding="utf-8")
    (tmp_path / "data.noun").write_text(LICENCE_LINE + PERSON_LINE, encoding="utf-8")
    (tmp_path / "data.verb").write_text(LICENCE_LINE + VERB_LINE, encoding="utf-8")
    (tmp_path / "data.adj").write_text(LICENCE_LINE + ADJECTIVE_LINE, encoding="utf-8")
    (tmp_path / "data.adv").write_text(LICENCE_LINE, encoding="utf-8")
    return tmp_path


def written(sources: Path, seed: int, *options: str) -> bytes:
    out = sources / f"texts-{seed}.jsonl"
    arguments = [
        "--wiki",
        str(sources / "wiki.json"),
        "--wordnet",
        str(sources),
        "--seed",
        str(seed),
        "--out",
        str(out),
    ]
    assert main([*arguments, *options]) == 0
    return out.read_bytes()


def test_a_synset_line_gives_words_gloss_examples_and_the_wider_sense() -> None:
    synset = parse_synset(VERB_LINE, "verb")
    assert synset.lemmas == ("master", "control")
    assert synset.gloss == "have a firm understanding or knowledge of; be on top of"
    assert synset.examples == ("Do you control these data?",)
    assert synset.hypernym == "00595935v"
    assert not synset.is_instance


def test_a_named_person_is_known_as_one() -> None:
    synset = parse_synset(PERSON_LINE, "noun")
    assert synset.is_person
    assert "Sir Alfred Hitchcock" in synset.lemmas


def test_the_marker_of_an_adjective_is_no_part_of_the_word() -> None:
    assert parse_synset(ADJECTIVE_LINE, "adj").lemmas == ("afloat",)


def test_the_licence_that_opens_a_data_file_is_no_synset() -> None:
    assert [s.key for s in parse_synsets([LICENCE_LINE, VERB_LINE, "\n"], "verb")] == ["00597385v"]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(sources: Path) -> None:
    assert written(sources, 3) == written(sources, 3)
    assert written(sources, 3) != written(sources, 4)


def test_an_excluded_title_is_left_out_whatever_its_case_or_disambiguator(sources: Path) -> None:
    (sources / "titles.txt").write_text("vertigo\nAlfred Hitchcock (director)\n", encoding="utf-8")
    rows = [
        json.loads(line) for line in written(sources, 0, "--exclude-titles", str(sources / "titles.txt")).splitlines()
    ]
    passages = [row["passage"] for row in rows]
    assert not any(text.startswith(("Vertigo", "Alfred Hitchcock", "English film director")) for text in passages)
    assert any("Alan Turing" in text for text in passages)
    assert [s.key for s in without_titles(read_wordnet(sources), ["Nobody"])] == ["11052299n", "00597385v", "00003131a"]


def test_every_passage_has_a_query_and_none_twice(sources: Path) -> None:
    passages = build_passages(read_articles(sources / "wiki.json"), read_wordnet(sources), seed=1)
    assert {passage.source for passage in passages} == {"wiki", "wordnet"}
    for passage in passages:
        assert passage.queries
        assert len(set(passage.queries)) == len(passage.queries)
        assert all(query.strip() for query in passage.queries)


def test_a_comparison_names_both_things() -> None:
    article = Article(title="Ada Lovelace", text=WIKI["Ada Lovelace"]["extract"], description="", topic="People")
    passages = article_passages(article, {"person": ["Alan Turing"]}, random.Random(0))
    compared = [query for query in passages[0].queries if "Turing" in query]
    assert compared
    assert all("Lovelace" in query for query in compared)


@pytest.mark.parametrize(
    ("topic", "description", "family"),
    [
        ("People", "American film actress", "person"),
        ("Arts", "1958 film by Alfred Hitchcock", "film"),
        ("Arts", "1975 song by Queen", "song"),
        ("Arts", "Novel by Tolstoy", "work"),
        ("Geography", "City in Italy", "place"),
        ("Mathematics", "Branch of algebra", "thing"),
    ],
)
def test_question_frames_follow_the_kind_of_thing(topic: str, description: str, family: str) -> None:
    assert Article("t", "x", description, topic).family == family


def test_every_frame_has_room_for_its_names() -> None:
    assert SINGLE.keys() == PAIR.keys()
    assert all(frame.count("{}") == 1 for frames in SINGLE.values() for frame in frames)
    assert all(frame.count("{}") == 2 for frames in PAIR.values() for frame in frames)
    assert "Hitchcock" in single_question("person", "Hitchcock", random.Random(0))
    assert "Vertigo" in pair_question("film", "Psycho", "Vertigo", random.Random(0))


def test_a_title_loses_its_disambiguator_but_never_all_of_itself() -> None:
    assert plain_title("Adam Green (filmmaker)") == "Adam Green"
    assert plain_title("(What's the Story) Morning Glory?") == "(What's the Story) Morning Glory?"
    assert plain_title("(untitled)") == "(untitled)"


def test_pieces_too_short_for_a_sentence_are_dropped() -> None:
    assert split_sentences("Born in St. Vincent. No. This one is long enough to stay.") == [
        "This one is long enough to stay."
    ]


def test_the_wordnet_reader_keeps_the_order_of_its_files(sources: Path) -> None:
    synsets = read_wordnet(sources)
    assert [type(s) for s in synsets] == [Synset] * 3
    assert [s.key[-1] for s in synsets] == ["n", "v", "a"]
