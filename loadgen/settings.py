"""What a user may set, checked at the edge: a YAML file, then flags, then `--set key=value`, later ones winning.

Guards: unknown keys (with a suggestion), keys given twice, wrong types, contradictions. Inside the package the values of
`client.py`, `arrivals.py`, `lengths.py` and `stages.py` are used instead of these.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Share = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]


class Model(BaseModel):
    """Base of all settings: frozen, and no key that is not named here."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetSettings(Model):
    """A server. `embeddings_url` and `generation_url` default to `base_url`, `metrics_urls` to `<address>/metrics` of each."""

    name: str = "target"
    base_url: str = "http://127.0.0.1:8000"
    embeddings_url: str | None = None
    generation_url: str | None = None
    metrics_urls: tuple[str, ...] | None = None
    embed_model: str = "orthrus-embed"
    generate_model: str = "orthrus"
    api: Literal["completions", "chat"] = "completions"
    api_key_file: Path | None = None
    prepare: str | None = None


class ClosedSettings(Model):
    """`clients` requests in flight at all times; they begin over `ramp_s` seconds."""

    kind: Literal["closed"] = "closed"
    clients: PositiveInt = 64
    ramp_s: NonNegative = 0.0


class RateSettings(Model):
    """Open loop at `rate` requests per second: evenly spaced or Poisson."""

    kind: Literal["constant", "poisson"]
    rate: PositiveFloat


class GammaSettings(Model):
    """Open loop, bursty: gamma gaps with a coefficient of variation of `variation` (1 is Poisson)."""

    kind: Literal["gamma"]
    rate: PositiveFloat
    variation: PositiveFloat = 3.0


class RampSettings(Model):
    """Open loop whose Poisson rate changes in steps of (rate per second, seconds)."""

    kind: Literal["ramp"]
    steps: tuple[tuple[PositiveFloat, PositiveFloat], ...] = Field(min_length=1)


ArrivalSettings = Annotated[ClosedSettings | RateSettings | GammaSettings | RampSettings, Field(discriminator="kind")]


class UniformSettings(Model):
    """Evenly from `low` to `high` tokens."""

    low: PositiveInt
    high: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> "UniformSettings":
        if self.high < self.low:
            raise ValueError(f"high={self.high} is below low={self.low}")
        return self


class LogNormalSettings(Model):
    """Log-normal with the given median, cut to `low`..`high` tokens."""

    median: PositiveFloat
    sigma: PositiveFloat
    low: PositiveInt = 1
    high: PositiveInt


LengthSettings = PositiveInt | UniformSettings | LogNormalSettings


class PromptSettings(Model):
    """How prompts are made. `ids` sends token ids of real text, `random_ids` ids below `vocabulary` (no tokenizer needed)."""

    embed_tokens: LengthSettings = 640
    generate_tokens: LengthSettings = 640
    output_tokens: LengthSettings = 150
    form: Literal["text", "ids", "random_ids"] = "text"
    vocabulary: PositiveInt = 32_000
    corpus: Path | None = None
    tokens_per_word: PositiveFloat | None = None


class SamplingSettings(Model):
    """How generations are asked for."""

    temperature: NonNegative = 0.7
    ignore_eos: bool = True
    stream: bool = True
    extra_body: dict[str, object] = {}


class StopSettings(Model):
    """When a stage stops sending, and how long it waits for what is in flight then (default: the request timeout)."""

    max_requests: PositiveInt | None = None
    max_duration_s: PositiveFloat | None = None
    max_error_ratio: Share | None = 0.5
    drain_s: NonNegative | None = None


class GoalSettings(Model):
    """Latency goals in seconds; goodput counts the requests that meet all goals of their kind."""

    embed_e2e_s: PositiveFloat | None = None
    generate_ttft_s: PositiveFloat | None = None
    generate_tpot_s: PositiveFloat | None = None
    generate_e2e_s: PositiveFloat | None = None
    session_e2e_s: PositiveFloat | None = None


class ClientLimitSettings(Model):
    """Above any of these the client was the bottleneck: the run fails with exit code 3 and says so in every report."""

    schedule_lag_p99_s: PositiveFloat = 0.05
    loop_lag_p99_s: PositiveFloat = 0.05
    turnaround_p99_s: PositiveFloat = 0.05
    cpu_ratio: PositiveFloat = 0.9


class RatioSettings(Model):
    """Each request embeds or generates by a coin. `levels` runs a stage per value: clients or rates.

    `min_goodput_ratio` ends the levels once fewer requests than this meet their goals.
    """

    kind: Literal["ratio"]
    embed_share: Share = 0.5
    arrivals: ArrivalSettings = ClosedSettings()
    levels: tuple[PositiveFloat, ...] = ()
    min_goodput_ratio: Share = 0.0


