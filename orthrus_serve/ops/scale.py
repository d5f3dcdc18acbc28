"""`orthrus-serve scale`: another number of engine replicas on the running application, without a restart of those that stay.

Replicas that leave get no more requests and finish what they run. Leaves out what is changed in the configuration
(`deployed_config.py`), and scaling by load, which Serve does by itself (`args.autoscaling`).
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from orthrus_serve.config.load import engine_deployment
from orthrus_serve.errors import OrthrusError
from orthrus_serve.ops.deployed_config import Deployed, check_scale, find_application, of_arm, scaled

POLL_EVERY_S = 0.5


class ScaleError(OrthrusError):
    """The number of replicas did not come about in time."""


class Api(Protocol):
    """What is needed of `ServeApi`."""

    def details(self) -> dict[str, Any]: ...

    def deploy(self, config: dict[str, Any]) -> None: ...


def scale(
    num_replicas: int,
    api: Api,
    say: Callable[[str], None],
    *,
    app: str | None = None,
    arm: str | None = None,
    timeout_s: float = 900.0,
) -> None:
    """Scales, and returns when so many engines run and no other is starting; those that leave may still finish their work.

    Args:
        app: name of the application; None takes the only one of ours.
        arm: whose engines, where there are arms.
        timeout_s: how long loading may take.

    Raises:
        ConfigError: it cannot be had there.
        ServeApiError, ScaleError: Serve does not answer; the engines did not come up in time.
    """
    details = api.details()
    deployed = of_arm(find_application(details, app), arm)
    check_scale(details, deployed, num_replicas)
    before = replica_states(details, deployed.name, deployed.arm)
    began_s = time.monotonic()
    api.deploy(scaled(details, deployed.name, num_replicas, deployed.arm))
    states = _until_running(num_replicas, api, deployed, began_s + timeout_s)
    say(f"{deployed.label}: {before['RUNNING']} → {num_replicas} engines in {time.monotonic() - began_s:.1f} s")
    if states["STOPPING"]:
        say(f"{states['STOPPING']} more get no requests any longer, and end when they have finished what they run")
    if num_replicas != deployed.args.num_replicas:
        say(
            f"note: the file that it was started from says num_replicas: {deployed.args.num_replicas}; deploying that file "
            "again, or a new start, goes back to it"
        )


def replica_states(details: Mapping[str, Any], app: str, arm: str = "") -> Counter[str]:
    """How many engine replicas are in each of Serve's states (`STARTING`, `UPDATING`, `RUNNING`, `STOPPING`, …)."""
    deployments = details["applications"].get(app, {}).get("deployments") or {}
    engines = deployments.get(engine_deployment(arm)) or {}
    return Counter(str(replica["state"]) for replica in engines.get("replicas") or ())


def _until_running(num_replicas: int, api: Api, deployed: Deployed, deadline_s: float) -> Counter[str]:
    while True:
        states = replica_states(api.details(), deployed.name, deployed.arm)
        if states["RUNNING"] == num_replicas and set(states) <= {"RUNNING", "STOPPING"}:
            return states
        if time.monotonic() > deadline_s:
            told = ", ".join(f"{count} {state.lower()}" for state, count in sorted(states.items())) or "none"
            raise ScaleError(f"not yet {num_replicas} engines: {told}. Serve goes on trying; `serve status` says why")
        time.sleep(POLL_EVERY_S)
