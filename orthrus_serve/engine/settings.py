"""What travels from the configuration into EngineCore and its workers, and the pooling parameters of one request.

Travels in vLLM's `additional_config`, the one sanctioned way. Leaves out everything live (that goes by `channel.py`).
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self, get_args

from orthrus_serve.config.schema import AdapterSpec, AppArgs
from orthrus_serve.errors import ConfigError
from orthrus_serve.policy.topology import PRESETS
from orthrus_serve.types import Activation, CardShare, PolicyName, PoolingKind, Reduction

KEY = "orthrus"
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
POOLING_KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)
CARD_SHARES: tuple[CardShare, ...] = get_args(CardShare)

# Of engines that share a card: an input of one that embeds may be such that it cannot be cut by a quota.
SEPARATE_POLICY: PolicyName = "hetero_fcfs"


@dataclass(frozen=True)
class HeadSettings:
    """A dense layer over all hidden states (`HeadSpec`), as the workers need it."""

    path: str
    activation: Activation = "none"
    reduction: Reduction = "mean"


@dataclass(frozen=True)
class PoolingSpec:
    """How one request's hidden states become its vector. `dimensions` None keeps the whole hidden size."""

    pooling: PoolingKind = "last"
    normalize: bool = True
    dimensions: int | None = None
    head: HeadSettings | None = None

    @property
    def needs_every_state(self) -> bool:
        """Whether a prefix-cache hit, which skips hidden states, would spoil the vector."""
        return self.pooling != "last"


@dataclass(frozen=True)
class LiveSettings:
    """What may change while the engine runs, from the next step on.

    Attributes:
        policy: how kinds share a step.
        min_share: floor of each kind as a part of the budget (policy `orthrus`), 0 to 0.5.
        embed_weight: what an embedding token counts beside one of a generation's prompt (policy `orthrus`).
        max_wait_steps: a kind whose oldest waiting request waited for more steps goes first (policy `orthrus`).
        target_tpot_ms: time target of steps that hold decodes; None holds nothing back.
        step_tokens: largest token budget; None is the engine's own.
        card_share: how two engines on one card share it; None where this one has the card for itself, and then it stays so.
    """

    policy: PolicyName = "orthrus"
    min_share: float = 0.125
    embed_weight: float = 1.0
    max_wait_steps: int = 64
    target_tpot_ms: float | None = None
    step_tokens: int | None = None
    card_share: CardShare | None = None

    def changed(self, wanted: Mapping[str, Any], max_step_tokens: int) -> Self:
        """These settings with some replaced.

        Raises:
            ConfigError: the first wanted value that cannot be, with what can.
        """
        names = {field.name for field in fields(self)}
        for name, value in wanted.items():
            if name not in names:
                raise ConfigError(f"unknown setting {name!r}; there are {', '.join(sorted(names))}")
            if name == "card_share" and (self.card_share is None) != (value is None):
                raise ConfigError("card_share: goes with topology separate_models, where two engines share a card")
            if name == "policy" and self.card_share is not None and value != SEPARATE_POLICY:
                raise ConfigError(
                    f"policy {value!r}: an engine of separate_models has one kind; it goes by arrival order"
                )
            problem = _problem(name, value, max_step_tokens)
            if problem:
                raise ConfigError(f"{name} {value!r} is not {problem}")
        return replace(self, **wanted)


def _problem(name: str, value: Any, max_step_tokens: int) -> str | None:
    """What a value of a live setting should have been; None when it is that."""
    if name == "policy":
        return None if value in POLICIES else f"one of {', '.join(POLICIES)}"
    if name == "card_share":
        return None if value is None or value in CARD_SHARES else f"one of {', '.join(CARD_SHARES)}"
    if name in ("target_tpot_ms", "step_tokens") and value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "min_share":
        return None if is_number and 0 <= value <= 0.5 else "a number from 0 to 0.5"
    if name == "embed_weight":
        return None if is_number and 0 < value < float("inf") else "a number above 0"
    if name == "target_tpot_ms":
        return None if is_number and 0 < value < float("inf") else "a number of milliseconds above 0, or null"
    is_whole = is_number and isinstance(value, int)
    if name == "max_wait_steps":
        return None if is_whole and value >= 1 else "a whole number from 1"
    return (
        None if is_whole and 1 <= value <= max_step_tokens else f"a whole number from 1 to {max_step_tokens}, or null"
    )


