"""The `args` of an Orthrus application, parsed once into frozen values.

Guards: unknown keys, wrong types and contradictions stop the start and name the key. Leaves out: whether files exist and
whether vLLM accepts its own keys (`engine/args.py` and `orthrus-serve check` look at those).
"""

from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from orthrus_serve.config.clients import AdmissionSpec, ApiKeysSpec, StreamSpec
from orthrus_serve.config.embedder import TOPOLOGY as SEPARATE
from orthrus_serve.config.embedder import EmbedderSpec, embedder_problem, name_problem
from orthrus_serve.config.roles import ROLES, PrefillSplitSpec, RoutingSpec, SplitSpec, connector_problem
from orthrus_serve.config.section import Section, expand
from orthrus_serve.config.telemetry_keys import LogSpec, TracingSpec
from orthrus_serve.types import (
    Activation,
    CardShare,
    ClosedField,
    KvConnectorName,
    PolicyName,
    PoolingKind,
    Reduction,
    RouterRule,
    TopologyName,
)


class ModelSpec(Section):
    """The generator: a folder with Hugging Face files, and the name that clients put into `model`."""

    path: str = Field(min_length=1)
    name: str = Field(default="orthrus", min_length=1)

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return expand(value)


class HeadSpec(Section):
    """A dense layer over every hidden state of an input, and what makes one vector of its rows. For `pooling: all`.

    `path` is a safetensors file with `weight` `[out, hidden size]` and, if there is one, `bias` `[out]`. The states are kept
    until the input is complete, so `max_input_tokens` bounds them: longer inputs are refused, and the start is refused when
    all slots full of them would take more than `max_state_bytes`.
    """

    path: str = Field(min_length=1)
    activation: Activation = "none"
    reduction: Reduction = "mean"
    max_input_tokens: int = Field(default=1024, ge=1)
    max_state_bytes: int = Field(default=2**30, ge=1)

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return expand(value)


class GenerateAdapterSpec(Section):
    """A LoRA adapter that generates, under a name of its own."""

    path: str = Field(min_length=1)

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return expand(value)


class AdapterSpec(Section):
    """A LoRA adapter that embeds, and everything that stock HTTP bodies cannot say about it.

    `pooling` and `normalize` say how hidden states become a vector. `append_eos` appends the end-of-sequence token to the
    token ids of every input, token input included, unless it is there already. `dimensions` lists the lengths that a
    client may ask for (Matryoshka); the vector is cut, then normalised. No text prefix is ever added by the server. `head`
    goes with `pooling: all`, and only with it.
    """

    path: str = Field(min_length=1)
    pooling: PoolingKind = "last"
    normalize: bool = True
    append_eos: bool = True
    dimensions: tuple[int, ...] = ()
    head: HeadSpec | None = None

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return expand(value)

    @field_validator("dimensions")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(n < 1 for n in value):
            raise ValueError("every entry must be at least 1")
        return value

    @model_validator(mode="after")
    def _head_with_all(self) -> Self:
        if (self.pooling == "all") != (self.head is not None):
            raise ValueError("pooling: 'all' and head go together: a head turns all hidden states into one vector")
        return self


class EngineSpec(Section):
    """How one engine mixes kinds within a step.

    `min_share` is the smallest share of a step's budget that a kind with waiting work gets (0 to 0.5; policy `orthrus`), and
    `max_wait_steps` the number of steps after which a kind whose oldest request still waits goes first. `embed_weight` is what
    an embedding token counts beside one of a generation's prompt where the two share a step in proportion (policy `orthrus`).
    `target_tpot_ms` bounds the time of steps that hold decodes, by a model of step times fitted as the engine runs; None lets
    every step be as large as vLLM's `max_num_batched_tokens`.
    `step_log` names a file to which each step's composition is appended as a JSON line; None writes none. `peak_tflops` is
    what one device can do at most, for its utilisation; None takes it from a table of devices (`telemetry/device_peaks.py`).
    `card_share` is how two engines share a card (`separate_models` only; None: `remaining`), see `policy/card_share.py`.
    """

    min_share: float = Field(default=0.125, ge=0.0, le=0.5)
    embed_weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    max_wait_steps: int = Field(default=64, ge=1)
    target_tpot_ms: float | None = Field(default=None, gt=0)
    step_log: str | None = None
    peak_tflops: float | None = Field(default=None, gt=0)
    card_share: CardShare | None = None


class LimitSpec(Section):
    """What one request may ask for. Above any of these the answer is a 400 that names the field and the limit.

    `open_fields` are fields of vLLM's API that are closed without it (`request_check.CLOSED`).
    """

    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    max_inputs: int = Field(default=2048, ge=1)
    max_n: int = Field(default=128, ge=1)
    max_logprobs: int = Field(default=20, ge=0)
    open_fields: tuple[ClosedField, ...] = ()


