"""Which arm of an A/B test answers a request, and which requests are copied to another. Pure: chance as an argument.

Guards: a session stays where it is for as long as the weights stay, whichever Front it meets, and a change of weights moves as
few sessions as it can. An arm of weight 0 is chosen for nobody, and still answers those who force it. Leaves out where the
weights come from and what an arm is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

_HASHES = 2**53  # as many as a float holds exactly


@dataclass(frozen=True)
class Mirror:
    """A copy of this share (0 to 1) of the requests that arm `source` answers goes to arm `target`, which answers nobody."""

    source: str
    target: str
    share: float


def choose_arm(weights: Mapping[str, float], session: str | None, chance: float) -> str:
    """The arm of a request.

    Args:
        weights: by arm, none negative, at least one above 0; only their ratios matter.
        session: what the client calls its session; requests that name none go by `chance`.
        chance: drawn from [0, 1).
    """
    positive = {arm: weight for arm, weight in weights.items() if weight > 0}
    if session:
        # Weighted rendezvous hashing: each arm draws an exponential arrival time at a rate of its weight, the first one wins.
        return min(positive, key=lambda arm: (_arrival(session, arm) / positive[arm], arm))
    place = chance * sum(positive.values())
    for arm, weight in positive.items():
        place -= weight
        if place < 0:
            return arm
    return next(reversed(positive))  # rounding


def is_mirrored(mirror: Mirror | None, arm: str, chance: float) -> bool:
    """Whether a request that `arm` answers is copied; `chance` is drawn from [0, 1)."""
    return mirror is not None and mirror.source == arm and chance < mirror.share


def _arrival(session: str, arm: str) -> float:
    digest = blake2b(session.encode("utf-8", "surrogatepass"), digest_size=8, key=arm.encode()).digest()
    return -math.log((int.from_bytes(digest) % _HASHES + 1) / (_HASHES + 1))