class SingleSettings(Model):
    """One kind alone."""

    kind: Literal["embed", "generate"]
    arrivals: ArrivalSettings = ClosedSettings()
    levels: tuple[PositiveFloat, ...] = ()
    min_goodput_ratio: Share = 0.0


class PoolsSettings(Model):
    """A separate stream of arrivals per kind, sized by the user so that the offered ratio is the wanted one."""

    kind: Literal["pools"]
    embed: ArrivalSettings = ClosedSettings(clients=32)
    generate: ArrivalSettings = ClosedSettings(clients=32)


class PhasesSettings(Model):
    """Phases of changing embed share, a fixed number of requests each, at fixed concurrency."""

    kind: Literal["phases"]
    embed_shares: tuple[Share, ...] = Field(default=(0.1, 0.5, 0.9), min_length=1)
    requests_per_phase: PositiveInt = 1000
    clients: PositiveInt = 64


class BlockSettings(Model):
    """The worst block for first-come-first-served: all generations first, then at once all embeddings."""

    kind: Literal["block"]
    num_generate: PositiveInt = 1000
    num_embed: PositiveInt = 1000
    send_per_s: PositiveFloat = 1000.0


class IterRetGenSettings(Model):
    """Sessions: embed the query, retrieve, generate with what was found, build the next query from the text; again.

    `variant` says what is embedded in the loop: the query only, or the query and the retrieved documents.
    """

    kind: Literal["iter_retgen"]
    variant: Literal["query_only", "query_and_documents"] = "query_and_documents"
    arrivals: ArrivalSettings = ClosedSettings(clients=16)
    hops: LengthSettings = UniformSettings(low=2, high=5)
    documents: LengthSettings = UniformSettings(low=1, high=10)
    output_tokens: LengthSettings = 300
    document_tokens: PositiveInt = 120
    questions: Path | None = None
    corpus: Path | None = None
    max_passages: PositiveInt | None = None
    query_prefix: str = "query: "
    passage_prefix: str = "passage: "
    index: Literal["flat", "hnsw"] = "flat"
    index_cache: Path | None = Path("~/.cache/loadgen/index")


class TraceSettings(Model):
    """Replays a JSONL file of {timestamp, kind, prompt_tokens, output_tokens}, `speed` times as fast as recorded."""

    kind: Literal["trace"]
    path: Path
    speed: PositiveFloat = 1.0


WorkloadSettings = Annotated[
    RatioSettings
    | SingleSettings
    | PoolsSettings
    | PhasesSettings
    | BlockSettings
    | IterRetGenSettings
    | TraceSettings,
    Field(discriminator="kind"),
]


class BoundSettings(Model):
    """What the load-balance bound is computed for: a split of cards between the kinds, measured beside each other.

    `rates_from` names the target on which each kind is measured alone; that target has `cards` cards in all, and serves each
    kind with all of them (`rates: shared`) or with its part of the split (`rates: split`).
    """

    split: tuple[PositiveInt, PositiveInt]
    rates_from: str
    rates: Literal["shared", "split"] = "shared"


class CompareSettings(Model):
    """Several targets, interleaved round by round; the first is the baseline of all ratios."""

    targets: tuple[TargetSettings, ...] = Field(min_length=2)
    rounds: Annotated[int, Field(ge=2)] = 5
    bound: BoundSettings | None = None

    @model_validator(mode="after")
    def _names(self) -> "CompareSettings":
        names = [target.name for target in self.targets]
        if len(set(names)) < len(names):
            raise ValueError(f"targets need different names, got {', '.join(names)}")
        if self.bound is not None and self.bound.rates_from not in names:
            raise ValueError(f"bound.rates_from={self.bound.rates_from!r} is none of the targets {', '.join(names)}")
        return self


class Settings(Model):
    """Everything about one run. `warmup_s` None: until every request sent in the first burst has ended.

    `seed` None: drawn anew and written into the report, so that two runs against one server do not repeat their prompts.
    """

    target: TargetSettings = TargetSettings()
    workload: WorkloadSettings
    prompts: PromptSettings = PromptSettings()
    sampling: SamplingSettings = SamplingSettings()
    stop: StopSettings = StopSettings()
    goals: GoalSettings = GoalSettings()
    client_limits: ClientLimitSettings = ClientLimitSettings()
    compare: CompareSettings | None = None
    warmup_s: NonNegative | None = None
    timeout_s: PositiveFloat = 600.0
    processes: PositiveInt = 1
    seed: Annotated[int, Field(ge=0)] | None = None
