"""What a request costs on its way, by Ray Serve's switches: processor time of each process, and requests a second. A tool.

Run: `python -m tests.serve.http_path --json FILE.json` (five minutes or so). Proxy, Fronts and replicas are real, the engines
answer at once (`metered.py`), so whatever is measured is the way there and back. Each way is a Ray of its own, in turn, twice;
clients, proxy, Fronts and replicas share the cores. Processor time is the kernel's count for each process, over one load.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from orthrus_serve.ops import haproxy

WAYS: dict[str, dict[str, str]] = {
    "as it is": {},
    "throughput": {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
    "HAProxy": {"RAY_SERVE_ENABLE_HA_PROXY": "1"},
    "both, as advised": haproxy.SWITCHES | {haproxy.BINARY_PATH: str(Path(sys.executable).with_name(haproxy.SCRIPT))},
}
MODULE = "tests.serve.http_path"
NUM, TOKENS_PER_S = 2, 1_000_000
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "embed": ("/v1/embeddings", {"input": [[1] * 512]}),
    "generate": ("/v1/completions", {"prompt": [1] * 512, "max_tokens": 32}),
    "stream": ("/v1/completions", {"prompt": [1] * 512, "max_tokens": 32, "stream": True}),
}
# Parts of command lines, the first that is found.
PROCESSES = {
    "ProxyActor": "proxy",
    "haproxy": "proxy",
    "HAProxyManager": "HAProxy's manager",
    ":Front": "Front",
    ":Engine": "replica",
}


def kind_of(process: psutil.Process) -> str:
    """What a process below this one is."""
    line = " ".join(process.cmdline()) or process.name()
    return next((name for part, name in PROCESSES.items() if part in line), "others")


def processor_times() -> Counter[str]:
    """Milliseconds of processor time so far, of the processes below this one, by what they are."""
    found: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            what, times = kind_of(process), process.cpu_times()
            found[what] += round(1000 * (times.user + times.system))
    return found


async def ask(url: str, kind: str, num_clients: int, seconds: float) -> int:
    """Requests that were answered in so many seconds to clients without a pause."""
    path, body = BODIES[kind]
    ends_s, num = time.monotonic() + seconds, 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal num
        while time.monotonic() < ends_s:
            async with session.post(url + path, json=body) as response:
                await response.read()
                assert response.status == 200, response.status
            num += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*[client(session) for _ in range(num_clients)])
    return num


def measure(num_clients: int, seconds: float) -> dict[str, Any]:
    """One way: the one that this process' environment says. Ray reads it when it is imported."""
    from ray import serve

    from orthrus_serve.app import compose
    from orthrus_serve.config.schema import AppArgs
    from tests.serve.conftest import FAKE_ARGS, local_serve
    from tests.serve.metered import start_metered

    args = AppArgs.model_validate({**FAKE_ARGS, "num_replicas": NUM, "front": {"num_replicas": NUM, "num_cpus": 0.1}})
    found: dict[str, Any] = {}
    with local_serve() as url:
        serve.run(compose(args, start_metered(TOKENS_PER_S)), name="path", route_prefix="/")
        for kind in BODIES:
            asyncio.run(ask(url, kind, num_clients, 2.0))
            before, began_s = processor_times(), time.monotonic()
            num = asyncio.run(ask(url, kind, num_clients, seconds))
            took_s, used = time.monotonic() - began_s, processor_times() - before
            found[kind] = {
                "requests": num,
                "per_s": round(num / took_s, 1),
                "ms": {what: round(used[what] / num, 2) for what in sorted(used)},
            }
    return found


def run_one(way: str, module: str, arguments: list[str]) -> Any:
    """What a tool finds of one way, in a process of its own: Ray reads its switches when it is imported."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE_")}
    command = [sys.executable, "-m", module, "--one", *arguments]
    out = subprocess.run(command, env=usual | WAYS[way], check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def tell(row: dict[str, Any]) -> None:
    """Prints a row as soon as it is there."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def write_rows(path: Path, module: str, rows: list[dict[str, Any]]) -> None:
    """All rows of a tool, with what they were made by."""
    about = {
        "command": f"python -m {module} {' '.join(sys.argv[1:])}",
        "python": platform.python_version(),
        "ray": metadata.version("ray"),
        "processors": os.cpu_count(),
        "rows": rows,
    }
    path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--times", type=int, default=2, help="how often each way takes its turn")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.stdout.write(json.dumps(measure(options.clients, options.seconds)) + "\n")
        return 0
    rows: list[dict[str, Any]] = []
    for number in range(options.times):
        for way in WAYS:
            load_average = os.getloadavg()[0]
            found = run_one(way, MODULE, ["--clients", str(options.clients), "--seconds", str(options.seconds)])
            rows.append({"way": way, "turn": number, "load_average": load_average, **found})
            tell(rows[-1])
    if options.json:
        write_rows(options.json, MODULE, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
