"""What arrives, and when: traces of requests and of sessions whose requests wait for each other. Pure, seeded.

Leaves out who answers. A trace is scaled so that it holds exactly the share asked for of what the engines can compute: luck in
the lengths does not decide a comparison.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orthrus_serve.types import RequestKind

MAX_PROMPT = 4000


@dataclass(frozen=True)
class Arrival:
    """A request of a trace. `num_output` is known to the engine only; clients allow `max_tokens`.

    Attributes:
        at_s: when it arrives; of a `then`, how long after the end of the one before.
        then: the request that the client sends when this one is answered.
    """

    at_s: float
    kind: RequestKind
    num_prompt: int
    num_output: int
    then: "Arrival | None" = None

    @property
    def num_tokens(self) -> int:
        """Tokens that an engine computes for it."""
        return self.num_prompt + self.num_output

    @property
    def num_tokens_in_all(self) -> int:
        """The same, with all that follow."""
        return self.num_tokens + (self.then.num_tokens_in_all if self.then is not None else 0)


MakeOne = Callable[[random.Random], Arrival]


def heavy_tailed(rng: random.Random, embed_share: float = 0.6, max_output: int = 2000) -> Arrival:
    """Prompts log-normal, outputs Pareto (shape 1.3: a hundredth of them hold a fifth of all output tokens)."""
    if rng.random() < embed_share:
        return Arrival(0.0, "embed", min(MAX_PROMPT, 5 + int(rng.lognormvariate(4.4, 1.0))), 0)
    prompt = min(MAX_PROMPT, 10 + int(rng.lognormvariate(5.0, 0.8)))
    return Arrival(0.0, "generate", prompt, min(max_output, int(40 * rng.paretovariate(1.3))))


@dataclass(frozen=True)
class Coin:
    """Requests of two sizes by a coin; `spread` is the standard deviation of the logarithm of each length, 0 for none."""

    embed_share: float
    prompt: int = 640
    output: int = 150
    spread: float = 0.0
    max_output: int = 2000

    def __call__(self, rng: random.Random) -> Arrival:
        """One of them."""
        is_embed = rng.random() < self.embed_share
        prompt = max(1, min(MAX_PROMPT, round(self.prompt * self._factor(rng))))
        output = 0 if is_embed else max(1, min(self.max_output, round(self.output * self._factor(rng))))
        return Arrival(0.0, "embed" if is_embed else "generate", prompt, output)

    def _factor(self, rng: random.Random) -> float:
        # The mean is 1 whatever the spread.
        return rng.lognormvariate(-(self.spread**2) / 2, self.spread) if self.spread else 1.0


@dataclass(frozen=True)
class Hops:
    """Iter-RetGen: embed a query, retrieve, generate from what was found, and again with the new query."""

    num_hops: int = 3
    query: int = 60
    prompt: int = 500
    output: int = 300
    retrieve_s: float = 0.02
    spread: float = 0.0

    def __call__(self, rng: random.Random) -> Arrival:
        """One session."""
        coin = Coin(0.0, self.prompt, self.output, self.spread)
        hop: Arrival | None = None
        for _ in range(self.num_hops):
            made = coin(rng)
            generate = Arrival(self.retrieve_s, "generate", made.num_prompt, made.num_output, hop)
            hop = Arrival(0.0, "embed", self.query, 0, generate)
        assert hop is not None
        return hop


def poisson(make_one: MakeOne, seed: int, seconds: float, tokens_per_s: float) -> list[Arrival]:
    """A Poisson process of so many seconds that brings exactly so many tokens a second, to the last request."""
    rng = random.Random(seed)
    made: list[Arrival] = []
    at_s, num_tokens = 0.0, 0
    while num_tokens < tokens_per_s * seconds:
        at_s += rng.expovariate(1.0)
        made.append(replace(make_one(rng), at_s=at_s))
        num_tokens += made[-1].num_tokens_in_all
    stretch = seconds / at_s
    return [replace(arrival, at_s=arrival.at_s * stretch) for arrival in made]


Shape = Literal["steady", "bursts"]


def in_bursts(trace: Sequence[Arrival], period_s: float = 20.0, peak: float = 0.5) -> list[Arrival]:
    """The same requests, but of each period the kind generates in its first part and embeds in the rest, so that the ratio of
    kinds swings while the sum of work stays. `peak` is how much of a kind is moved to its own half, 0 to 1."""
    rng = random.Random(len(trace))
    moved: list[Arrival] = []
    for arrival in trace:
        start_s, at_s = arrival.at_s // period_s * period_s, arrival.at_s % period_s
        own = at_s < period_s / 2 if arrival.kind == "generate" else at_s >= period_s / 2
        if not own and rng.random() < peak:
            at_s = (at_s + period_s / 2) % period_s
        moved.append(replace(arrival, at_s=start_s + at_s))
    return sorted(moved, key=lambda arrival: arrival.at_s)
