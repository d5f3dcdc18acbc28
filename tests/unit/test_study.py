"""The study as a command: it runs, its figures are drawn, and its arithmetic is right."""

import gzip
import json
from pathlib import Path

import pytest

from orthrus_serve.policy.roles import Split
from orthrus_serve.sim import choice_cost, real_run, study
from orthrus_serve.sim.cluster import Answer, Played
from orthrus_serve.sim.figures import lines, ratios
from orthrus_serve.sim.summary import percentile, skew, summary
from orthrus_serve.sim.topologies import Mix, best_splits, fullest, is_foretold


def test_a_quick_study_answers_every_question_and_draws_what_it_found(tmp_path: Path) -> None:
    assert study.main(["--out", str(tmp_path), "--quick"]) == 0
    told = json.loads(gzip.decompress((tmp_path / "rows.json.gz").read_bytes()))
    assert told["quick"] is True
    assert set(told["rows"]) == set(study.EXPERIMENTS)
    assert all(told["rows"].values())
    drawn = {path.stem: path.stat().st_size for path in tmp_path.glob("*.png")}
    assert set(drawn) == {"sizes", "looked_at", "fronts", "delays", "dedicated"}
    assert all(1_000 < size < 200_000 for size in drawn.values())


def test_the_cost_of_a_choice_is_told_for_every_way_and_size(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    assert choice_cost.main(["--sizes", "4", "40", "--choices", "20", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["way"], row["replicas"]) for row in rows] == [
        (way, size) for way in choice_cost.WAYS for size in (4, 40)
    ]
    assert all(0 < row["choice_median_us"] <= row["choice_p99_us"] for row in rows)


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert percentile([], 0.5) != percentile([], 0.5)


def test_skew_is_the_busiest_over_the_mean() -> None:
    assert skew([1, 1, 1, 1]) == 1.0
    assert skew([3, 1, 1, 1]) == 2.0
    assert skew([0, 0]) == 1.0


def test_a_summary_counts_who_arrived_in_time_and_tells_kinds_and_sessions_apart() -> None:
    answers = [
        Answer("embed", 1.0, 9.0, False, 1.0),
        Answer("embed", 5.0, 1.0, False, 5.0),
        Answer("generate", 6.5, 3.0, True, 5.0),
        Answer("generate", 11.0, 9.0, True, 11.0),
    ]
    found = summary(Played([], [2.0, 6.0], answers, 1), from_s=4.0, until_s=10.0)
    assert (found["skew"], found["retried"]) == (1.5, 1)
    assert [found[kind]["requests"] for kind in ("all", "generate", "embed")] == [2, 1, 1]
    assert (found["embed"]["p99_ms"], found["generate"]["p99_ms"]) == (1000.0, 3000.0)
    assert found["session"] == {"p50_ms": 4500, "p99_ms": 4500}


def test_a_split_is_as_full_as_its_fuller_part() -> None:
    half = Mix(1.0, embed_work=0.5)
    assert fullest(Split(2, 2), 4, half) == 1.0
    assert fullest(Split(1, 3), 4, half) == 2.0
    assert best_splits(4, half) == [Split(2, 2), Split(3, 1)]
    assert best_splits(4, Mix(1.0, embed_work=0.1)) == [Split(1, 3)]
    assert best_splits(4, Mix(1.0, embed_work=0.9)) == [Split(3, 1)]


def test_a_split_is_foretold_to_pay_only_where_both_kinds_have_more_than_they_need() -> None:
    mostly_embeddings = Mix(1.0, embed_work=0.85)
    assert is_foretold(Split(3, 1), 4, mostly_embeddings, load=0.6)
    assert not is_foretold(Split(3, 1), 4, mostly_embeddings, load=0.8), "embeddings are too full"
    assert not is_foretold(Split(3, 1), 4, Mix(1.0, embed_work=0.7), load=0.3), "generations have less than their share"


def test_lines_and_ratios_put_together_what_belongs_together() -> None:
    def row(arm: str, share: float, p99_ms: float) -> dict:
        told = {kind: {"p99_ms": p99_ms} for kind in ("all", "embed", "generate")}
        return {"arm": arm, "embed_share": share, "utilisation": 0.5, "bursts": 0.0, "fullest": 1.2, **told}

    rows = [
        row("orthrus", 0.1, 1000),
        row("dedicated 1:3", 0.1, 500),
        row("orthrus", 0.2, 1000),
        row("dedicated 1:3", 0.2, 4000),
    ]
    assert lines(rows, "embed_share") == {
        "orthrus": ([0.1, 0.2], [1.0, 1.0]),
        "dedicated 1:3": ([0.1, 0.2], [0.5, 4.0]),
    }
    assert [(one["embed_share"], one["embed"], one["generate"]) for one in ratios(rows)] == [
        (0.1, 0.5, 0.5),
        (0.2, 4.0, 4.0),
    ]


def test_a_real_run_is_played_again_by_rule_and_trace() -> None:
    raw = {
        "conditions": {"tokens_per_s": 1000, "engines": 2, "fronts": 1},
        "traces": [[[0.0, "embed", 500, 0], [0.1, "embed", 500, 0], [0.2, "embed", 500, 0]]],
        "blocks": [
            {"rule": "exact (simulated)", "round": 0, "latency_ms": []},
            {"rule": "least_remaining_tokens", "round": 0, "latency_ms": [510, 510, 800], "load_average": 1.0},
        ],
    }
    (row,) = real_run.compare(raw)
    assert (row["measured_p50_ms"], row["rule"]) == (510, "least_remaining_tokens")
    assert row["simulated_p50_ms"] == 506
    assert row["simulated_p99_ms"] == pytest.approx(800, abs=15)
