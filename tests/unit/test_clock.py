"""A clock that jumps: the wall clock decides nothing, and a clock given to the policies may jump either way.

That no module reads the wall clock is a rule of ruff (`pyproject.toml`, banned-api).
"""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.key_limits import MINUTE_S, KeyAccounts, KeyLimits, Taken
from orthrus_serve.policy.promises import MAX_WAIT_S, Promises
from orthrus_serve.policy.quarantine import Quarantine, QuarantineRules
from orthrus_serve.types import ReplicaId
from tests.unit.test_door import Entrance

A, B = ReplicaId("a"), ReplicaId("b")
# From one look at the clock to the next: mostly forward, now and then by hours, either way.
JUMPS = st.lists(st.one_of(st.floats(0, 5), st.sampled_from([-86_400.0, -3600.0, -1.0, 3600.0, 86_400.0])), max_size=60)


@given(JUMPS, st.integers(1, 120))
def test_a_jump_lets_a_key_have_no_more_than_its_minute_and_shuts_it_out_for_no_longer(
    jumps: list[float], per_minute: int
) -> None:
    accounts = KeyAccounts(KeyLimits(requests_per_minute=per_minute))
    now_s = latest_s = 1e6
    accounts.state("a", now_s)  # its minute begins
    num_taken = 0
    for jump in jumps:
        now_s += jump
        latest_s = max(latest_s, now_s)
        for _ in range(3):
            answer = accounts.take("a", 1, now_s)
            if isinstance(answer, Taken):
                num_taken += 1
            else:
                assert answer.wait_s is not None
                assert 0 < answer.wait_s <= MINUTE_S  # what a client is told to wait, whatever the clock did
    # A clock that was set back gives nothing twice.
    assert num_taken <= per_minute + (latest_s - 1e6) * per_minute / MINUTE_S + 1e-6
    assert isinstance(accounts.take("a", 1, latest_s + MINUTE_S), Taken)


@given(JUMPS)
def test_a_replica_that_is_out_is_probed_once_at_a_time_and_returns_after_any_jump(jumps: list[float]) -> None:
    quarantine, now_s = Quarantine(QuarantineRules()), 1e6
    quarantine.told(A, "stalled", now_s)
    probing: set[ReplicaId] = set()
    for number, jump in enumerate(jumps):
        now_s += jump
        due = quarantine.due(now_s)
        assert not probing & set(due)
        probing |= set(due)
        if number % 2:
            for replica_id in probing:
                quarantine.probed(replica_id, False, now_s)
            probing.clear()
        assert quarantine.out == {A}
    quarantine.told(A, None, now_s)  # it says that it is well: it is probed now, whenever that was due
    assert set(quarantine.due(now_s)) | probing == {A}
    quarantine.probed(A, True, now_s)
    assert quarantine.out == set()


@given(JUMPS)
def test_places_kept_for_those_who_come_back_are_never_negative_and_never_far(jumps: list[float]) -> None:
    promises, now_s = Promises(), 1e6
    for number, jump in enumerate(jumps):
        now_s += jump
        assert 0 <= promises.promise(number % 7, 100, 3.0, now_s) <= MAX_WAIT_S
        if promises.is_due(number % 5, now_s):
            promises.redeem(number % 5)
        assert 0 <= promises.expected_tokens <= 700


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_admission_and_limits_do_not_notice_when_the_wall_clock_is_set(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    entrance = Entrance({"embed": {"e2e_ms": 1000}, "each_key": {"requests_per_minute": 2}})
    before = dict(entrance.door.limit_headers("k"))
    entrance.enter().leave()
    wall: Any = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
    entrance.enter().leave()
    assert dict(entrance.door.limit_headers("k")) == before  # another key's minute is full, as it was
    with pytest.raises(Exception, match="Rate limit reached: requests per minute"):
        entrance.enter()
