"""How good an answer and a retrieval were: exact match, F1, recall, as SQuAD and 2WikiMultihopQA define them. Pure."""

import re
import string
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def short_answer(text: str) -> str:
    """The part of a generated text that counts as the answer: its first line, without a leading `Answer:`."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    return re.sub(r"^(so )?(the )?(final )?answer( is)?\s*:?\s*", "", first, flags=re.IGNORECASE)


def exact_match(answer: str, gold: str) -> float:
    """1.0 if both are the same after normalisation, else 0.0."""
    return float(normalise(answer) == normalise(gold))


def f1(answer: str, gold: str) -> float:
    """Harmonic mean of word precision and recall, 0 to 1; yes, no and noanswer must match whole."""
    got, wanted = normalise(answer).split(), normalise(gold).split()
    closed = ("yes", "no", "noanswer")
    if got != wanted and (" ".join(got) in closed or " ".join(wanted) in closed):
        return 0.0
    common = sum((Counter(got) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(got), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def contains(text: str, gold: str) -> float:
    """1.0 if the gold answer stands anywhere in the text as whole words, else 0.0: kinder than exact match to long answers."""
    return float(f" {normalise(gold)} " in f" {normalise(text)} ")


def recall(found_titles: Iterable[str], gold_titles: Iterable[str]) -> float:
    """Share of the gold documents that were found, 0 to 1; 1.0 if there are none."""
    gold = set(gold_titles)
    return len(gold & set(found_titles)) / len(gold) if gold else 1.0
