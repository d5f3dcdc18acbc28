"""What the tokens of streamed answers cost on their way, and how late they come, by the number of streams. A tool.

Run: `python -m tests.serve.stream_path --json FILE.json` (some minutes). Proxy, Front and replica are real, one of each. The
engine is a clock (`clocked.py`): in every stream a token is due each `--gap` seconds, whatever the way does. Clients, proxy,
Front and replica share the cores.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from orthrus_serve.config.schema import AppArgs
from tests.serve.http_path import WAYS, kind_of, processor_times, run_one, tell, write_rows

MODULE = "tests.serve.stream_path"
NUM_TOKENS = 100
BOUNDS: dict[str, bool] = {"no bound": False, "usual": True}


async def ask(url: str, num_streams: int, ends_s: float) -> tuple[int, list[float]]:
    """Tokens of the streams that were open until then, each begun again when it ends, and how late each event came, in s."""
    num_tokens, lags_s = 0, list[float]()
    body = {"prompt": [1] * 64, "max_tokens": NUM_TOKENS, "stream": True}

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal num_tokens
        while time.monotonic() < ends_s:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200, response.status
                made = 0
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        lags_s.append(time.monotonic() - event["due_s"])
                        made = event["made"]
                assert made == NUM_TOKENS
                num_tokens += made

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*[client(session) for _ in range(num_streams)])
    return num_tokens, lags_s


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One way: the one that this process' environment says. Ray reads it when it is imported. One Front, one replica."""
    from ray import serve

    from orthrus_serve.app import compose
    from tests.serve.clocked import start_clocked
    from tests.serve.conftest import FAKE_ARGS, local_serve

    rows: list[dict[str, Any]] = []
    with local_serve() as url:
        for bound in options.bounds:
            own = {"num_replicas": 1, "front": {"num_replicas": 1, "num_cpus": 0.1}}
            args = AppArgs.model_validate({**FAKE_ARGS, **own, "streams": {"is_bounded": BOUNDS[bound]}})
            serve.run(compose(args, start_clocked(options.gap)), name="path", route_prefix="/")
            if options.apart:
                set_apart()
            for num_streams in options.streams:
                asyncio.run(ask(url, num_streams, time.monotonic() + 1))
                rows.append({"bound": bound, "streams": num_streams, **load(url, num_streams, options)})
            serve.delete("path")
    return rows


def set_apart() -> None:
    """Proxy and Front get the second core, replica and clients the first: then it is always the way that is full first."""
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        core = 1 if kind_of(process) in ("proxy", "Front") else 0
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, {core})


def load(url: str, num_streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """So many streams for a while."""
    before, began_s = processor_times(), time.monotonic()
    num_tokens, lags_s = asyncio.run(ask(url, num_streams, began_s + options.seconds))
    took_s, used = time.monotonic() - began_s, processor_times() - before
    quantiles = statistics.quantiles(lags_s, n=100)
    return {
        "seconds": round(took_s, 1),
        "due_per_s": round(num_streams / options.gap),
        "came_per_s": round(num_tokens / took_s),
        "lag_ms": {"p50": round(1000 * quantiles[49], 1), "p99": round(1000 * quantiles[98], 1)},
        "us_per_token": {what: round(1000 * used[what] / num_tokens) for what in sorted(used)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gap", type=float, default=0.04, help="s between two tokens of a stream")
    parser.add_argument(
        "--bounds", nargs="+", choices=BOUNDS, default=list(BOUNDS), help="whether `streams` is bounded"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument(
        "--apart", action="store_true", help="proxy and Front on one core, replica and clients on another"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["as it is", "both, as advised"])
    parser.add_argument("--times", type=int, default=2, help="how often each way takes its turn")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.stdout.write(json.dumps(measure(options)) + "\n")
        return 0
    rows: list[dict[str, Any]] = []
    arguments = ["--gap", str(options.gap), "--seconds", str(options.seconds), "--streams", *map(str, options.streams)]
    arguments += ["--bounds", *options.bounds, *["--apart"] * options.apart]
    for turn in range(options.times):
        for way in options.ways:
            for row in run_one(way, MODULE, arguments):
                rows.append({"way": way, "turn": turn, **row})
                tell(rows[-1])
    if options.json:
        write_rows(options.json, MODULE, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
