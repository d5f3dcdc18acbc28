"""The token ledger: what is charged is what is settled, and nothing ever goes negative."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orthrus_serve.policy.ledger import TokenLoadLedger
from orthrus_serve.types import ReplicaId, RequestId

A, B = ReplicaId("a"), ReplicaId("b")
R, S = RequestId("r"), RequestId("s")


def make_ledger(**charges: tuple[ReplicaId, int]) -> TokenLoadLedger:
    ledger = TokenLoadLedger()
    for request_id, (replica_id, num_tokens) in charges.items():
        ledger.charge(RequestId(request_id), replica_id, num_tokens)
    return ledger


def test_settling_twice_releases_once():
    ledger = make_ledger(r=(A, 100), s=(A, 7))
    assert ledger.settle(R) == 100
    assert ledger.settle(R) == 0
    assert ledger.load(A) == 7


def test_an_unknown_completion_is_ignored():
    ledger = make_ledger(r=(A, 100))
    assert ledger.settle(S) == 0
    ledger.move(S, B)
    ledger.correct(B, {S: 5})
    assert ledger.loads([A, B]) == {A: 100, B: 0}


def test_settling_after_a_replica_died_does_not_go_negative():
    ledger = make_ledger(r=(A, 100))
    ledger.forget(A)
    assert ledger.settle(R) == 0
    assert ledger.load(A) == 0


def test_a_retry_replaces_the_charge_of_the_first_try():
    ledger = make_ledger(r=(A, 100))
    ledger.charge(R, B, 90)
    assert ledger.loads([A, B]) == {A: 0, B: 90}


def test_a_report_corrects_the_estimate_and_adds_what_others_have_there():
    ledger = make_ledger(r=(A, 100))
    ledger.correct(A, {R: 30}, num_other_tokens=500)
    assert ledger.load(A) == 530
    assert ledger.settle(R) == 30
    assert ledger.load(A) == 500
    ledger.correct(A, {}, num_other_tokens=0)
    assert ledger.load(A) == 0


def test_a_report_older_than_a_charge_leaves_the_charge():
    ledger = make_ledger(r=(A, 100))
    ledger.correct(A, {})
    assert ledger.load(A) == 100


def test_a_request_that_left_the_reports_has_nothing_left():
    ledger = make_ledger(r=(A, 100))
    ledger.correct(A, {R: 10})
    ledger.correct(A, {})
    assert ledger.load(A) == 0
    assert ledger.settle(R) == 0


def test_a_moved_request_is_unreported_at_its_new_replica():
    ledger = make_ledger(r=(A, 100))
    ledger.correct(A, {R: 60})
    ledger.move(R, B)
    ledger.correct(B, {})
    assert ledger.loads([A, B]) == {A: 0, B: 60}


def test_a_report_for_a_request_that_is_charged_elsewhere_is_ignored():
    ledger = make_ledger(r=(A, 100))
    ledger.correct(B, {R: 1})
    assert ledger.loads([A, B]) == {A: 100, B: 0}


def test_in_flight_tokens_stay_whole_until_the_end_and_open_requests_count_everybody():
    ledger = make_ledger(r=(A, 100), s=(B, 40))
    ledger.correct(A, {R: 30}, num_other_tokens=500, num_other_open=2)
    assert (ledger.in_flight_tokens, ledger.open_requests) == ({A: 100, B: 40}, {A: 3, B: 1})
    ledger.move(R, B)
    assert (ledger.in_flight_tokens, ledger.remaining_tokens) == ({B: 140}, {A: 500, B: 70})
    ledger.settle(R)
    assert (ledger.in_flight_tokens, ledger.open_requests) == ({B: 40}, {A: 2, B: 1})


def test_drift_is_how_far_the_last_reports_were_from_what_was_thought():
    ledger = make_ledger(r=(A, 100), s=(B, 40))
    ledger.correct(A, {R: 30})
    ledger.correct(B, {S: 50})
    assert ledger.num_drift_tokens == 80
    ledger.correct(A, {R: 30})
    ledger.settle(S)
    ledger.correct(B, {})
    assert ledger.num_drift_tokens == 0


def test_drift_ends_with_the_last_request_although_no_report_follows():
    """The replica's last report can be there before the end of the answer: it moves the charge to zero, and is the last."""
    ledger = make_ledger(r=(A, 100), s=(A, 40))
    ledger.correct(A, {R: 30, S: 40})
    ledger.correct(A, {})
    assert ledger.num_drift_tokens == 70
    ledger.settle(R)
    assert ledger.num_drift_tokens == 70
    ledger.settle(S)
    assert ledger.num_drift_tokens == 0
    assert ledger._known == {}


