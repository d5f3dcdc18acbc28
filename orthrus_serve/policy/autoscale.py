"""How many replicas a load in remaining tokens calls for, and for how long already. Pure; time is an argument.

Up, when the load is above the target of the replicas that are wanted now, for a while. Down, when it would fit into fewer with
room to spare, for a (longer) while. Of all that was called for meanwhile the most cautious is done: the fewest additions, the
fewest removals. Guards: never beyond the limits; a load that is not known whole removes nobody.
Leaves out where the load comes from and who starts replicas (`serving/autoscaling.py`).
"""

import math
from dataclasses import dataclass

# Fewer replicas must have this share of their target at most, or a load around a threshold would start and stop engines.
DOWN_SHARE = 0.8


@dataclass(frozen=True)
class AutoscaleLimits:
    """What the decision may do, and how soon.

    Attributes:
        target_tokens_per_replica: remaining tokens that one replica is to have at most.
        upscale_delay_s, downscale_delay_s: how long a load must call for it.
    """

    min_replicas: int
    max_replicas: int
    target_tokens_per_replica: int
    upscale_delay_s: float
    downscale_delay_s: float


@dataclass(frozen=True)
class Call:
    """What the load has called for without a break.

    Attributes:
        num_replicas: the most cautious of all calls since `since_s`.
    """

    num_replicas: int
    since_s: float


def decide(
    num_tokens: int, num_wanted: int, limits: AutoscaleLimits, call: Call | None, now_s: float, *, is_whole: bool = True
) -> tuple[int, Call | None]:
    """How many replicas are to run from now on, and the call to be given next time.

    Args:
        num_tokens: remaining tokens of all replicas.
        num_wanted: replicas that are to run now; some of them may still be loading.
        call: what this function returned last time; None at first.
        is_whole: whether every running replica's load is in `num_tokens`.
    """
    bounded = min(max(num_wanted, limits.min_replicas), limits.max_replicas)
    if bounded != num_wanted:
        return bounded, None
    called = _called_for(num_tokens, num_wanted, limits, is_whole=is_whole)
    if called == num_wanted:
        return num_wanted, None
    is_up = called > num_wanted
    if call is None or (call.num_replicas > num_wanted) != is_up:
        call = Call(called, now_s)
    else:
        call = Call(min(call.num_replicas, called) if is_up else max(call.num_replicas, called), call.since_s)
    if now_s - call.since_s < (limits.upscale_delay_s if is_up else limits.downscale_delay_s):
        return num_wanted, call
    return call.num_replicas, None


def _called_for(num_tokens: int, num_wanted: int, limits: AutoscaleLimits, *, is_whole: bool) -> int:
    target = limits.target_tokens_per_replica
    up = min(math.ceil(num_tokens / target), limits.max_replicas)
    if up > num_wanted:
        return up
    down = max(math.ceil(num_tokens / (target * DOWN_SHARE)), limits.min_replicas)
    return min(down, num_wanted) if is_whole else num_wanted
