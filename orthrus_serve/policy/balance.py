"""How evenly load is spread over replicas, as one number. Pure. Leaves out how load is measured (`ledger.py`)."""

from collections.abc import Collection


def imbalance_ratio(loads: Collection[int]) -> float:
    """The largest load over the mean: from 1, all have the same (or nothing), to the number of replicas, one has all."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total > 0 else 1.0
