"""Switching changes `user_config` and nothing else, and is over when every Front and engine says so."""

import copy
from typing import Any

import pytest

from orthrus_serve.config.load import parse_live
from orthrus_serve.config.schema import FrontLiveSpec, LiveSpec
from orthrus_serve.errors import ConfigError
from orthrus_serve.ops.deployed_config import (
    Wanted,
    behind,
    deploy_config,
    find_application,
    live_spec,
    parse_wanted,
    refusals,
    settled,
    switched,
    target,
)
from orthrus_serve.policy.roles import Split

ARGS: dict[str, Any] = {
    "topology": "orthrus",
    "num_replicas": 4,
    "model": {"path": "/m"},
    "adapters": {"e": {"path": "/a"}},
}
OURS: dict[str, Any] = {
    "name": "ours", "route_prefix": "/", "import_path": "orthrus_serve.app:build", "args": ARGS,
    "deployments": [{"name": "Engine", "health_check_period_s": 3, "user_config": {"policy": "orthrus", "min_share": 0.2}}],
}  # fmt: skip
THEIRS = {"name": "theirs", "route_prefix": "/theirs", "import_path": "their.app:make"}


def details(*configs: dict[str, Any], by_hand: tuple[str, ...] = ()) -> dict[str, Any]:
    applications: dict[str, Any] = {config["name"]: {"deployed_app_config": config} for config in configs}
    applications |= {name: {"deployed_app_config": None} for name in by_hand}
    http = {"host": "0.0.0.0", "port": 8123}
    return {"proxy_location": "HeadOnly", "http_options": http, "target_capacity": None, "applications": applications}


def deployment(config: dict[str, Any], name: str, app: str = "ours") -> dict[str, Any]:
    (application,) = [one for one in config["applications"] if one["name"] == app]
    (found,) = [one for one in application["deployments"] if one["name"] == name]
    return found


def without_user_config(config: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for application in config["applications"]:
        for one in application.get("deployments", []):
            one.pop("user_config", None)
        application["deployments"] = [one for one in application.get("deployments", []) if set(one) != {"name"}]
    return config


def test_only_user_config_changes_and_everybody_elses_application_goes_back_as_it_came():
    before = details(OURS, THEIRS, by_hand=("notebook",))
    untouched = copy.deepcopy(before)
    config = switched(before, "ours", Wanted("dedicated", split=Split(1, 3)))
    assert before == untouched
    assert without_user_config(config) == without_user_config(deploy_config(before))
    assert [one["name"] for one in config["applications"]] == ["ours", "theirs"]
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8123}
    assert "target_capacity" not in config


def test_both_deployments_are_told_and_what_else_was_set_live_stays():
    config = switched(details(OURS), "ours", Wanted("dedicated", "round_robin", Split(1, 3)))
    engine, front = deployment(config, "Engine"), deployment(config, "Front")
    assert engine["user_config"] == {"topology": "dedicated", "policy": "hetero_fcfs", "min_share": 0.2}
    assert engine["health_check_period_s"] == 3
    assert front["user_config"] == {
        "topology": "dedicated",
        "rule": "round_robin",
        "dedicated": {"embed": 1, "generate": 3},
    }
    parse_live(engine["user_config"], (), LiveSpec)
    parse_live(front["user_config"], (), FrontLiveSpec)


def test_switching_back_leaves_nothing_of_the_switch_behind():
    there = switched(details(OURS), "ours", Wanted("dedicated", "round_robin", Split(1, 3)))
    back = switched(details(*there["applications"]), "ours", Wanted("orthrus"))
    assert deployment(back, "Front")["user_config"] == {"topology": "orthrus"}
    assert deployment(back, "Engine")["user_config"] == {"topology": "orthrus", "policy": "orthrus", "min_share": 0.2}


def test_live_settings_of_the_engines_are_merged_with_those_that_stand():
    wanted = parse_wanted("hetero_fcfs", settings=["min_share=0.3", "step_tokens=1024", "embed_weight=4"])
    assert wanted.engine == {"min_share": 0.3, "step_tokens": 1024, "embed_weight": 4.0}
    engine = deployment(switched(details(OURS), "ours", wanted), "Engine")
    assert engine["user_config"] == {**wanted.engine, "topology": "hetero_fcfs", "policy": "hetero_fcfs"}
    later = details({**OURS, "deployments": [engine]})
    kept = deployment(switched(later, "ours", parse_wanted("orthrus", settings=["step_tokens=512"])), "Engine")
    assert kept["user_config"] == {**wanted.engine, "step_tokens": 512, "topology": "orthrus", "policy": "orthrus"}
    parse_live(kept["user_config"], (), LiveSpec)


