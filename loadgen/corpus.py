"""Where text comes from: passages in a JSONL file of titles and texts, or a built-in word list when there is no file.

The built-in text is drawn word by word with the frequencies of ordinary English (Zipf); reports say when it was used. Leaves
out how prompts are cut from it (`prompts.py`).
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from loadgen.errors import SettingsError

# Where `orthrus-serve model fetch` puts the Wikipedia leads that travel with the product.
TRAVELLING_CORPUS = Path("~/.cache/orthrus_serve/demo/corpus.jsonl")
BUILT_IN = "built-in word list"
BUILT_IN_PASSAGES = 400
Row = TypeVar("Row", bound=msgspec.Struct)


class Passage(msgspec.Struct, frozen=True):
    """A title and its text; further fields of a line are skipped."""

    title: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Passages, and a name for reports."""

    name: str
    passages: tuple[Passage, ...]


def load_corpus(path: Path | None, max_passages: int | None = None) -> Corpus:
    """The corpus at `path`; without one the travelling corpus, or the built-in words where that was not fetched.

    Raises:
        SettingsError: the file cannot be read, or a line has no title or text.
    """
    if path is None and not TRAVELLING_CORPUS.expanduser().is_file():
        return built_in_corpus()
    file = (path or TRAVELLING_CORPUS).expanduser()
    passages = tuple(read_jsonl(file, Passage, max_passages))
    if not passages:
        raise SettingsError(f"corpus: {file} has no passages")
    return Corpus(name=file.name, passages=passages)


def read_jsonl(path: Path, shape: type[Row], limit: int | None = None) -> list[Row]:
    """One value of `shape` per line.

    Raises:
        SettingsError: the file cannot be read or a line does not fit; names the line.
    """
    decoder = msgspec.json.Decoder(shape)
    rows: list[Row] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and len(rows) >= limit:
                    break
                if line.strip():
                    rows.append(_decode(decoder, line, f"{path}, line {number}"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    return rows


def _decode(decoder: msgspec.json.Decoder[Row], line: bytes, where: str) -> Row:
    try:
        return decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise SettingsError(f"{where}: {error}") from error


def built_in_corpus(seed: int = 1) -> Corpus:
    """Made-up passages from the commonest words of English Wikipedia; the same ones for the same seed."""
    words = resources.files("loadgen").joinpath("data/words.txt").read_text(encoding="utf-8").split()
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(10, len(words) + 10)
    weights /= weights.sum()
    passages: list[Passage] = []
    for number in range(BUILT_IN_PASSAGES):
        drawn = [words[int(index)] for index in rng.choice(len(words), size=int(rng.integers(60, 140)), p=weights)]
        sentences = [" ".join(drawn[begin : begin + 14]).capitalize() + "." for begin in range(0, len(drawn), 14)]
        passages.append(Passage(title=f"{drawn[0].capitalize()} {drawn[1]} {number}", text=" ".join(sentences)))
    return Corpus(name=BUILT_IN, passages=tuple(passages))
