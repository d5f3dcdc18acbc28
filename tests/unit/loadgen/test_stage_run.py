"""On a virtual clock: every time below can be worked out by hand."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from loadgen.arrivals import Burst, ClosedLoop, Constant, Replay
from loadgen.lengths import Fixed
from loadgen.stage_run import StageEnd, StageRun
from loadgen.stages import AnyWork, Content, Listed, Sessions, SessionWork, Stage, Work
from loadgen.stop import StopRule
from tests.unit.loadgen.builders import mix, place, stage
from tests.unit.loadgen.virtual_time import run_virtually


def play(
    what: Stage, answer_s: float | Callable[[int], float], **where: int
) -> tuple[StageEnd, list[tuple[float, AnyWork]]]:
    """Runs a stage whose n-th request takes `answer_s` (negative: fails after that time); the end, and what was sent when."""
    sent: list[tuple[float, AnyWork]] = []

    async def scenario(now: Any) -> StageEnd:
        async def execute(work: AnyWork, scheduled_s: float | None) -> bool:
            sent.append((now(), work))
            takes_s = answer_s if isinstance(answer_s, float) else answer_s(len(sent) - 1)
            await asyncio.sleep(abs(takes_s))
            return takes_s >= 0

        return await StageRun(what, 0, place(**where), execute, now).run(0.0)

    return run_virtually(scenario), sent


def times(sent: list[tuple[float, AnyWork]]) -> list[float]:
    return [at_s for at_s, _ in sent]


def test_open_loop_arrivals_do_not_wait_for_answers() -> None:
    end, sent = play(
        stage(Constant(2.0), stop=StopRule(max_duration_s=3.0)),
        100.0,
    )
    assert times(sent) == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    assert end.in_flight_at_cut_off == 6
    assert end.cut_off_s == pytest.approx(3.0)
    assert end.ended_s == pytest.approx(33.0)  # 30 s of patience


def test_the_cut_off_comes_on_time_though_every_client_waits() -> None:
    end, sent = play(stage(ClosedLoop(3), stop=StopRule(max_duration_s=10.0)), 7.0)
    assert times(sent) == pytest.approx([0.0] * 3 + [7.0] * 3)
    assert (end.cut_off_s, end.ended_s) == pytest.approx((10.0, 14.0))
    assert (end.in_flight_at_cut_off, end.reason) == (3, "time")


def test_a_number_of_requests_is_sent_exactly_and_the_cut_off_is_the_last_start() -> None:
    end, sent = play(stage(ClosedLoop(4), stop=StopRule(max_requests=10)), 1.0)
    assert times(sent) == pytest.approx([0.0] * 4 + [1.0] * 4 + [2.0] * 2)
    assert (end.cut_off_s, end.ended_s) == pytest.approx((2.0, 3.0))
    assert (end.reason, end.in_flight_at_cut_off) == ("requests", 2)


def test_clients_that_start_over_a_ramp_do_not_march_in_step() -> None:
    _, sent = play(stage(ClosedLoop(4, ramp_s=4.0), stop=StopRule(max_requests=8)), 4.0)
    assert times(sent) == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])


def test_too_many_errors_end_the_stage() -> None:
    rule = StopRule(max_duration_s=1000.0, max_error_ratio=0.5)
    end, sent = play(stage(ClosedLoop(1), stop=rule), -1.0)
    assert (end.reason, len(sent)) == ("errors", 20)


def test_a_block_is_sent_in_its_order_and_measures_to_its_last_answer() -> None:
    works = (*[Work("generate", 8, 8)] * 3, *[Work("embed", 8)] * 2)
    end, sent = play(stage(Burst(5, 10.0), Listed(works), StopRule()), 5.0)
    assert [work.kind for _, work in sent if isinstance(work, Work)] == ["generate"] * 3 + ["embed"] * 2
    assert times(sent) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert (end.reason, end.ended_s) == ("schedule ended", pytest.approx(5.4))


def test_a_trace_keeps_times_and_lengths_over_several_workers() -> None:
    works = tuple(Work("embed", 10 + number) for number in range(5))
    what = stage(Replay((0.0, 1.0, 2.0, 3.0, 4.0)), Listed(works), StopRule())
    sent: list[tuple[float, int]] = []
    for worker in range(2):
        _, mine = play(what, 1.0, worker=worker, num_workers=2)
        sent += [(at_s, work.prompt_tokens) for at_s, work in mine if isinstance(work, Work)]
    sent.sort()
    assert sent == [(0.0, 10), (1.0, 11), (2.0, 12), (3.0, 13), (4.0, 14)]


def test_sessions_have_numbers_of_their_own_over_all_workers() -> None:
    content: Content = Sessions(Fixed(3), Fixed(2), Fixed(9))
    numbers: list[int] = []
    for worker in range(3):
        _, sent = play(stage(ClosedLoop(3), content, StopRule(max_requests=12)), 1.0, worker=worker, num_workers=3)
        numbers += [work.number for _, work in sent if isinstance(work, SessionWork)]
    assert sorted(numbers) == list(range(12))


def test_a_worker_without_a_share_ends_at_once() -> None:
    end, sent = play(stage(ClosedLoop(1), stop=StopRule(max_requests=1)), 1.0, worker=1, num_workers=2)
    assert sent == []
    assert end.in_flight_at_cut_off == 0


def test_a_fault_of_this_program_is_raised_and_not_counted_as_the_server_s() -> None:
    async def scenario(now: Any) -> StageEnd:
        async def execute(work: AnyWork, scheduled_s: float | None) -> bool:
            raise TypeError("a bug")

        return await StageRun(stage(ClosedLoop(2), stop=StopRule(max_duration_s=5.0)), 0, place(), execute, now).run(
            0.0
        )

    with pytest.raises(TypeError, match="a bug"):
        run_virtually(scenario)


def test_lag_of_a_client_that_is_busy_is_measured() -> None:
    """The executor holds the loop for 0.3 s of virtual time by moving the clock: what was due meanwhile leaves late."""
    skew = [0.0]

    async def scenario(now: Any) -> StageEnd:
        def skewed() -> float:
            return now() + skew[0]

        async def execute(work: AnyWork, scheduled_s: float | None) -> bool:
            skew[0] += 0.3 if skew[0] == 0 else 0.0
            return True

        run = StageRun(stage(Constant(10.0), mix(), StopRule(max_duration_s=1.0)), 0, place(), execute, skewed)
        return await run.run(0.0)

    lags = run_virtually(scenario).health.schedule_lag_s
    assert max(lags) == pytest.approx(0.3, abs=1e-6)  # due at 0.1, the clock says 0.4
    assert lags[-1] == pytest.approx(0.0, abs=1e-6)
