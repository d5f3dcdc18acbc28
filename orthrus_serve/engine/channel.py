"""The channel between EngineCore and the process that owns the engine: settings down, remaining tokens up.

EngineCore looks utility methods up by name on itself, so a function set on its class when our scheduler's module is imported
there is reachable by `call_utility_async`. Commands (`set`) take effect in the next step. Reports come by `watch`: the core
answers it with a future that the next `schedule()` resolves, so the report leaves while that step's forward runs; asking in
between (`remaining`) would wait for the running step. Refusals come back as values: a failed utility call arrives as a bare
exception, and an exception in a replica's `reconfigure()` costs the replica its life.
"""

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from orthrus_serve.engine.card import CardPartner
from orthrus_serve.engine.kv_handover import is_to_fetch
from orthrus_serve.engine.lane_queue import LaneQueue, lane_of
from orthrus_serve.engine.orphan_watch import end_with_owner
from orthrus_serve.engine.settings import LiveSettings
from orthrus_serve.engine.step_record import StepRecorder
from orthrus_serve.engine.vllm_compat import EngineCore, Scheduler
from orthrus_serve.errors import ConfigError
from orthrus_serve.policy.step_plan import LANES

Report = dict[str, Any]

# Seen as a Scheduler by the type checker, so that a renamed hook is an error; mixed into one at run time.
_SchedulerBase = Scheduler if TYPE_CHECKING else object


def install_channel() -> None:
    """Makes the channel callable on EngineCore. Its parameters must be spelt out: the core counts them."""

    def orthrus_channel(self: Any, operation: str, argument: Any = None) -> Any:
        return self.scheduler.answer(operation, argument)

    EngineCore.orthrus_channel = orthrus_channel  # pyright: ignore[reportAttributeAccessIssue]


class CoreChannelMixin(_SchedulerBase):
    """The core's end, on the scheduler. Runs on the core's own thread, between two steps."""

    live: LiveSettings
    waiting: LaneQueue
    recorder: StepRecorder

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        end_with_owner()
        self.card: CardPartner | None = None
        self._watchers: list[Future[Report]] = []
        self._report_gap_s = 0.0
        self._last_report_s = 0.0

    def answer(self, operation: str, argument: Any) -> Any:
        """Carries out one call of the near end: `set`, `remaining`, `watch` or `join_card`."""
        if operation == "set":
            return self._set(argument)
        if operation == "watch":
            return self._watch(argument)
        if operation == "remaining":
            return self._report()
        if operation == "join_card":
            self.card = CardPartner(*argument)
            return None
        raise ValueError(f"unknown channel operation {operation!r}")

    def facts(self) -> dict[str, Any]:
        """What else a report says of the engine as it is now."""
        return {}

    def push_report(self, *, last: bool = False) -> None:
        """Resolves pending watches; `last` ignores the rate limit, since an idle engine will not come by again."""
        now_s = time.monotonic()
        if not self._watchers or (not last and now_s - self._last_report_s < self._report_gap_s):
            return
        self._last_report_s = now_s
        watchers, self._watchers = self._watchers, []
        report = self._report()
        for watcher in watchers:
            watcher.set_result(report)

    @override
    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        if not self.has_requests():
            self._rest()
        return outputs

    @override
    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        if not self.has_requests():
            self._rest()
        return finished

    def _rest(self) -> None:
        """The last request is over: whoever waits for news is told, the other engine of the card too."""
        if self.card is not None:
            self.card.rest()
        self.push_report(last=True)

    def _set(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """All or nothing: either every setting is applied from the next step on, or none."""
        refused = None
        try:
            self.live = self.live.changed(wanted, self.vllm_config.scheduler_config.max_num_batched_tokens)
        except ConfigError as error:
            refused = str(error)
        return {"applied": {**asdict(self.live), "step": self.recorder.totals.steps}, "refused": refused}

    def _watch(self, gap_s: float | None) -> "Future[Report]":
        self._report_gap_s = float(gap_s or 0.0)
        watcher: Future[Report] = Future()
        if self.has_requests():
            self._watchers.append(watcher)
        else:
            watcher.set_result(self._report())
        return watcher

    def _report(self) -> Report:
        """Facts only; what an output will cost is estimated by whoever reads them.

        `requests` maps an internal request id to (lane, prompt tokens left, output tokens made, most output tokens);
        `oldest_wait_s` has for each kind how long its oldest waiting request has waited; `pooling_states` counts embeddings of
        which a part is computed;
        `kept` is how many finished requests still hold KV, for another engine to fetch.
        """
        requests: dict[str, tuple[int, int, int, int]] = {}
        prompt_left = [0, 0]
        pooling_states = 0
        for request in self.requests.values():
            if request.is_finished():
                continue
            lane = lane_of(request)
            is_fetched = is_to_fetch(request.kv_transfer_params)
            left = 0 if is_fetched else max(0, request.num_prompt_tokens - request.num_computed_tokens)
            prompt_left[lane] += left
            # Its sums are kept from its first chunk on, and dropped when it is preempted: then nothing of it is computed.
            pooling_states += lane == 1 and request.num_computed_tokens > 0
            most = request.max_tokens if lane == 0 else 0
            requests[request.request_id] = (int(lane), left, request.num_output_tokens, most)
        return {
            "policy": self.live.policy,
            "running": len(self.running),
            "waiting": len(self.waiting),
            "prompt_left": {lane.kind: prompt_left[lane] for lane in LANES},
            "totals": self.recorder.totals.as_dict(),
            "requests": requests,
            "oldest_wait_s": {lane.kind: self.waiting.oldest_wait_s(lane) for lane in LANES},
            "pooling_states": pooling_states,
            **self.facts(),
            "kept": len(self.requests) - len(requests),
        }


class EngineChannel:
    """The near end, beside AsyncLLM.

    Args:
        llm: the engine; needs `engine_core.call_utility_async`, `errored` and `dead_error`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def set(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Changes settings from the next step on.

        Returns:
            `{"applied": {...what holds now...}, "refused": None or the reason why nothing was changed}`.

        Raises:
            EngineDeadError: the core is gone.
        """
        return await self._call("set", dict(wanted))

    async def watch(self, gap_s: float = 0.05) -> Report:
        """The next report: during the next step, at once when idle, and at most every `gap_s` seconds under load."""
        return await self._call("watch", gap_s)

    async def remaining(self) -> Report:
        """A report now. Waits for the running step: for tests and tools, not for a loop."""
        return await self._call("remaining", None)

    async def join_card(self, path: str, slot: int) -> None:
        """From the next step on the engine shares its card with another one, by this page and as this slot."""
        await self._call("join_card", [path, slot])

    async def _call(self, operation: str, argument: Any) -> Any:
        # A call that is pending when the core dies is never answered, so the wait also looks at `errored`.
        call = asyncio.ensure_future(self._llm.engine_core.call_utility_async("orthrus_channel", operation, argument))
        try:
            while not (await asyncio.wait({call}, timeout=0.2))[0]:
                if self._llm.errored:
                    raise self._llm.dead_error
            return call.result()
        finally:
            call.cancel()
