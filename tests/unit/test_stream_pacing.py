"""How often streams may send: on a simulated clock, where every stream sends as soon as it may."""

import contextlib
import heapq
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.stream_pacing import (
    FAST_FRONT_CHUNKS_PER_S,
    FRONT_CHUNKS_PER_S,
    LATE_S,
    LEAST_CHUNKS_PER_S,
    NUM_LATE,
    PROXY_CHUNKS_PER_S,
    REPLICA_CHUNKS_PER_S,
    Sending,
    Sharers,
    StreamPacer,
    usual_chunks_per_s,
)


@given(num_streams=st.integers(1, 300), per_s=st.floats(50.0, 5000.0))
def test_all_streams_together_send_no_more_than_their_chunks_a_second(num_streams: int, per_s: float) -> None:
    pacer, seconds = StreamPacer(lambda: per_s), 2.0
    streams = [Sending(pacer) for _ in range(num_streams)]
    for stream in streams:
        stream.sent()  # the first of each waits for nothing
    due = [(pacer.gap_s, number) for number in range(num_streams)]
    num_sent = 0
    while due[0][0] <= seconds:
        now_s, number = due[0]
        num_sent += 1
        heapq.heapreplace(due, (now_s + streams[number].sent(), number))
    assert num_sent <= per_s * seconds + num_streams
    assert num_sent >= per_s * seconds - num_streams  # nor are they held back more than they must be


def test_a_stream_counts_from_its_first_chunk_to_its_end_however_it_ends() -> None:
    pacer = StreamPacer(lambda: 100.0)
    with pacer.stream() as waiting:
        with contextlib.suppress(ConnectionError), pacer.stream() as other:
            assert pacer.num_sending == 0
            assert other.sent() == pytest.approx(0.01)
            assert waiting.sent() == pytest.approx(0.02)
            assert other.sent() == pytest.approx(0.02)  # once
            raise ConnectionError
        assert pacer.num_sending == 1
    assert pacer.num_sending == 0
    with pacer.stream():
        pass  # it never sent anything
    assert pacer.num_sending == 0


def gap_of_one(pacer: StreamPacer) -> float:
    with pacer.stream() as stream:
        return stream.sent()


def test_while_fronts_answer_late_fewer_chunks_are_sent_and_as_many_as_before_once_they_do_not() -> None:
    pacer = StreamPacer(lambda: 2000.0)
    gaps: list[float] = []
    for _ in range(100):
        pacer.answered(2 * LATE_S)
        gaps.append(gap_of_one(pacer))
    assert gaps == sorted(gaps)
    assert gaps[NUM_LATE - 2 : NUM_LATE + 1] == pytest.approx([1 / 2000, 1 / 2000 / 0.8, 1 / 2000 / 0.8**2])
    assert gaps[-1] == 1 / LEAST_CHUNKS_PER_S
    for _ in range(100):
        pacer.answered(LATE_S)
    assert gap_of_one(pacer) == 1 / 2000


def test_answers_that_are_late_now_and_then_change_nothing() -> None:
    pacer, rng = StreamPacer(lambda: 2000.0), random.Random(1)
    slow = [2 * LATE_S if rng.random() < 0.15 else 0.005 for _ in range(2000)]
    rates: list[float] = []
    for took_s in slow:
        pacer.answered(took_s)
        rates.append(1 / gap_of_one(pacer))
    assert sum(rate > 1500 for rate in rates) > 0.98 * len(rates)


def test_the_most_may_change_while_it_runs() -> None:
    most_per_s = iter([2000.0, 500.0, *[1000.0] * 100])
    pacer = StreamPacer(lambda: next(most_per_s))
    pacer.answered(0.001)
    assert gap_of_one(pacer) == 1 / 500  # three more replicas came
    for _ in range(100):
        pacer.answered(0.001)
    assert gap_of_one(pacer) == 1 / 1000


@pytest.mark.parametrize("took_s", [0.0, 10.0])
def test_an_operator_s_own_number_is_the_most_and_none_can_be_asked_for(took_s: float) -> None:
    little, endless = StreamPacer(lambda: 10.0), StreamPacer(lambda: math.inf)
    for _ in range(50):
        little.answered(took_s)
        endless.answered(took_s)
    assert gap_of_one(little) == 0.1
    assert gap_of_one(endless) == 0.0


@pytest.mark.parametrize(
    ("sharers", "has_haproxy", "is_optimized", "expected"),
    [
        (Sharers(4, 4), False, False, PROXY_CHUNKS_PER_S / 4),  # one Python proxy for all of them
        (Sharers(4, 4), False, True, PROXY_CHUNKS_PER_S / 4),
        (Sharers(4, 4), True, False, FRONT_CHUNKS_PER_S),
        (Sharers(4, 4), True, True, FAST_FRONT_CHUNKS_PER_S),
        (Sharers(1, 2), True, True, FAST_FRONT_CHUNKS_PER_S / 2),
        (Sharers(4, 1), True, True, REPLICA_CHUNKS_PER_S),
        (Sharers(1, 0), True, False, FRONT_CHUNKS_PER_S),
        (Sharers(1, 1), False, False, min(PROXY_CHUNKS_PER_S, FRONT_CHUNKS_PER_S)),
    ],
)
def test_a_replica_s_share_is_of_what_is_full_first(
    sharers: Sharers, has_haproxy: bool, is_optimized: bool, expected: float
) -> None:
    usual = usual_chunks_per_s(sharers, has_haproxy=has_haproxy, is_throughput_optimized=is_optimized)
    assert usual == expected
