"""How two engines on one card share it: how many tokens one may compute in a step, from what both have left. Pure.

Guards: neither is ever left with nothing, both together plan at most one whole budget, an engine alone has the whole one, and
an input that cannot be cut into chunks runs within a stated number of steps. Leaves out how each knows of the other
(`engine/card_page.py`) and time: a share is a share of tokens in a step, the device decides what runs first.
"""

from dataclasses import dataclass
from math import ceil

from orthrus_serve.types import CardShare

# Of a whole budget, with `static`: what two engines have that know nothing of each other, and must both fit.
STATIC_SHARE = 0.5


@dataclass(frozen=True)
class CardLoad:
    """What both engines of a card have left to compute, in tokens; `other` is 0 when it is idle or was not heard of lately."""

    own: int
    other: int


def share_of(rule: CardShare, load: CardLoad, min_share: float) -> float:
    """The part of a whole step's budget that this engine may compute, above 0 and at most 1.

    Args:
        rule: `remaining` is in proportion to remaining tokens, and everything while the other is idle; `static` a half at all
            times; `whole` everything at all times, as if nobody else were there.
        min_share: floor of each (0 to 0.5), so the other's floor is the most that one of two busy engines can have.
    """
    if rule == "whole":
        return 1.0
    if rule == "static":
        return STATIC_SHARE
    if load.other <= 0:
        return 1.0
    own = max(0, load.own)
    return min(max(own / (own + load.other), min_share), 1.0 - min_share)


def share_tokens(share: float, largest: int, decodes: int = 0) -> int:
    """Tokens of one step: that part of the largest, and at least every decode with one token beside them."""
    return min(largest, max(int(share * largest), decodes + 1))


def credited(left: int, tokens: int, largest: int) -> int:
    """The budget of a step whose inputs cannot be cut: what earlier steps left over, and this step's tokens.

    Inputs run first come, first served, and what does not fit waits. So with F tokens a step at least, an input of L tokens
    at the head of the line runs within ⌈L / F⌉ steps, and the k-th within the sum of that over all k (`most_steps`): nothing
    is spent while the head waits, and `largest` is no less than any input.
    """
    return min(largest, max(0, left) + tokens)


def most_steps(lengths: list[int], largest: int, min_share: float) -> int:
    """Steps until the last of a line of uncut inputs runs, at most; `lengths` are theirs, in tokens, up to `largest` each."""
    floor = share_tokens(min_share, largest)
    return sum(ceil(length / floor) for length in lengths)