class HealthSpec(Section):
    """When a replica that is alive but cannot serve leaves the pool, and when it is replaced.

    `max_failures` failures in a row put it out for the Front that met them; it returns when it answers a probe, which may take
    up to `probe_timeout_s`. A core that has not answered for `stall_s` is stalled: no Front sends it anything more, and
    `replace_after_s` later its replica is replaced. A step, on CPU or with a kernel to compile, must never take that long.
    """

    max_failures: int = Field(default=3, ge=1)
    probe_timeout_s: float = Field(default=30.0, gt=0)
    stall_s: float = Field(default=60.0, gt=0)
    replace_after_s: float = Field(default=60.0, ge=0)


class AutoscalingSpec(Section):
    """Let the load decide how many engine replicas run; `num_replicas` is then what the start begins with.

    The load is the remaining tokens of all replicas. One is added when it has been above `target_tokens_per_replica` each for
    `upscale_delay_s`, and removed, after it has finished what it runs, when the rest would have had room to spare for
    `downscale_delay_s`. Zero replicas would make a request wait for a whole start, so there is always one.
    """

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(ge=1)
    target_tokens_per_replica: int = Field(ge=1)
    upscale_delay_s: float = Field(default=30.0, ge=0)
    downscale_delay_s: float = Field(default=600.0, ge=0)


class FrontSpec(Section):
    """The deployment that speaks HTTP. `num_replicas` None means one for each engine replica on GPUs and one for every
    two on CPU. `session_header` is where clients name their session, which keeps its arm."""

    num_replicas: int | None = Field(default=None, ge=1)
    num_cpus: float = Field(default=0.1, ge=0)
    session_header: str = Field(default="x-session-id", pattern=r"^[A-Za-z0-9-]+$")


class RouterSpec(Section):
    """How an engine replica is chosen. `rule` None is the topology's own."""

    rule: RouterRule | None = None


class MirrorSpec(Section):
    """Copies this share of what arm `from` answers to arm `to`, whose answers to them go nowhere."""

    source: str = Field(alias="from")
    target: str = Field(alias="to")
    share: float = Field(ge=0.0, le=1.0)


class FrontLiveSpec(RoutingSpec):
    """The `user_config` of the Fronts: what may change while they run.

    With arms, each has its routing under `arms`. `weights` name every arm, and None weighs them alike.
    """

    weights: dict[str, Annotated[float, Field(ge=0.0)]] | None = None
    mirror: MirrorSpec | None = None
    arms: dict[str, RoutingSpec] = Field(default_factory=dict)


class LiveSpec(Section):
    """The `user_config` of the engines: what may change while they run. None leaves a setting as the start made it.

    `topology` is the one whose policy is meant when `policy` is None, and what the metrics are labelled with.
    """

    topology: TopologyName | None = None
    policy: PolicyName | None = None
    min_share: float | None = Field(default=None, ge=0.0, le=0.5)
    embed_weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_wait_steps: int | None = Field(default=None, ge=1)
    target_tpot_ms: float | None = Field(default=None, gt=0)
    step_tokens: int | None = Field(default=None, ge=1)
    card_share: CardShare | None = None


class ArmSpec(Section):
    """One arm of an A/B test: a pool of its own. `engine` and `vllm` change single keys of those of the application; `router`
    None is that of the application."""

    topology: TopologyName
    num_replicas: int = Field(default=1, ge=1)
    dedicated: SplitSpec | None = None
    disagg_pd: PrefillSplitSpec | None = None
    router: RouterSpec | None = None
    autoscaling: AutoscalingSpec | None = None
    engine: EngineSpec = EngineSpec()
    vllm: dict[str, Any] = Field(default_factory=dict)


# What each arm says for itself.
OF_ARMS = ("topology", "num_replicas", "dedicated", "disagg_pd", "autoscaling")


