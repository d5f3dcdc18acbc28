"""Topologies expand to what their page in the design says."""

import typing

import pytest

from orthrus_serve.policy.topology import PRESETS, RULE_SAYS, STEP_HOLDS, describe, expand
from orthrus_serve.types import PolicyName


@pytest.mark.parametrize("name", typing.get_args(PolicyName))
def test_every_topology_has_a_preset_and_a_description(name):
    topology = expand(name, num_replicas=4)
    text = "\n".join(describe(topology))
    assert name in text
    assert STEP_HOLDS[topology.pools[0].policy] in text
    assert RULE_SAYS[topology.router_rule] in text


def test_the_mixed_topologies_differ_in_the_scheduler_policy_only():
    pools = {name: expand(name, num_replicas=4).pools for name in PRESETS}
    assert {name: pool.policy for name, (pool,) in pools.items()} == {name: name for name in PRESETS}
    assert len({(pool.name, pool.num_replicas, pool.kinds) for (pool,) in pools.values()}) == 1
    assert len({expand(name, num_replicas=4).router_rule for name in PRESETS}) == 1


@pytest.mark.parametrize(("num_replicas", "num_fronts"), [(1, 1), (2, 1), (3, 2), (4, 2), (8, 4)])
def test_there_is_one_front_for_every_two_replicas(num_replicas, num_fronts):
    assert expand("orthrus", num_replicas=num_replicas).num_fronts == num_fronts


def test_the_number_of_fronts_can_be_given():
    assert expand("orthrus", num_replicas=1, num_fronts=3).num_fronts == 3


def test_a_plan_counts_gpus():
    assert expand("orthrus", num_replicas=4, num_gpus_per_replica=2).num_gpus == 8
    assert "8 GPUs in all" in describe(expand("orthrus", num_replicas=4, num_gpus_per_replica=2))[0]
    assert any(
        "1 replica, on CPU" in line for line in describe(expand("orthrus", num_replicas=1, num_gpus_per_replica=0))
    )
