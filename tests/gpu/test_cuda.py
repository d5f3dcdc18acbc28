"""Right on CUDA: each group of `cases.py` in a process of its own, judged here. Skipped without a CUDA device.

On a card: `pytest tests/gpu`. The demo model must have been fetched (`orthrus-serve model fetch`); the rest makes its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engine.harness import POOLINGS

ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TORCHDYNAMO_DISABLE": "0"}


def run_group(group: str, folder: Path, *options: str) -> dict[str, Any]:
    file = folder / f"{group}.json"
    command = [sys.executable, "-m", "tests.gpu.cases", group, "--json", str(file), *options]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, check=False, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


def test_tokens_equal_stock_and_vectors_equal_the_reference(tmp_path: Path) -> None:
    result = run_group("tiny", tmp_path)
    for row in result["rows"]:
        assert row["tokens_equal_stock"], row
        assert row["worst_cosine"] > 0.9995, row  # fp16 against an fp32 reference
    assert result["totals"]["mixed_steps"] > 0
    assert result["pooled_steps"] > 0  # each of them was refused any wait for the device
    assert result["totals"]["preemptions"] > 0
    assert not any(result["leaks"].values())


def test_the_demo_model_embeds_and_generates_together(tmp_path: Path) -> None:
    result = run_group("demo", tmp_path)
    assert all(result["worst_cosine_to_fp32"][p] > 0.998 for p in POOLINGS if p != "cls")
    assert sum(result["tokens_in_common"]) / (result["of"] * len(result["tokens_in_common"])) > 0.5
    assert not any(result["leaks"].values())


def test_chunks_equal_whole_on_a_7b_shape(tmp_path: Path) -> None:
    result = run_group("mistral", tmp_path)
    for row in result["rows"]:
        assert min(row["worst_cosine_to_whole"].values()) > 0.9999, row
    assert max(result["cosine_of_two_inputs"].values()) < 0.999
    assert not any(result["leaks"].values())
