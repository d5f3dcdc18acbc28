"""The page of metrics (`docs/metrics.md`), from the catalogue: `python -m orthrus_serve.ops.metrics_page > docs/metrics.md`.

Leaves out how they are scraped (`docs/observability.md`).
"""

import sys

from orthrus_serve.telemetry.catalog import CATALOG, LABEL_VALUES, Metric

HEAD = """# Metrics

Made from `orthrus_serve/telemetry/catalog.py` by `python -m orthrus_serve.ops.metrics_page`; a test compares. How to scrape
them, and what else is there (vLLM's own, Ray's), is in [observability](observability.md); what they look like, in
[dashboards](../dashboards/README.md).

Every sample also has `replica`: the id of the engine replica or Front that counted it, and in an application with arms those of
engines have `arm`. A histogram has the usual `_bucket`, `_sum` and `_count`.

"""
GROUPS = {
    "orthrus_engine_": "Engines: what steps hold and what the engine holds",
    "orthrus_request": "Requests",
    "orthrus_front_": "Fronts: routing and load",
    "orthrus_": "Other counts of the Fronts",
}


def metrics_page() -> str:
    """The page."""
    left = list(CATALOG)
    parts: list[str] = []
    for prefix, title in GROUPS.items():
        of_group = [metric for metric in left if metric.name.startswith(prefix)]
        left = [metric for metric in left if metric not in of_group]
        rows = "\n".join(_row(metric) for metric in of_group)
        parts.append(f"## {title}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n{rows}\n")
    values = "\n".join(f"| `{label}` | {_values(label)} |" for label in LABEL_VALUES)
    return HEAD + "\n".join(parts) + f"\n## Labels\n\n| label | values |\n|---|---|\n{values}\n"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def _values(label: str) -> str:
    free = {
        "arm": "names of `args.arms`; empty without arms",
        "adapter": "names of the adapters",
        "target": "id of an engine replica; the series ends with it",
    }
    return free.get(label) or ", ".join(f"`{value}`" for value in LABEL_VALUES[label])


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
