"""A real Prometheus (Debian's package) for tests: started on a free port, asked over its HTTP API."""

import contextlib
import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest
import yaml

from tests.ports import free_port
from tests.serve.conftest import REPOSITORY

DASHBOARDS = REPOSITORY / "dashboards"
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool (Debian: apt-get install prometheus)",
)


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def ask(self, expr: str) -> list[Any]:
        """The result of an instant query now. A query that Prometheus cannot read fails the test."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expr}, timeout=30).json()
        assert answer["status"] == "success", f"{expr}: {answer.get('error')}"
        return answer["data"]["result"]

    def numbers(self, expr: str) -> list[float]:
        """The numbers of an instant query; those that are not numbers are left out."""
        values = [float(sample["value"][1]) for sample in self.ask(expr)]
        return [value for value in values if not math.isnan(value)]

    def alerts(self) -> dict[str, str]:
        """State of the worst alert of each rule: pending or firing."""
        found = httpx.get(f"{self.url}/api/v1/alerts", timeout=30).json()["data"]["alerts"]
        return {
            alert["labels"]["alertname"]: alert["state"]
            for alert in sorted(found, key=lambda one: one["state"] == "firing")
        }

    def rules(self) -> list[Any]:
        """Every rule that is loaded."""
        groups = httpx.get(f"{self.url}/api/v1/rules", timeout=30).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@contextlib.contextmanager
def running_prometheus(folder: Path, pages: Mapping[str, str], rules: Sequence[Path] = ()) -> Iterator[Prometheus]:
    """Scrapes each page (job → URL) every second, and evaluates the rules as often."""
    jobs = [
        {"job_name": job, "metrics_path": urlparse(page).path, "static_configs": [{"targets": [urlparse(page).netloc]}]}
        for job, page in pages.items()
    ]
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {"global": every, "scrape_configs": jobs, "rule_files": [str(rule) for rule in rules]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
               f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]  # fmt: skip
    with subprocess.Popen(command) as process:
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            _until_ready(server)
            yield server
        finally:
            process.terminate()


def _until_ready(server: Prometheus) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/-/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError("Prometheus does not start")


# Grafana's variables, as a board with everything chosen fills them in. The window is as many scrapes as Grafana's would hold.
VARIABLES = {"$topology": ".*", "$replica": ".*", "$arm": ".*", "$__rate_interval": "60s"}


def board_queries() -> Iterator[tuple[str, str]]:
    """Every query of every panel of every board: where it stands, and the query as Prometheus gets it."""
    for file in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"]
                for name, value in VARIABLES.items():
                    expr = expr.replace(name, value)
                yield f"{file.stem}: {panel['title']} ({target['refId']})", expr


def rule_queries() -> Iterator[tuple[str, str]]:
    """What each alert compares: a rule itself has no result while nothing is wrong."""
    for rule in yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]:
        expr = rule["expr"].replace("absent(", "(")
        for part in re.split(r"\s+(?:>|<|==)\s+|\s+and(?: on \(\w+\))?\s+", expr):
            if not re.fullmatch(r"[\d.]+", part):
                yield f"alerts: {rule['alert']}", part
