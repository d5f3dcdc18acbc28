"""What an engine tells of itself for the metrics: steps by duration, operations, waits, pools, memory, adapters, stages."""

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from orthrus_serve.engine.lane_queue import LaneQueue
from orthrus_serve.engine.model_flops import flops_of
from orthrus_serve.engine.stage_times import StageTimes, stages_of
from orthrus_serve.engine.step_record import StepTotals
from orthrus_serve.policy.step_plan import Lane
from tests.engine.harness import Engine, token_ids


def loaded(engine: Engine, rng: random.Random) -> None:
    for number in range(6):
        engine.generate(f"g{number}", token_ids(rng, 30), 6)
        engine.embed(f"e{number}", token_ids(rng, 90), "mean")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_step_is_timed_once(
    make_engine: Callable[..., Engine], rng: random.Random, async_scheduling: bool
) -> None:
    engine = make_engine(budget=64, async_scheduling=async_scheduling)
    loaded(engine, rng)
    engine.run()
    totals = engine.scheduler.recorder.totals
    assert sum(map(sum, totals.durations.values())) == totals.steps
    assert 0 < totals.busy_with_decodes_s < totals.busy_s
    assert sum(totals.durations["with"]) > 0
    assert totals.late_steps == 0


def test_a_report_tells_what_waits_what_is_pooled_and_what_is_used(
    make_engine: Callable[..., Engine], rng: random.Random
) -> None:
    engine = make_engine(budget=64, max_num_seqs=4)
    loaded(engine, rng)
    engine.step()
    time.sleep(0.01)
    report = engine.scheduler.answer("remaining", None)
    assert set(report["oldest_wait_s"]) == {"generate", "embed"}
    assert max(report["oldest_wait_s"].values()) >= 0.01
    assert report["pooling_states"] == len(engine.runner.pooler_progress) > 0
    assert 0 < report["kv_free_blocks"] < report["kv_blocks"]
    assert (report["adapters"], report["adapter_places"]) == (1, 1)
    assert report["adapter_requests"] == {"orthrus-embed": 6}
    assert (report["target_s"], report["peak_flops"]) == (None, None)  # a CPU is in no table
    engine.run()
    report = engine.scheduler.answer("remaining", None)
    assert report["oldest_wait_s"] == {"generate": 0.0, "embed": 0.0}
    assert report["pooling_states"] == 0


def test_steps_over_the_target_are_late(make_engine: Callable[..., Engine], rng: random.Random) -> None:
    engine = make_engine(budget=64, live={"target_tpot_ms": 0.001})
    loaded(engine, rng)
    engine.run()
    totals = engine.scheduler.recorder.totals
    assert totals.late_steps == sum(totals.durations["with"]) > 0


def test_operations_of_a_step_are_two_for_each_weight_that_a_token_meets(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(budget=64)
    flops = flops_of(engine.scheduler.vllm_config)
    config: Any = engine.scheduler.vllm_config.model_config.hf_config
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    head = hidden // config.num_attention_heads
    attention = hidden * head * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    assert flops.per_token == 2 * layers * (attention + 3 * hidden * inner)
    assert flops.per_attended == 4 * layers * hidden
    assert flops.per_row == 2 * hidden * config.vocab_size
    assert flops.of_step(2, 3, 1) == 2 * flops.per_token + 3 * flops.per_attended + flops.per_row


def test_operations_are_those_of_what_was_computed(make_engine: Callable[..., Engine], rng: random.Random) -> None:
    engine = make_engine(budget=64)
    engine.embed("e", token_ids(rng, 50), "mean")
    engine.run()
    flops = flops_of(engine.scheduler.vllm_config)
    assert engine.scheduler.recorder.totals.model_flops == pytest.approx(flops.of_step(50, 50 * 51 // 2, 1))


def test_the_oldest_waiting_request_is_found_behind_one_that_was_preempted() -> None:
    now = [100.0]
    queue = LaneQueue(clock=lambda: now[0])

    def request(name: str) -> Any:
        return SimpleNamespace(
            request_id=name, pooling_params=None, num_tokens=5, num_computed_tokens=0, arrival_time=0.0
        )

    assert queue.oldest_wait_s(Lane.GENERATE) == 0.0
    queue.add_request(request("old"))
    now[0] = 107.0
    queue.prepend_request(request("preempted"))
    now[0] = 110.0
    assert queue.oldest_wait_s(Lane.GENERATE) == 10.0
    assert queue.oldest_wait_s(Lane.EMBED) == 0.0


def test_a_request_that_is_passed_over_keeps_its_wait() -> None:
    now = [0.0]
    queue = LaneQueue(clock=lambda: now[0])
    one = SimpleNamespace(request_id="a", pooling_params=None, num_tokens=5, num_computed_tokens=0, arrival_time=0.0)
    queue.add_request(one)  # pyright: ignore[reportArgumentType]
    now[0] = 3.0
    queue.tick()
    queue.pop_request()
    queue.prepend_requests([one])  # pyright: ignore[reportArgumentType]
    assert queue.oldest_wait_s(Lane.GENERATE) == 3.0


def test_totals_are_flat_for_the_channel() -> None:
    totals = StepTotals()
    totals.took(0.0005, has_decodes=True, target_s=0.0001)
    totals.took(9.0, has_decodes=False, target_s=0.0001)
    flat = totals.as_dict()
    assert all(isinstance(value, int | float) for value in flat.values())
    assert (flat["steps_with_decodes_0"], flat["steps_without_decodes_15"]) == (1, 1)
    assert (flat["late_steps"], flat["busy_s"], flat["busy_with_decodes_s"]) == (1, 9.0005, 0.0005)


def finished(reason: str, max_tokens: int | None) -> Any:
    return SimpleNamespace(finish_reason=reason, max_tokens_param=max_tokens, queued_time=1.0, prefill_time=2.0,
                           inference_time=5.0, decode_time=3.0)  # fmt: skip


def test_stages_are_told_by_kind_and_only_of_what_was_computed() -> None:
    seen: list[tuple[str, str, float]] = []
    times = StageTimes(None, 0, observe=lambda *stage: seen.append(stage))
    times.record(None, None)
    all_ended = [finished("length", 8), finished("stop", None), finished("abort", 8)]
    times.record(None, SimpleNamespace(finished_requests=all_ended))
    assert seen == [
        ("generate", "queue", 1.0), ("generate", "prefill", 2.0), ("generate", "decode", 3.0),
        ("embed", "queue", 1.0), ("embed", "embed", 5.0),
    ]  # fmt: skip
    assert list(stages_of(finished("error", None))) == []
