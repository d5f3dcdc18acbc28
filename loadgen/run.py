"""One run against one target, from settings to a report: prepare, send, measure. Shows nothing; tells a `Watcher`."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from loadgen import settings as user
from loadgen.client import Client, Sampling, Target, make_session
from loadgen.client_verdict import ClientLimits
from loadgen.corpus import Corpus, load_corpus
from loadgen.errors import SettingsError
from loadgen.fleet import Fleet
from loadgen.measures import Goals, Window, summarise
from loadgen.plan import stages_of
from loadgen.preparation import check_target, corpus_vectors, make_prompt_table, vectors_file
from loadgen.prompts import PromptTable
from loadgen.provenance import make_provenance
from loadgen.questions import answerable, corpus_for, load_questions
from loadgen.records import Kind, StageResult
from loadgen.server_metrics import Poller, monotonic_since, window
from loadgen.stages import Listed, Mix, Place, Sessions, Stage
from loadgen.summary import SCHEMA, RunReport, Series, ServerSummary, StageSummary
from loadgen.worker import Job, LibraryParts, Snapshot

WORDS_PER_TOKEN = 0.7  # cuts documents to about so many tokens
MAX_POINTS = 4000  # per series, for pictures


class Watcher(Protocol):
    """Whoever shows what goes on."""

    def say(self, text: str) -> None:
        """Something happened."""

    def begin_stage(self, stage: Stage, number: int, num_stages: int) -> None:
        """A stage is about to start."""

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """A worker tells how far it is."""

    def end_stage(self, summary: StageSummary) -> None:
        """A stage has been measured."""


@dataclass(frozen=True)
class Prepared:
    """What was learnt from a target before the load; may serve several runs against it."""

    table: PromptTable
    library: LibraryParts | None
    prompts: str  # a sentence about corpus and sizes, for the report


def run(settings: user.Settings, watcher: Watcher, prepared: Prepared | None = None) -> RunReport:
    """Runs all stages and returns the report.

    Raises:
        SettingsError, TargetError, WorkerError: there is no result.
    """
    stages = stages_of(settings)
    if settings.sampling.stream is False:
        watcher.say("without streaming there is no TTFT, TPOT or ITL")
    target = target_of(settings.target)
    seed = settings.seed or 0
    provenance = make_provenance(target, seed, settings.processes)
    prepared = prepared or asyncio.run(prepare(settings, target, stages, watcher))
    zero_s = time.monotonic()
    job = Job(
        place=Place(0, settings.processes, seed),
        target=target,
        sampling=sampling_of(settings.sampling),
        stages=stages,
        table=prepared.table,
        library=prepared.library,
        zero_s=zero_s,
    )
    poller = Poller(target.metrics_urls, monotonic_since(zero_s))
    poller.start()
    try:
        summaries, series = _run_stages(settings, job, poller, watcher)
    finally:
        poller.stop()
    return RunReport(
        schema=SCHEMA,
        target=target.name,
        workload=settings.workload.kind,
        prompts=prepared.prompts,
        provenance=provenance,
        settings=settings.model_dump(mode="json"),
        stages=summaries,
        series=series,
    )


def _run_stages(
    settings: user.Settings, job: Job, poller: Poller, watcher: Watcher
) -> tuple[list[StageSummary], list[Series]]:
    summaries: list[StageSummary] = []
    series: list[Series] = []
    goals = Goals(**settings.goals.model_dump())
    limits = ClientLimits(**settings.client_limits.model_dump())
    with Fleet(job, settings.processes) as fleet:
        for index, stage in enumerate(job.stages):
            watcher.begin_stage(stage, index + 1, len(job.stages))
            results = fleet.run_stage(index, watcher.on_snapshot)
            poller.read()
            rng = np.random.default_rng([job.place.seed, 99, index])
            summary = summarise(stage, results, goals, limits, lambda seen: _server_in(poller, seen), rng)
            summaries.append(summary)
            series += series_of(stage, results)
            watcher.end_stage(summary)
            if _goodput_is_gone(settings.workload, summary):
                watcher.say(f"{stage.name}: goodput fell below the limit, the levels end here")
                break
    return summaries, series


def _server_in(poller: Poller, seen: Window) -> ServerSummary:
    counted = window(poller.readings, seen.begin_s, seen.end_s)
    return ServerSummary(
        prefix_hit_ratio=counted.prefix_hit_ratio,
        step_fill=counted.step_fill,
        mixed_step_ratio=counted.mixed_step_ratio,
        mean_running=counted.mean_running,
        mean_waiting=counted.mean_waiting,
    )


def _goodput_is_gone(workload: user.WorkloadSettings, summary: StageSummary) -> bool:
    if not isinstance(workload, user.RatioSettings | user.SingleSettings):
        return False
    ratios = [kind.goodput_ratio for kind in summary.kinds if kind.goodput_ratio is not None]
    return bool(ratios) and min(ratios) < workload.min_goodput_ratio


def target_of(settings: user.TargetSettings) -> Target:
    """The inner form of a target.

    Raises:
        SettingsError: the key file cannot be read.
    """
    embeddings = (settings.embeddings_url or settings.base_url).rstrip("/")
    generation = (settings.generation_url or settings.base_url).rstrip("/")
    pages = tuple(dict.fromkeys(f"{url}/metrics" for url in (embeddings, generation)))
    return Target(
        name=settings.name,
        embeddings_url=embeddings.removesuffix("/v1"),
        generation_url=generation.removesuffix("/v1"),
        metrics_urls=pages if settings.metrics_urls is None else settings.metrics_urls,
        embed_model=settings.embed_model,
        generate_model=settings.generate_model,
        api=settings.api,
        api_key=None if settings.api_key_file is None else _read_key(settings.api_key_file),
        prepare=settings.prepare,
    )


def sampling_of(settings: user.SamplingSettings) -> Sampling:
    """The inner form of sampling."""
    return Sampling(settings.temperature, settings.ignore_eos, settings.stream, settings.extra_body)


async def prepare(settings: user.Settings, target: Target, stages: Sequence[Stage], watcher: Watcher) -> Prepared:
    """Asks the target what must be known before the load."""
    kinds = kinds_of(stages)
    async with make_session() as http:
        client = Client(target, sampling_of(settings.sampling), http, time.monotonic)
        await check_target(client, kinds, target)
        if isinstance(settings.workload, user.IterRetGenSettings):
            corpus, library = await _library(settings.workload, target, client, settings.seed or 0, watcher)
            text = f"{corpus.name}, {len(corpus.passages)} passages; {len(library.questions)} questions"
            return Prepared(_no_table(), library, text)
        corpus = load_corpus(settings.prompts.corpus)
        table = await make_prompt_table(target, settings.prompts, corpus, kinds, client, http)
    return Prepared(table, None, f"unique prompts from {corpus.name}; lengths {table.sizing}")


async def _library(
    workload: user.IterRetGenSettings, target: Target, client: Client, seed: int, watcher: Watcher
) -> tuple[Corpus, LibraryParts]:
    corpus = corpus_for(workload.corpus, workload.questions, workload.max_passages)
    questions = answerable(load_questions(workload.questions, corpus, seed), corpus)
    cache = workload.index_cache
    file: Path | None = None
    if cache is not None:
        file = vectors_file(cache, target.embed_model, corpus.passages, workload.passage_prefix)
    watcher.say(f"embedding {len(corpus.passages)} passages for the index (kept for the next run)")
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if done * 10 // len(corpus.passages) > before * 10 // len(corpus.passages):
            watcher.say(f"  {done} of {len(corpus.passages)}")

    vectors = await corpus_vectors(client, corpus.passages, workload.passage_prefix, file, progress)
    return corpus, LibraryParts(
        passages=corpus.passages,
        vectors=vectors,
        index=workload.index,
        questions=questions,
        query_prefix=workload.query_prefix,
        passage_prefix=workload.passage_prefix,
        document_words=max(round(workload.document_tokens * WORDS_PER_TOKEN), 1),
        embed_documents=workload.variant == "query_and_documents",
    )


def kinds_of(stages: Sequence[Stage]) -> tuple[Kind, ...]:
    """The kinds that a run will send."""
    kinds: set[Kind] = set()
    for content in (stream.content for stage in stages for stream in stage.streams):
        match content:
            case Mix(embed_share):
                kinds |= {"embed"} if embed_share > 0 else set()
                kinds |= {"generate"} if embed_share < 1 else set()
            case Listed(works):
                kinds |= {work.kind for work in works}
            case Sessions():
                kinds |= {"embed", "generate"}
    return tuple(kind for kind in ("embed", "generate") if kind in kinds)


def series_of(stage: Stage, results: Sequence[StageResult]) -> list[Series]:
    """The points of the pictures, thinned evenly."""
    series: list[Series] = []
    records = sorted((record for result in results for record in result.records), key=lambda record: record.sent_s)
    for kind in ("embed", "generate"):
        mine = [record for record in records if record.kind == kind and record.ok]
        if not mine:
            continue
        step = max(len(mine) // MAX_POINTS, 1)
        thin = mine[::step]
        series.append(
            Series(
                stage=stage.name,
                kind=kind,
                sent_s=[round(record.sent_s, 4) for record in thin],
                ended_s=[round(record.ended_s, 4) for record in thin],
                e2e_s=[round(record.e2e_s, 5) for record in thin],
                ttft_s=[round(record.ttft_s, 5) for record in thin if record.ttft_s is not None],
            )
        )
    return series


def _no_table() -> PromptTable:
    """Sessions make their own prompts."""
    none = np.zeros(0, dtype=np.int64)
    return PromptTable(words=(), sizes=none, first_words=(), first_sizes=none, extra={}, sizing="")


def _read_key(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(f"target.api_key_file: {path} cannot be read: {error.strerror}") from error