def test_an_application_without_a_list_of_deployments_gets_one():
    plain = {key: value for key, value in OURS.items() if key != "deployments"}
    config = switched(details(plain), "ours", Wanted("unified_homo"))
    assert deployment(config, "Engine") == {
        "name": "Engine",
        "user_config": {"topology": "unified_homo", "policy": "unified_homo"},
    }


def test_a_change_that_would_restart_replicas_is_refused_with_the_way_out():
    with_environment = {**OURS, "runtime_env": {"env_vars": {"A": "1"}}}
    with pytest.raises(ConfigError, match=r"restart the replicas.*deployments: \[\{name: Front\}, \{name: Engine\}\]"):
        switched(details(with_environment), "ours", Wanted("unified_homo"))
    listed = {**with_environment, "deployments": [{"name": "Front"}, {"name": "Engine"}]}
    config = switched(details(listed), "ours", Wanted("unified_homo"))
    assert config["applications"][0]["runtime_env"] == {"env_vars": {"A": "1"}}


def test_the_application_is_found_and_its_address_is_what_serve_says():
    deployed = find_application(details(THEIRS, OURS))
    assert (deployed.name, deployed.url, deployed.args.num_replicas) == ("ours", "http://127.0.0.1:8123", 4)
    other = {**OURS, "name": "b", "route_prefix": "/b"}
    assert find_application(details(OURS, other), "b").url == "http://127.0.0.1:8123/b"


@pytest.mark.parametrize(
    ("found", "name", "reason"),
    [
        (details(), None, "no application does"),
        (
            details(THEIRS),
            None,
            "no application there was started from a file with import_path orthrus_serve.app:build",
        ),
        (details(by_hand=("ours",)), None, "no application there was started from a file"),
        (details(THEIRS), "theirs", "'theirs' was not started from a file with import_path orthrus_serve.app:build"),
        (details(OURS), "our", "no application 'our'; did you mean 'ours'?"),
        (details(OURS), "zzz", "no application 'zzz'; there are ours"),
        (details(OURS, {**OURS, "name": "b"}), None, "name one with --app: b, ours"),
    ],
)
def test_an_application_that_cannot_be_switched_is_refused_in_a_sentence(found, name, reason):
    with pytest.raises(ConfigError) as caught:
        find_application(found, name)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("dedicatd",), "there is no topology 'dedicatd'; did you mean 'dedicated'?"),
        (("disagg",), "there is no topology 'disagg'; did you mean 'disagg_pd'?"),
        (("orthrus", "round-robin"), "there is no rule 'round-robin'; did you mean 'round_robin'?"),
        (("orthrus", None, "1:3"), "in topology orthrus every replica serves both kinds"),
        (("dedicated", None, "1"), "such as 1:3"),
        (("dedicated", None, "0:3"), "such as 1:3"),
        (("dedicated", None, "1:3:5"), "such as 1:3"),
        (("dedicated", None, "-1:3"), "such as 1:3"),
        (("orthrus", None, None, ["min_share"]), "--set: must be NAME=VALUE such as step_tokens=1024; got 'min_share'"),
        (("orthrus", None, None, ["min_shar=0.1"]), "--set.min_shar: unknown key; did you mean 'min_share'?"),
        (("orthrus", None, None, ["min_share=0.7"]), "--set.min_share: must be at most 0.5, got the number 0.7"),
        (("orthrus", None, None, ["embed_weight=0"]), "--set.embed_weight: must be more than 0, got the number 0"),
        (
            ("orthrus", None, None, ["step_tokens=many"]),
            "--set.step_tokens: must be a whole number, got the text 'many'",
        ),
        (("orthrus", None, None, ["step_tokens=["]), "--set: 'step_tokens=[' has no value that could be read"),
        (("orthrus", None, None, ["target_tpot_ms="]), "--set: target_tpot_ms needs a value"),
        (("orthrus", None, None, ["policy=hetero_fcfs"]), "--set: policy is what the topology says"),
    ],
)
def test_a_wish_that_cannot_be_is_refused_in_a_sentence(given, reason):
    with pytest.raises(ConfigError) as caught:
        parse_wanted(*given)
    assert reason in str(caught.value)


