"""Topologies expand to what their page in the design says."""

import typing

import pytest

from orthrus_serve.config.roles import ROLES
from orthrus_serve.errors import ConfigError
from orthrus_serve.policy.roles import Split
from orthrus_serve.policy.topology import PRESETS, RULE_SAYS, STEP_HOLDS, describe, expand, split_for
from orthrus_serve.types import PolicyName, RouterRule, TopologyName


@pytest.mark.parametrize("name", typing.get_args(TopologyName))
def test_every_topology_has_a_preset_and_a_description(name):
    topology = expand(name, num_replicas=4)
    text = "\n".join(describe(topology))
    assert name in text
    holds = "two engines on each card" if name == "separate_models" else STEP_HOLDS[topology.pools[0].policy]
    assert holds in text
    assert RULE_SAYS[topology.router_rule] in text


def test_every_rule_is_described():
    assert set(RULE_SAYS) == set(typing.get_args(RouterRule))


def test_topologies_differ_in_policy_and_roles_only_as_far_as_the_router_sees_them():
    pools = {name: expand(name, num_replicas=4).pools for name in PRESETS}
    mixed = typing.get_args(PolicyName)
    assert {name: pool.policy for name, (pool,) in pools.items()} == {
        **{name: name for name in mixed},
        "dedicated": "hetero_fcfs",
        "disagg_pd": "hetero_fcfs",
        "separate_models": "hetero_fcfs",
    }
    assert len({(pool.name, pool.num_replicas, pool.kinds) for (pool,) in pools.values()}) == 1
    assert len({expand(name, num_replicas=4).router_rule for name in PRESETS}) == 1
    assert {name: expand(name, num_replicas=4).split for name in mixed} == dict.fromkeys(mixed)


def test_dedicated_gives_one_replica_to_embeddings_unless_told_otherwise():
    assert expand("dedicated", num_replicas=4).split == Split(1, 3)
    assert expand("dedicated", num_replicas=8, split=Split(1, 1)).split == Split(1, 1)
    (line,) = [line for line in describe(expand("dedicated", num_replicas=8, split=Split(1, 3))) if "pool" in line]
    assert line.endswith("8 replicas, 1 GPU each, 2 serving embed and 6 serving generate")


def test_prefill_and_decode_are_planned_by_role():
    (line,) = [line for line in describe(expand("disagg_pd", num_replicas=4, split=Split(1, 3))) if "pool" in line]
    assert line.endswith("4 replicas, 1 GPU each, 1 prefilling and serving embed, 3 decoding")
    assert [name for name in PRESETS if expand(name, num_replicas=4).hands_over] == ["disagg_pd"]
    assert expand("disagg_pd", num_replicas=4).ratios == {"dedicated": None, "disagg_pd": {"prefill": 1, "decode": 3}}


def test_the_configuration_and_the_presets_agree_on_which_topologies_have_roles():
    assert {name for name, preset in PRESETS.items() if preset.is_split} == set(ROLES)


@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8])
@pytest.mark.parametrize("name", typing.get_args(TopologyName))
def test_pools_of_every_ordinary_size_are_planned(name, num_replicas):
    if PRESETS[name].is_split and num_replicas == 1:
        return
    topology = expand(name, num_replicas=num_replicas)
    assert (topology.num_gpus, topology.num_fronts) == (num_replicas, num_replicas)
    assert any(f"Engine: {num_replicas} replica" in line for line in describe(topology))


def test_one_replica_cannot_be_dedicated():
    with pytest.raises(ConfigError, match="topology 'dedicated' needs at least 2 replicas.*there is 1"):
        expand("dedicated", num_replicas=1)
    assert split_for("orthrus", 1, Split(1, 3)) is None


def test_a_split_that_is_given_holds_for_whatever_number_of_replicas_there_will_be():
    assert split_for("dedicated", 1, Split(1, 3)) == Split(1, 3)


def test_the_rule_can_be_given():
    assert expand("orthrus", num_replicas=2, router_rule="round_robin").router_rule == "round_robin"


@pytest.mark.parametrize(("num_replicas", "on_gpus", "on_cpu"), [(1, 1, 1), (2, 2, 1), (3, 3, 2), (4, 4, 2), (8, 8, 4)])
def test_there_is_one_front_for_each_gpu_and_for_every_two_engines_on_cpu(num_replicas, on_gpus, on_cpu):
    assert expand("orthrus", num_replicas=num_replicas).num_fronts == on_gpus
    assert expand("orthrus", num_replicas=num_replicas, num_gpus_per_replica=0).num_fronts == on_cpu


def test_the_number_of_fronts_can_be_given():
    assert expand("orthrus", num_replicas=1, num_fronts=3).num_fronts == 3


def test_a_plan_counts_gpus():
    assert expand("orthrus", num_replicas=4, num_gpus_per_replica=2).num_gpus == 8
    assert "8 GPUs in all" in describe(expand("orthrus", num_replicas=4, num_gpus_per_replica=2))[0]
    assert any(
        "1 replica, on CPU" in line for line in describe(expand("orthrus", num_replicas=1, num_gpus_per_replica=0))
    )
