"""The most that sharing all cards between both kinds can gain over splitting the cards, from each kind's rate alone. Pure.

What a measured ratio has above this bound comes from mixing itself, not from load balance.
"""

import msgspec

from loadgen.intervals import Estimate


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """For one embed share. `embed_rate` and `generate_rate` are requests per second of one card that does nothing else."""

    stage: str
    embed_share: float
    split: tuple[int, int]
    embed_rate: Estimate
    generate_rate: Estimate
    bound: float


def load_balance_bound(embed_share: float, split: tuple[int, int], embed_rate: float, generate_rate: float) -> float:
    """[N ÷ (p/e + (1−p)/g)] ÷ min(nₑ·e/p, n_g·g/(1−p)), with N = nₑ + n_g, p the embed share, e and g the rates per card.

    The numerator is what N cards do that may all work on either kind; the denominator is what the split does at the same mix,
    where the slower side holds up the other.
    """
    num_embed, num_generate = split
    cards = num_embed + num_generate
    shared = cards / (embed_share / embed_rate + (1 - embed_share) / generate_rate)
    sides = [num_embed * embed_rate / embed_share] if embed_share > 0 else []
    sides += [num_generate * generate_rate / (1 - embed_share)] if embed_share < 1 else []
    return shared / min(sides)