def test_roles_are_as_asked_or_as_args_have_them_or_one_to_all_others():
    plain, split = find_application(details(OURS)), {"embed": 2, "generate": 2}
    told = find_application(details({**OURS, "args": {**ARGS, "dedicated": split}}))
    assert settled(Wanted("dedicated", split=Split(3, 1)), told, 4).split == Split(3, 1)
    assert settled(Wanted("dedicated"), told, 4).split == Split(2, 2)
    assert settled(Wanted("dedicated"), plain, 8).split == Split(1, 7)
    assert settled(Wanted("orthrus"), plain, 1).split is None
    with pytest.raises(ConfigError, match=r"topology dedicated needs at least 2 engine replicas.*ours runs 1"):
        settled(Wanted("dedicated"), plain, 1)


def test_prefill_and_decode_need_engines_with_a_connector():
    plain = find_application(details(OURS))
    with pytest.raises(ConfigError, match="ours.topology: disagg_pd moves KV.*started without kv_connector"):
        settled(Wanted("disagg_pd"), plain, 4)
    ratio = {"prefill": 2, "decode": 1}
    told = find_application(details({**OURS, "args": {**ARGS, "kv_connector": "nixl", "disagg_pd": ratio}}))
    wanted = settled(Wanted("disagg_pd"), told, 3)
    assert wanted.split == Split(2, 1)
    assert live_spec(wanted).model_dump(exclude_none=True) == {"topology": "disagg_pd", "disagg_pd": ratio}
    assert target(wanted, told).ratios == {"dedicated": None, "disagg_pd": ratio}


def page(**changes: Any) -> dict[str, Any]:
    """A status page on which everybody follows `dedicated` 1:3."""
    front = {
        "front": "f", "topology": "dedicated", "rule": "least_remaining_tokens",
        "dedicated": {"embed": 1, "generate": 3}, "disagg_pd": None, "refused": None,
    }  # fmt: skip
    engine = {
        "replica": "e", "answered": True, "topology": "dedicated", "settings": {"policy": "hetero_fcfs"}, "refused": None,
    }  # fmt: skip
    return {
        "fronts": [{**front, **changes.get("front", {})}],
        "engines": [{**engine, **changes.get("engine", {})}],
        "num_fronts_silent": changes.get("silent", 0),
    }


def test_a_replica_that_serve_does_not_list_right_now_is_waited_for():
    topology = target(Wanted("dedicated", split=Split(1, 3)), find_application(details(OURS)))
    before, now = page(), {**page(engine={"listed": False}), "fronts": []}
    assert [line.split(";")[0] for line in behind(now, topology, before)] == [
        "Front: 1 less than before",
        "engine: 1 less than before",
    ]
    assert behind(before, topology, now) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"front": {"topology": "orthrus"}}, ["Front f has not followed"]),
        ({"front": {"rule": "round_robin"}}, ["Front f has not followed"]),
        ({"front": {"dedicated": {"embed": 2, "generate": 2}}}, ["Front f has not followed"]),
        ({"front": {"refused": "why"}}, ["Front f refused: why"]),
        ({"engine": {"topology": "orthrus"}}, ["engine e has not followed"]),
        ({"engine": {"settings": {"policy": "orthrus"}}}, ["engine e has not followed"]),
        ({"engine": {"refused": "why"}}, ["engine e refused: why"]),
        ({"engine": {"answered": False, "topology": None}}, ["engine e does not answer"]),
        ({"silent": 2}, ["2 Fronts do not answer"]),
    ],
)
def test_whoever_does_not_follow_is_named(changes, expected):
    topology = target(Wanted("dedicated", split=Split(1, 3)), find_application(details(OURS)))
    assert behind(page(**changes), topology, page()) == expected


def test_an_engine_follows_once_it_has_the_settings_asked_for():
    topology = target(Wanted("dedicated", split=Split(1, 3)), find_application(details(OURS)))
    has = {"policy": "hetero_fcfs", "step_tokens": 1024}
    assert behind(page(engine={"settings": has}), topology, page(), {"step_tokens": 1024}) == []
    assert behind(page(engine={"settings": has}), topology, page(), {"step_tokens": 512}) == [
        "engine e has not followed"
    ]


def test_refusals_name_who_and_why():
    assert refusals(page()) == set()
    assert refusals(page(front={"refused": "a"}, engine={"refused": "b"})) == {("f", "a"), ("e", "b")}