def test_nothing_is_kept_about_replicas_without_a_request():
    ledger = make_ledger(r=(A, 100))
    ledger.correct(A, {R: 7}, num_other_tokens=3)
    ledger.settle(R)
    ledger.correct(A, {})
    ledger.correct(B, {})
    assert ledger._known == ledger.remaining_tokens == ledger.in_flight_tokens == ledger.open_requests == {}


def test_a_negative_charge_is_refused_and_changes_nothing():
    ledger = make_ledger(r=(A, 100))
    with pytest.raises(ValueError, match="negative"):
        ledger.charge(R, A, -1)
    assert ledger.load(A) == 100


replicas = st.sampled_from([ReplicaId(name) for name in "abc"])
requests = st.sampled_from([RequestId(f"r{number}") for number in range(6)])
tokens = st.integers(0, 10**6)


class LedgerAgainstAList(RuleBasedStateMachine):
    """The ledger beside a plain dictionary of open charges, under any order of events."""

    def __init__(self):
        super().__init__()
        self.ledger = TokenLoadLedger()
        self.open: dict[RequestId, tuple[ReplicaId, int]] = {}
        self.charged: dict[RequestId, int] = {}
        self.others: dict[ReplicaId, int] = {}
        self.seen: set[RequestId] = set()

    @rule(request=requests, replica=replicas, num=tokens)
    def charge(self, request, replica, num):
        self.ledger.charge(request, replica, num)
        self.open[request] = (replica, num)
        self.charged[request] = num
        self.seen.discard(request)

    @rule(request=requests, replica=replicas)
    def move(self, request, replica):
        self.ledger.move(request, replica)
        if request in self.open and self.open[request][0] != replica:
            self.open[request] = (replica, self.open[request][1])
            self.seen.discard(request)

    @rule(request=requests)
    def settle(self, request):
        assert self.ledger.settle(request) == self.open.pop(request, (None, 0))[1]
        assert self.ledger.settle(request) == 0

    @rule(replica=replicas)
    def forget(self, replica):
        self.ledger.forget(replica)
        self.open = {request: charge for request, charge in self.open.items() if charge[0] != replica}
        self.others.pop(replica, None)

    @rule(replica=replicas, report=st.dictionaries(requests, st.integers(-5, 10**6)), others=st.integers(-5, 10**6))
    def correct(self, replica, report, others):
        self.ledger.correct(replica, report, others)
        for request, (where, _) in list(self.open.items()):
            if where == replica and (request in report or request in self.seen):
                self.open[request] = (replica, max(0, report.get(request, 0)))
                self.seen.add(request)
        self.others[replica] = max(0, others)

    @invariant()
    def loads_are_the_sum_of_open_charges_and_others(self):
        for replica in (ReplicaId(name) for name in "abc"):
            own = sum(num for where, num in self.open.values() if where == replica)
            assert self.ledger.load(replica) == own + self.others.get(replica, 0)
            here = [request for request, (where, _) in self.open.items() if where == replica]
            assert self.ledger.in_flight_tokens.get(replica, 0) == sum(self.charged[request] for request in here)
            assert self.ledger.open_requests.get(replica, 0) == len(here)
        assert self.ledger.num_open == len(self.open)
        assert self.ledger.num_own_tokens == sum(num for _, num in self.open.values())

    def teardown(self):
        for request in list(self.open):
            self.ledger.settle(request)
        assert self.ledger.num_own_tokens == 0
        assert self.ledger.num_open == self.ledger.num_drift_tokens == 0
        assert self.ledger.in_flight_tokens == self.ledger.open_requests == {}
        assert self.ledger.remaining_tokens == {replica: num for replica, num in self.others.items() if num}


TestLedgerAgainstAList = LedgerAgainstAList.TestCase
