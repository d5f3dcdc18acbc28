"""Topology `separate_models` in a file: what goes with it, what two engines may take of a card, and what cannot be switched."""

import json
from pathlib import Path
from typing import Any

import pytest

from orthrus_serve.config.check import check_serve_file
from orthrus_serve.config.embedder import MAX_CARD_MEMORY
from orthrus_serve.config.environment import replica_environment
from orthrus_serve.config.load import ServeFile, parse_args, parse_serve_file
from orthrus_serve.engine.separate_kwargs import embedder_kwargs, generator_kwargs
from orthrus_serve.engine.settings import EngineSettings, LiveSettings
from orthrus_serve.errors import ConfigError
from orthrus_serve.ops.deployed_config import Deployed, Wanted, settled
from orthrus_serve.ops.plan import plan_lines
from orthrus_serve.ops.vllm_args import vllm_command_line
from orthrus_serve.serving.pool_keeper import make_probes
from orthrus_serve.serving.served import EmbedderFacts, served_by

CPU = {"kv_cache_memory_bytes": 2**24}


def separate(**changes: Any) -> dict[str, Any]:
    return {
        "topology": "separate_models",
        "model": {"path": "/m"},
        "embedder": {"path": "/e", "vllm": CPU},
        "num_gpus_per_replica": 0,
        "vllm": CPU,
    } | changes


def on_gpu(generator: float | None, embedder: float | None) -> dict[str, Any]:
    sections = [{} if share is None else {"gpu_memory_utilization": share} for share in (generator, embedder)]
    return separate(num_gpus_per_replica=1, vllm=sections[0], embedder={"path": "/e", "vllm": sections[1]})


def mixed(**changes: Any) -> dict[str, Any]:
    return {"topology": "orthrus", "model": {"path": "/m"}, "adapters": {"a": {"path": "/a"}}} | changes


