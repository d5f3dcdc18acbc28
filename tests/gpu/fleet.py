"""The table of topologies through HTTP on all cards of a host: `python -m tests.gpu.fleet all --cards 4 --out DIR`.

`up` writes a Serve file from `configs/orthrus.yaml` (Mistral-7B shapes with random weights, a random adapter) and starts it in
the background; `run` goes through arms in the order of their worth, switches the topology live before each, and loads the
server with `loadgen`; `down` stops it; `all` is the three in turn. A row per arm is printed, and kept in `rows.jsonl`; an arm
that has a row there is not run again, so every set-up needs a folder of its own. `--until S` starts no arm that would end later
than S seconds from now. `--on-cpu` rehearses everything with the tiny model.

`--arms` names the arms instead (`fleet_arms.named_arm`), with live settings of the engines, so that each policy is measured at
its own best. With `--stock`, `up` also starts two stock vLLM servers on the card, one for each kind (`stock_pair.py`), for arms
named so.

With `--connector`, for `up` and `run` alike, the engines are started with NIXL between them, so that `disagg_pd` is one more
topology of the same engines in the coin form.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from orthrus_serve.ops import haproxy
from orthrus_serve.ops.local_server import Paths, start, stop
from tests.gpu import stock_pair
from tests.gpu.engines import GRAPH_SIZES, copy_tokenizer, random_model, say
from tests.gpu.fleet_arms import (
    Arm,
    Scale,
    block_arms,
    coin_arms,
    hop_arms,
    model_flop_ratio,
    named_arm,
    phase_arms,
    pool_arms,
)
from tests.gpu.stock_pair import EMBED_URL, GENERATE_URL

REPOSITORY = Path(__file__).parents[2]
PROMPT, OUTPUT = 640, 150
POLICIES = ("orthrus", "unified_homo", "hetero_fcfs")
FORMS = ("coin", "pools", "block", "phases", "topologies", "hops", "policies")
URL = "http://127.0.0.1:8000"
PARAMETERS, PEAK_FLOPS = 7.24e9, 790e12  # Mistral-7B; an H200's measured bf16 matrix rate


def all_arms(options: argparse.Namespace, scale: Scale, rows: list[dict[str, Any]]) -> Iterator[Arm]:
    """The arms in the order of their worth. Lazily, since the pools' rates come from rows made before."""
    pair = ("dedicated", "orthrus")
    if options.arms:
        yield from map(named_arm, options.arms)
        return
    for form in options.forms:
        match form:
            case "coin":
                yield from coin_arms(scale, (*pair, "disagg_pd") if options.connector else pair)
            case "pools":
                yield from pool_arms(scale, pair, totals_of(rows, scale.clients_in_all()))
            case "block":
                yield from block_arms(scale, (*pair, "hetero_fcfs", "unified_homo"))
            case "phases":
                yield from phase_arms(scale, pair)
            case "hops":
                yield from hop_arms(scale, (*pair, "unified_homo"))
            case "topologies":
                yield from coin_arms(scale, ("unified_homo", "hetero_fcfs"))
            case "policies":  # twice the clients, so that steps are full
                yield from coin_arms(scale, POLICIES, times=2)
            case _:
                raise ValueError(form)


def totals_of(rows: list[dict[str, Any]], clients: int) -> dict[float, float]:
    """What `orthrus` did in the coin form with so many clients, requests/s by embed share."""
    return {
        row["embed_share_asked"]: row["total_per_s"]
        for row in rows
        if row["arm"] == f"coin-{row.get('embed_share_asked')}-{clients}-orthrus" and row.get("total_per_s")
    }


def serve_file(options: argparse.Namespace, folder: Path) -> Path:
    """A Serve file like `configs/orthrus.yaml`, with a model that needs no download. Returns its path."""
    content = yaml.safe_load((REPOSITORY / "configs" / "orthrus.yaml").read_text())
    args = content["applications"][0]["args"]
    args["num_replicas"] = options.cards
    if options.on_cpu:
        from tests.engine.harness import make_tiny_model

        tiny = make_tiny_model(folder / "tiny")
        args |= {"num_gpus_per_replica": 0, "num_cpus_per_replica": 0.2}
        args["vllm"] = {
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 256,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 * 2**20,
        }
    else:
        tiny = random_model(folder / "random", "mistral-7b-v0.1")
        copy_tokenizer(options.tokenizer, tiny.model)
        args["vllm"] |= {"load_format": "dummy", "cudagraph_capture_sizes": GRAPH_SIZES}
        if options.kv_gib:
            args["vllm"] |= {"kv_cache_memory_bytes": int(options.kv_gib * 2**30), "gpu_memory_utilization": 0.1}
        if options.step_tokens:
            args["vllm"]["max_num_batched_tokens"] = options.step_tokens
    args["model"] = {"name": "orthrus", "path": str(tiny.model)}
    args["adapters"] = {"orthrus-embed": {"path": str(tiny.adapter), "pooling": "last", "append_eos": False}}
    if options.connector:
        args["kv_connector"] = "nixl"
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def model_of(file: Path) -> Path:
    """The model folder that a Serve file names."""
    return Path(yaml.safe_load(file.read_text())["applications"][0]["args"]["model"]["path"])


