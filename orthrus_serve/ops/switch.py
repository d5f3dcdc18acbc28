"""`orthrus-serve switch`: another topology on the running application, without a restart.

Reads what Serve has deployed, changes `user_config` only, puts it back, and waits until every Front and every engine says that
it follows. Leaves out what is changed and when it holds (`deployed_config.py`).
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from orthrus_serve.errors import OrthrusError
from orthrus_serve.ops.deployed_config import (
    Deployed,
    Wanted,
    behind,
    find_application,
    of_arm,
    refusals,
    settled,
    switched,
    target,
)
from orthrus_serve.ops.serve_api import ServeApi
from orthrus_serve.policy.topology import Topology

POLL_EVERY_S = 0.02
PAGE_TIMEOUT_S = 10.0
# Serve changes the replicas a few at a time, tenths of a second apart.
REFUSAL_HOLDS_S = 2.0


class SwitchError(OrthrusError):
    """The switch was refused by a replica, or did not come to its end in time."""


def switch(
    wanted: Wanted,
    api: ServeApi,
    say: Callable[[str], None],
    *,
    app: str | None = None,
    arm: str | None = None,
    base_url: str | None = None,
    timeout_s: float = 30.0,
) -> float:
    """Switches, and returns the seconds from putting the new configuration until all had followed.

    Args:
        app: name of the application; None takes the only one of ours.
        arm: which pool, where there are arms.
        base_url: where its Fronts answer; None takes what Serve says of itself.

    Raises:
        ConfigError: it cannot be had there.
        ServeApiError, SwitchError: Serve does not answer; a replica refused or did not follow in time.
    """
    details = api.details()
    deployed = of_arm(find_application(details, app), arm)
    url = (base_url or deployed.url).rstrip("/")
    before = status_page(url, deployed.arm)
    wanted = settled(wanted, deployed, len(before["engines"]))
    topology = target(wanted, deployed)
    began_s = time.monotonic()
    api.deploy(switched(details, deployed.name, wanted, deployed.arm))
    page = _until_followed(url, deployed.arm, lambda page: behind(page, topology, before, wanted.engine), timeout_s)
    took_s = time.monotonic() - began_s
    for line in report_lines(before, page, topology, deployed, took_s, wanted.engine):
        say(line)
    return took_s


def status_page(url: str, arm: str = "") -> dict[str, Any]:
    """The `/status` page of the application at `url`, or what it says of one arm.

    Raises:
        SwitchError: there is none.
    """
    try:
        answer = httpx.get(f"{url}/status", timeout=PAGE_TIMEOUT_S, trust_env=False)
        page = answer.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise SwitchError(
            f"{url}/status does not answer ({type(error).__name__}); `--base-url` takes the application's address"
        ) from error
    if arm and isinstance(page, dict):
        page = (page.get("arms") or {}).get(arm)
    if not isinstance(page, dict) or not {"fronts", "engines", "num_fronts_silent"} <= page.keys():
        raise SwitchError(f"{url}/status is not the page of this version of Orthrus")
    return page


def report_lines(
    before: Mapping[str, Any],
    page: Mapping[str, Any],
    topology: Topology,
    deployed: Deployed,
    took_s: float,
    settings: Mapping[str, Any],
) -> list[str]:
    """What the user reads afterwards."""
    split = topology.split
    roles = "every replica serves both kinds"
    if split is not None:
        counts = {kind: sum(engine["kinds"] == [kind] for engine in page["engines"]) for kind in ("embed", "generate")}
        roles = f"{counts['embed']} embed, {counts['generate']} generate"
        if topology.hands_over:
            roles = f"{counts['embed']} prefill and embed, {counts['generate']} decode"
    who = f"{len(page['fronts'])} Front(s) and {len(page['engines'])} engine(s)"
    lines = [
        f"{deployed.label}: {before['topology']} → {topology.name}; {who} followed in {took_s:.2f} s",
        f"policy       {topology.pools[0].policy}",
        f"router rule  {topology.router_rule}",
        f"roles        {roles}",
        *([f"engines      {', '.join(f'{name}={value}' for name, value in settings.items())}"] if settings else []),
    ]
    if not page["engines"]:
        lines.append("note: no engine replica runs yet; those that start will follow")
    if topology.name != deployed.args.topology:
        lines.append(
            f"note: the file that it was started from says topology: {deployed.args.topology}; deploying that file again, or a "
            "new start, goes back to it"
        )
    return lines


def _until_followed(
    url: str, arm: str, who_waits: Callable[[Mapping[str, Any]], list[str]], timeout_s: float
) -> dict[str, Any]:
    began_s = time.monotonic()
    not_refused_s = began_s  # when somebody was behind for another reason than a refusal, last
    while True:
        page, now_s = status_page(url, arm), time.monotonic()
        waiting = who_waits(page)
        if not waiting:
            return page
        if len(waiting) > len(refusals(page)):
            not_refused_s = now_s
        # A refusal may also be that of an earlier change, of a replica whose turn has not come.
        if now_s - not_refused_s > REFUSAL_HOLDS_S:
            raise SwitchError("\n".join(sorted(waiting)))
        if now_s - began_s > timeout_s:
            raise SwitchError("\n".join([f"not all followed within {timeout_s:g} s:", *sorted(waiting)]))
        time.sleep(POLL_EVERY_S)
