"""Draws every board from a real Prometheus that scrapes the product under load: `python -m tests.serve.draw_boards FOLDER`.

For those who change a board and have no Grafana at hand. One picture a board, with its panels where Grafana puts
them, and the pages that were scraped. With `--url` it asks a Prometheus that runs already, and prints the queries that had no
answer there in the last ten minutes; its rates suit a scrape every 15 s.
"""

import argparse
import json
import math
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from tests.serve import test_prometheus
from tests.serve.prometheus import DASHBOARDS, VARIABLES, Prometheus, board_queries

# Span and step of a picture in s, and the window of rates: for the test's scrapes every second, and for every 15 s.
TEST_WINDOW = (60, 2, "10s")
URL_WINDOW = (600, 10, "60s")
SPAN_S = TEST_WINDOW[0]


def ranges(server: Prometheus, expr: str, window: tuple[int, int, str]) -> list[Any]:
    """What a query gave over the window's span."""
    span_s, step_s, rate = window
    for name, value in {**VARIABLES, "$__rate_interval": rate}.items():
        expr = expr.replace(name, value)
    now_s = server.ask("vector(time())")[0]["value"][0]
    params = {"query": expr, "start": now_s - span_s, "end": now_s, "step": step_s}
    return httpx.get(f"{server.url}/api/v1/query_range", params=params, timeout=30).json()["data"]["result"]


def points(series: dict[str, Any]) -> list[tuple[float, float]]:
    """When, and how much, of a line; without what is no number."""
    return [(at_s, float(value)) for at_s, value in series["values"] if not math.isnan(float(value))]


def legend(target: dict[str, Any], labels: dict[str, str]) -> str:
    """What a line is called."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], "")[-14:], target["legendFormat"])


def draw(server: Prometheus, board: dict[str, Any], file: Path, window: tuple[int, int, str] = TEST_WINDOW) -> None:
    """One picture of a board."""
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(24, height * 0.5))
    for panel in panels:
        x, y, w, h = (panel["gridPos"][side] for side in "xywh")
        axes = figure.add_axes((x / 24 + 0.02, 1 - (y + h - 1) / height, w / 24 - 0.03, (h - 2.2) / height))
        axes.set_title(f"{panel['title']} [{panel['fieldConfig']['defaults']['unit']}]", fontsize=9)
        for target in panel["targets"]:
            for series in ranges(server, target["expr"], window):
                times_s, values = zip(*(points(series) or [(math.nan, math.nan)]), strict=True)
                axes.plot(times_s, values, label=legend(target, series["metric"]))
        for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]:
            if step["value"] <= (axes.get_ylim()[1] or 1) * 1.5:
                axes.axhline(step["value"], color=step["color"], linewidth=0.8, linestyle="--")
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7, labelbottom=False)
        axes.legend(fontsize=6, loc="upper left")
    figure.savefig(file, dpi=60)


class _Drawing:
    """A plug-in of pytest that draws when the tests' Prometheus has seen a minute of load."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @pytest.fixture(scope="module", autouse=True)
    def drawn(self, prometheus: Prometheus, arms: Any, real: Any) -> None:
        test_prometheus.under_load([arms, real], SPAN_S)
        for app in (arms, real):
            text = httpx.get(f"{app.url}/metrics", timeout=30).text
            (self._folder / f"{app.name}.txt").write_text(text, encoding="utf-8")
        for file in sorted(DASHBOARDS.glob("*.json")):
            draw(prometheus, json.loads(file.read_text(encoding="utf-8")), self._folder / f"{file.stem}.png")


def draw_running(server: Prometheus, folder: Path) -> int:
    """Every board from a Prometheus that runs. Returns 1 when a query has no answer."""
    for file in sorted(DASHBOARDS.glob("*.json")):
        draw(server, json.loads(file.read_text(encoding="utf-8")), folder / f"{file.stem}.png", URL_WINDOW)
    empty = [place for place, expr in board_queries() if not any(map(points, ranges(server, expr, URL_WINDOW)))]
    sys.stdout.write("".join(f"no answer: {place}\n" for place in empty))
    return int(bool(empty))


def main() -> int:
    """Runs the serve test of the boards with the drawing in it; or draws from a Prometheus that runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--url", help="of a Prometheus that scrapes a server")
    args = parser.parse_args()
    folder: Path = args.folder or Path(tempfile.mkdtemp(prefix=f"boards-{time.monotonic():.0f}-"))
    folder.mkdir(parents=True, exist_ok=True)
    mpl.use("Agg")
    if args.url:
        return draw_running(Prometheus(args.url), folder)
    chosen = "answer_under_load or test_top"
    return pytest.main(["-q", "tests/serve/test_prometheus.py", "-k", chosen], plugins=[_Drawing(folder)])


if __name__ == "__main__":
    sys.exit(main())
