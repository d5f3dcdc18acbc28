"""What fits on a card is arithmetic that can be checked by hand."""

import json
from pathlib import Path

import pytest

from orthrus_serve.cli import main
from orthrus_serve.errors import ConfigError
from orthrus_serve.ops.size_table import GPUS, MODELS, read_shape, table
from orthrus_serve.policy.sizing import Gpu, ModelShape, fit

MISTRAL_FOLDER = Path(__file__).parents[1] / "gpu/shapes/mistral-7b-v0.1"
MODEL = {shape.name: shape for shape in MODELS}
GPU = {gpu.name: gpu for gpu in GPUS}


def test_parameters_are_those_that_the_models_are_known_for():
    known = {"Mistral-7B-v0.1": 7.2417, "Qwen2-7B": 7.6156, "Llama-3.1-8B": 8.0303}
    for name, billions in known.items():
        assert MODEL[name].parameters / 1e9 == pytest.approx(billions, rel=1e-3), name


def test_tied_embeddings_count_once():
    shape = ModelShape("SmolLM2-135M", 30, 576, 1536, 9, 3, 64, 49152, ties_embeddings=True)
    assert shape.parameters / 1e6 == pytest.approx(134.5, rel=1e-3)


def test_a_token_keeps_a_key_and_a_value_in_every_layer():
    assert MODEL["Mistral-7B-v0.1"].kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131072
    assert MODEL["Qwen2-7B"].kv_bytes_per_token == 57344


def test_a_rank_16_adapter_of_a_7b_model_has_some_42_million_weights():
    assert MODEL["Mistral-7B-v0.1"].adapter_bytes(16) == 2 * 41_943_040


def test_the_rate_on_the_measured_card_is_the_measured_one():
    found = fit(MODEL["Mistral-7B-v0.1"], GPU["H200 141 GB"], request_tokens=800)
    assert found.tokens_per_s == pytest.approx(39_495, rel=0.01)


def test_what_does_not_fit_is_nothing_at_all():
    small = Gpu("small", 16 * 10**9, 1e14)
    assert fit(MODEL["Llama-3.1-8B"], small, request_tokens=800).kv_tokens == 0
    assert "does not fit" in table([ModelShape("big", 80, 8192, 28672, 64, 8, 128, 128256, False)])[2]


def test_longer_requests_are_fewer():
    shape, gpu = MODEL["Mistral-7B-v0.1"], GPU["H100 80 GB"]
    one, two = (fit(shape, gpu, request_tokens=tokens).requests for tokens in (800, 1600))
    assert one == pytest.approx(2 * two, abs=1)


def test_a_folder_gives_the_shape_that_is_known():
    shape = read_shape(MISTRAL_FOLDER)
    assert shape.parameters == MODEL["Mistral-7B-v0.1"].parameters
    assert shape.kv_bytes_per_token == MODEL["Mistral-7B-v0.1"].kv_bytes_per_token


@pytest.mark.parametrize("text", ["[]", "{", json.dumps({"hidden_size": 4})])
def test_a_folder_of_something_else_is_refused_with_a_sentence(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="is not the config.json of a decoder"):
        read_shape(tmp_path)


def test_the_command_prints_a_row_for_each_model(capsys):
    assert main(["size", str(MISTRAL_FOLDER), "--tokens", "640"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["size"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(MODELS)
    assert main(["size", "/nowhere"]) == 2