def complaint(args: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_args(args, ("args",))
    return str(caught.value)


def file_of(args: dict[str, Any], *deployments: dict[str, Any]) -> ServeFile:
    application = {"import_path": "orthrus_serve.app:build", "args": args, "deployments": list(deployments)}
    return parse_serve_file(json.dumps({"applications": [application]}))


def test_an_embedder_takes_the_place_of_adapters_and_answers_for_the_base_name():
    args = parse_args(separate())
    assert (args.embedder and args.embedder.name, args.base_name_adapter) == ("orthrus-embed", "orthrus-embed")
    assert json.loads(make_probes(args)["embed"].body)["model"] == "orthrus-embed"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (separate(embedder=None), "args.embedder: missing; topology separate_models has a model of its own"),
        (separate(adapters={"a": {"path": "/a"}}), "args.adapters: in topology separate_models the embedder embeds"),
        (mixed(embedder={"path": "/e"}), "args.embedder: goes with topology separate_models; in topology orthrus adapters"),
        (mixed(engine={"card_share": "static"}), "args.engine.card_share: goes with topology separate_models"),
        (mixed(adapters={}), "args.adapters: name at least one embedding adapter"),
        (separate(model={"path": "/m", "name": "orthrus-embed"}), "args.adapters: 'orthrus-embed' names two things"),
        (separate(embed_adapter="a"), "args.embed_adapter: 'a' is not one of []"),
        (separate(embedder={"path": "/e", "vllm": CPU, "pooling": "max"}), "args.embedder.pooling: must be 'mean'"),
        (separate(embedder={"path": "/e", "vllm": CPU, "polling": "cls"}), "unknown key; did you mean 'pooling'?"),
        (separate(embedder={"path": "/e", "vllm": CPU, "dimensions": [0]}), "every entry must be at least 1"),
        (separate(embedder={"path": "/e", "vllm": {**CPU, "runner": "pooling"}}), "args.embedder.vllm.runner is set by"),
        (separate(vllm={}), "args.vllm.kv_cache_memory_bytes: missing; on CPU each of two engines must say"),
        (separate(embedder={"path": "/e"}), "args.embedder.vllm.kv_cache_memory_bytes: missing"),
        (separate(engine={"card_share": "half"}), "args.engine.card_share: must be 'remaining', 'static' or 'whole'"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_named(args, expected):
    assert expected in complaint(args)


def test_two_engines_that_want_more_than_a_card_are_told_which_number_to_lower():
    assert complaint(on_gpu(0.7, 0.4)) == (
        "args.vllm.gpu_memory_utilization 0.7 + args.embedder.vllm.gpu_memory_utilization 0.4 is 1.1 of one card, above 0.95; "
        "lower args.vllm.gpu_memory_utilization to 0.55 or less"
    )
    assert "lower args.embedder.vllm.gpu_memory_utilization to 0.45 or less" in complaint(on_gpu(0.5, 0.6))


@pytest.mark.parametrize("shares", [(0.65, 0.3), (0.475, 0.475), (0.7, None), (None, 0.2), (None, None)])
def test_what_fits_or_is_not_written_is_left_to_the_start(shares):
    assert sum(share or 0 for share in shares) <= MAX_CARD_MEMORY
    parse_args(on_gpu(*shares))


def test_a_worker_of_either_engine_needs_a_gpu_of_the_replica():
    args = on_gpu(0.5, 0.3)
    args["embedder"]["vllm"]["tensor_parallel_size"] = 2
    assert "args.embedder.vllm.tensor_parallel_size" in complaint(args)


def test_arms_may_put_separate_models_against_a_mixed_engine():
    embeds = {"adapters": {"a": {"path": "/a"}}, "embedder": {"path": "/e", "vllm": CPU}}
    arms = {"a": {"topology": "orthrus"}, "b": {"topology": "separate_models", "engine": {"card_share": "whole"}}}
    args = parse_args({"model": {"path": "/m"}, "num_gpus_per_replica": 0, "vllm": CPU, **embeds, "arms": arms})
    of_a, of_b = args.by_arm["a"], args.by_arm["b"]
    assert (of_a.embedder, list(of_a.adapters), of_a.base_name_adapter) == (None, ["a"], "a")
    assert (of_b.adapters, of_b.base_name_adapter, of_b.engine.card_share) == ({}, "orthrus-embed", "whole")
    alone = {"model": {"path": "/m"}, "num_gpus_per_replica": 0, "vllm": CPU, "adapters": {"a": {"path": "/a"}}}
    assert "args.arms.b.embedder: missing" in complaint({**alone, "arms": arms})


def test_a_file_may_not_switch_into_or_out_of_it_at_the_start():
    for args, wanted, name in (
        (separate(), "orthrus", "Engine"),
        (separate(num_replicas=2), "dedicated", "Front"),
        (mixed(), "separate_models", "Front"),
    ):
        with pytest.raises(ConfigError, match="runs other engines, with other weights") as caught:
            file_of(args, {"name": name, "user_config": {"topology": wanted}})
        assert "deployments[0].user_config.topology: " in str(caught.value)
    file_of(separate(), {"name": "Engine", "user_config": {"topology": "separate_models", "card_share": "static"}})


@pytest.mark.parametrize(
    ("args", "wanted"), [(separate(), "orthrus"), (separate(), "dedicated"), (mixed(), "separate_models")]
)
def test_a_running_application_is_not_switched_into_or_out_of_it(args, wanted):
    deployed = Deployed("a", "http://x", parse_args(args))
    with pytest.raises(ConfigError, match="start the application from that"):
        settled(Wanted(wanted), deployed, 4)


def test_one_engine_is_not_two():
    with pytest.raises(ConfigError, match="two engines on a card, and vllm serves one"):
        vllm_command_line(file_of(separate()))


def test_check_looks_at_both_models(tmp_path: Path):
    args = separate(embedder={"path": str(tmp_path / "orthrus_serve" / "e"), "vllm": CPU})
    with pytest.raises(ConfigError) as caught:
        check_serve_file(file_of(args))
    told = str(caught.value)
    assert "args.model.path: /m is not a folder" in told
    assert "args.embedder.path: " in told
    assert "`orthrus-serve model fetch --with-embedder`" in told


def test_check_knows_vllms_keys_in_both_sections():
    args = separate(embedder={"path": "/e", "vllm": {**CPU, "max_num_sequences": 8}})
    with pytest.raises(ConfigError, match=r"args\.embedder\.vllm\.max_num_sequences: unknown key; did you mean"):
        check_serve_file(file_of(args))


def test_the_plan_tells_of_two_engines_and_how_they_share():
    lines = "\n".join(plan_lines(file_of(separate(vllm={**CPU, "max_num_batched_tokens": 512}))))
    assert "two engines on each card" in lines
    assert "orthrus-embed: /e (a model of its own, pooling as its files say; also answers /v1/embeddings" in lines
    assert "generator 512 tokens, embedder vLLM's default for this device; card_share remaining: scaled by" in lines
    live = {"name": "Engine", "user_config": {"card_share": "static"}}
    assert "card_share static: half of it" in "\n".join(plan_lines(file_of(separate(), live)))


def test_stock_engines_get_no_adapters_and_no_worker_of_ours():
    args = parse_args(separate(engine={"step_log": "/logs/steps"}))
    assert args.embedder is not None
    generator, embedder = generator_kwargs(args, on_cpu=True), embedder_kwargs(args, args.embedder, on_cpu=True)
    for kwargs in (generator, embedder):
        assert not {"worker_cls", "enable_lora", "pooler_config", "hf_overrides"} & kwargs.keys()
    assert (generator["runner"], embedder["runner"]) == ("generate", "pooling")
    logs = [EngineSettings.from_additional_config(k["additional_config"]).step_log for k in (generator, embedder)]
    assert logs == ["/logs/steps", "/logs/steps.embed"]
    live = EngineSettings.from_additional_config(embedder["additional_config"]).live
    assert (live.policy, live.card_share) == ("hetero_fcfs", "remaining")


def test_what_the_models_files_do_not_say_is_told_to_vllm():
    spec = {"path": "/e", "vllm": CPU, "pooling": "cls", "normalize": False, "dimensions": [64]}
    args = parse_args(separate(embedder=spec))
    assert args.embedder is not None
    kwargs = embedder_kwargs(args, args.embedder, on_cpu=True)
    assert kwargs["pooler_config"] == {"seq_pooling_type": "CLS", "use_activation": False}
    assert kwargs["hf_overrides"]["matryoshka_dimensions"] == [64]


def test_vllm_chooses_the_runner_of_stock_engines_on_cuda():
    assert "VLLM_USE_V2_MODEL_RUNNER" not in replica_environment(parse_args(on_gpu(0.5, 0.3)))
    assert replica_environment(parse_args(separate()))["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert replica_environment(parse_args(mixed()))["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_an_input_is_measured_by_the_model_that_it_is_for():
    args = parse_args(separate(embedder={"path": "/e", "vllm": CPU, "dimensions": [8]}))
    facts = {"base_name": "orthrus", "vocab_size": 500, "max_model_len": 100, "vector_sizes": {"orthrus-embed": 16}}
    served = served_by(args, **facts, embedder=EmbedderFacts(900, 256))
    adapter = served.adapters["orthrus-embed"]
    assert (served.longest_prompt, served.longest_input(adapter)) == (99, 256)
    assert (served.vocab_size_of("orthrus"), served.vocab_size_of("orthrus-embed")) == (500, 900)
    assert (adapter.appends_eos, adapter.dimensions, served.base_name_adapter) == (False, (8,), "orthrus-embed")


def test_an_engine_with_the_card_for_itself_has_no_share_to_change():
    with pytest.raises(ConfigError, match="goes with topology separate_models"):
        LiveSettings().changed({"card_share": "static"}, 512)
    shared = LiveSettings(policy="hetero_fcfs", card_share="remaining")
    assert shared.changed({"card_share": "static", "policy": "hetero_fcfs"}, 512).card_share == "static"
    with pytest.raises(ConfigError, match="goes by arrival order"):
        shared.changed({"policy": "orthrus"}, 512)
