"""Writes the boards of `boards.py` as Grafana JSON beside this file: `python dashboards/make.py`.

Decides how a panel looks and where it stands; every board has the same variables, and colours by the same rule. Leaves out what
is shown. `tests/repo` compares the files with what this would write.
"""

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from boards import BOARDS, Board, Panel  # noqa: E402  beside this file, which is not part of a package

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTORS = {
    "<E>": 'topology=~"$topology",replica=~"$replica",arm=~"$arm"',
    "<F>": 'topology=~"$topology",arm=~"$arm"',
    "<A>": 'arm=~"$arm"',
    "<V>": 'replica=~"$replica",arm=~"$arm"',
    "<R>": "$__rate_interval",
}
# Variable → the metric whose label gives its values.
VARIABLES = {
    "topology": "orthrus_engine_steps_total",
    "arm": "orthrus_front_replicas",
    "replica": "orthrus_engine_steps_total",
}
ROW_HEIGHT, STAT_HEIGHT, WIDTH = 8, 4, 24
GREEN, ORANGE, RED = "green", "orange", "red"


def expression(expr: str) -> str:
    """A query with its selectors filled in."""
    for name, labels in SELECTORS.items():
        expr = expr.replace(name, labels)
    return expr


def board_json(board: Board) -> dict[str, Any]:
    """A board as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in board.rows:
        panels.append({"type": "row", "title": row.title, "collapsed": False, "id": len(panels) + 1, "panels": [],
                       "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}})  # fmt: skip
        height = STAT_HEIGHT if all(panel.kind == "stat" for panel in row.panels) else ROW_HEIGHT
        width = WIDTH // len(row.panels)
        for place, panel in enumerate(row.panels):
            grid = {"x": place * width, "y": top + 1, "w": width, "h": height}
            panels.append({**panel_json(panel), "id": len(panels) + 1, "gridPos": grid})
        top += 1 + height
    links = [
        {
            "type": "dashboards",
            "tags": ["orthrus"],
            "title": "Orthrus",
            "asDropdown": True,
            "includeVars": True,
            "keepTime": True,
        }
    ]
    return {
        "uid": board.uid, "title": board.title, "description": board.says, "tags": ["orthrus"], "schemaVersion": 39,
        "editable": True, "refresh": "10s", "time": {"from": "now-30m", "to": "now"}, "timezone": "", "graphTooltip": 1,
        "links": links, "templating": {"list": variables()}, "annotations": {"list": []}, "panels": panels,
    }  # fmt: skip


def variables() -> list[dict[str, Any]]:
    """What can be chosen at the top of every board."""
    chosen = [
        {"name": name, "label": name.capitalize(), "type": "query", "datasource": DATASOURCE, "refresh": 2, "multi": True,
         "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "sort": 1,
         "query": {"query": f"label_values({metric}, {name})", "refId": name}, "definition": f"label_values({metric}, {name})"}
        for name, metric in VARIABLES.items()
    ]  # fmt: skip
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1},
        *chosen,
    ]


def panel_json(panel: Panel) -> dict[str, Any]:
    """A panel without its place."""
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": DATASOURCE,
            "expr": expression(query.expr),
            "legendFormat": query.legend,
        }
        for number, query in enumerate(panel.queries)
    ]
    custom = {"lineWidth": 2, "fillOpacity": 30 if panel.stacked else 8, "showPoints": "never",
              "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
              "thresholdsStyle": {"mode": "off" if panel.bad is None else "line"}}  # fmt: skip
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": thresholds(panel)}
    if panel.kind == "stat":
        defaults["color"] = {"mode": "thresholds"}
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background" if panel.bad is not None else "value",
                   "graphMode": "area", "textMode": "value_and_name"}  # fmt: skip
    else:
        defaults |= {"color": {"mode": "palette-classic"}, "custom": custom}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {"type": panel.kind, "title": panel.title, "description": panel.says, "datasource": DATASOURCE, "targets": targets,
            "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}  # fmt: skip


def thresholds(panel: Panel) -> dict[str, Any]:
    """Green, orange and red by a panel's `good` and `bad`."""
    steps: list[dict[str, Any]] = [{"color": GREEN, "value": None}]
    if panel.good is not None and panel.bad is not None:
        if panel.bad > panel.good:
            between = [{"color": ORANGE, "value": panel.good}] if panel.bad - panel.good != 1 or panel.good else []
            steps += [*between, {"color": RED, "value": panel.bad}]
        else:
            steps = [{"color": RED, "value": None}, {"color": GREEN, "value": panel.good}]
    return {"mode": "absolute", "steps": steps}


def files() -> dict[str, str]:
    """Name → text of every file that this writes."""
    return {f"{board.uid}.json": json.dumps(board_json(board), indent=1) + "\n" for board in BOARDS}


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
