"""Faults that public load generators had. Each test is named after what must not happen, or must, here."""

import asyncio
from typing import Any

import numpy as np
import pytest

from loadgen.answer import StreamReader
from loadgen.arrivals import ClosedLoop, Constant
from loadgen.mock_server import Fault, Script
from loadgen.prompts import HEAD, PromptMaker
from loadgen.requester import Recorder, SingleRequests
from loadgen.stage_run import StageRun
from loadgen.stages import AnyWork, rng_for
from loadgen.stop import StopRule
from tests.unit.loadgen.builders import chat_event, mix, place, served, sse, stage, text_event, usage_event, word_table
from tests.unit.loadgen.virtual_time import run_virtually


def test_a_client_sends_its_next_request_when_its_own_answer_is_in_not_when_all_are() -> None:
    """llmperf #59: waves. One request takes 10 s, the others 1 s: the other three clients go on meanwhile."""
    sent_s: list[float] = []

    async def scenario(now: Any) -> None:
        async def execute(work: AnyWork, scheduled_s: float | None) -> bool:
            sent_s.append(now())
            await asyncio.sleep(10.0 if len(sent_s) == 1 else 1.0)
            return True

        await StageRun(stage(ClosedLoop(4), stop=StopRule(max_requests=31)), 0, place(), execute, now).run(0.0)

    run_virtually(scenario)
    # 4 at t = 0, then 3 each second up to t = 9: by hand 4 + 9 × 3 = 31.
    assert sorted(sent_s) == pytest.approx([0.0] * 4 + [float(second) for second in range(1, 10) for _ in range(3)])


def test_no_two_prompts_share_a_prefix() -> None:
    """inference-perf #570: every prompt began at index 0 of the corpus."""
    maker = PromptMaker(word_table(), np.random.default_rng(1))
    prompts = [str(maker.make("embed", 40)).split() for _ in range(3000)]
    heads = [tuple(prompt[:HEAD]) for prompt in prompts]
    assert len(set(heads)) == len(heads)
    assert len({prompt[0] for prompt in prompts}) > 30


def test_workers_with_one_seed_make_different_prompts() -> None:
    """inference-perf #539: each worker inherited the same generator state."""
    table = word_table()
    made: list[str] = []
    for worker in range(4):
        maker = PromptMaker(table, rng_for(place(worker, 4)))
        made += [str(maker.make("generate", 30)) for _ in range(200)]
    assert len(set(made)) == len(made)


def test_role_only_usage_only_and_done_events_are_no_tokens() -> None:
    """inference-perf #452: they were counted in TTFT, TPOT and ITL."""
    reader = StreamReader()
    reader.feed(sse(chat_event('{"role":"assistant","content":""}')), 0.1)
    reader.feed(sse(chat_event('{"content":"a"}')), 1.0)
    reader.feed(sse(chat_event('{"content":"b"}')), 1.5)
    reader.feed(sse(chat_event("{}", "length"), usage_event(7, 2), "[DONE]"), 9.0)
    answer = reader.end(9.1)
    assert answer.error is None
    assert (answer.first_token_s, answer.last_token_s, answer.gaps_s) == (1.0, 1.5, [0.5])
    assert (answer.output_tokens, answer.output_counted_by) == (2, "usage")


async def test_no_more_requests_are_in_flight_than_asked_over_all_workers() -> None:
    """inference-perf #320: real concurrency higher than asked. The server counts, three workers share seven clients."""
    async with served(Script(embed_s=0.005)) as (server, client):
        now = asyncio.get_running_loop().time
        runs = [
            StageRun(
                stage(ClosedLoop(7), mix(1.0), StopRule(max_requests=90)),
                0,
                place(worker, 3),
                SingleRequests(
                    client, PromptMaker(word_table(), rng_for(place(worker, 3))), Recorder("s", worker, now), 30.0
                ),
                now,
            )
            for worker in range(3)
        ]
        await asyncio.gather(*(run.run(now()) for run in runs))
    assert server.seen.peak_in_flight <= 7
    assert server.seen.embeds == 90


def test_a_stage_whose_requests_never_end_does_not_hold_up_the_next_stage() -> None:
    """inference-perf #608: a sweep deadlocked after a timed-out stage."""
    ends: list[tuple[float, float, int]] = []

    async def scenario(now: Any) -> None:
        for begin_s, answer_s in ((0.0, 1e9), (40.0, 0.1)):

            async def execute(work: AnyWork, scheduled_s: float | None, answer_s: float = answer_s) -> bool:
                await asyncio.sleep(answer_s)
                return True

            slow = stage(Constant(2.0), stop=StopRule(max_duration_s=10.0), drain_s=5.0)
            end = await StageRun(slow, 0, place(), execute, now).run(begin_s)
            ends.append((end.cut_off_s, end.ended_s, end.in_flight_at_cut_off))

    run_virtually(scenario)
    assert ends[0] == pytest.approx((10.0, 15.0, 20))  # sends for 10 s, waits 5 s more, gives up
    assert ends[1] == pytest.approx((50.0, 50.0, 0))


async def ended_with(fault: Fault, timeout_s: float = 30.0, api: str = "completions") -> tuple[str | None, Recorder]:
    async with served(Script(generate_faults={0: fault}), api) as (_, client):
        recorder = Recorder("stage", 0, asyncio.get_running_loop().time)
        single = SingleRequests(client, PromptMaker(word_table(), np.random.default_rng(0)), recorder, timeout_s)
        run = StageRun(
            stage(ClosedLoop(1), mix(0.0), StopRule(max_requests=1)),
            0,
            place(),
            single,
            asyncio.get_running_loop().time,
        )
        await run.run(asyncio.get_running_loop().time())
    [record] = recorder.records
    return record.error, recorder


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_an_error_event_in_a_200_stream_is_an_error(api: str) -> None:
    """guidellm #743, #795: recorded as a success with zero latency."""
    error, recorder = await ended_with("error_event", api=api)
    assert error == "error in the stream: engine died"
    assert not recorder.records[0].ok


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_an_empty_answer_is_an_error(api: str) -> None:
    """guidellm #615: empty terminal responses counted as complete."""
    error, _ = await ended_with("empty", api=api)
    assert error == "empty answer"


async def test_a_partial_stream_and_then_a_timeout_is_an_error() -> None:
    """aibrix #2567: recorded as success."""
    error, _ = await ended_with("stall", timeout_s=0.5)
    assert error == "timeout of 0.5 s after 2 content events"


@pytest.mark.parametrize("fault", ["truncate", "reset"])
async def test_a_stream_that_just_ends_is_an_error(fault: Fault) -> None:
    error, _ = await ended_with(fault)
    assert error is not None
    assert "after 2 content events" in error


@pytest.mark.parametrize("fault", ["http_500", "http_503"])
async def test_an_error_status_is_an_error_with_the_server_s_reason(fault: Fault) -> None:
    error, _ = await ended_with(fault)
    assert error == f"HTTP {fault[5:]}: scripted refusal"


def test_the_first_token_s_time_is_that_of_the_first_content_not_of_the_last_chunk() -> None:
    """aibrix #2481: TTFT was measured at the last chunk."""
    reader = StreamReader()
    for second in range(1, 6):
        reader.feed(sse(text_event("x")), float(second))
    reader.feed(sse(text_event("", "length"), "[DONE]"), 6.0)
    answer = reader.end(6.0)
    assert answer.first_token_s == 1.0
    assert answer.last_token_s == 5.0
    assert answer.gaps_s == [1.0] * 4
