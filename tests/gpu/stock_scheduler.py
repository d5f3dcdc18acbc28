"""vLLM's own schedulers with one thing added: the size of a step is read from a file, so that one start serves a whole sweep.

The file is named in `additional_config` (`step_tokens_file`), holds a whole number, and is looked at every 64 steps.
"""

from pathlib import Path
from typing import Any

from typing_extensions import override
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

LOOK_EVERY = 64


class _StepSizeFromFile(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most = self.max_num_scheduled_tokens
        self._file = Path(self.vllm_config.additional_config["step_tokens_file"])
        self._num_looked = 0

    @override
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._num_looked % LOOK_EVERY == 0 and self._file.exists():
            self.max_num_scheduled_tokens = min(self._most, int(self._file.read_text()))
        self._num_looked += 1
        return super().schedule(throttle_prefills)


class StockScheduler(_StepSizeFromFile, Scheduler):
    """For engines without async scheduling: pooling, and CPU."""


class StockAsyncScheduler(_StepSizeFromFile, AsyncScheduler):
    """For generations on CUDA. Subclassing `Scheduler` there would turn async scheduling off."""
