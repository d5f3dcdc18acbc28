"""Schemathesis over the real server with a tiny model, by the description that vLLM's application gives of itself. A tool.

Run: `python -m tests.serve.schema_fuzz --schemathesis PATH/OF/schemathesis` (some ten minutes on two cores). Schemathesis is no
dependency: install it into an environment of its own. Ends with its exit status; after it, both tasks must still be answered.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx
from ray import serve
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import FrontendArgs

from orthrus_serve.app import build
from orthrus_serve.config.schema import AppArgs
from orthrus_serve.engine.args import engine_args
from orthrus_serve.serving.routes import ROUTES
from tests.engine.harness import make_tiny_model
from tests.serve.admission_real import real_args
from tests.serve.conftest import local_serve

NAME = "described"


def description(args: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI of vLLM's application, cut to the routes that the server answers."""
    started_with = engine_args(AppArgs.model_validate(args))
    namespace = Namespace(**(vars(FrontendArgs()) | vars(started_with)))
    model_config = started_with.create_model_config()
    whole = build_app(namespace, supported_tasks=("generate", "embed"), model_config=model_config).openapi()
    answered = {path: method.lower() for path, (method, _) in ROUTES.items()}
    paths = {path: operations for path, operations in whole["paths"].items() if path in answered}
    return whole | {
        "paths": {
            path: {m: o for m, o in operations.items() if m == answered[path]} for path, operations in paths.items()
        }
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", type=Path, required=True)
    parser.add_argument("--max-examples", type=int, default=60, help="of each operation and phase")
    parser.add_argument("--max-time", type=int, default=1800, metavar="S")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, local_serve() as base:
        args = real_args(make_tiny_model(Path(folder)))
        del args["admission"]
        serve.run(build(args), name=NAME, route_prefix="/")
        described = Path(folder) / "openapi.json"
        described.write_text(json.dumps(description(args)))
        command = [
            str(options.schemathesis), "run", str(described), "--url", base, "--phases", "examples,fuzzing", "--mode", "all",
            "--checks", "not_a_server_error", "--continue-on-failure", "--max-examples", str(options.max_examples),
            "--max-time", str(options.max_time), "--request-timeout", "60", "--seed", str(options.seed), "--no-color",
        ]  # fmt: skip
        # It is no part of this environment.
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        status = subprocess.run(command, cwd=folder, env=clean, check=False).returncode
        after = [
            httpx.post(f"{base}/v1/embeddings", json={"input": "w3"}, timeout=60).status_code,
            httpx.post(f"{base}/v1/completions", json={"prompt": "w3", "max_tokens": 2}, timeout=60).status_code,
        ]
        state = httpx.get(f"{base}/status", timeout=10).json()
    left = [engine["open"] for engine in state["engines"]]
    sys.stdout.write(json.dumps({"exit": status, "after": after, "open": left}) + "\n")
    return status or int(after != [200, 200] or any(left))


if __name__ == "__main__":
    sys.exit(main())
