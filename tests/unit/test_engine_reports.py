"""What a replica reports of the calls that it works on, and how that reaches the Fronts."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.remaining import Progress, output_left, remaining_tokens
from orthrus_serve.serving.engine_reports import OpenCalls, ReplicaReport, ReportSender, report_gap_s

counts = st.integers(0, 10**6)


@given(st.lists(st.builds(Progress, counts, counts, counts)), counts)
def test_what_is_left_is_the_rest_of_the_prompts_and_of_the_expected_outputs(requests, expected):
    left = remaining_tokens(requests, expected)
    assert left >= sum(request.num_prompt_left for request in requests)
    assert left <= sum(request.num_prompt_left + min(expected, request.max_output) for request in requests)
    further = [Progress(max(0, r.num_prompt_left - 3), r.num_made + 1, r.max_output) for r in requests]
    assert remaining_tokens(further, expected) <= left


def test_an_output_is_expected_up_to_its_limit_and_less_what_is_made():
    assert (output_left(100, None), output_left(100, 30), output_left(100, 30, 20), output_left(100, 30, 31)) == (
        100, 30, 10, 0,
    )  # fmt: skip


def test_a_call_keeps_its_charge_until_the_engine_has_it_then_follows_it_then_has_nothing_left():
    calls = OpenCalls()
    call = calls.begin("f", "r", charge=500, expected_output=40)
    calls.follow({}, calls.mark)
    assert calls.by_front() == {"f": {"r": 500}}
    mark = calls.mark
    calls.note(call, "e1")  # the engine took it after this report was asked for
    calls.follow({}, mark)
    assert calls.by_front() == {"f": {"r": 500}}
    calls.follow({"e1": (0, 300, 0, 64)}, calls.mark)
    assert calls.by_front() == {"f": {"r": 340}}
    calls.follow({"e1": (0, 0, 30, 64)}, calls.mark)
    assert calls.by_front() == {"f": {"r": 10}}
    calls.follow({}, calls.mark)
    assert calls.by_front() == {"f": {"r": 0}}
    calls.end(call)
    calls.end(call)
    assert calls.by_front() == {}


def test_a_call_of_several_requests_has_what_is_left_of_all_and_is_young_while_one_of_them_is():
    calls = OpenCalls()
    call = calls.begin("f", "r", charge=90, expected_output=0)
    for engine_id in ("e1", "e2"):
        calls.note(call, engine_id)
    calls.follow({"e1": (1, 20, 0, 0)}, mark=1)
    assert calls.by_front() == {"f": {"r": 90}}
    calls.follow({"e1": (1, 20, 0, 0), "e2": (1, 50, 0, 0), "stranger": (0, 9, 9, 9)}, calls.mark)
    assert calls.by_front() == {"f": {"r": 70}}
    calls.follow({"e2": (1, 50, 0, 0)}, calls.mark)
    assert calls.by_front() == {"f": {"r": 50}}


def test_a_front_reads_its_own_calls_one_by_one_and_the_others_as_a_sum():
    report = ReplicaReport("a", {"f": {"1": 5, "2": 6}, "g": {"3": 70}, "h": {"4": 800, "5": 0}})
    assert (report.own("f"), report.num_other_tokens("f"), report.num_other_open("f")) == ({"1": 5, "2": 6}, 870, 3)
    assert (report.own("new"), report.num_other_tokens("new"), report.num_other_open("new")) == ({}, 881, 5)


class Fronts:
    """Takes reports, as often as it is told to fail first."""

    def __init__(self, num_failures: int = 0) -> None:
        self.num_failures = num_failures
        self.now: dict[str, dict[str, int]] = {}
        self.got: list[ReplicaReport] = []
        self.took_s: list[float] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.sender = ReportSender(
            lambda: ReplicaReport("a", self.now), self._take, retry_gap_s=0.05, answered=self.took_s.append
        )

    async def _take(self, report: ReplicaReport) -> float:
        if self.num_failures:
            self.num_failures -= 1
            raise ConnectionError("no Front")
        self.got.append(report)
        await self.may_answer.wait()
        return 0.02

    async def until(self, num_got: int) -> None:
        async with asyncio.timeout(5):
            while len(self.got) < num_got:  # noqa: ASYNC110 - nothing to wait on from outside
                await asyncio.sleep(0.005)


@pytest.fixture
async def running(request: pytest.FixtureRequest) -> Any:
    fronts = Fronts(getattr(request, "param", 0))
    task = asyncio.create_task(fronts.sender.run())
    await asyncio.sleep(0)
    yield fronts
    assert not task.done()
    task.cancel()


def test_no_front_gets_more_than_eighty_reports_a_second_from_however_many_replicas():
    assert [report_gap_s(num) for num in (0, 1, 4, 8, 16, 800)] == [0.1, 0.1, 0.1, 0.1, 0.2, 10.0]


async def test_only_changes_are_sent_and_many_at_once_are_one_message(running: Fronts) -> None:
    running.sender.wake()
    await asyncio.sleep(0.05)
    assert running.got == []
    for number in range(100):
        running.now = {"f": {"r": number}}
        running.sender.wake()
    await running.until(1)
    assert running.got == [ReplicaReport("a", {"f": {"r": 99}}, number=1)]


async def test_how_long_the_fronts_took_to_answer_is_told(running: Fronts) -> None:
    running.may_answer.clear()
    running.now = {"f": {"r": 1}}
    running.sender.wake()
    await running.until(1)
    await asyncio.sleep(0.05)
    assert running.took_s == []  # not before they have
    running.may_answer.set()
    running.now = {}
    running.sender.wake()
    await running.until(2)
    assert running.took_s[0] >= 0.05


@pytest.mark.parametrize("running", [1], indirect=True)
async def test_a_message_that_failed_says_nothing_of_how_long_fronts_take(running: Fronts) -> None:
    running.now = {"f": {"r": 1}}
    running.sender.wake()
    await running.until(1)
    running.now = {}
    running.sender.wake()
    await running.until(2)
    assert (running.sender.num_sent, len(running.took_s)) == (3, 2)


async def test_no_more_than_one_message_is_sent_in_a_gap(running: Fronts) -> None:
    began_s = asyncio.get_running_loop().time()
    for number in range(200):
        running.now = {"f": {"r": number}}
        running.sender.wake()
        await asyncio.sleep(0.001)
    took_s = asyncio.get_running_loop().time() - began_s
    assert 2 <= len(running.got) <= took_s / 0.02 + 1
    assert [report.number for report in running.got] == list(range(1, len(running.got) + 1))


@pytest.mark.parametrize("running", [3], indirect=True)
async def test_a_report_that_did_not_arrive_is_sent_again_as_it_is_then_even_if_nothing_changes(
    running: Fronts,
) -> None:
    running.now = {"f": {"r": 1}}
    running.sender.wake()
    await asyncio.sleep(0.06)
    running.now = {}  # ended meanwhile, and nobody says so again
    await running.until(1)
    assert running.got[-1].calls == {}
