"""The mixed scheduler: decides caps and order around vLLM's own `schedule()`, and leaves the scheduling to it.

Adds to stock: a lane per kind, quotas per step by policy, no prefix-cache reads for pooling that needs every hidden state, a
record of what each step held, and the core's end of the channel. vLLM names this module by `scheduler_cls`; importing it in
EngineCore also installs the channel.
"""

from typing import Any

from typing_extensions import override

from orthrus_serve.engine.channel import CoreChannelMixin, install_channel
from orthrus_serve.engine.lane_queue import LaneQueue, lane_of, tokens_left
from orthrus_serve.engine.settings import EngineSettings
from orthrus_serve.engine.step_record import StepRecorder
from orthrus_serve.engine.vllm_compat import (
    SCHEDULER_HOOKS,
    AsyncScheduler,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
    verify_hooks,
)
from orthrus_serve.policy.step_plan import LANES, Admissible, Lane, LaneLoad, StepPlan, plan_alternating, plan_step
from orthrus_serve.types import PolicyName

verify_hooks(SCHEDULER_HOOKS)
install_channel()


class MixedSchedulerMixin(CoreChannelMixin):
    """Quotas per kind around the stock scheduler. Mixed into `Scheduler` and `AsyncScheduler` below."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = EngineSettings.from_additional_config(self.vllm_config.additional_config)
        self.mixing_policy: PolicyName = self.settings.policy
        self.min_share = self.settings.min_share
        self.waiting = LaneQueue()
        self.recorder = StepRecorder(self.settings.step_log)
        self._idle_lane: Lane | None = None
        self._last_lane = Lane.EMBED

    @override
    def add_request(self, request: Request) -> None:
        if request.pooling_params is not None:
            adapter = request.lora_request.lora_name if request.lora_request else None
            pooling = self.settings.pooling_of(adapter, request.pooling_params.extra_kwargs)
            if pooling.needs_every_state:
                request.skip_reading_prefix_cache = True
        super().add_request(request)

    @override
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        budget = self.max_num_scheduled_tokens
        plan = self._plan(budget)
        if plan is not None:
            self.waiting.begin(plan)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self._idle_lane = None
            self.waiting.end()
        self._record(output, budget)
        self.push_report()
        return output

    # Both loops of the stock schedule() call this with the token count of each request, and take 0 for "not now".
    @override
    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        count = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        lane = lane_of(request)
        if lane == self._idle_lane:
            return 0
        if request.status == RequestStatus.RUNNING and not request.is_prefill_chunk:
            return count  # a decode: reserved before the quotas were made
        return self.waiting.take(lane, count)

    def _plan(self, budget: int) -> StepPlan | None:
        """This step's plan; None means arrival order without quotas."""
        if self.mixing_policy == "hetero_fcfs":
            return None
        # Decodes first: they are reserved, and stock preemption takes its victims from the tail. The sort is stable.
        self.running.sort(key=lambda request: request.is_prefill_chunk)
        prefill, num_decodes = self._running_tokens()
        free_slots = self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input
        free_blocks = self._num_free_blocks()
        loads = (
            LaneLoad(prefill[0], self._admissible(Lane.GENERATE, free_slots, budget)),
            LaneLoad(prefill[1], self._admissible(Lane.EMBED, free_slots, budget)),
        )
        if self.mixing_policy == "orthrus":
            return plan_step(budget - num_decodes, loads, free_slots, free_blocks, self.min_share)
        work = [bool(load.running_tokens or (load.waiting and load.waiting[0].blocks <= free_blocks)) for load in loads]
        work[Lane.GENERATE] = work[Lane.GENERATE] or num_decodes > 0
        self._last_lane, plan = plan_alternating(self._last_lane, (work[0], work[1]), budget)
        self._idle_lane = self._last_lane.other
        return plan

    def _running_tokens(self) -> tuple[list[int], int]:
        """Prefill tokens left of running requests per lane, and tokens of the decodes that this step will compute."""
        prefill, num_decodes = [0, 0], 0
        for request in self.running:
            count = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            if request.is_prefill_chunk:
                prefill[lane_of(request)] += max(count, 0)
            elif not _last_token_in_flight(request):
                num_decodes += max(count, 0)
        return prefill, num_decodes

    def _admissible(self, lane: Lane, free_slots: int, budget: int) -> tuple[Admissible, ...]:
        """Heads of a lane's line that could start, up to the free slots and one budget's worth of tokens."""
        heads: list[Admissible] = []
        tokens = 0
        for request in self.waiting.line(lane):
            if len(heads) >= free_slots or tokens >= budget:
                break
            heads.append(Admissible(tokens_left(request), -(-request.num_tokens // self.block_size)))
            tokens += heads[-1].tokens
        return tuple(heads)

    def _num_free_blocks(self) -> int:
        # With nothing running, every head must be tried: the block count is an estimate (sliding windows need fewer), and
        # a head held back by it would wait for ever.
        pool = self.kv_cache_manager.block_pool
        return pool.get_num_free_blocks() if self.running else pool.num_gpu_blocks * self.max_num_active_reqs

    def _record(self, output: SchedulerOutput, budget: int) -> None:
        rows: dict[str, tuple[str, int, int]] = {}
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens - count  # advanced by the stock schedule() already
            if lane_of(request) is Lane.EMBED:
                rows[request_id] = ("embed", start, count)
            else:
                rows[request_id] = ("decode" if start >= request.num_prompt_tokens else "prefill", start, count)
        preempted = sorted(output.preempted_req_ids or ())
        facts = {"policy": self.mixing_policy, "waiting": len(self.waiting), "preempted": preempted}
        self.recorder.record(rows, budget, facts)


def _last_token_in_flight(request: Request) -> bool:
    """Async scheduling: the stock loop skips a request whose last token is still being computed, so reserve nothing."""
    placeholders = request.num_output_placeholders
    done = request.num_computed_tokens + 2 - placeholders
    return placeholders > 0 and done >= request.num_prompt_tokens + request.max_tokens


class MixedScheduler(MixedSchedulerMixin, Scheduler):
    """The mixed scheduler where async scheduling is off (CPU)."""


class MixedAsyncScheduler(MixedSchedulerMixin, AsyncScheduler):
    """The mixed scheduler where async scheduling is on (CUDA). Subclassing `Scheduler` there would turn it off."""


__all__ = ["LANES", "MixedAsyncScheduler", "MixedScheduler", "MixedSchedulerMixin"]
