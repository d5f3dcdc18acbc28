"""Reads WordNet's `data.*` files (format wndb(5WN)) into synsets. Pure but for `read_wordnet`; decides nothing else."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")
_PERSON_FILE, _LOCATION_FILE = "18", "15"  # lexnames(5WN)
_EXAMPLE = re.compile(r'"([^"]+)"')


@dataclass(frozen=True)
class Synset:
    """One sense: its words, definition and examples; `hypernym` is the key of a wider sense, or None.

    `is_instance` marks a named thing (a person, a city); `lexical_file` is WordNet's topic number, as in `lexnames`.
    """

    key: str
    lexical_file: str
    lemmas: tuple[str, ...]
    gloss: str
    examples: tuple[str, ...]
    hypernym: str | None
    is_instance: bool

    @property
    def is_person(self) -> bool:
        """Whether this is a named person."""
        return self.is_instance and self.lexical_file == _PERSON_FILE

    @property
    def is_place(self) -> bool:
        """Whether this is a named place."""
        return self.is_instance and self.lexical_file == _LOCATION_FILE


def parse_synset(line: str, part_of_speech: str) -> Synset:
    """One line of a data file. Word counts are hexadecimal there; adjectives may carry a marker such as `(p)`."""
    head, _, text = line.partition(" | ")
    fields = head.split()
    num_words = int(fields[3], 16)
    lemmas = tuple(re.sub(r"\((?:a|p|ip)\)$", "", word).replace("_", " ") for word in fields[4 : 4 + 2 * num_words : 2])
    pointers = fields[5 + 2 * num_words :]
    symbols = [(pointers[i], pointers[i + 1] + pointers[i + 2]) for i in range(0, _num_pointers(fields, num_words), 4)]
    hypernym = next((key for symbol, key in symbols if symbol in {"@", "@i"}), None)
    gloss = re.split(r'[;:,]?\s*"', text.strip(), maxsplit=1)[0].strip(" ;:")
    return Synset(
        key=fields[0] + part_of_speech[0],
        lexical_file=fields[1],
        lemmas=lemmas,
        gloss=gloss,
        examples=tuple(example.strip() for example in _EXAMPLE.findall(text)),
        hypernym=hypernym,
        is_instance=any(symbol == "@i" for symbol, _ in symbols),
    )


def _num_pointers(fields: list[str], num_words: int) -> int:
    return 4 * int(fields[4 + 2 * num_words])


def parse_synsets(lines: Iterable[str], part_of_speech: str) -> Iterator[Synset]:
    """Every synset of a data file. The licence, which opens the file, has lines that begin with two blanks."""
    for line in lines:
        if not line.startswith("  ") and line.strip():
            yield parse_synset(line, part_of_speech)


def read_wordnet(folder: Path) -> list[Synset]:
    """All synsets of `data.noun`, `data.verb`, `data.adj` and `data.adv`, in file order."""
    synsets: list[Synset] = []
    for name in _PARTS_OF_SPEECH:
        with (folder / f"data.{name}").open(encoding="utf-8") as lines:
            synsets.extend(parse_synsets(lines, name))
    return synsets
