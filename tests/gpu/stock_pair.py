"""Two `vllm serve` processes that share a card, one that generates and one that embeds: what one would run without Orthrus.

Stock vLLM as its pages say: no LoRA anywhere (an embedder with a process of its own has its adapter merged into the weights),
CUDA graphs as large as Orthrus', async scheduling for generations. The size of a step can be set while they run
(`stock_scheduler.py`).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orthrus_serve.ops.local_server import is_healthy
from tests.gpu.engines import GRAPH_SIZES

REPOSITORY = Path(__file__).parents[2]
GENERATE_PORT, EMBED_PORT = 8101, 8102
GENERATE_URL, EMBED_URL = (f"http://127.0.0.1:{port}" for port in (GENERATE_PORT, EMBED_PORT))
URLS = {"generate": GENERATE_URL, "embed": EMBED_URL}
# Written into the embedder's memory: it holds few inputs at a time, each for a step or two.
EMBED_KV_GIB = 3


def command(kind: str, model: Path, folder: Path, *, kv_gib: float, on_cpu: bool) -> list[str]:
    """The command line of one of the two."""
    scheduler = "StockAsyncScheduler" if kind == "generate" and not on_cpu else "StockScheduler"
    options: dict[str, Any] = {
        "port": GENERATE_PORT if kind == "generate" else EMBED_PORT,
        "served-model-name": "orthrus" if kind == "generate" else "orthrus-embed",
        "max-num-seqs": 32 if on_cpu else 256,
        "max-num-batched-tokens": 256 if on_cpu else 8192,
        "kv-cache-memory-bytes": int(kv_gib * 2**30),
        "scheduler-cls": f"tests.gpu.stock_scheduler.{scheduler}",
        "additional-config": json.dumps({"step_tokens_file": str(_step_tokens_file(folder))}),
    }
    if on_cpu:
        options |= {"dtype": "float32", "max-model-len": 1024}
    else:
        options |= {
            "dtype": "bfloat16",
            "load-format": "dummy",
            "max-model-len": 4096,
            # What must be free at the start; how much is used, the line above says.
            "gpu-memory-utilization": 0.1,
            "compilation-config": json.dumps({"cudagraph_capture_sizes": GRAPH_SIZES}),
        }
    if kind == "embed":
        options |= {"runner": "pooling", "convert": "embed", "pooler-config": json.dumps({"seq_pooling_type": "LAST"})}
    flags = ["--disable-sliding-window", "--disable-uvicorn-access-log", *(["--enforce-eager"] if on_cpu else [])]
    told = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *told, *flags]


def start(model: Path, folder: Path, *, kv_gib: float, on_cpu: bool) -> dict[str, subprocess.Popen[bytes]]:
    """Starts both and returns at once, with the processes by kind; `wait` waits for them."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    for kind, gib in (("generate", kv_gib), ("embed", kv_gib if on_cpu else EMBED_KV_GIB)):
        with (folder / f"{kind}.log").open("w") as log:
            process = subprocess.Popen(
                command(kind, model, folder, kv_gib=gib, on_cpu=on_cpu),
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            )  # fmt: skip
        (folder / f"{kind}.pid").write_text(str(process.pid))
        processes[kind] = process
    return processes


def wait(processes: Mapping[str, subprocess.Popen[bytes]], folder: Path, timeout_s: float = 400.0) -> None:
    """Until all of them answer.

    Raises:
        RuntimeError: one of them ended, or did not answer in time; with the end of its log.
    """
    give_up_s = time.monotonic() + timeout_s
    for kind, process in processes.items():
        while not is_healthy(URLS[kind]):
            ended = process.poll() is not None
            if ended or time.monotonic() > give_up_s:
                reason = "ended" if ended else "is late"
                raise RuntimeError(f"{kind} {reason}: {(folder / f'{kind}.log').read_text()[-3000:]}")
            time.sleep(0.5)


def set_step_tokens(folder: Path, tokens: int) -> None:
    """The size of a step of both, from at most 64 steps later on."""
    file = _step_tokens_file(folder)
    part = file.with_suffix(".part")
    part.write_text(str(tokens))
    part.replace(file)  # whole or not at all: a scheduler may look just now


def stop(folder: Path) -> None:
    """Ends both with all their processes."""
    for file in folder.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(file.read_text()), signal.SIGKILL)
        file.unlink()


def _step_tokens_file(folder: Path) -> Path:
    return folder.resolve() / "step_tokens"
