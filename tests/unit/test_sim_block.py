"""The worst block in virtual time: what a weight moves, and how near it is to what two H200s did."""

import json

import pytest

from orthrus_serve.sim.batching import BatchSpec
from orthrus_serve.sim.block import main, run_block
from orthrus_serve.sim.step_clock import h200


@pytest.mark.parametrize(
    ("policy", "embed_p99_s", "generate_p99_s", "whole_s"),
    [("orthrus", 18.6, 21.1, 22.1), ("hetero_fcfs", 18.8, 19.0, 20.9)],
)
def test_the_block_takes_as_long_as_on_cards(policy, embed_p99_s, generate_p99_s, whole_s):
    """`docs/benchmarks/2026-11-30-gpu-two-cards.md`: 1,000 of each kind on two cards."""
    found = run_block(BatchSpec(h200(), policy), 500)
    assert found.embed_p99_s == pytest.approx(embed_p99_s, rel=0.1)
    assert found.generate_p99_s == pytest.approx(generate_p99_s, rel=0.1)
    assert found.whole_s == pytest.approx(whole_s, rel=0.1)


def test_a_weight_moves_the_wait_from_one_kind_to_the_other_and_not_the_whole():
    found = [run_block(BatchSpec(h200(), embed_weight=weight), 300) for weight in (0.25, 1.0, 4.0)]
    waits = [one.embed_p99_s for one in found]
    assert waits[2] < 0.75 * waits[1] < 0.75 * waits[0]
    assert [one.whole_s for one in found] == pytest.approx([found[1].whole_s] * 3, rel=0.05)


def test_alternating_steps_end_although_decodes_hold_every_slot():
    found = run_block(BatchSpec(h200(), "unified_homo", max_num_seqs=4), 20)
    assert max(found.embed_p99_s, found.generate_p99_s) <= found.whole_s


def test_the_command_prints_and_writes_a_row_for_each_way(tmp_path, capsys):
    file = tmp_path / "block.json"
    assert main(["--requests", "20", "--weights", "1", "4", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [(row["policy"], row["embed_weight"]) for row in rows] == [
        ("orthrus", 1.0), ("orthrus", 4.0), ("hetero_fcfs", 1.0), ("unified_homo", 1.0),
    ]  # fmt: skip
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
