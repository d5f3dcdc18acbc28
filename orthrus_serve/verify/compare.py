"""Whether an answer is the reference's, to what is near enough for the number format that the server computes in. Pure.

Vectors are near when their angle and their length are; where rounding alone turns a vector further, as it does with some short
inputs of some models in 16 bits, so far as it does that, some times over. Tokens are held against the reference's logits one by
one, given the server's own tokens before: a token other than the likeliest is a near tie when its logit is within the
tolerance, and a deviation else. Two sequences that part at a near tie are never compared beyond it word for word.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Tolerance:
    """What is near enough.

    Attributes:
        cosine: most that a vector's cosine to the reference's may lack of 1.
        length: most that its length may differ, as a ratio.
        logit: how far below the likeliest token's logit the reference may see the server's token.
    """

    cosine: float
    length: float
    logit: float


# The reference computes in float32. Those of float16 and bfloat16 hold most vectors (`python -m tests.engine.rounding`).
TOLERANCES = {
    "float32": Tolerance(cosine=1e-5, length=1e-3, logit=1e-3),
    "float16": Tolerance(cosine=2e-3, length=2e-2, logit=0.25),
    "bfloat16": Tolerance(cosine=5e-3, length=5e-2, logit=1.0),
}


# A server adds up in another order than the reference, so its rounding is another one of about the same size.
ROUNDINGS = 4.0
# What rounding turns further than this tells nothing of the server.
MOST_ROUNDING = 0.25


@dataclass(frozen=True)
class Finding:
    """How one answer compares. `cosine` belongs to a vector, `is_rounded` says that it is near only by what rounding does to
    it; `num_ties` counts near ties among `num_tokens` tokens."""

    problem: str | None = None
    cosine: float | None = None
    is_rounded: bool = False
    num_tokens: int = 0
    num_ties: int = 0


def cosine(left: Floats, right: Floats) -> float:
    """Cosine of two vectors, in float64; 0 when one of them has no direction."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths > 0 else 0.0


def compare_vector(
    got: Floats, expected: Floats, tolerance: Tolerance, rounded: Callable[[], Floats] | None = None
) -> Finding:
    """A server's vector against the reference's. `rounded` gives the reference's in the server's own number format, and is
    asked only when the vector is not near otherwise."""
    if got.shape != expected.shape:
        return Finding(f"{got.size} numbers, expected {expected.size}", cosine=0.0)
    if not np.isfinite(got).all():
        return Finding("not every number is finite", cosine=0.0)
    found = cosine(got, expected)
    if 1 - found > tolerance.cosine:
        by_rounding = 0.0 if rounded is None else min(MOST_ROUNDING, ROUNDINGS * (1 - cosine(rounded(), expected)))
        if 1 - found > by_rounding:
            return Finding(f"cosine {found:.6f}", cosine=found)
        return Finding(cosine=found, is_rounded=True)
    length, wanted = float(np.linalg.norm(got)), float(np.linalg.norm(expected))
    if abs(length - wanted) > tolerance.length * wanted:
        return Finding(f"length {length:.4g}, expected {wanted:.4g}", cosine=found)
    return Finding(cosine=found)


def compare_tokens(got: list[int], logits: Floats, num_wanted: int, tolerance: Tolerance) -> Finding:
    """A server's tokens against the reference's logits before each of them [tokens, vocabulary]."""
    num_ties = 0
    for place, (token, row) in enumerate(zip(got, logits, strict=True)):
        if not 0 <= token < row.size:
            return Finding(f"token {place}: {token} is not in the vocabulary", num_tokens=len(got))
        gap = float(row.max() - row[token])
        if gap > tolerance.logit:
            wanted = int(row.argmax())
            return Finding(f"token {place}: {token}, expected {wanted} (gap {gap:.3g})", num_tokens=len(got))
        num_ties += int(gap > 0)
    if len(got) != num_wanted:
        return Finding(f"{len(got)} tokens, expected {num_wanted}", num_tokens=len(got))
    return Finding(num_tokens=len(got), num_ties=num_ties)
