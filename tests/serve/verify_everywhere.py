"""`orthrus-serve verify` against every topology, on real engines over a tiny model in float32. Prints a row for each.

`python -m tests.serve.verify_everywhere`: one application is switched live through the topologies of adapters, another has
arms, and one a model of its own that embeds. For the page about `verify`; the suite has the cases most likely to break.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from ray import serve

from orthrus_serve.app import build
from orthrus_serve.cli import main as orthrus_serve
from tests.engine.harness import make_tiny_model
from tests.engine.tiny_embedder import make_tiny_embedder
from tests.serve import test_disagg, test_separate
from tests.serve.conftest import local_serve
from tests.serve.test_verify import serve_file

SWITCHED = ("disagg_pd", "orthrus", "hetero_fcfs", "unified_homo", "dedicated")


def verified(url: str, folder: Path, args: dict[str, Any]) -> str:
    """Exit code, rows, vectors' worst cosine and near ties, as a row of a table."""
    report, said = folder / "report.json", io.StringIO()
    with contextlib.redirect_stdout(said):
        code = orthrus_serve(["verify", url, "--config", serve_file(folder, args), "--json", str(report)])
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
    wrong = [f"{row['case']} {row['model']}: {row['problem']}" for row in rows if row["problem"]]
    cosines = [row["worst"].removeprefix("cosine ") for row in rows if row["worst"].startswith("cosine")]
    asked = [line.split()[2] for line in said.getvalue().splitlines() if line.startswith("asking ")]
    return f"{' + '.join(asked)} | {len(rows)} | {min(cosines)} | {code} | {'; '.join(wrong) or 'equal'}"


def main() -> int:
    with tempfile.TemporaryDirectory() as made, local_serve() as url:
        folder = Path(made)
        tiny, embedder = make_tiny_model(folder / "tiny"), make_tiny_embedder(folder / "embedder")
        args = test_disagg.args_of(tiny)
        serve.run(build(args), name="pd", route_prefix="/pd")
        for topology in SWITCHED:
            split = {"dedicated": {"embed": 1, "generate": 1}} if topology == "dedicated" else {}
            for deployment, more in (("Engine", {}), ("Front", split)):
                wanted = {"topology": topology, **more}
                serve.get_deployment_handle(deployment, "pd").broadcast("reconfigure", wanted).results(timeout_s=30)
            sys.stdout.write(f"| `{topology}` | {verified(f'{url}/pd', folder, args)} |\n")
        serve.delete("pd")
        alone = ("topology", "num_replicas", "disagg_pd", "kv_connector", "kv_lease_s")
        shared = {key: value for key, value in args.items() if key not in alone}
        arms = {**shared, "arms": {"fcfs": {"topology": "hetero_fcfs"}, "orthrus": {"topology": "orthrus"}}}
        serve.run(build(arms), name="arms", route_prefix="/arms")
        sys.stdout.write(f"| arms `fcfs`, `orthrus` | {verified(f'{url}/arms', folder, arms)} |\n")
        serve.delete("arms")
        separate = test_separate.args_of(tiny, embedder)
        serve.run(build(separate), name="separate", route_prefix="/separate")
        sys.stdout.write(f"| `separate_models` | {verified(f'{url}/separate', folder, separate)} |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
