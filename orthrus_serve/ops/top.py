"""`orthrus-serve top`: what every replica does now, by kind, from `/status` and `/metrics` of a running server.

Decides how the numbers look. Leaves out how they are computed (`top_rates.py`).
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from orthrus_serve.errors import OrthrusError
from orthrus_serve.ops.top_rates import Row, Scrape, Summary, parse_scrape, rows, summary

TIMEOUT_S = 10.0
COLUMNS = ("replica", "kind", "held", "oldest", "left", "tokens/s", "of batch", "TPOT", "fill", "KV", "state")
_NONE = "–"

Pages = tuple[Scrape, dict[str, Any]]


class ServerNotReadableError(OrthrusError):
    """The server does not answer, or not with what Orthrus answers."""


def top(base_url: str, interval_s: float, *, once: bool) -> None:
    """Shows the table every `interval_s` until interrupted; with `once`, prints it once, for scripts and logs.

    Raises:
        ServerNotReadableError: nobody answers there.
    """
    with httpx.Client(base_url=base_url.rstrip("/"), timeout=TIMEOUT_S) as client:
        views = _views(client, interval_s, time.sleep)
        if once:
            found, total = next(views)
            sys.stdout.write("\n".join(plain(found, total)) + "\n")
            return
        with Live(console=Console(), auto_refresh=False, screen=True) as live:
            for found, total in views:
                live.update(_table(found, total), refresh=True)


def _views(
    client: httpx.Client, interval_s: float, sleep: Callable[[float], None]
) -> Iterator[tuple[list[Row], Summary]]:
    before, _ = _fetch(client)
    while True:
        sleep(interval_s)
        after, status = _fetch(client)
        yield rows(before, after, status), summary(before, after)
        before = after


def _fetch(client: httpx.Client) -> Pages:
    try:
        metrics = client.get("/metrics").raise_for_status().text
        at_s = time.monotonic()
        status = client.get("/status").raise_for_status().json()
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        raise ServerNotReadableError(
            f"{client.base_url} does not answer as a server of Orthrus does: {error}"
        ) from error
    if not {"engines", "arms"} & status.keys():
        raise ServerNotReadableError(f"{client.base_url}/status is not the page of an Orthrus server")
    return parse_scrape(metrics, at_s), status


def plain(found: Sequence[Row], total: Summary) -> list[str]:
    """The table as lines of plain text."""
    table = [COLUMNS, *(cells(row) for row in found)]
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return [*lines, total.line]


def cells(row: Row) -> tuple[str, ...]:
    """A row's cells, in the order of `COLUMNS`."""
    name = f"{row.arm}/{row.replica}" if row.arm else row.replica
    rates = (row.rates or {}).items()
    return (
        name,
        row.kind,
        _number(row.held),
        _duration(row.oldest_s),
        _number(row.left),
        _NONE if any(rate is None for _, rate in rates) else " + ".join(f"{rate:.0f} {part}" for part, rate in rates),
        _percent(row.share),
        _duration(row.tpot_s),
        _percent(row.fill),
        _percent(row.kv),
        row.state,
    )


def _table(found: Sequence[Row], total: Summary) -> Table:
    table = Table(title="orthrus-serve top", caption=total.line, expand=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("replica", "kind", "tokens/s", "state") else "right")
    for row in found:
        is_well = row.state not in ("silent", "quarantined", "leaving")
        table.add_row(*cells(row), style="" if is_well else "red")
    return table


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.0f} %"


def _duration(value_s: float | None) -> str:
    if value_s is None:
        return _NONE
    return f"{1000 * value_s:.0f} ms" if value_s < 1 else f"{value_s:.1f} s"
