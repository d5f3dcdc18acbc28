"""The questions about topologies and sessions, on engines in steps with the durations of an H200.

When `dedicated` beats `orthrus`, and whether that can be told beforehand; sessions whose hops wait for each other; admission;
whether the engine behaves as the card did. Rows as in `experiments.py`. Leaves out fluid engines and pool sizes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from orthrus_serve.policy.roles import Split
from orthrus_serve.sim.batching import BatchSpec
from orthrus_serve.sim.cluster import Cluster, Played, Setup
from orthrus_serve.sim.experiments import RULES, Arm, Row, in_steps, play
from orthrus_serve.sim.gate import AdmissionSetup
from orthrus_serve.sim.single import ClosedLoop, capacity_tokens_per_s
from orthrus_serve.sim.step_clock import h200
from orthrus_serve.sim.workload import Coin, Hops, in_bursts, poisson
from orthrus_serve.types import PolicyName, RequestKind

# Read off the study's own cases: up to this load of their part, embeddings alone wait no longer than beside generations.
MAX_EMBED_LOAD = 0.7

# What the card did (docs/benchmarks/2026-11-30-gpu-steps.md): share of embeddings, policy, seconds of warming up and measuring,
# and per kind requests a second and p99 in s.
MEASURED_ON_H200: tuple[tuple[float, PolicyName, float, float, dict[str, tuple[float, float]]], ...] = (
    (1.0, "orthrus", 10, 15, {"embed": (61.72, 4.164)}),
    (0.9, "orthrus", 10, 30, {"embed": (51.92, 4.319), "generate": (5.7, 8.416)}),
    (0.9, "unified_homo", 10, 30, {"embed": (48.93, 4.086), "generate": (7.6, 10.333)}),
    (0.9, "hetero_fcfs", 10, 30, {"embed": (52.71, 3.748), "generate": (5.54, 12.151)}),
    (0.5, "orthrus", 14, 42, {"embed": (24.91, 1.492), "generate": (24.98, 12.967)}),
    (0.5, "unified_homo", 14, 42, {"embed": (24.06, 0.43), "generate": (25.41, 13.188)}),
    (0.1, "orthrus", 8, 24, {"embed": (4.42, 0.346), "generate": (38.56, 10.063)}),
    (0.1, "unified_homo", 8, 24, {"embed": (4.13, 0.111), "generate": (38.94, 10.405)}),
    (0.0, "orthrus", 8, 22, {"generate": (42.06, 9.909)}),
)


def card(quick: bool) -> Iterator[Row]:
    """The closed loops that ran on the card, in virtual time."""
    for share, policy, warm_s, seconds, measured in MEASURED_ON_H200[: 2 if quick else None]:
        simulated = ClosedLoop(BatchSpec(h200(), policy), Coin(share), 256).run(warm_s, seconds)
        for kind, (per_s, p99_s) in measured.items():
            yield {
                "embed_share": share,
                "policy": policy,
                "kind": kind,
                "measured_per_s": per_s,
                "simulated_per_s": round(simulated.per_s("embed" if kind == "embed" else "generate"), 2),
                "measured_p99_s": p99_s,
                "simulated_p99_s": round(simulated.p99_s("embed" if kind == "embed" else "generate"), 3),
            }


@dataclass(frozen=True)
class Mix:
    """What a mix of both kinds costs, in engines that are never idle.

    Attributes:
        tokens_per_s: that a mixed engine computes.
        embed_work: share of the work of both kinds that is embedding, if each kind had engines of its own, 0 to 1.
    """

    tokens_per_s: float
    embed_work: float


@cache
def mix_of(coin: Coin) -> Mix:
    """Found with one engine for each: for both kinds, for embeddings only, for generations only."""
    embed = capacity_tokens_per_s(BatchSpec(h200()), replace(coin, embed_share=1.0)) / coin.prompt
    generate = capacity_tokens_per_s(BatchSpec(h200()), replace(coin, embed_share=0.0)) / (coin.prompt + coin.output)
    work = (coin.embed_share / embed, (1 - coin.embed_share) / generate)
    return Mix(capacity_tokens_per_s(BatchSpec(h200()), coin), work[0] / sum(work))


def fullest(split: Split, num_replicas: int, mix: Mix) -> float:
    """By how much the fuller part of the split exceeds the mean: 1 is a split that fits exactly."""
    embed = num_replicas * mix.embed_work
    num_embed = split.num_embed(num_replicas)
    return max(embed / num_embed, (num_replicas - embed) / (num_replicas - num_embed))


def is_foretold(split: Split, num_replicas: int, mix: Mix, load: float) -> bool:
    """Whether an operator should expect that split to beat `orthrus`: it leaves embeddings nearly a third idle, and generations
    more than their share. `load` is that of all replicas, 1 is full."""
    num_embed = split.num_embed(num_replicas)
    embed_load = num_replicas * mix.embed_work * load / num_embed
    return embed_load <= MAX_EMBED_LOAD and (num_replicas - num_embed) / num_replicas > 1 - mix.embed_work


def best_splits(num_replicas: int, mix: Mix) -> list[Split]:
    """The two whole splits next to the right one, or the only one."""
    below = int(num_replicas * mix.embed_work)
    return [Split(embed, num_replicas - embed) for embed in (below, below + 1) if 0 < embed < num_replicas]


def dedicated(quick: bool) -> Iterator[Row]:
    """`orthrus` against the best splits of `dedicated`, over mixes, loads, and bursts of one kind after the other."""
    seconds = 2.0 if quick else 40.0
    cases = (
        [(0.5, 0.7, 0.0)]
        if quick
        else [
            *((share, load, 0.0) for load in (0.6, 0.85) for share in (0.2, 0.4, 0.5, 0.6, 0.8, 0.9)),
            *((0.6, 0.7, peak) for peak in (0.5, 1.0)),
        ]
    )
    num_replicas = 4
    for share, utilisation, peak in cases:
        coin = Coin(share, spread=0.5)
        mix = mix_of(coin)
        trace = poisson(coin, 1, seconds, utilisation * num_replicas * mix.tokens_per_s)
        if peak:
            trace = in_bursts(trace, peak=peak)
        about = {
            "embed_share": share,
            "utilisation": utilisation,
            "bursts": peak,
            "embed_work": round(mix.embed_work, 3),
        }
        mixed = Setup(in_steps(BatchSpec(h200())), num_replicas)
        yield {**about, **play(mixed, Arm("orthrus", {}), trace, seconds)}
        apart = Setup(in_steps(BatchSpec(h200(), "hetero_fcfs")), num_replicas)
        for split in best_splits(num_replicas, mix):
            arm = Arm(f"dedicated {split.embed}:{split.generate}", {"split": split})
            told = {
                "fullest": round(fullest(split, num_replicas, mix), 3),
                "foretold": is_foretold(split, num_replicas, mix, utilisation),
            }
            yield {**about, **told, **play(apart, arm, trace, seconds)}


def sessions(quick: bool) -> Iterator[Row]:
    """Iter-RetGen: three hops, each waiting for the one before, by rule."""
    num_replicas, seconds = (4, 2.0) if quick else (8, 40.0)
    hops = Hops(spread=0.5)
    capacity = capacity_tokens_per_s(BatchSpec(h200()), hops)
    trace = poisson(hops, 1, seconds, 0.8 * num_replicas * capacity)
    for arm in RULES:
        yield play(Setup(in_steps(BatchSpec(h200())), num_replicas, num_replicas // 2), arm, trace, seconds)


def batches(quick: bool) -> Iterator[Row]:
    """Every rule on engines in steps, each of which holds dozens of requests at a time."""
    coin = Coin(0.5, spread=1.0)
    capacity = capacity_tokens_per_s(BatchSpec(h200()), coin)
    for num_replicas, seconds in ((4, 2.0),) if quick else ((4, 60.0), (16, 20.0)):
        trace = poisson(coin, 1, seconds, 0.85 * num_replicas * capacity)
        for arm in RULES:
            setup = Setup(in_steps(BatchSpec(h200())), num_replicas, max(2, num_replicas // 2))
            yield play(setup, arm, trace, seconds)


def admission(quick: bool) -> Iterator[Row]:
    """Loads around what four engines can compute, with and without admission; goals are for whole answers."""
    coin = Coin(0.5, spread=0.5)
    capacity = capacity_tokens_per_s(BatchSpec(h200()), coin)
    num_replicas, seconds = 4, 4.0 if quick else 60.0
    goals_s: dict[RequestKind, float] = {"generate": 40.0, "embed": 2.0}
    for load in (1.5,) if quick else (1.0, 1.25, 1.5):
        trace = poisson(coin, 1, seconds, load * num_replicas * capacity)
        for setup in (None, AdmissionSetup(goals_s)):
            played = Cluster(Setup(in_steps(BatchSpec(h200())), num_replicas, admission=setup), 1).play(trace)
            yield {"load": load, "admission": setup is not None, **kept(played, goals_s, seconds / 4, seconds)}


def kept(played: Played, goals_s: Mapping[RequestKind, float], from_s: float, until_s: float) -> Row:
    """Of requests that arrived in that time, by kind: answered in time a second, late and refused, as shares of all."""
    row: Row = {}
    for kind, goal_s in goals_s.items():
        took = [a.latency_s for a in played.answers if a.kind == kind and from_s <= a.at_s < until_s]
        num_refused = sum(kind == other and from_s <= at_s < until_s for other, at_s in played.refused)
        num_late = sum(latency_s > goal_s for latency_s in took)
        row[kind] = {
            "in_time_per_s": round((len(took) - num_late) / (until_s - from_s), 1),
            "late": round(num_late / max(1, len(took) + num_refused), 4),
            "refused": round(num_refused / max(1, len(took) + num_refused), 4),
        }
    return row


EXPERIMENTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "card": card,
    "dedicated": dedicated,
    "sessions": sessions,
    "batches": batches,
    "admission": admission,
}
