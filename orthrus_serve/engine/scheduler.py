"""The mixed scheduler: decides budget, caps and order around vLLM's own `schedule()`, and leaves the scheduling to it.

Adds to stock: a lane per kind, quotas per step by policy, a step-time target, no prefix-cache reads for pooling that needs
every hidden state, a record of what each step held, and the core's end of the channel. vLLM names this module by
`scheduler_cls`; importing it in EngineCore also installs the channel.
"""

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip, get_open_port

from orthrus_serve.config.environment import kv_side_channel
from orthrus_serve.engine.channel import CoreChannelMixin, install_channel
from orthrus_serve.engine.kv_handover import (
    DIGEST,
    give_up_late,
    is_to_fetch,
    problem_with,
    prompt_digest,
    with_deadline,
)
from orthrus_serve.engine.lane_queue import LaneQueue, adapter_of, lane_of, tokens_left
from orthrus_serve.engine.model_flops import flops_of
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
from orthrus_serve.engine.vllm_fixes import NO_TOKEN_LEFT
from orthrus_serve.policy.step_plan import (
    LANES,
    Adapters,
    Admissible,
    Ages,
    Lane,
    LaneLoad,
    StepPlan,
    plan_alternating,
    plan_step,
    usable_waiting_tokens,
)
from orthrus_serve.policy.step_time import StepTimeModel, step_budget
from orthrus_serve.telemetry.catalog import LABEL_VALUES
from orthrus_serve.telemetry.device_peaks import peak_flops
from orthrus_serve.telemetry.log import event_log

log = event_log(__name__)

verify_hooks(SCHEDULER_HOOKS)
install_channel()

# Tokens beside decodes that a time target never takes away, so that every wait stays bounded.
LEAST_PREFILL_TOKENS = 16


@dataclass(frozen=True)
class Work:
    """What there is to do before a step: decode tokens, each lane's load, free slots and KV blocks, adapters of the running."""

    decodes: int
    loads: tuple[LaneLoad, LaneLoad]
    free_slots: int
    free_blocks: int
    ages: Ages
    adapters: Adapters

    @property
    def usable_tokens(self) -> int:
        """Tokens that could be computed at once, were there no budget; waiting requests only as slots and memory allow."""
        running = self.loads[0].running_tokens + self.loads[1].running_tokens
        waiting = usable_waiting_tokens(self.loads, self.free_slots, self.free_blocks, self.adapters)
        return self.decodes + running + waiting


