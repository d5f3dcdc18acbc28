"""How long each finished request was in each stage of its engine, by kind, from vLLM's own stamps.

vLLM publishes the same stages without the kind, so a queue of embeddings would hide that of generations. Leaves out requests
that were aborted, whose stamps may be missing, and how the times are published.
"""

from collections.abc import Callable, Iterator
from typing import Any

from typing_extensions import override
from vllm.v1.metrics.loggers import StatLoggerBase

from orthrus_serve.engine.vllm_compat import STATS_HOOKS, verify_hooks
from orthrus_serve.telemetry.catalog import Stage
from orthrus_serve.types import RequestKind

Observe = Callable[[RequestKind, Stage, float], None]
# How a request ends that was computed as far as it was to be.
_COMPLETE = ("stop", "length")


class StageTimes(StatLoggerBase):
    """A stat logger for AsyncLLM: hands the stages of every request that finished to `observe`."""

    def __init__(self, *_config_and_index: Any, observe: Observe) -> None:
        verify_hooks(STATS_HOOKS)
        self._observe = observe

    @override
    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        for finished in iteration_stats.finished_requests if iteration_stats is not None else ():
            for kind, stage, duration_s in stages_of(finished):
                self._observe(kind, stage, duration_s)

    @override
    def log_engine_initialized(self) -> None:
        pass


def stages_of(finished: Any) -> Iterator[tuple[RequestKind, Stage, float]]:
    """Kind, stage and seconds of a request that finished; nothing of one that was aborted.

    Args:
        finished: vLLM's `FinishedRequestStats`; only an embedding has no `max_tokens_param`.
    """
    if str(finished.finish_reason) not in _COMPLETE:
        return
    if finished.max_tokens_param is None:
        yield "embed", "queue", finished.queued_time
        yield "embed", "embed", finished.inference_time
    else:
        yield "generate", "queue", finished.queued_time
        yield "generate", "prefill", finished.prefill_time
        yield "generate", "decode", finished.decode_time
