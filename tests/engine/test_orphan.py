"""A core whose owner is killed does not stay behind with the GPU."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engine.harness import TinyModel

OWNER = """
import sys, time, psutil
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.engine.args import make_engine
if __name__ == "__main__":
    engine = make_engine(AppArgs.model_validate({
        "topology": "orthrus", "model": {"path": sys.argv[1]}, "adapters": {"e": {"path": sys.argv[2]}},
        "vllm": {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 16 * 2**20},
    }))
    print("up", *[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def running_owner(tiny: TinyModel, folder: Path) -> Iterator[subprocess.Popen[str]]:
    script = folder / "owner.py"
    script.write_text(OWNER)
    command = [sys.executable, str(script), str(tiny.model), str(tiny.adapter)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as owner:
        yield owner


def wait_until_ended(children: list[psutil.Process], within_s: float) -> None:
    ends_s = time.monotonic() + within_s
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < ends_s, [child.name() for child in children if child.is_running()]
        time.sleep(0.2)


def test_core_and_workers_end_soon_after_their_owner_is_killed(tiny: TinyModel, tmp_path: Path) -> None:
    with running_owner(tiny, tmp_path) as owner:
        assert owner.stdout is not None
        line = next(line for line in owner.stdout if line.startswith("up "))
        children = [psutil.Process(int(pid)) for pid in line.split()[1:]]
        names = [child.name() for child in children]
        assert any("EngineCor" in name for name in names), names
        os.kill(owner.pid, signal.SIGKILL)
    wait_until_ended(children, 60)


@pytest.mark.timeout(700)
def test_a_core_that_was_still_loading_when_its_owner_was_killed_ends_too(tiny: TinyModel, tmp_path: Path) -> None:
    """On a busy machine the owner is gone before it has greeted its core, which vLLM lets wait for that for five minutes; it
    holds nothing yet."""
    with running_owner(tiny, tmp_path) as owner:
        ends_s = time.monotonic() + 120
        children: list[psutil.Process] = []
        while not any("EngineCor" in child.name() for child in children):
            assert time.monotonic() < ends_s, children
            time.sleep(0.05)
            children = psutil.Process(owner.pid).children(recursive=True)
        os.kill(owner.pid, signal.SIGKILL)
    wait_until_ended(children, 400)
