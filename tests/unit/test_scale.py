"""`scale` changes one number, waits for it, and says what differs from the file."""

import copy
from typing import Any

import pytest

from orthrus_serve.errors import ConfigError
from orthrus_serve.ops import scale as scale_module
from orthrus_serve.ops.deployed_config import deploy_config
from orthrus_serve.ops.scale import ScaleError, scale
from tests.unit.test_deployed_config import ARGS, OURS, THEIRS, deployment, details, without_user_config


class FakeServe:
    """Serve's API over a cluster whose replicas come and go after some questions."""

    def __init__(self, config: dict[str, Any] = OURS, after: int = 3) -> None:
        self.now = details(config, THEIRS)
        self.put: list[dict[str, Any]] = []
        self.after = after
        self._states(["RUNNING"] * 4)

    def _states(self, states: list[str]) -> None:
        replicas = [{"state": state} for state in states]
        self.now["applications"]["ours"]["deployments"] = {"Engine": {"replicas": replicas}}

    def details(self) -> dict[str, Any]:
        if self.put:
            self.after -= 1
            wanted = deployment(self.put[-1], "Engine")["num_replicas"]
            running = ["RUNNING"] * (wanted if self.after <= 0 else min(4, wanted))
            self._states([*running, *["STARTING"] * (wanted - len(running)), *["STOPPING"] * (4 - wanted)])
        return copy.deepcopy(self.now)

    def deploy(self, config: dict[str, Any]) -> None:
        self.put.append(config)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_module, "POLL_EVERY_S", 0.001)


def test_only_the_number_of_engines_differs_afterwards() -> None:
    serve = FakeServe()
    scale(2, serve, lambda _: None)
    (put,) = serve.put
    assert deployment(put, "Engine").pop("num_replicas") == 2
    assert without_user_config(put) == without_user_config(deploy_config(details(OURS, THEIRS)))


def test_it_waits_for_engines_that_start_and_not_for_those_that_finish_their_work() -> None:
    serve, said = FakeServe(), []
    scale(6, serve, said.append)
    assert serve.after == 0
    assert said[0].startswith("ours: 4 → 6 engines in ")
    assert "file that it was started from says num_replicas: 4" in said[1]
    said.clear()
    scale(3, FakeServe(), said.append)
    assert said[1].startswith("1 more get no requests any longer")
    said.clear()
    scale(4, FakeServe(), said.append)
    assert len(said) == 1


def test_engines_that_do_not_come_up_in_time_are_an_error_that_says_how_far_it_got() -> None:
    with pytest.raises(ScaleError, match="not yet 6 engines: 4 running, 2 starting"):
        scale(6, FakeServe(after=10**9), lambda _: None, timeout_s=0.02)


@pytest.mark.parametrize(
    ("args", "live", "num_replicas", "expected"),
    [
        ({}, {}, 0, "topology orthrus needs at least 1 engine replicas, got 0"),
        ({}, {"topology": "dedicated"}, 1, "topology dedicated needs at least 2"),
        ({"autoscaling": {"max_replicas": 8, "target_tokens_per_replica": 9}}, {}, 2, "scales itself"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_put(
    args: dict[str, Any], live: dict[str, Any], num_replicas: int, expected: str
) -> None:
    front = {"name": "Front", "user_config": live}
    serve = FakeServe({**OURS, "args": {**ARGS, **args}, "deployments": [front]})
    with pytest.raises(ConfigError, match=expected):
        scale(num_replicas, serve, lambda _: None)
    assert serve.put == []
