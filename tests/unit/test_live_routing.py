"""A Front follows its user_config, refuses what cannot be, and never raises."""

from typing import Any

import pytest

from orthrus_serve.config.load import parse_args
from orthrus_serve.policy.roles import Split
from orthrus_serve.serving.live_routing import LiveRouting
from orthrus_serve.serving.router_state import RouterState

ARGS: dict[str, Any] = {
    "topology": "orthrus",
    "num_replicas": 4,
    "model": {"path": "/m"},
    "adapters": {"e": {"path": "/a"}},
    "router": {"rule": "power_of_two"},
}


def live(**changes: Any) -> tuple[LiveRouting, RouterState]:
    state = RouterState()
    return LiveRouting(parse_args({**ARGS, **changes}), state), state


def test_a_front_begins_as_args_say():
    routing, state = live()
    assert (state.rule, state.split) == ("power_of_two", None)
    none: dict[str, Any] = {"dedicated": None, "disagg_pd": None, "refused": None}
    assert routing.describe() == {"topology": "orthrus", "rule": "power_of_two", **none}
    assert live(topology="dedicated", router={})[1].split == Split(1, 3)
    assert live(topology="dedicated", dedicated={"embed": 2, "generate": 2})[1].split == Split(2, 2)


@pytest.mark.parametrize(
    ("user_config", "rule", "split"),
    [
        ({"topology": "dedicated"}, "least_remaining_tokens", Split(1, 3)),
        ({"topology": "dedicated", "dedicated": {"embed": 1, "generate": 1}}, "least_remaining_tokens", Split(1, 1)),
        ({"topology": "unified_homo"}, "least_remaining_tokens", None),  # the rule of args is that of args' topology
        ({"topology": "unified_homo", "rule": "round_robin"}, "round_robin", None),
        ({"rule": "round_robin"}, "round_robin", None),
        ({"topology": "orthrus"}, "power_of_two", None),
        ({}, "power_of_two", None),
        (None, "power_of_two", None),
    ],
)
def test_a_change_holds_whole_and_leaves_nothing_of_the_one_before(user_config, rule, split):
    routing, state = live()
    routing.change({"topology": "dedicated", "rule": "round_robin"})
    routing.change(user_config)
    assert (state.rule, state.split, routing.describe()["refused"]) == (rule, split, None)
    assert routing.topology == ((user_config or {}).get("topology") or "orthrus")


@pytest.mark.parametrize(
    ("user_config", "reason"),
    [
        ({"topology": "dedicatd"}, "did you mean 'dedicated'?"),
        ({"rule": "fastest"}, "user_config.rule: must be"),
        ({"topolgy": "dedicated"}, "user_config.topolgy: unknown key"),
        ({"dedicated": {"embed": 0, "generate": 4}}, "user_config.dedicated.embed: must be at least 1"),
        ([1], "must be a mapping"),
        ("dedicated", "must be a mapping"),
        (object(), "must be text"),
        ({1: 2}, "the key 1 must be text"),
        ({"topology": float("nan")}, "must be a finite number"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason_and_changes_nothing(user_config, reason):
    routing, state = live()
    routing.change({"topology": "dedicated"})
    routing.change(user_config)
    assert (routing.topology, state.split) == ("dedicated", Split(1, 3))
    assert reason in routing.describe()["refused"]


def test_dedicated_is_refused_where_one_replica_was_started_and_no_split_is_given():
    routing, state = live(num_replicas=1)
    routing.change({"topology": "dedicated"})
    assert "at least 2 replicas" in routing.describe()["refused"]
    assert state.split is None


def test_prefill_and_decode_are_shared_out_where_the_engines_have_a_connector():
    routing, state = live(kv_connector="nixl", disagg_pd={"prefill": 1, "decode": 2})
    assert not routing.hands_over
    routing.change({"topology": "disagg_pd"})
    assert (routing.hands_over, state.split, routing.describe()["refused"]) == (True, Split(1, 2), None)
    assert routing.describe()["disagg_pd"] == {"prefill": 1, "decode": 2}
    routing.change({"topology": "disagg_pd", "disagg_pd": {"prefill": 3, "decode": 1}})
    assert state.split == Split(3, 1)
    routing.change({"topology": "dedicated"})
    assert (routing.hands_over, state.split) == (False, Split(1, 3))


def test_prefill_and_decode_are_refused_where_the_engines_have_no_connector():
    routing, _ = live()
    routing.change({"topology": "disagg_pd"})
    assert (routing.topology, routing.hands_over) == ("orthrus", False)
    assert "started without kv_connector" in routing.describe()["refused"]
