"""Quarantine: who goes out, who comes back, who is never blamed, and that nothing is kept of replicas that are gone."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orthrus_serve.policy.quarantine import Quarantine, QuarantineRules
from orthrus_serve.types import ReplicaId, RequestKind

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
RULES = QuarantineRules(max_failures=3, first_gap_s=0.5, longest_gap_s=10.0)


def make_quarantine(*out: ReplicaId) -> Quarantine:
    quarantine = Quarantine(RULES)
    for replica_id in out:
        fail(quarantine, replica_id, 3)
    return quarantine


def fail(quarantine: Quarantine, replica_id: ReplicaId, times: int, now_s: float = 0.0) -> None:
    for _ in range(times):
        quarantine.ended("embed", [replica_id], None, now_s)


def test_three_failures_in_a_row_put_a_replica_out_and_nobody_else() -> None:
    quarantine = Quarantine(RULES)
    fail(quarantine, A, 2)
    fail(quarantine, B, 1)
    assert quarantine.out == frozenset()
    fail(quarantine, A, 1)
    assert quarantine.out == {A}
    assert quarantine.reasons == {A: "3 embed requests in a row: failed"}


def test_an_answer_between_failures_starts_the_count_anew() -> None:
    quarantine = Quarantine(RULES)
    for _ in range(10):
        fail(quarantine, A, 2)
        quarantine.ended("embed", [], A, 0.0)
    assert quarantine.out == frozenset()


def test_good_embeddings_do_not_excuse_failing_generations() -> None:
    quarantine = Quarantine(RULES)
    gaps = []
    for _ in range(3):
        for _ in range(3):
            quarantine.ended("generate", [A], B, 0.0)
            quarantine.ended("embed", [], A, 0.0)
        assert quarantine.reasons == {A: "3 generate requests in a row: failed"}
        gaps.append(quarantine.next_due_s())
        quarantine.due(100.0)
        quarantine.probed(A, True, 100.0)
    assert gaps == [0.5, 1.0, 2.0]


def test_a_request_that_is_answered_elsewhere_blames_the_replica_that_failed() -> None:
    quarantine = Quarantine(RULES)
    for _ in range(3):
        quarantine.ended("embed", [A], B, 0.0, "status 500")
    assert quarantine.out == {A}


def test_a_request_that_fails_everywhere_blames_nobody_however_often_it_is_sent() -> None:
    quarantine = Quarantine(RULES)
    for _ in range(1000):
        quarantine.ended("embed", [A, B], None, 0.0)
        quarantine.ended("embed", [B, C], None, 0.0)
    assert quarantine.out == frozenset()


def test_two_failures_on_one_replica_are_two_failures_of_one_request() -> None:
    quarantine = Quarantine(RULES)
    quarantine.ended("embed", [A, A], None, 0.0)
    quarantine.ended("embed", [A, A], None, 0.0)
    assert quarantine.out == frozenset()


def test_a_replica_that_names_a_problem_is_out_at_once_and_probed_when_it_names_none() -> None:
    quarantine = Quarantine(RULES)
    quarantine.told(A, "the core is stalled", now_s=5.0)
    assert quarantine.reasons == {A: "the core is stalled"}
    assert quarantine.due(5.1) == []
    quarantine.told(A, None, now_s=5.2)
    assert quarantine.out == {A}, "only a probe brings it back"
    assert quarantine.due(5.2) == [A]


def test_a_good_report_of_a_well_replica_keeps_nothing() -> None:
    quarantine = Quarantine(RULES)
    quarantine.told(A, None, 0.0)
    assert (quarantine.out, quarantine.next_due_s()) == (frozenset(), None)


def test_probes_back_off_from_half_a_second_to_ten() -> None:
    quarantine = make_quarantine(A)
    now_s, gaps = 0.0, []
    for _ in range(8):
        due_s = quarantine.next_due_s()
        assert due_s is not None
        gaps.append(due_s - now_s)
        assert quarantine.due(due_s - 0.01) == []
        assert quarantine.due(due_s) == [A]
        assert (quarantine.due(due_s), quarantine.next_due_s()) == ([], None), "one probe at a time"
        now_s = due_s
        quarantine.probed(A, False, now_s)
    assert gaps == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]


def test_a_good_probe_brings_a_replica_back_with_a_clean_count() -> None:
    quarantine = make_quarantine(A)
    quarantine.due(1.0)
    quarantine.probed(A, True, 1.0)
    assert quarantine.out == frozenset()
    fail(quarantine, A, 2, now_s=1.0)
    assert quarantine.out == frozenset()


def test_a_replica_that_passes_probes_and_nothing_else_is_out_longer_each_time() -> None:
    quarantine, gaps = Quarantine(RULES), []
    for _ in range(4):
        fail(quarantine, A, 3)
        gaps.append(quarantine.next_due_s())
        quarantine.due(100.0)
        quarantine.probed(A, True, 100.0)
    assert gaps == [0.5, 1.0, 2.0, 4.0]
    quarantine.ended("embed", [], A, 100.0)
    fail(quarantine, A, 3)
    assert quarantine.next_due_s() == 0.5


def test_a_replica_that_is_gone_is_forgotten_with_its_running_probe() -> None:
    quarantine = make_quarantine(A, B)
    quarantine.due(1.0)
    quarantine.keep_only([B])
    quarantine.probed(A, False, 2.0)
    assert quarantine.out == {B}


def test_a_late_answer_does_not_bring_a_replica_back() -> None:
    quarantine = make_quarantine(A)
    quarantine.ended("embed", [], A, 0.1)
    assert quarantine.out == {A}


KINDS: st.SearchStrategy[RequestKind] = st.sampled_from(["embed", "generate"])
REPLICAS = st.sampled_from([ReplicaId(name) for name in "abcd"])


class QuarantineLife(RuleBasedStateMachine):
    """Whatever happens, in whatever order: out only for a cause, in after a good probe, and no memory of the gone."""

    @initialize()
    def start(self) -> None:
        self.quarantine = Quarantine(RULES)
        self.now_s = 0.0
        self.probing: set[ReplicaId] = set()

    @rule(kind=KINDS, failed_on=st.lists(REPLICAS, max_size=3), answered_by=st.none() | REPLICAS)
    def a_request_ends(self, kind: RequestKind, failed_on: list[ReplicaId], answered_by: ReplicaId | None) -> None:
        before = self.quarantine.out
        self.quarantine.ended(kind, failed_on, answered_by, self.now_s)
        assert before <= self.quarantine.out
        assert self.quarantine.out - before <= set(failed_on) - {answered_by}
        if answered_by is None and len(set(failed_on)) > 1:
            assert self.quarantine.out == before

    @rule(replica_id=REPLICAS, problem=st.none() | st.just("stalled"))
    def a_report_comes(self, replica_id: ReplicaId, problem: str | None) -> None:
        before = self.quarantine.out
        self.quarantine.told(replica_id, problem, self.now_s)
        assert self.quarantine.out == before | ({replica_id} if problem else set())

    @rule(passed_s=st.floats(0.0, 20.0))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        due = set(self.quarantine.due(self.now_s))
        assert due <= self.quarantine.out
        assert not due & self.probing
        self.probing |= due

    @rule(replica_id=REPLICAS, is_well=st.booleans())
    def a_probe_ends(self, replica_id: ReplicaId, is_well: bool) -> None:
        was_out = replica_id in self.quarantine.out
        self.quarantine.probed(replica_id, is_well, self.now_s)
        is_out = was_out and not (replica_id in self.probing and is_well)
        assert (replica_id in self.quarantine.out) == is_out
        self.probing.discard(replica_id)

    @rule(running=st.sets(REPLICAS))
    def replicas_change(self, running: set[ReplicaId]) -> None:
        self.quarantine.keep_only(running)
        self.probing &= running
        assert self.quarantine.out <= running

    @invariant()
    def everybody_out_is_probed_before_long(self) -> None:
        if self.quarantine.out - self.probing:
            due_s = self.quarantine.next_due_s()
            assert due_s is not None
            assert due_s <= self.now_s + RULES.longest_gap_s


TestQuarantineLife = QuarantineLife.TestCase