@dataclass(frozen=True)
class EngineSettings:
    """The part of the configuration that the scheduler and the workers read.

    `adapters` maps an adapter's served name to its pooling; the request itself may only override what HTTP can say.
    `peak_flops` are a device's operations a second at most; None where its name tells.
    """

    live: LiveSettings = LiveSettings()
    step_log: str | None = None
    peak_flops: float | None = None
    adapters: Mapping[str, PoolingSpec] = field(default_factory=dict)

    @classmethod
    def from_args(cls, args: AppArgs) -> Self:
        """The settings of an application's engines."""
        adapters = {name: _pooling_of(spec) for name, spec in args.adapters.items()}
        engine = args.engine
        policy = PRESETS[args.topology].pool.policy
        card_share = None if args.embedder is None else engine.card_share or "remaining"
        live = LiveSettings(
            policy=policy,
            min_share=engine.min_share,
            embed_weight=engine.embed_weight,
            max_wait_steps=engine.max_wait_steps,
            target_tpot_ms=engine.target_tpot_ms,
            card_share=card_share,
        )
        peak_flops = None if engine.peak_tflops is None else engine.peak_tflops * 1e12
        return cls(live, engine.step_log, peak_flops, adapters)

    def to_additional_config(self) -> dict[str, Any]:
        """A JSON-able mapping for vLLM's `additional_config`."""
        return {KEY: asdict(self)}

    @classmethod
    def from_additional_config(cls, additional_config: object) -> Self:
        """Reads `to_additional_config` back.

        Raises:
            ConfigError: a key or a value that these settings do not know.
        """
        raw = dict(additional_config.get(KEY, {})) if isinstance(additional_config, Mapping) else {}
        adapters = {name: _parse_pooling(name, spec) for name, spec in raw.pop("adapters", {}).items()}
        try:
            live = dict(raw.pop("live", {}))
            shares_card = live.get("card_share") is not None
            start = LiveSettings(SEPARATE_POLICY, card_share="remaining") if shares_card else LiveSettings()
            live = start.changed(live, max_step_tokens=sys.maxsize)
            return cls(live, **raw, adapters=adapters)
        except (TypeError, ConfigError) as error:
            raise ConfigError(f"additional_config.{KEY}: {error}") from error

    def pooling_of(self, adapter: str | None, overrides: Mapping[str, Any] | None) -> PoolingSpec:
        """The pooling of one request: its adapter's, with the request's own `pooling`, `normalize` and `dimensions`."""
        spec = self.adapters.get(adapter or "", PoolingSpec())
        known = {k: v for k, v in (overrides or {}).items() if k in ("pooling", "normalize", "dimensions")}
        return replace(spec, **known)


def _pooling_of(spec: AdapterSpec) -> PoolingSpec:
    head = spec.head and HeadSettings(spec.head.path, spec.head.activation, spec.head.reduction)
    return PoolingSpec(pooling=spec.pooling, normalize=spec.normalize, head=head)


def _parse_pooling(name: str, raw: Mapping[str, Any]) -> PoolingSpec:
    try:
        head = raw.get("head")
        spec = PoolingSpec(**{**raw, "head": HeadSettings(**head) if head else None})
    except TypeError as error:
        raise ConfigError(f"additional_config.{KEY}.adapters.{name}: {error}") from error
    if spec.pooling not in POOLING_KINDS:
        raise ConfigError(f"adapter {name!r}: pooling {spec.pooling!r} is not one of {POOLING_KINDS}")
    return spec
