"""A core whose owner is killed does not stay behind with the GPU."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

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


def test_core_and_workers_end_soon_after_their_owner_is_killed(tiny: TinyModel, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    command = [sys.executable, str(script), str(tiny.model), str(tiny.adapter)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as owner:
        assert owner.stdout is not None
        line = next(line for line in owner.stdout if line.startswith("up "))
        children = [psutil.Process(int(pid)) for pid in line.split()[1:]]
        names = [child.name() for child in children]
        assert any("EngineCor" in name for name in names), names
        os.kill(owner.pid, signal.SIGKILL)
    ends_s = time.monotonic() + 60
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < ends_s, [child.name() for child in children if child.is_running()]
        time.sleep(0.2)
