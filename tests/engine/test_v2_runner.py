"""The V2 model runner, which CUDA uses, on CPU through Triton's interpreter. The cases are in `v2_cases.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.v2_cases import CASES

ROOT = Path(__file__).parents[2]
CHILD = (
    "import sys; from tests.engine.triton_interpreter import use_interpreter; use_interpreter(); "
    "from pathlib import Path; from tests.engine.v2_cases import main; main(Path(sys.argv[1]))"
)
CHILD_TIMEOUT_S = 280


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Case → None or the traceback of its failure; cases that were not reached are missing."""
    out = tmp_path_factory.mktemp("v2") / "failures.json"
    out.write_text("{}")
    with (out.parent / "log").open("w") as log:
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-c", CHILD, str(out)],
            cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=CHILD_TIMEOUT_S, check=False,
        )  # fmt: skip
    found = json.loads(out.read_text())
    return found or {"log": (out.parent / "log").read_text()[-4000:]}


@pytest.mark.parametrize("name", CASES)
def test_on_the_v2_runner(failures: dict[str, str | None], name: str) -> None:
    assert name in failures, f"the process ended before this case: {failures}"
    assert failures[name] is None, failures[name]
