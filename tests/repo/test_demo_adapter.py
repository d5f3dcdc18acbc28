"""The adapter that ships: small, bound by name, and described by the numbers that were measured."""

import json
from pathlib import Path

from orthrus_serve.engine.adapter_keys import prepare_adapter
from orthrus_serve.model.demo_check import check_adapter, read_header
from orthrus_serve.model.wheels import file_sha256

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "orthrus_serve" / "model" / "demo_adapter"
REPORT = json.loads((ROOT / "docs" / "benchmarks" / "2026-11-30-demo-adapter.json").read_text(encoding="utf-8"))


def test_the_adapter_takes_at_most_five_megabytes() -> None:
    assert sum(file.stat().st_size for file in ADAPTER.iterdir()) <= 5_000_000


def test_the_adapter_binds_as_it_is(tmp_path: Path) -> None:
    check_adapter(ADAPTER)
    assert prepare_adapter(ADAPTER, tmp_path) == ADAPTER


def test_its_tensors_have_the_rank_that_its_config_says() -> None:
    config = json.loads((ADAPTER / "adapter_config.json").read_text(encoding="utf-8"))
    header, _ = read_header(ADAPTER / "adapter_model.safetensors")
    ranks = {entry["shape"][0] for name, entry in header.items() if ".lora_A." in name}
    assert ranks == {config["r"]}
    assert {name.split(".")[-3] for name in header} == set(config["target_modules"])
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}


def test_the_reported_scores_are_those_of_this_file() -> None:
    digest = file_sha256(ADAPTER / "adapter_model.safetensors")
    readme = (ADAPTER / "README.md").read_text(encoding="utf-8")
    assert REPORT["shipped_sha256"] == digest
    assert digest in readme
    row = next(line for line in readme.splitlines() if line.startswith("| **this adapter**"))
    scores = REPORT["runs"][REPORT["shipped"]]["scores"]
    expected = [scores[size][key] for size in ("60", "500") for key in ("hit@1", "R@5", "R@10")]
    found = [float(cell.strip(" *")) for cell in row.split("|")[2:-1]]
    assert all(abs(a - b) <= 0.00051 for a, b in zip(found, expected, strict=True))


def test_the_licences_of_its_texts_are_named() -> None:
    readme = (ADAPTER / "README.md").read_text(encoding="utf-8")
    assert "CC BY-SA" in readme
    assert "Princeton University" in readme
