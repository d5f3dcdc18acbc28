"""The loss of a whole Ray node under load: see `second_node.py`, which runs in a process, and a cluster, of its own."""

import json
import os
import subprocess
import sys

import pytest

from tests.serve.conftest import REPOSITORY
from tests.serve.second_node import NUM_CLIENTS


@pytest.mark.timeout(300)  # a Ray with two nodes starts, one of them twice
def test_the_loss_of_a_node_costs_only_the_streams_that_it_was_sending() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.serve.second_node"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("{")]  # Ray prints others
    seen = json.loads(line)
    assert set(seen["before"]) == {"right"}, seen
    # What had no byte yet was answered by the other replica; what had some was cut, and told so.
    assert set(seen["ends"]) <= {"right", "cut with an error event"}, seen
    assert seen["ends"].get("cut with an error event", 0) <= NUM_CLIENTS, seen
    assert seen["at_rest"], seen
