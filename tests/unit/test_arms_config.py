"""Arms in a Serve file, and what is set live of them."""

from typing import Any

import pytest

from orthrus_serve.config.arms import live_problems, weights_of
from orthrus_serve.config.load import engine_deployment, parse_args, parse_live
from orthrus_serve.config.schema import FrontLiveSpec
from orthrus_serve.errors import ConfigError
from orthrus_serve.ops.ab import parse_weights
from orthrus_serve.ops.deployed_config import Deployed, Wanted, of_arm, switched, weighted
from orthrus_serve.ops.plan import num_fronts, topology_of

ARMS: dict[str, Any] = {
    "a": {"topology": "dedicated", "num_replicas": 2},
    "b": {"topology": "orthrus", "engine": {"max_wait_steps": 9}, "vllm": {"max_num_seqs": 8}},
}
ARGS: dict[str, Any] = {
    "model": {"path": "/m"},
    "adapters": {"e": {"path": "/a"}},
    "engine": {"min_share": 0.25},
    "vllm": {"max_num_seqs": 64, "dtype": "float32"},
    "router": {"rule": "round_robin"},
    "arms": ARMS,
}


def test_an_arm_changes_single_keys_of_what_the_application_says():
    args = parse_args(ARGS)
    a, b = args.by_arm.values()
    assert (a.topology, a.num_replicas, a.vllm, a.engine.max_wait_steps) == ("dedicated", 2, ARGS["vllm"], 64)
    assert b.vllm == {"max_num_seqs": 8, "dtype": "float32"}
    assert (b.engine.min_share, b.engine.max_wait_steps, b.router.rule, b.arms) == (0.25, 9, "round_robin", {})
    assert (args.most_replicas, num_fronts(args), topology_of(b).router_rule) == (3, 3, "round_robin")
    assert [engine_deployment(arm) for arm in args.by_arm] == ["Engine-a", "Engine-b"]


def test_without_arms_the_only_one_has_no_name():
    args = parse_args({**{key: value for key, value in ARGS.items() if key != "arms"}, "topology": "orthrus"})
    assert args.by_arm == {"": args}
    assert engine_deployment("") == "Engine"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"topology": "orthrus"}, "topology: each of arms says this for itself"),
        ({"num_replicas": 2}, "num_replicas: each of arms says this for itself"),
        ({"arms": {"a": ARMS["a"]}}, "arms: name at least two, or none"),
        ({"arms": {"A b": ARMS["a"], "c": ARMS["b"]}}, "'A b' is no name"),
        ({"arms": {"a": {"topology": "dedicated"}, "b": ARMS["b"]}}, "arms.a.num_replicas: topology dedicated needs"),
        (
            {"arms": {"a": {"topolgy": "orthrus"}, "b": ARMS["b"]}},
            "arms.a.topolgy: unknown key; did you mean 'topology'?",
        ),
        ({"arms": {"a": {}, "b": ARMS["b"]}}, "arms.a.topology: missing"),
        ({"arms": {"a": 1, "b": ARMS["b"]}}, "arms.a: must be a mapping"),
        ({"arms": {**ARMS, "c": {"topology": "orthrus", "vllm": {"model": "x"}}}}, "arms.c.vllm.model"),
    ],
)
def test_what_is_wrong_with_an_arm_is_named(changes, reason):
    with pytest.raises(ConfigError) as refused:
        parse_args({**ARGS, **changes})
    assert reason in str(refused.value)


def test_weights_add_up_to_one_and_are_alike_by_default():
    args = parse_args(ARGS)
    assert weights_of(args, FrontLiveSpec()) == {"a": 0.5, "b": 0.5}
    live = parse_live({"weights": {"a": 3, "b": 1}, "mirror": {"from": "a", "to": "b", "share": 1}}, (), FrontLiveSpec)
    assert live_problems(args, live, ()) == []
    assert weights_of(args, live) == {"a": 0.75, "b": 0.25}


def test_weights_on_the_command_line():
    assert parse_weights(["a=90%", "b=10"]) == {"a": 90, "b": 10}
    for words in (["a"], ["a=x"], ["=1"], ["a=-1"], ["a=inf"], ["a=nan"], ["a=1", "a=2"]):
        with pytest.raises(ConfigError):
            parse_weights(words)


def details(**front: Any) -> dict[str, Any]:
    config = {"name": "app", "import_path": "orthrus_serve.app:build", "args": ARGS}
    config["deployments"] = [{"name": "Front", "user_config": front}]
    return {"applications": {"app": {"deployed_app_config": config}}}


def test_a_switch_of_one_arm_leaves_the_weights_and_the_other_arm():
    before = {"weights": {"a": 1.0, "b": 0.0}, "arms": {"b": {"topology": "hetero_fcfs"}}}
    config = switched(details(**before), "app", Wanted("orthrus"), "a")
    front, engine = config["applications"][0]["deployments"]
    assert front["user_config"] == {**before, "arms": {**before["arms"], "a": {"topology": "orthrus"}}}
    assert (engine["name"], engine["user_config"]["policy"]) == ("Engine-a", "orthrus")
    again = weighted(details(**before), "app", {"a": 0.5, "b": 0.5})
    assert again["applications"][0]["deployments"][0]["user_config"] == {**before, "weights": {"a": 0.5, "b": 0.5}}


def test_which_arm_is_meant_must_be_said():
    deployed = Deployed("app", "http://x", parse_args(ARGS))
    assert (of_arm(deployed, "b").args.topology, of_arm(deployed, "b").label) == ("orthrus", "app, arm b")
    with pytest.raises(ConfigError, match="name one with --arm: a, b"):
        of_arm(deployed, None)
    with pytest.raises(ConfigError, match="there is no arm 'c'"):
        of_arm(deployed, "c")
