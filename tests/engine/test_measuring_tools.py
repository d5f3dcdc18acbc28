"""The tools that measure on a card run here on the tiny model, so that they are not found broken there."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.settings_file import parse_settings
from orthrus_serve.ops.deployed_config import parse_wanted
from tests.engine.harness import VOCAB_SIZE, Engine, make_tiny_model
from tests.gpu.closed_loop import ClosedLoop, Load
from tests.gpu.engines import copy_tokenizer
from tests.gpu.fleet import totals_of
from tests.gpu.fleet_arms import (
    Scale,
    block_arms,
    coin_arms,
    hop_arms,
    model_flop_ratio,
    named_arm,
    phase_arms,
    pool_arms,
)
from tests.gpu.hops import HopLoad, run_hops


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("tools")
    engine = Engine(make_tiny_model(folder), folder / "steps", budget=128)
    yield engine
    engine.close()


def test_a_closed_loop_counts_what_its_steps_held(engine: Engine) -> None:
    load = Load(4, 0.5, prompt_tokens=40, output_tokens=5, warm_s=0.3, measured_s=1.0, vocabulary=VOCAB_SIZE)
    row = ClosedLoop(engine).run(load, {"policy": "orthrus"})
    assert row["embed_per_s"] > 0
    assert row["generate_per_s"] > 0
    assert row["tokens_per_s"] > 0
    assert 0 < row["fill"] <= 1
    assert not engine.scheduler.requests  # what was in flight at its end was ended


def test_hops_embed_and_then_generate(engine: Engine) -> None:
    load = HopLoad(3, warm_s=0.3, seconds=1.5, hops=2, query=10, prompt=20, output=4, documents=2, document=15)
    row = run_hops(engine, load, VOCAB_SIZE)
    assert row["hops_per_s"] > 0
    assert row["embed_tokens_per_s"] > 0
    assert row["decode_tokens_per_s"] > 0


def test_arms_of_a_fleet_offer_the_ratio_that_they_are_named_after() -> None:
    scale = Scale(cards=4, clients=128, stretch=1.0, block=1000, phase=1600)
    pair = ("dedicated", "orthrus")
    coins = list(coin_arms(scale, pair))
    assert [arm.topology for arm in coins] == list(pair) * 3
    totals = totals_of(
        [
            {
                "topology": "orthrus",
                "arm": arm.name,
                "total_per_s": 100.0 if "512" in arm.name else 7.0,
                **arm.settings["workload"],
            }
            | {"embed_share_asked": arm.settings["workload"]["embed_share"]}
            for arm in [*coins, *coin_arms(scale, pair, times=2)]
            if arm.topology == "orthrus"
        ],
        clients=4 * 128,
    )
    assert set(totals) == {0.9, 0.5, 0.1}
    for arm in pool_arms(scale, pair, totals):
        rates = {kind: arm.settings["workload"][kind]["rate"] for kind in ("embed", "generate")}
        assert sum(rates.values()) == pytest.approx(90.0)
        assert rates["embed"] / 90.0 == pytest.approx(float(arm.name.split("-")[1]))
    every = [*coins, *block_arms(scale, pair), *phase_arms(scale, pair)]
    hops = list(hop_arms(scale, pair))
    assert len({arm.name for arm in [*every, *hops]}) == len(every) + len(hops)
    for arm in [*every, *hops]:
        parse_settings(arm.settings)  # loadgen takes them
    # Everything that compares the two topologies of the paper fits into the 25 minutes of a rented machine.
    assert sum(arm.takes_s for arm in [*every, *pool_arms(scale, pair, totals)]) < 25 * 60


@pytest.mark.parametrize(
    ("text", "kind", "engine"),
    [
        ("coin,share=0.9,clients=64,warm_s=6,window_s=15,stream=1/orthrus,embed_weight=4,target_tpot_ms=40", "ratio",
         {"step_tokens": "2048", "embed_weight": "4", "target_tpot_ms": "40"}),
        ("block,requests=600/unified_homo,step_tokens=4096", "block", {"step_tokens": "4096", "embed_weight": "1"}),
        ("phases,requests=400,clients=256/hetero_fcfs", "phases", {"step_tokens": "2048", "embed_weight": "1"}),
        ("hops,variant=query_only,clients=160,warm_s=15,window_s=40,passages=1000/stock,step_tokens=8192", "iter_retgen",
         {"step_tokens": "8192"}),
    ],
)  # fmt: skip
def test_a_named_arm_is_a_load_and_what_serves_it(text: str, kind: str, engine: dict[str, str]) -> None:
    arm = named_arm(text)
    assert (arm.settings["workload"]["kind"], arm.engine) == (kind, engine)
    assert arm.settings["sampling"]["stream"] == ("stream=1" in text)
    if arm.topology != "stock":
        assert parse_wanted(arm.topology, settings=[f"{name}={value}" for name, value in engine.items()]).engine
    parse_settings(arm.settings)  # loadgen takes them


@pytest.mark.parametrize("text", ["coins/orthrus", "block,count=3/orthrus", "coin,share=0.5/orthrus"])
def test_a_named_arm_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        named_arm(text)


def test_model_flops_of_tokens_are_two_for_each_parameter() -> None:
    assert model_flop_ratio(1000.0, 2.0, cards=5, parameters=1e9, peak_flops=1e12) == pytest.approx(0.2)


def test_a_tokenizer_is_cut_to_the_vocabulary_of_the_model(tmp_path: Path) -> None:
    source, model = tmp_path / "source", tmp_path / "model"
    source.mkdir()
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 5}')
    (source / "tokenizer_config.json").write_text("{}")
    tokenizer = {
        "model": {
            "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3, "c": 4, "abc": 5},
            "merges": [["a", "b"], ["ab", "c"]],
        },
        "added_tokens": [{"id": 0, "content": "<s>"}],
    }
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    copy_tokenizer(source, model)
    cut = json.loads((model / "tokenizer.json").read_text())["model"]
    assert (max(cut["vocab"].values()), cut["merges"]) == (4, [["a", "b"]])
    tokenizer["added_tokens"] = [{"id": 5, "content": "<|end|>"}]
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"<\|end\|>"):
        copy_tokenizer(source, model)
