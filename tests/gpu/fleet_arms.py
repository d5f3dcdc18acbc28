"""What `fleet.py` runs: one arm is a topology and a load. Pure: numbers in, arms out."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SHARES = (0.9, 0.5, 0.1)
# How long the slowest request of a coin arm takes on mixed cards, by embed share, at 128 clients a card: seen on two H200s.
SLOWEST_S = {0.9: 10.0, 0.5: 8.0, 0.1: 7.0}
EMBED_PER_S, GENERATE_PER_S = 60.0, 42.0  # what one card does of one kind alone, seen without HTTP
SESSIONS = 80  # Iter-RetGen, per card


@dataclass(frozen=True)
class Arm:
    """One measurement. `takes_s` is what it is expected to take, everything included; `settings` are loadgen's, `engine` live
    settings of the engines."""

    name: str
    topology: str
    takes_s: float
    settings: dict[str, Any]
    engine: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """How large the load is. `clients` per card; `stretch` multiplies all durations; counts are requests of an arm."""

    cards: int
    clients: int
    stretch: float
    block: int
    phase: int

    def clients_in_all(self, times: int = 1) -> int:
        return self.cards * self.clients * times


def ratio_load(embed_share: float, clients: int) -> dict[str, Any]:
    """Closed loop, each request by a coin."""
    return {"kind": "ratio", "embed_share": embed_share, "arrivals": {"kind": "closed", "clients": clients}}


def block_load(count: int) -> dict[str, Any]:
    """So many generations, then at once as many embeddings."""
    return {"kind": "block", "num_generate": count, "num_embed": count}


def phases_load(requests: int, clients: int) -> dict[str, Any]:
    """10, 50, 90 % embeddings, so many requests each."""
    shape = {"requests_per_phase": requests, "clients": clients}
    return {"kind": "phases", "embed_shares": [0.1, 0.5, 0.9], **shape}


def hops_load(variant: str, clients: int, passages: int) -> dict[str, Any]:
    """Iter-RetGen in its short form: 2 to 5 hops, 1 to 10 documents, 300 tokens an answer."""
    return {
        "kind": "iter_retgen",
        "variant": variant,
        "arrivals": {"kind": "closed", "clients": clients},
        "output_tokens": 300,
        "max_passages": passages,
        "index_cache": None,
    }


def coin_arms(scale: Scale, topologies: tuple[str, ...], *, times: int = 1) -> Iterator[Arm]:
    """Closed loop, each request by a coin. A window is three times the slowest request, after a warm-up of one."""
    for share in SHARES if times == 1 else (0.5,):
        generating = max(1, scale.cards - 1)
        queued_s = scale.clients_in_all() * max(share / EMBED_PER_S, (1 - share) / GENERATE_PER_S / generating)
        slowest_s = max(SLOWEST_S[share], queued_s) * scale.stretch * times
        for topology in topologies:
            yield Arm(
                f"coin-{share}-{scale.clients_in_all(times)}-{topology}",
                topology,
                5.2 * slowest_s + 6.0,
                {
                    "workload": ratio_load(share, scale.clients_in_all(times)),
                    "warmup_s": slowest_s,
                    "stop": {"max_duration_s": 4 * slowest_s, "drain_s": 2 * slowest_s},
                },
            )


def pool_arms(scale: Scale, topologies: tuple[str, ...], totals: dict[float, float]) -> Iterator[Arm]:
    """A Poisson stream per kind at 0.9 of what `orthrus` did at that share (`totals`, requests/s)."""
    warm_s, window_s, drain_s = 8.0 * scale.stretch, 24.0 * scale.stretch, 8.0 * scale.stretch
    for share in SHARES:
        if share not in totals:
            continue
        rates = {"embed": 0.9 * totals[share] * share, "generate": 0.9 * totals[share] * (1 - share)}
        for topology in topologies:
            yield Arm(
                f"pools-{share}-{topology}",
                topology,
                warm_s + window_s + drain_s + 6.0,
                {
                    "workload": {"kind": "pools"}
                    | {kind: {"kind": "poisson", "rate": round(rate, 2)} for kind, rate in rates.items()},
                    "warmup_s": warm_s,
                    "stop": {"max_duration_s": warm_s + window_s, "drain_s": drain_s},
                },
            )


def block_arms(scale: Scale, topologies: tuple[str, ...]) -> Iterator[Arm]:
    """All generations, then at once all embeddings."""
    for topology in topologies:
        yield Arm(
            f"block-{topology}",
            topology,
            scale.block * (1 / 42 + 1 / 60) * (1.2 if topology == "dedicated" else 1 / scale.cards) + 6.0,
            {"workload": block_load(scale.block)},
        )


def phase_arms(scale: Scale, topologies: tuple[str, ...]) -> Iterator[Arm]:
    """10, 50, 90 % embeddings, a fixed number of requests each."""
    for topology in topologies:
        yield Arm(
            f"phases-{topology}",
            topology,
            3 * scale.phase / (25 * scale.cards if topology == "dedicated" else 40 * scale.cards) + 6.0,
            {"workload": phases_load(scale.phase, scale.clients_in_all())},
        )


def hop_arms(scale: Scale, topologies: tuple[str, ...]) -> Iterator[Arm]:
    """Iter-RetGen in its short form, both variants."""
    warm_s, window_s, drain_s = 20.0 * scale.stretch, 45.0 * scale.stretch, 20.0 * scale.stretch
    for variant in ("query_and_documents", "query_only"):
        for topology in topologies:
            yield Arm(
                f"hops-{variant}-{topology}",
                topology,
                warm_s + window_s + drain_s + 15.0,
                {
                    "workload": hops_load(variant, max(2, scale.cards * SESSIONS * scale.clients // 128), 400),
                    "warmup_s": warm_s,
                    "stop": {"max_duration_s": warm_s + window_s, "drain_s": drain_s},
                },
            )


def named_arm(text: str) -> Arm:
    """An arm by its description: `FORM[,NAME=VALUE]…/TOPOLOGY[,SETTING=VALUE]…`, the load before the slash, the server after.

    Forms, with what they take: `coin` (share, clients, warm_s, window_s), `block` (requests, of each kind), `phases` (requests
    in each, clients), `hops` (variant, clients, warm_s, window_s, passages). With `stream=1` generations are streamed. Topology
    `stock` is the pair of stock servers, and its one setting `step_tokens`.

    Raises:
        ValueError: there is no such form, or a value is missing or unknown.
    """
    load, _, server = text.partition("/")
    (form, *values), (topology, *settings) = load.split(","), server.split(",")
    given = dict(value.split("=", 1) for value in values)
    stream = given.pop("stream", "0") == "1"
    try:
        workload, takes_s, timing = _FORMS[form](**given)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{text}: {error}") from error
    # Settings stay where nobody names them, so every arm names those that another one may have changed.
    usual = {} if topology == "stock" else {"step_tokens": "2048", "embed_weight": "1"}
    # Nothing is waited for at the end of a window: what is open then counts as open, and is gone before the next arm.
    return Arm(
        text.replace("/", "--"),
        topology,
        takes_s,
        {"workload": workload, "sampling": {"stream": stream}} | timing,
        usual | dict(setting.split("=", 1) for setting in settings),
    )


# Workload, what the arm is expected to take in seconds, and when to begin and end.
_Load = tuple[dict[str, Any], float, dict[str, Any]]


def _window(warm_s: str, window_s: str) -> tuple[float, dict[str, Any]]:
    whole_s = float(warm_s) + float(window_s)
    return whole_s + 7.0, {"warmup_s": float(warm_s), "stop": {"max_duration_s": whole_s, "drain_s": 0.5}}


def _coin(share: str, clients: str, warm_s: str, window_s: str) -> _Load:
    return ratio_load(float(share), int(clients)), *_window(warm_s, window_s)


def _block(requests: str) -> _Load:
    count = int(requests)
    return block_load(count), count * (1 / 42 + 1 / 60) * 1.2 + 6.0, {}


def _phases(requests: str, clients: str) -> _Load:
    return phases_load(int(requests), int(clients)), 3 * int(requests) / 35 + 6.0, {}


def _hops(variant: str, clients: str, warm_s: str, window_s: str, passages: str) -> _Load:
    takes_s, timing = _window(warm_s, window_s)
    return hops_load(variant, int(clients), int(passages)), takes_s + 8.0 + int(passages) / 100, timing


_FORMS = {"coin": _coin, "block": _block, "phases": _phases, "hops": _hops}


def model_flop_ratio(tokens: float, seconds: float, cards: int, parameters: float, peak_flops: float) -> float:
    """Model FLOPs of so many tokens (two for each parameter, attention left out) ÷ what the cards could do in that time."""
    return 2.0 * parameters * tokens / (seconds * cards * peak_flops)