class MixedSchedulerMixin(CoreChannelMixin):
    """Quotas per kind around the stock scheduler. Mixed into `Scheduler` and `AsyncScheduler` below."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        if vllm_config.kv_transfer_config is not None:
            # One for each engine of a machine, chosen only now, a moment before the connector listens there. Minutes before,
            # when the core is started, it could be lost to any connection, and the connector then waits for ever.
            kv_side_channel(get_ip(), get_open_port())
        super().__init__(vllm_config, *args, **kwargs)
        self.settings = EngineSettings.from_additional_config(self.vllm_config.additional_config)
        self.live = self.settings.live
        self.waiting = LaneQueue()
        self.recorder = StepRecorder(self.settings.step_log, flops_of(self.vllm_config))
        self._peak_flops = self.settings.peak_flops or peak_flops(current_platform.get_device_name())
        self._adapter_requests: dict[str, int] = {}
        self._adapter_waits = 0
        self._handovers: dict[str, int] = dict.fromkeys(LABEL_VALUES["fetch"], 0)
        self.step_time = StepTimeModel(scale=self.scheduler_config.max_num_batched_tokens)
        self._own_budget = self.max_num_scheduled_tokens
        self._idle_lane: Lane | None = None
        self._adapters = Adapters()
        self._used: tuple[set[int], set[int]] = (set(), set())  # adapters of running requests by lane, 0 for none
        self._last_lane = Lane.EMBED
        self._in_flight: deque[tuple[int, int, float]] = deque()  # tokens, decodes, start of each step not yet updated
        self._last_end_s = 0.0

    @override
    def add_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        # One that is refused by the app comes with another prompt, only to free what is kept for it.
        if params is not None and is_to_fetch(params) and not request.abort_immediately:
            connector = self.vllm_config.kv_transfer_config
            problem = (
                "there is no connector" if connector is None else problem_with(params, request, connector.engine_id)
            )
            if connector is None or problem is not None:
                log.error("handover_refused", request=request.request_id, problem=problem)
                request.kv_transfer_params = None
                self._handovers["refused"] += 1
            else:
                self._handovers["accepted"] += 1
                lease_s = connector.get_from_extra_config("kv_lease_duration", 0)
                request.kv_transfer_params = with_deadline(params, lease_s, time.monotonic())
        if request.pooling_params is not None:
            adapter = request.lora_request.lora_name if request.lora_request else None
            pooling = self.settings.pooling_of(adapter, request.pooling_params.extra_kwargs)
            if pooling.needs_every_state:
                request.skip_reading_prefix_cache = True
        if request.lora_request is not None:
            name = request.lora_request.lora_name
            self._adapter_requests[name] = self._adapter_requests.get(name, 0) + 1
        super().add_request(request)

    @override
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.waiting.tick()
        if self.live.policy != "hetero_fcfs":
            # Decodes first: they are reserved, and stock preemption takes its victims from the tail. The sort is stable.
            self.running.sort(key=lambda request: request.is_prefill_chunk)
        work = self._survey()
        budget = self._card_budget(work, self._step_budget(work))
        plan = self._plan(work, budget)
        if plan is not None:
            self.waiting.begin(plan)
        self.max_num_scheduled_tokens = budget  # what the stock loop starts from
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self._idle_lane = None
            self.waiting.end()
        if self.card is not None:
            self.card.computed(output.total_num_scheduled_tokens, is_line_empty=not self.waiting)
        self._record(output, budget, work)
        self.push_report()
        return output

    @override
    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if self._in_flight:
            # Steps overlap with async scheduling: a step runs from its start or the end of the one before, whichever is later.
            tokens, decodes, start_s = self._in_flight.popleft()
            end_s = time.monotonic()
            duration_s = end_s - max(start_s, self._last_end_s)
            self._last_end_s = end_s
            self.step_time.observe(tokens, decodes, duration_s)
            if tokens:  # a step without any only tells the worker who has finished
                self.recorder.totals.took(duration_s, has_decodes=decodes > 0, target_s=self._target_s)
        running = list(self.running) if self.card is not None else []
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if self.card is not None:
            self.card.learn(running)
        return outputs

    # Both loops of the stock schedule() call this with the token count of each request, and take 0 for "not now".
    @override
    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        count = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        lane = lane_of(request)
        if lane == self._idle_lane:
            return 0
        if request.status != RequestStatus.RUNNING:
            self._used[lane].add(adapter_of(request))  # it starts, or the stock loop ends with it
        elif not request.is_prefill_chunk:
            return count  # a decode: reserved before the quotas were made
        return self.waiting.take(lane, count)

    # Called for each head that the stock loop looks at; False means "skip it for this step".
    @override
    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        # The stock loop counts the adapters of this step only. A running request that gets no token in it counts too: it must
        # find its place in the next one.
        adapter = adapter_of(request)
        if adapter and not self._places_beside(lane_of(request)).admits(adapter):
            self._adapter_waits += 1
            return False
        if give_up_late(request.kv_transfer_params, time.monotonic()):
            log.warning("handover_too_late", request=request.request_id)
            self._handovers["late"] += 1
        return super()._handle_blocked_waiting_request(request)

    # Called for every request that ends, before its last output is made. The connector's own parameters of a finished prompt go
    # out with what the prompt was.
    @override
    def _connector_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        if request.status == RequestStatus.FINISHED_ERROR and request.use_structured_output:
            request.stop_reason = NO_TOKEN_LEFT
        is_kept, params = super()._connector_finished(request)
        return is_kept, {**params, DIGEST: prompt_digest(request)} if params else params

    @override
    def facts(self) -> dict[str, Any]:
        """See the catalogue's `orthrus_engine_*`; counts since the engine started."""
        pool = self.kv_cache_manager.block_pool
        return {
            "kv_free_blocks": pool.get_num_free_blocks(),
            "kv_blocks": pool.num_gpu_blocks,
            "target_s": self._target_s,
            "peak_flops": self._peak_flops,
            "adapters": len({adapter_of(request) for request in self.running} - {0}),
            "adapter_places": self.lora_config.max_loras if self.lora_config else 0,
            "adapter_requests": dict(self._adapter_requests),  # encoded on another thread, while this one goes on
            "adapter_waits": self._adapter_waits,
            "handovers": dict(self._handovers),
        }

    @property
    def _target_s(self) -> float | None:
        target_ms = self.live.target_tpot_ms
        return None if target_ms is None else target_ms / 1e3

    def _step_budget(self, work: Work) -> int:
        largest = min(self._own_budget, self.live.step_tokens or self._own_budget)
        return step_budget(
            self.step_time,
            self._target_s,
            work.decodes,
            least_prefill=LEAST_PREFILL_TOKENS,
            max_tokens=largest,
        )

    def _card_budget(self, work: Work, budget: int) -> int:
        """What this engine may compute of it, where another one shares the card."""
        if self.card is None or self.live.card_share is None:
            return budget
        return self.card.budget(
            self.live.card_share,
            self.live.min_share,
            work.decodes,
            budget,
            requests=self.requests.values(),
            can_chunk=self.scheduler_config.enable_chunked_prefill,
        )

    def _plan(self, work: Work, budget: int) -> StepPlan | None:
        """This step's plan; None means arrival order without quotas."""
        # Alternating steps may leave more adapters running than one mixed step holds: until some end, steps go on alternating.
        crowded = len(work.adapters.used) > work.adapters.most
        if self.live.policy == "hetero_fcfs" and not crowded:
            return None
        if self.live.policy == "orthrus" and not crowded:
            return plan_step(
                budget - work.decodes,
                work.loads,
                free_slots=work.free_slots,
                free_blocks=work.free_blocks,
                min_share=self.live.min_share,
                embed_weight=self.live.embed_weight,
                ages=work.ages,
                adapters=work.adapters,
            )
        has_work = [
            bool(load.running_tokens or (load.waiting and load.waiting[0].blocks <= work.free_blocks))
            for load in work.loads
        ]
        has_work[Lane.GENERATE] = has_work[Lane.GENERATE] or work.decodes > 0
        self._last_lane, plan = plan_alternating(self._last_lane, (has_work[0], has_work[1]), budget)
        self._idle_lane = self._last_lane.other
        return plan

    def _survey(self) -> Work:
        prefill, decodes = [0, 0], 0
        self._used = (set(), set())
        for request in self.running:
            count = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            lane = lane_of(request)
            if request.is_prefill_chunk:
                prefill[lane] += max(count, 0)
            elif _last_token_in_flight(request):
                continue
            else:
                decodes += max(count, 0)
            self._used[lane].add(adapter_of(request))
        for request in self.kv_holding_waiting:  # offered before all others, once their KV is there
            if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS or self._has_arrived(request):
                prefill[lane_of(request)] += max(1, tokens_left(request))
                self._used[lane_of(request)].add(adapter_of(request))
        free_slots = max(0, self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input)
        ages = self.waiting.ages(self.live.max_wait_steps) if self.live.policy == "orthrus" else Ages()
        self._adapters = self._places(ages)
        loads = [
            LaneLoad(prefill[lane], self._admissible(lane, free_slots, self._places_beside(lane))) for lane in LANES
        ]
        return Work(decodes, (loads[0], loads[1]), free_slots, self._num_free_blocks(), ages, self._adapters)

    def _has_arrived(self, request: Request) -> bool:
        """Whether the KV that a request waits for is there, or will not come."""
        return request.request_id in self.finished_recving_kv_req_ids

    def _places(self, ages: Ages) -> Adapters:
        """Places for adapters; the next one is kept for the oldest overdue request that needs one."""
        most = self.lora_config.max_loras if self.lora_config else 0
        used = (self._used[0] | self._used[1]) - {0}
        heads = sorted((self.waiting.line(lane)[0] for lane in ages.overdue), key=lambda head: head.arrival_time)
        wanted = [adapter for adapter in map(adapter_of, heads) if adapter not in {0, *used}]
        return Adapters(frozenset(used), most, wanted[0] if wanted else 0)

    def _places_beside(self, lane: Lane) -> Adapters:
        """What a waiting request of a lane finds in use now: an alternating step holds nothing of the other lane."""
        alone = self.live.policy == "unified_homo"
        used = self._used[lane] if alone else self._used[0] | self._used[1]
        return replace(self._adapters, used=frozenset(used - {0}))

    def _admissible(self, lane: Lane, free_slots: int, adapters: Adapters) -> tuple[Admissible, ...]:
        """Requests of a lane that could start, in order, up to the free slots and one budget's worth of tokens."""
        heads: list[Admissible] = []
        tokens = 0
        for request in self.waiting.line(lane):
            if len(heads) >= free_slots or tokens >= self._own_budget:
                break
            adapter = adapter_of(request)
            if not adapters.admits(adapter):
                continue
            adapters = adapters.adding(adapter)
            blocks = -(-request.num_tokens // self.block_size)
            heads.append(Admissible(tokens_left(request), blocks, adapter, request.arrival_time))
            tokens += heads[-1].tokens
        return tuple(heads)

    def _num_free_blocks(self) -> int:
        # With nothing running, every head must be tried: the block count is an estimate (sliding windows need fewer), and
        # a head held back by it would wait for ever.
        pool = self.kv_cache_manager.block_pool
        return pool.get_num_free_blocks() if self.running else pool.num_gpu_blocks * self.max_num_active_reqs

    def _record(self, output: SchedulerOutput, budget: int, work: Work) -> None:
        self._in_flight.append((output.total_num_scheduled_tokens, work.decodes, time.monotonic()))
        rows: dict[str, tuple[str, int, int]] = {}
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens - count  # advanced by the stock schedule() already
            if lane_of(request) is Lane.EMBED:
                rows[request_id] = ("embed", start, count)
            else:
                rows[request_id] = ("decode" if start >= request.num_prompt_tokens else "prefill", start, count)
        preempted = sorted(output.preempted_req_ids or ())
        facts = {"policy": self.live.policy, "waiting": len(self.waiting), "preempted": preempted}
        if self.card is not None:
            facts["card"] = self.card.told
        self.recorder.record(rows, budget, work.usable_tokens, facts)


def _last_token_in_flight(request: Request) -> bool:
    """Async scheduling: the stock loop skips a request whose last token is still being computed, so reserve nothing."""
    placeholders = request.num_output_placeholders
    done = request.num_computed_tokens + 2 - placeholders
    return placeholders > 0 and done >= request.num_prompt_tokens + request.max_tokens


class MixedScheduler(MixedSchedulerMixin, Scheduler):
    """The mixed scheduler where async scheduling is off (CPU)."""


class MixedAsyncScheduler(MixedSchedulerMixin, AsyncScheduler):
    """The mixed scheduler where async scheduling is on (CUDA). Subclassing `Scheduler` there would turn it off."""
