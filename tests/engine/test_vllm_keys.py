"""What `check` reads off vLLM's source is what vLLM has, and the configurations use nothing else."""

import dataclasses
from pathlib import Path

import pytest

from orthrus_serve.config.load import read_serve_file
from orthrus_serve.config.vllm_keys import REFUSED_VLLM_KEYS, check_vllm_keys, installed_vllm_keys

CONFIGS = Path(__file__).parents[2] / "configs"
# Refused although vLLM 0.32 has no such engine argument: people know them from other versions or from its command line.
FROM_ELSEWHERE = {"task", "override_pooler_config", "lora_modules", "host", "port", "api_key"}


@pytest.fixture(scope="module")
def vllm_keys():
    from vllm.engine.arg_utils import AsyncEngineArgs

    return {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_the_keys_read_without_an_import_are_vllms(vllm_keys):
    assert installed_vllm_keys() == vllm_keys


def test_refused_keys_exist_in_vllm_or_are_known_from_elsewhere(vllm_keys):
    assert REFUSED_VLLM_KEYS.keys() - vllm_keys == FROM_ELSEWHERE


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_configurations_use_vllms_keys(file, vllm_keys):
    for application in read_serve_file(file).applications:
        check_vllm_keys(application.args.vllm, vllm_keys)