class AppArgs(Section):
    """The `args` of `orthrus_serve.app:build` in a Serve file.

    `kv_connector` is what moves KV between engines, for topology `disagg_pd`; with it in the file, a running application can be
    switched to that topology. KV that nobody fetches is freed `kv_lease_s` after it was computed.

    With `arms`, everything that is one pool's is read from `by_arm`; `topology` here is then that of the first arm.
    """

    topology: TopologyName
    model: ModelSpec
    adapters: dict[str, AdapterSpec] = Field(default_factory=dict)
    embedder: EmbedderSpec | None = None
    generate_adapters: dict[str, GenerateAdapterSpec] = Field(default_factory=dict)
    num_replicas: int = Field(default=1, ge=1)
    num_gpus_per_replica: float = Field(default=1.0, ge=0)
    num_cpus_per_replica: float = Field(default=1.0, ge=0)
    embed_adapter: str | None = None
    engine: EngineSpec = EngineSpec()
    limits: LimitSpec = LimitSpec()
    streams: StreamSpec = StreamSpec()
    front: FrontSpec = FrontSpec()
    router: RouterSpec = RouterSpec()
    dedicated: SplitSpec | None = None
    disagg_pd: PrefillSplitSpec | None = None
    kv_connector: KvConnectorName | None = None
    kv_lease_s: int = Field(default=120, ge=6)
    health: HealthSpec = HealthSpec()
    admission: AdmissionSpec | None = None
    api_keys: ApiKeysSpec | None = None
    autoscaling: AutoscalingSpec | None = None
    tracing: TracingSpec | None = None
    log: LogSpec = LogSpec()
    vllm: dict[str, Any] = Field(default_factory=dict)
    arms: dict[str, ArmSpec] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        embedder = [] if self.embedder is None else [self.embedder.name]
        problem = name_problem([self.model.name, *embedder, *self.adapters, *self.generate_adapters])
        if problem is None and not self.arms:  # each arm is checked as an application of its own
            problem = embedder_problem(self.topology, self.embedder, self.adapters, self.engine.card_share)
        if problem is not None:
            raise ValueError(problem)
        if self.embed_adapter is not None and self.embed_adapter not in self.adapters:
            raise ValueError(f"embed_adapter: {self.embed_adapter!r} is not one of {sorted(self.adapters)}")
        gpus = self.num_gpus_per_replica
        if gpus > 1 and gpus != int(gpus):
            raise ValueError(f"num_gpus_per_replica: above one it must be a whole number, got {gpus:g}")
        if self.arms:
            return self
        self._check_autoscaling()
        if self.topology in ROLES and self.num_replicas < 2:
            raise ValueError(
                f"num_replicas: topology {self.topology} needs at least 2, {ROLES[self.topology]}; got {self.num_replicas}"
            )
        problem = connector_problem(self.topology, self.kv_connector, self.vllm)
        if problem is not None:
            raise ValueError(problem)
        return self

    def _check_autoscaling(self) -> None:
        spec = self.autoscaling
        if spec is None:
            return
        if spec.max_replicas < spec.min_replicas:
            raise ValueError(
                f"autoscaling.max_replicas: must be at least min_replicas ({spec.min_replicas}), got {spec.max_replicas}"
            )
        if not spec.min_replicas <= self.num_replicas <= spec.max_replicas:
            raise ValueError(
                f"num_replicas: must be from autoscaling.min_replicas to max_replicas ({spec.min_replicas} to "
                f"{spec.max_replicas}), got {self.num_replicas}"
            )
        if self.topology in ROLES and spec.min_replicas < 2:
            raise ValueError(f"autoscaling.min_replicas: topology {self.topology} needs at least 2")

    @property
    def by_arm(self) -> dict[str, "AppArgs"]:
        """The args of each arm as those of an application of its own; without arms, these, under the empty name."""
        return {name: self.of_arm(name) for name in self.arms} or {"": self}

    def of_arm(self, name: str) -> "AppArgs":
        """The args of one arm. Raises ValidationError when they contradict each other."""
        # What the application says is taken as parsed: nothing of it is checked, or expanded, twice.
        arm = self.arms[name]
        of_arm: dict[str, Any] = {key: getattr(arm, key) for key in OF_ARMS}
        of_arm["router"] = arm.router or self.router
        of_arm["engine"] = self.engine.model_copy(update=arm.engine.model_dump(exclude_unset=True))
        of_arm["vllm"] = {**self.vllm, **arm.vllm}
        # An arm has one thing that embeds: the embedder in its own topology, adapters in all others.
        of_arm |= {"adapters": {}, "embed_adapter": None} if arm.topology == SEPARATE else {"embedder": None}
        kept = {key: getattr(self, key) for key in type(self).model_fields if key not in (*of_arm, "arms")}
        return AppArgs.model_validate({**kept, **of_arm})

    @property
    def most_replicas(self) -> int:
        """Engine replicas that may ever run."""
        if self.arms:
            return sum(args.most_replicas for args in self.by_arm.values())
        return self.autoscaling.max_replicas if self.autoscaling is not None else self.num_replicas

    def routed(self, live: RoutingSpec | None = None) -> RoutingSpec:
        """What Fronts go by: what `args` say, with what is changed live."""
        if live is None:
            live = RoutingSpec()
        topology = live.topology or self.topology
        rule = live.rule or (self.router.rule if topology == self.topology else None)
        dedicated, disagg_pd = live.dedicated or self.dedicated, live.disagg_pd or self.disagg_pd
        return RoutingSpec(topology=topology, rule=rule, dedicated=dedicated, disagg_pd=disagg_pd)

    @property
    def base_name_adapter(self) -> str | None:
        """What answers `/v1/embeddings` under the generator's name: the embedder, `embed_adapter`, or the only adapter."""
        if self.embedder is not None:
            return self.embedder.name
        if self.embed_adapter is not None:
            return self.embed_adapter
        return next(iter(self.adapters)) if len(self.adapters) == 1 else None
