"""`check` looks at the folders that a file names, before anything is started."""

import json
from typing import Any

import pytest

from orthrus_serve.config.check import check_serve_file
from orthrus_serve.config.load import Application, ServeFile, parse_args
from orthrus_serve.config.schema import LiveSpec
from orthrus_serve.errors import ConfigError


@pytest.fixture
def folders(tmp_path):
    """A model folder and an adapter folder that look right from outside."""
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    adapter.mkdir()
    (model / "config.json").write_text(json.dumps({"hidden_size": 64}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    write_lora(adapter, r=16)
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    return tmp_path


def write_lora(adapter, **lora: Any) -> None:
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **lora}))


def make_file(folders, dimensions=(), **vllm: Any) -> ServeFile:
    adapter = {"path": str(folders / "adapter"), "dimensions": list(dimensions)}
    raw = {"topology": "orthrus", "model": {"path": str(folders / "model")}, "adapters": {"e": adapter}, "vllm": vllm}
    application = Application("a", "/", parse_args(raw), LiveSpec(), ("applications", 0))
    return ServeFile("f.yaml", "127.0.0.1", 8000, (application,))


def complaint_about(file: ServeFile) -> str:
    with pytest.raises(ConfigError) as caught:
        check_serve_file(file)
    return str(caught.value)


def test_good_folders_pass_and_the_summary_names_the_address(folders):
    checked = check_serve_file(make_file(folders, dimensions=(64, 8), max_lora_rank=16))
    assert checked.lines == ("a: orthrus, orthrus generates, e embeds", "answers at http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        ("model/config.json", "args.model.path: {0}/model has no readable config.json"),
        ("model/model.safetensors", "args.model.path: {0}/model has no weights"),
        ("model/tokenizer.json", "args.model.path: {0}/model has no tokenizer"),
        ("adapter/adapter_config.json", "args.adapters.e.path: {0}/adapter has no readable adapter_config.json"),
        ("adapter/adapter_model.safetensors", "args.adapters.e.path: {0}/adapter has no adapter_model.safetensors"),
    ],
)
def test_a_missing_file_is_named_with_its_key(folders, gone, expected):
    (folders / gone).unlink()
    assert f"f.yaml: applications[0].{expected.format(folders)}" in complaint_about(make_file(folders))


def test_missing_folders_are_all_named(folders):
    (folders / "model").rename(folders / "elsewhere")
    (folders / "adapter").rename(folders / "elsewhere2")
    lines = complaint_about(make_file(folders)).splitlines()
    assert ["is not a folder" in line for line in lines] == [True, True]


def test_a_demo_folder_that_is_missing_is_answered_with_the_command_that_makes_it(folders):
    assert "orthrus-serve model fetch" in complaint_about(make_file(folders / ".cache" / "orthrus_serve" / "demo"))


def test_a_dummy_model_needs_no_weights(folders):
    (folders / "model" / "model.safetensors").unlink()
    check_serve_file(make_file(folders, load_format="dummy"))


@pytest.mark.parametrize("lora", [{"r": 32}, {"r": 8, "rank_pattern": {"q_proj": 32}}])
def test_a_rank_above_the_limit_is_refused(folders, lora):
    write_lora(folders / "adapter", **lora)
    assert "the adapter's rank 32 is above vllm.max_lora_rank 16" in complaint_about(
        make_file(folders, max_lora_rank=16)
    )
    check_serve_file(make_file(folders))


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ({}, "gives no rank (r)"),
        ({"r": "16"}, "gives no rank (r)"),
        ({"r": 8, "peft_type": "LOHA"}, "is a LOHA adapter"),
    ],
)
def test_an_adapter_that_is_no_lora_is_refused(folders, lora, expected):
    write_lora(folders / "adapter", **lora)
    assert expected in complaint_about(make_file(folders))


def test_dimensions_above_the_hidden_size_are_refused(folders):
    assert "adapters.e.dimensions: 65 is above the model's hidden size, 64" in complaint_about(
        make_file(folders, (8, 65))
    )


def test_broken_json_is_a_sentence_and_not_a_traceback(folders):
    (folders / "model" / "config.json").write_text("{")
    (folders / "adapter" / "adapter_config.json").write_bytes(b"\xff\x00")
    assert "no readable config.json" in complaint_about(make_file(folders))


def test_adapters_that_generate_are_looked_at_too(folders):
    file = make_file(folders)
    raw = {**file.applications[0].args.model_dump(mode="json"), "generate_adapters": {"g": {"path": "/nowhere"}}}
    application = Application("a", "/", parse_args(raw), LiveSpec(), ("applications", 0))
    assert "args.generate_adapters.g.path: /nowhere is not a folder" in complaint_about(
        ServeFile("f.yaml", "127.0.0.1", 8000, (application,))
    )


def test_a_rank_above_what_vllm_serves_is_refused(folders):
    write_lora(folders / "adapter", r=513)
    assert "rank 513 is above 512" in complaint_about(make_file(folders))


def test_numbers_that_cannot_work_together_are_refused(folders):
    text = complaint_about(make_file(folders, max_num_batched_tokens=16, max_num_seqs=16))
    assert "args.vllm.max_num_batched_tokens: 16 leaves no room for prompts" in text
