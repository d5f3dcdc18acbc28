"""A few rounds of the fuzz in every run of the tests, on both runners; `make fuzz` runs many."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.fuzz import MAX_LOGIT_GAP, MIN_COSINE, Models, Setting, logit_gap, run_round, settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models.make(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("setting", [*settings(4, seed=1), *settings(3, seed=100)], ids=str)
def test_nothing_is_lost_leaked_or_wrong(models: Models, tmp_path: Path, setting: Setting) -> None:
    result = run_round(models, setting, tmp_path)
    assert result.wrong == []
    assert result.embeddings > 15
    assert result.generations > 10


def test_the_checks_tell_one_adapter_from_another_and_one_token_from_the_next(models: Models) -> None:
    prompt = list(range(10, 40))
    tokens = models.second.greedy(prompt, 8, adapted=True)
    assert logit_gap(models, prompt, tokens, adapted=True) < MAX_LOGIT_GAP
    assert logit_gap(models, prompt, tokens, adapted=False) > MAX_LOGIT_GAP
    assert logit_gap(models, prompt, [*tokens[:7], tokens[7] + 1], adapted=True) > MAX_LOGIT_GAP
    for pooling in ("last", "mean"):
        assert float(models.first.vector(prompt, pooling) @ models.second.vector(prompt, pooling)) < MIN_COSINE
    assert float(models.first.vector(prompt, "mean") @ models.first.vector(prompt[:-1], "mean")) < MIN_COSINE


def test_nothing_is_lost_leaked_or_wrong_on_the_v2_runner() -> None:
    command = [sys.executable, "-m", "tests.engine.triton_interpreter", "tests.engine.fuzz", "--rounds", "2"]
    done = subprocess.run(
        [*command, "--seed", "1"], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    rounds = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, (rounds, done.stderr[-3000:])
    total = rounds[-1]
    assert (total["runner"], total["rounds"], total["wrong_rounds"]) == ("v2", 2, 0)
    assert total["embeddings"] > 15
    assert total["generations"] > 10
    assert total["preemptions"] > 0
    assert {r["setting"]["async_scheduling"] for r in rounds[:-1]} == {True, False}