def switch(arm: Arm, options: argparse.Namespace) -> float:
    """Switches what the arm is for; returns how long that took, in seconds."""
    if arm.topology == "stock":
        stock_pair.set_step_tokens(options.folder / "stock", int(arm.engine["step_tokens"]))
        return 0.0
    command = [sys.executable, "-m", "orthrus_serve.cli", "switch", arm.topology]
    if arm.topology in ("dedicated", "disagg_pd"):
        command += ["--split", f"1:{options.cards - 1}"]
    if arm.engine:
        command += ["--set", *(f"{name}={value}" for name, value in arm.engine.items())]
    began_s = time.monotonic()
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    return time.monotonic() - began_s


def load(arm: Arm, options: argparse.Namespace, out: Path, seed: int) -> dict[str, Any]:
    """Runs loadgen for one arm; returns the row. Each arm needs a `seed` of its own: prompts of an earlier one are cached."""
    small = options.on_cpu
    settings = arm.settings | {
        "target": target_of(arm),
        "prompts": {
            "form": "random_ids",
            "vocabulary": 500 if small else 32000,
            "embed_tokens": 100 if small else PROMPT,
            "generate_tokens": 100 if small else PROMPT,
            "output_tokens": 20 if small else OUTPUT,
        },
        "sampling": {"stream": options.stream} | arm.settings.get("sampling", {}),
        "processes": 1 if small else 8,
        "seed": seed,
    }
    if options.corpus and arm.settings["workload"]["kind"] == "iter_retgen":
        settings["workload"] = arm.settings["workload"] | {"corpus": str(options.corpus)}
    folder = out / arm.name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "loadgen", "run", "--config", str(file), "--out", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    report = folder / "report.json"
    if not report.exists():
        raise RuntimeError(done.stdout[-1500:] + done.stderr[-1500:])
    row = row_of(arm, json.loads(report.read_text()), options)
    row["loadgen_exit_code"] = done.returncode
    for name in ("report.html", *(picture.name for picture in folder.glob("*.png"))):
        (folder / name).unlink(missing_ok=True)
    with gzip.open(f"{report}.gz", "wt") as packed:
        packed.write(report.read_text())
    report.unlink()
    return row


def target_of(arm: Arm) -> dict[str, Any]:
    """Where loadgen sends an arm's requests."""
    if arm.topology != "stock":
        return {"base_url": URL, "metrics_urls": [f"{URL}/metrics"]}
    metrics = [f"{url}/metrics" for url in (GENERATE_URL, EMBED_URL)]
    return {"embeddings_url": EMBED_URL, "generation_url": GENERATE_URL, "metrics_urls": metrics}


