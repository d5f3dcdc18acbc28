"""`orthrus-serve ab`: the report that compares arms, and a change of their weights without a restart.

Leaves out the statistics (`policy/ab_report.py`) and what is changed in the configuration (`deployed_config.py`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from orthrus_serve.config.arms import weight_problems, weights_of
from orthrus_serve.config.complaint import did_you_mean
from orthrus_serve.config.schema import FrontLiveSpec
from orthrus_serve.errors import ConfigError, OrthrusError
from orthrus_serve.ops.deployed_config import find_application, weighted
from orthrus_serve.ops.scale import Api
from orthrus_serve.policy.ab_report import Row, Size, compare
from orthrus_serve.policy.slices import Cell, Told, from_page, merge_slices

POLL_EVERY_S = 0.02
PAGE_TIMEOUT_S = 10.0
LAST_WORDS = "Intervals hold at 95 % all together. Rates are what an arm was given by its weight, unless it was full."


class AbError(OrthrusError):
    """There is nothing to report, or the Fronts did not follow new weights."""


def report(base_url: str, baseline: str | None = None) -> list[str]:
    """The lines of the report: every arm against `baseline`, which is the first one unless named.

    Raises:
        AbError, ConfigError: there is no such page there, or no such arm.
    """
    page = _page(base_url.rstrip("/"), "/ab")
    try:
        told, arms = from_page(page), page["arms"]
        sizes = {name: Size(arm["num_replicas"], arm["num_gpus"]) for name, arm in arms.items()}
        return report_lines(told, arms, sizes, baseline, page["mirror"], page["num_fronts_silent"])
    except (KeyError, TypeError, ValueError) as error:
        raise AbError(f"{base_url}/ab is not the page of this version of Orthrus") from error


def report_lines(
    told: Told,
    arms: Mapping[str, Any],
    sizes: Mapping[str, Size],
    baseline: str | None,
    mirror: Mapping[str, Any] | None = None,
    num_silent: int = 0,
) -> list[str]:
    """What the user reads."""
    if baseline is not None and baseline not in arms:
        raise ConfigError(f"there is no arm {baseline!r}{did_you_mean(baseline, arms)}; there are {', '.join(arms)}")
    base = baseline or next(iter(arms))
    total = merge_slices(told.slices)
    measured_s = len(told.slices) * told.slice_s
    lines = [f"measured     {_duration(measured_s)} in whole slices, {_duration(told.since_s)} since the last change"]
    lines += [_arm_line(name, arm, sizes[name], total) for name, arm in arms.items()]
    if mirror:
        lines.append(f"mirror       {mirror['share']:.4g} of what {mirror['from']} answers is copied to {mirror['to']}")
    if num_silent:
        lines.append(f"note: {num_silent} Fronts do not answer; what they did is missing")
    if not any(cell.ok for cell in total.values()):
        return [*lines, "No request has ended in a whole slice of 10 s yet."]
    for name in arms:
        if name != base:
            lines += ["", f"{name} against {base}", *_table(compare(told, name, base, sizes), name, base, sizes)]
    return [*lines, "", LAST_WORDS]


def parse_weights(words: Sequence[str]) -> dict[str, float]:
    """`a=0.9 b=0.1`, or in percent: `a=90 b=10`; only the ratios matter.

    Raises:
        ConfigError: a word is something else.
    """
    weights: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition("=")
        try:
            weight = float(number.removesuffix("%"))
        except ValueError:
            weight = -1.0
        if not name or not 0 <= weight < float("inf"):
            raise ConfigError(f"{word!r}: must be an arm and its weight, such as orthrus=0.1")
        if name in weights:
            raise ConfigError(f"{word!r}: {name} is there twice")
        weights[name] = weight
    return weights


def change_weights(
    weights: Mapping[str, float],
    api: Api,
    say: Callable[[str], None],
    *,
    app: str | None = None,
    base_url: str | None = None,
    timeout_s: float = 30.0,
) -> None:
    """Changes the weights of the running application, and returns when every Front goes by them.

    Raises:
        ConfigError: there are no such arms.
        ServeApiError, AbError: Serve does not answer; a Front refused or did not follow in time.
    """
    details = api.details()
    deployed = find_application(details, app)
    if not deployed.args.arms:
        raise ConfigError(f"{deployed.name} has no arms")
    problems = weight_problems(weights, deployed.args, ("weights",))
    if problems:
        raise ConfigError("\n".join(problems))
    url = (base_url or deployed.url).rstrip("/")
    before = _page(url, "/status")
    wanted = weights_of(deployed.args, FrontLiveSpec(weights=dict(weights)))
    began_s = time.monotonic()
    api.deploy(weighted(details, deployed.name, weights))
    while True:
        page = _page(url, "/status")
        fronts = page["fronts"]
        late = [front for front in fronts if front["weights"] != wanted or front["refused"] is not None]
        if not late and fronts and not page["num_fronts_silent"]:
            break
        if time.monotonic() - began_s > timeout_s:
            reasons = [f"Front {front['front']}: {front['refused'] or 'has not followed'}" for front in late]
            raise AbError("\n".join([f"not all Fronts followed within {timeout_s:g} s", *reasons]))
        time.sleep(POLL_EVERY_S)
    took_s = time.monotonic() - began_s
    say(
        f"{deployed.name}: {_shares(before['weights'])} → {_shares(wanted)}; {len(fronts)} Front(s) followed in {took_s:.2f} s"
    )
    say("The report starts anew. The file on disk is as it was: deploying it again goes back to its weights.")


def _page(url: str, path: str) -> dict[str, Any]:
    try:
        answer = httpx.get(f"{url}{path}", timeout=PAGE_TIMEOUT_S, trust_env=False)
        page = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise AbError(
            f"{url}{path} does not answer ({type(error).__name__}); `--base-url` takes the application's address"
        ) from error
    if answer.status_code != 200:
        reason = page.get("error", {}).get("message") if isinstance(page, dict) else None
        raise AbError(f"{url}{path} answered {answer.status_code}: {reason or 'no page of Orthrus'}")
    if not isinstance(page, dict):
        raise AbError(f"{url}{path} is not the page of this version of Orthrus")
    return page


def _arm_line(name: str, arm: Mapping[str, Any], size: Size, total: Mapping[Any, Cell]) -> str:
    cells = [cell for (of, _), cell in total.items() if of == name]
    ok, failed, mirrored = (sum(getattr(cell, key) for cell in cells) for key in ("ok", "failed", "mirrored"))
    on = f"{size.num_gpus:g} GPUs" if size.num_gpus else f"{size.num_replicas} CPU replica(s)"
    copies = f", {mirrored} of them copies" if mirrored else ""
    done = f"{ok} answered{copies}, {failed} refused or failed"
    return f"arm          {name}: {arm['topology']} on {on}, weight {arm['weight']:.4g}; {done}"


def _table(rows: Sequence[Row], name: str, base: str, sizes: Mapping[str, Size]) -> list[str]:
    per = "GPU" if sizes[name].num_gpus and sizes[base].num_gpus else "replica"
    lines: list[str] = []
    for row in rows:
        is_rate = row.measure.endswith("/s")
        measure = f"{row.kind} {row.measure}{f' per {per}' if is_rate else ''}"
        values = f"{_value(row.of, is_rate):>10} against {_value(row.of_baseline, is_rate):>10}"
        lines.append(f"  {measure:<32} {values}   {_verdict(row)}")
    return lines


def _verdict(row: Row) -> str:
    ratio = row.ratio
    if ratio is None:
        return "cannot tell: one of them has none"
    wait = "" if ratio.more_s is None else f"; about {_duration(ratio.more_s)} more"
    if ratio.low is None or ratio.high is None:
        return f"cannot tell yet: {_percent(ratio.value)}, from too few requests{wait or '; hours more'}"
    between = f"{_percent(ratio.low)} to {_percent(ratio.high)}"
    if ratio.is_told:
        return f"{_percent(ratio.value)} ({between})"
    wait = f"{wait}, if it is as it looks" if wait else "; they may well be equal"
    return f"cannot tell: {_percent(ratio.value)} ({between}){wait}"


def _value(value: float | None, is_rate: bool) -> str:
    if value is None:
        return "-"
    if is_rate:
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def _shares(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {weight:.4g}" for name, weight in weights.items())


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
