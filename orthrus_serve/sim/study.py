"""The routing study as one command: `python -m orthrus_serve.sim.study --out DIR` writes rows and figures of every experiment.

Leaves out the experiments themselves. The same command gives the same numbers on any machine.
"""

import argparse
import gzip
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orthrus_serve import __version__
from orthrus_serve.sim import experiments, real_run, topologies
from orthrus_serve.sim.figures import draw

EXPERIMENTS = {**experiments.EXPERIMENTS, **topologies.EXPERIMENTS}


def run(names: Sequence[str], *, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Rows by experiment; tells each as it comes."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        began_s = time.monotonic()
        rows[name] = []
        for row in EXPERIMENTS[name](quick):
            rows[name].append(row)
            sys.stdout.write(f"{name}: {json.dumps(row)}\n")
            sys.stdout.flush()
        sys.stdout.write(f"{name}: {time.monotonic() - began_s:.0f} s\n")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and writes `rows.json.gz` and a PNG for each experiment that has a figure."""
    parser = argparse.ArgumentParser(prog="python -m orthrus_serve.sim.study", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for rows and figures; made if it is not there")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(EXPERIMENTS),
        default=list(EXPERIMENTS),
        metavar="NAME",
        help="these only; rows of others that are in the folder are kept",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small pools and short traces: whether it runs, not numbers"
    )
    parser.add_argument("--measured", type=Path, help="raw data of tests.serve.routing_rules, to compare with")
    options = parser.parse_args(argv)
    measured = None if options.measured is None else real_run.read(options.measured)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "rows.json.gz"
    rows = {} if len(options.only) == len(EXPERIMENTS) or not file.exists() else real_run.read(file)["rows"]
    rows.update(run(options.only, quick=options.quick))
    if measured is not None:
        rows["real_run"] = list(real_run.compare(measured))
    told = {"version": __version__, "python": platform.python_version(), "quick": options.quick, "rows": rows}
    file.write_bytes(gzip.compress(json.dumps(told).encode(), mtime=0))
    for path in draw(rows, options.out):
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
