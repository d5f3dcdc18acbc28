"""Keys under `vllm:` are vLLM's own, except those that Orthrus sets."""

import pytest

from orthrus_serve.config.vllm_keys import REFUSED_VLLM_KEYS, check_vllm_keys, field_names
from orthrus_serve.errors import ConfigError

KNOWN = ["model", "max_model_len", "max_num_seqs", "worker_cls", "dtype"]


def test_known_keys_pass():
    check_vllm_keys(["dtype", "max_model_len"], KNOWN)
    check_vllm_keys([], KNOWN)


def test_a_misspelt_key_is_answered_with_the_near_one():
    with pytest.raises(ConfigError, match=r"^vllm.max_model_length: unknown key; did you mean 'max_model_len'\?$"):
        check_vllm_keys(["max_model_length"], KNOWN)


def test_the_spelling_of_vllms_command_line_is_answered_with_the_key():
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        check_vllm_keys(["max-num-seqs"], KNOWN)


def test_a_key_that_orthrus_sets_is_never_suggested():
    with pytest.raises(ConfigError) as caught:
        check_vllm_keys(["modle", "worker_class"], KNOWN)
    assert "'model'" not in str(caught.value)
    assert "'worker_cls'" not in str(caught.value)


@pytest.mark.parametrize("key", sorted(REFUSED_VLLM_KEYS))
def test_a_refused_key_is_answered_with_a_sentence_whether_or_not_vllm_has_it(key):
    for known in ([], [key]):
        with pytest.raises(ConfigError, match=rf"^vllm\.{key} (is|are) .{{10,}}$"):
            check_vllm_keys([key], known)


def test_all_wrong_keys_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        check_vllm_keys(["dtype", "model", "nope"], KNOWN, path="args.vllm")
    assert [line.split()[0].rstrip(":") for line in str(caught.value).splitlines()] == [
        "args.vllm.model",
        "args.vllm.nope",
    ]


def test_field_names_are_those_of_the_named_classes_only():
    source = (
        "class A:\n  x: int = 1\n  y = 2\n  def f(self):\n    z: int = 3\nclass B(A):\n  w: str\nclass C:\n  v: int\n"
    )
    assert field_names(source, ("A", "B")) == {"x", "w"}
