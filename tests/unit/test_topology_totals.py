"""An engine's counts are divided among topologies without loss."""

from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.serving.topology_totals import TopologyTotals

TOPOLOGIES = ("orthrus", "hetero_fcfs", "unified_homo", "dedicated")


@given(st.lists(st.tuples(st.sampled_from(TOPOLOGIES), st.integers(0, 1000))))
def test_the_sum_over_topologies_is_the_engines_own_count(reports):
    totals, counted, expected = TopologyTotals("orthrus"), 0, dict.fromkeys(TOPOLOGIES, 0)
    for topology, more in reports:
        totals.topology = topology
        counted += more
        expected[topology] += more
        totals.see({"steps": counted})
    assert {name: counts["steps"] for name, counts in totals.by_topology().items()} == {
        name: count for name, count in expected.items() if name in totals.by_topology()
    }
    assert sum(counts["steps"] for counts in totals.by_topology().values()) == counted