def row_of(arm: Arm, report: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What matters of a report, flat. Latencies in seconds, of requests sent in the window."""
    row: dict[str, Any] = {
        "arm": arm.name,
        "topology": arm.topology,
        "cards": options.cards,
        "engine": arm.engine,
        "embed_share_asked": arm.settings["workload"].get("embed_share"),
        "stages": [],
    }
    for stage in report["stages"]:
        told: dict[str, Any] = {
            "stage": stage["name"],
            "window_s": round(stage["window_end_s"] - stage["window_begin_s"], 2),
            "elapsed_s": round(stage["elapsed_s"], 2),
            "fill": stage["server"]["step_fill"],
            "prefix_hits": stage["server"]["prefix_hit_ratio"],
            "bottlenecks": stage["client"]["bottlenecks"],
        }
        for kind in stage["kinds"]:
            name = kind["kind"]
            told |= {
                f"{name}_per_s": round(kind["rate"]["value"], 2),
                f"{name}_tokens_per_s": round(
                    kind["prompt_tokens_per_s"]["value"] + (kind["output_tokens_per_s"]["value"] or 0)
                ),
                f"{name}_errors": kind["errors"],
                f"{name}_open": kind["unfinished"],
            }
            for measure in ("e2e", "ttft", "tpot", "itl"):
                if kind[measure]:
                    told |= {
                        f"{name}_{measure}_{q}_s": round(kind[measure][q]["value"], 4) for q in ("p50", "p95", "p99")
                    }
        tokens_per_s = sum(told.get(f"{kind}_tokens_per_s", 0) for kind in ("embed", "generate"))
        told["model_flop_ratio"] = round(model_flop_ratio(tokens_per_s, 1.0, options.cards, PARAMETERS, PEAK_FLOPS), 3)
        if stage["sessions"]:
            told |= {
                "sessions_per_s": round(stage["sessions"]["rate"]["value"], 3),
                "mean_hops": stage["sessions"]["mean_hops"],
            }
            if stage["sessions"]["e2e"]:
                told |= {f"session_{q}_s": round(stage["sessions"]["e2e"][q]["value"], 2) for q in ("p50", "p99")}
        row["stages"].append(told)
    if len(row["stages"]) == 1:
        row |= row.pop("stages")[0]
        row["total_per_s"] = round(row.get("embed_per_s", 0.0) + row.get("generate_per_s", 0.0), 2)
    return row


def run(options: argparse.Namespace) -> int:
    """Goes through the arms until they or the time are spent. An arm that fails is told of, and the next one runs."""
    began_s = time.monotonic()
    scale = (
        Scale(options.cards, 8, options.stretch, 30, 40)
        if options.on_cpu
        else Scale(options.cards, options.clients, options.stretch, 1000, 400 * options.cards)
    )
    rows_file = options.out / "rows.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
    done = {row["arm"] for row in rows if "failed" not in row}
    rows += [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows else []
    running = None
    for arm in all_arms(options, scale, rows):
        if arm.name in done:
            continue
        left_s = options.until - (time.monotonic() - began_s)
        if arm.takes_s > left_s:
            say({"arm": arm.name, "left_out": f"takes {arm.takes_s:.0f} s, {left_s:.0f} s are left"})
            continue
        arm_began_s = time.monotonic()
        row: dict[str, Any]
        try:
            switched_s = switch(arm, options) if (arm.topology, arm.engine) != running else 0.0
            running = (arm.topology, arm.engine)
            # By what has run, also in earlier calls on this server: an arm that was left out must not give its seed to two.
            row = load(arm, options, options.out, 1000 * options.seed + len(rows)) | {
                "switched_s": round(switched_s, 2)
            }
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            row, running = {"arm": arm.name, "topology": arm.topology, "failed": str(error)[-1500:]}, None
        row["took_s"] = round(time.monotonic() - arm_began_s, 1)
        rows.append(row)
        with rows_file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        say(row)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("up", "run", "down", "all"))
    parser.add_argument("--cards", type=int, required=True)
    parser.add_argument("--out", type=Path, default=Path("fleet"), help="folder for rows and reports")
    parser.add_argument(
        "--folder", type=Path, default=Path(".make/fleet"), help="model, Serve file and the server's log"
    )
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--rows", type=Path, help="rows of an earlier run, for the pools' rates")
    parser.add_argument("--arms", nargs="+", metavar="LOAD/SERVER", help="these arms, in place of --forms")
    parser.add_argument("--stock", action="store_true", help="also start two stock vLLM servers on the card")
    parser.add_argument("--kv-gib", type=float, help="KV memory of each engine, where several share the card")
    parser.add_argument("--step-tokens", type=int, help="the largest step; --arms may set smaller ones live")
    parser.add_argument("--clients", type=int, default=128, help="per card, in closed loops")
    parser.add_argument("--stretch", type=float, default=1.0, help="factor on all durations")
    parser.add_argument("--until", type=float, default=1e9, metavar="S", help="start no arm that would end later")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer of at least 32,000 tokens")
    parser.add_argument("--corpus", type=Path, help="passages for hops, JSON lines of title and text")
    parser.add_argument("--connector", action="store_true", help="with NIXL between the engines: disagg_pd, too")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument(
        "--haproxy", type=Path, help="the script orthrus-haproxy: HAProxy before the Fronts, for all arms"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--on-cpu", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # Ray's Python proxy passes some 200 requests/s for a whole host, fewer than four cards answer.
    if options.haproxy is not None:
        os.environ.update(haproxy.SWITCHES | {haproxy.BINARY_PATH: str(options.haproxy.resolve())})
    return one_server(options)


def one_server(options: argparse.Namespace) -> int:
    """What the verb says, on one start of the engines."""
    paths = Paths(options.folder.resolve())
    if options.verb in ("up", "all"):
        paths.folder.mkdir(parents=True, exist_ok=True)
        file = serve_file(options, paths.folder)
        beside = paths.folder / "stock"
        started: dict[str, subprocess.Popen[bytes]] = {}
        if options.stock:  # beside our own start, as that takes as long
            kv_gib = options.kv_gib or 0.06
            started = stock_pair.start(model_of(file), beside, kv_gib=kv_gib, on_cpu=options.on_cpu)
        start(str(file), paths, lambda line: say({"server": line}))
        stock_pair.wait(started, beside)
    try:
        return run(options) if options.verb in ("run", "all") else 0
    finally:
        if options.verb in ("down", "all"):
            stock_pair.stop(paths.folder / "stock")
            stop(paths, lambda line: say({"server": line}))


if __name__ == "__main__":
    sys.exit(main())
