"""Key names decide whether an adapter does anything: what is renamed, what is left alone, what is refused."""

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from orthrus_serve.engine.adapter_keys import prepare_adapter, rename_keys
from orthrus_serve.errors import AdapterError

HEADLESS = "base_model.model.layers.0.self_attn.q_proj.lora_A.weight"
WITH_HEAD = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def make_adapter(folder: Path, keys: list[str]) -> Path:
    folder.mkdir(parents=True)
    save_file({key: torch.full((2, 3), float(i)) for i, key in enumerate(keys)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2}))
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a mapping


def test_a_key_of_a_headless_model_gets_the_missing_prefix() -> None:
    assert rename_keys([HEADLESS]) == {HEADLESS: WITH_HEAD}


def test_a_key_that_binds_already_is_left_alone() -> None:
    assert rename_keys([WITH_HEAD]) == {WITH_HEAD: WITH_HEAD}


def test_renaming_twice_is_renaming_once() -> None:
    once = rename_keys([HEADLESS, HEADLESS.replace("lora_A", "lora_B")])
    assert set(rename_keys(once.values()).values()) == set(once.values())


@pytest.mark.parametrize("keys", [[], ["base_model.model.layers.0.self_attn.q_proj.weight"]])
def test_keys_without_a_lora_weight_are_refused(keys: list[str]) -> None:
    with pytest.raises(AdapterError, match="LoRA"):
        rename_keys(keys)


def test_a_module_under_both_names_is_refused() -> None:
    with pytest.raises(AdapterError, match="twice"):
        rename_keys([HEADLESS, WITH_HEAD])


def test_an_adapter_that_binds_is_served_from_its_own_folder(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", [WITH_HEAD])
    assert prepare_adapter(folder, tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_a_headless_adapter_is_copied_with_its_values_under_the_new_names(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", [HEADLESS, HEADLESS.replace("q_proj", "v_proj")])
    copy = prepare_adapter(folder, tmp_path / "cache")
    assert torch.equal(stored(copy)[WITH_HEAD], stored(folder)[HEADLESS])
    assert json.loads((copy / "adapter_config.json").read_text()) == {"r": 2}
    assert (copy / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o644


def test_the_copy_is_made_once_and_anew_when_the_weights_change(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", [HEADLESS])
    first = prepare_adapter(folder, tmp_path / "cache")
    assert prepare_adapter(folder, tmp_path / "cache") == first
    save_file({HEADLESS: torch.ones(2, 3)}, folder / "adapter_model.safetensors")
    assert prepare_adapter(folder, tmp_path / "cache") != first


def test_replicas_that_start_together_get_the_same_whole_copy(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", [HEADLESS])
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(prepare_adapter(folder, tmp_path / "cache"))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == 1
    assert list((tmp_path / "cache").iterdir()) == [found[0]]
    assert list(stored(found[0])) == [WITH_HEAD]


@pytest.mark.parametrize("missing", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = make_adapter(tmp_path / "adapter", [WITH_HEAD])
    (folder / missing).unlink()
    with pytest.raises(AdapterError, match=missing):
        prepare_adapter(folder, tmp_path / "cache")


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", [HEADLESS])
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(AdapterError, match="adapter"):
        prepare_adapter(folder, tmp_path / "cache")
