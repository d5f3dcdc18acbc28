"""What every suite shares: markers from folders, the evaluation data option, switches that must be set before an import.

Order of suites (`testpaths`): unit, repo, engine, serve, gpu. One call of pytest runs them all, so that there is one closing
line; a test that needs a fresh process (another model runner, another device) starts one itself.

`make test` has two workers (pytest-xdist). Each takes a file at a time, and one of them all of `serve`: those tests share a Ray
and want the machine to themselves, and they come last, when the other worker is done or nearly so.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

# Before torch is imported by anyone: with two threads on two busy cores a small model is some 30 times slower than with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test may look for a model outside this machine, or report its use.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

SUITES = ("unit", "repo", "engine", "serve", "gpu")
TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--eval-data",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder with the 2WikiMultihopQA sample, written with `=`; tests that need it are skipped without",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each test with the name of its folder, so that `-m` and the folders cannot disagree."""
    has_cuda = shutil.which("nvidia-smi") is not None
    for item in items:
        parts = item.path.relative_to(TESTS).parts
        if len(parts) < 2 or parts[0] not in SUITES:
            raise pytest.UsageError(f"{item.nodeid}: tests live in one of tests/{{{','.join(SUITES)}}}")
        item.add_marker(parts[0])
        if parts[0] == "gpu" and not has_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests go to a worker together: those of a file, and all of `serve`."""
    from xdist.scheduler import LoadScopeScheduling  # not there where only the GPU suite is run

    class BySuite(LoadScopeScheduling):
        @override
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "serve" if path.startswith("tests/serve/") else path

    return BySuite(config, log)


@pytest.fixture(scope="session")
def eval_data(request: pytest.FixtureRequest) -> Path:
    """The folder given by `--eval-data`; skips the test without it, fails when the option names no folder."""
    folder: Path | None = request.config.getoption("--eval-data")
    if folder is None:
        pytest.skip("needs --eval-data=DIR")
    if not folder.is_dir():
        pytest.fail(f"--eval-data {folder}: no such folder")
    return folder
