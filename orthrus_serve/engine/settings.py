"""What travels from the configuration into EngineCore and its workers, and the pooling parameters of one request.

Travels in vLLM's `additional_config`, the one sanctioned way. Leaves out everything live (that goes by `channel.py`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self, get_args

from orthrus_serve.config.schema import AdapterSpec, AppArgs
from orthrus_serve.errors import ConfigError
from orthrus_serve.types import PolicyName, PoolingKind

KEY = "orthrus"
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
POOLING_KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)


@dataclass(frozen=True)
class PoolingSpec:
    """How one request's hidden states become its vector. `dimensions` None keeps the whole hidden size."""

    pooling: PoolingKind = "last"
    normalize: bool = True
    dimensions: int | None = None

    @property
    def needs_every_state(self) -> bool:
        """Whether a prefix-cache hit, which skips hidden states, would spoil the vector."""
        return self.pooling != "last"


@dataclass(frozen=True)
class EngineSettings:
    """The part of the configuration that the scheduler and the workers read.

    `adapters` maps an adapter's served name to its pooling; the request itself may only override what HTTP can say.
    """

    policy: PolicyName = "orthrus"
    min_share: float = 0.125
    step_log: str | None = None
    adapters: Mapping[str, PoolingSpec] = field(default_factory=dict)

    @classmethod
    def from_args(cls, args: AppArgs) -> Self:
        """The settings of an application's engines."""
        adapters = {name: _pooling_of(spec) for name, spec in args.adapters.items()}
        return cls(args.topology, args.engine.min_share, args.engine.step_log, adapters)

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
            settings = cls(**raw, adapters=adapters)
        except TypeError as error:
            raise ConfigError(f"additional_config.{KEY}: {error}") from error
        if settings.policy not in POLICIES:
            raise ConfigError(f"additional_config.{KEY}.policy: {settings.policy!r} is not one of {POLICIES}")
        return settings

    def pooling_of(self, adapter: str | None, overrides: Mapping[str, Any] | None) -> PoolingSpec:
        """The pooling of one request: its adapter's, with the request's own `pooling`, `normalize` and `dimensions`."""
        spec = self.adapters.get(adapter or "", PoolingSpec())
        known = {k: v for k, v in (overrides or {}).items() if k in ("pooling", "normalize", "dimensions")}
        return PoolingSpec(**{**asdict(spec), **known})


def _pooling_of(spec: AdapterSpec) -> PoolingSpec:
    return PoolingSpec(pooling=spec.pooling, normalize=spec.normalize)


def _parse_pooling(name: str, raw: Mapping[str, Any]) -> PoolingSpec:
    try:
        spec = PoolingSpec(**raw)
    except TypeError as error:
        raise ConfigError(f"additional_config.{KEY}.adapters.{name}: {error}") from error
    if spec.pooling not in POOLING_KINDS:
        raise ConfigError(f"adapter {name!r}: pooling {spec.pooling!r} is not one of {POOLING_KINDS}")
    return spec
