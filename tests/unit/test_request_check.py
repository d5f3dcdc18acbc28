"""Request bodies before vLLM sees them: what is refused, with which status and field, and what is completed."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.config.schema import AppArgs
from orthrus_serve.errors import ConfigError, RequestError
from orthrus_serve.serving.request_check import CHECKED_PATHS, check_request
from orthrus_serve.serving.served import Served, ServedAdapter, served_by

SERVED = Served(
    base_name="orthrus",
    generators=frozenset({"storyteller"}),
    adapters={"orthrus-embed": ServedAdapter(576, (64, 128)), "short": ServedAdapter(32, max_input_tokens=10)},
    base_name_adapter="orthrus-embed",
    vocab_size=1000,
    max_model_len=256,
    max_inputs=32,
    max_n=8,
    max_logprobs=20,
)
EMBED, COMPLETE, CHAT = "/v1/embeddings", "/v1/completions", "/v1/chat/completions"
MINIMAL: dict[str, dict[str, Any]] = {
    EMBED: {"model": "orthrus-embed", "input": "hello"},
    COMPLETE: {"model": "orthrus", "prompt": "hello"},
    CHAT: {"model": "orthrus", "messages": [{"role": "user", "content": "hello"}]},
    "/tokenize": {"model": "orthrus", "prompt": "hello"},
    "/detokenize": {"model": "orthrus", "tokens": [1, 2]},
}


def checked(path: str, served: Served = SERVED, **changes: Any) -> dict[str, Any]:
    return json.loads(check_request(path, json.dumps({**MINIMAL[path], **changes}).encode(), served).body)


def refused(path: str, raw: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check_request(path, raw, SERVED)
    return caught.value


@pytest.mark.parametrize("path", MINIMAL)
def test_a_good_body_passes_byte_for_byte(path: str) -> None:
    raw = json.dumps(MINIMAL[path], indent=1).encode()
    assert check_request(path, raw, SERVED).body is raw


def test_other_paths_are_not_looked_at() -> None:
    assert check_request("/v1/models", b"\xff", SERVED).body == b"\xff"


@pytest.mark.parametrize("path", MINIMAL)
@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"null", b"[]", b'"text"', b"3", b"\xff\xfe", b'{"model": NaN}', b'{"a": Infinity}', b"{'a': 1}",
        b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"\x1f\x8b\x08\x00",
    ],
)  # fmt: skip
def test_what_is_not_a_json_object_is_a_400(path: str, raw: bytes) -> None:
    error = refused(path, raw)
    assert (error.status, error.code) == (400, "invalid_json")


# (path, changes, field that the error names, text that the message holds)
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (EMBED, {"input": None}, "input", "required"),
    (EMBED, {"input": ""}, "input", "empty"),
    (EMBED, {"input": []}, "input", "empty"),
    (EMBED, {"input": [[]]}, "input[0]", "empty"),
    (EMBED, {"input": ["a", ""]}, "input[1]", "empty"),
    (EMBED, {"input": [[1], []]}, "input[1]", "empty"),
    (EMBED, {"input": 5}, "input", "text"),
    (EMBED, {"input": True}, "input", "text"),
    (EMBED, {"input": {"text": "a"}}, "input", "text"),
    (EMBED, {"input": [None]}, "input[0]", "null"),
    (EMBED, {"input": [1.5]}, "input[0]", "1.5"),
    (EMBED, {"input": [True]}, "input[0]", "true"),
    (EMBED, {"input": [{"role": "user"}]}, "input[0]", "object"),
    (EMBED, {"input": ["a", 1]}, "input[1]", "text"),
    (EMBED, {"input": [1, "a"]}, "input[1]", "token id"),
    (EMBED, {"input": [[1], "a"]}, "input[1]", "list"),
    (EMBED, {"input": [[1, [2]]]}, "input[0][1]", "token id"),
    (EMBED, {"input": [1, -1]}, "input[1]", "0 to 999"),
    (EMBED, {"input": [1000]}, "input[0]", "0 to 999"),
    (EMBED, {"input": [[1, 10**30]]}, "input[0][1]", "0 to 999"),
    (EMBED, {"input": [1] * 256}, "input", "255"),
    (EMBED, {"input": ["a"] * 33}, "input", "32"),
    (EMBED, {"input": "\ud800"}, "input", "surrogate"),
    (EMBED, {"messages": [{"role": "user", "content": "x"}]}, "messages", "input"),
    (EMBED, {"dimensions": 65}, "dimensions", "64, 128, 576"),
    (EMBED, {"dimensions": "64"}, "dimensions", "64, 128, 576"),
    (EMBED, {"dimensions": True}, "dimensions", "64, 128, 576"),
    (EMBED, {"dimensions": -1}, "dimensions", "64, 128, 576"),
    (EMBED, {"encoding_format": "hex"}, "encoding_format", "base64"),
    (EMBED, {"encoding_format": 1}, "encoding_format", "base64"),
    (EMBED, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "255"),
    (EMBED, {"truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "2 to 255"),
    (EMBED, {"padding": "max_length"}, "padding", "not offered"),
    (EMBED, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "255"),
    (EMBED, {"truncate_prompt_tokens": 256}, "truncate_prompt_tokens", "255"),
    (EMBED, {"truncate_prompt_tokens": "9"}, "truncate_prompt_tokens", "255"),
    (EMBED, {"model": 7}, "model", "string"),
    (EMBED, {"model": "storyteller"}, "model", "orthrus-embed"),
    (EMBED, {"model": "short", "input": [1] * 11}, "input", "10"),
    (EMBED, {"model": "short", "truncate_prompt_tokens": 11}, "truncate_prompt_tokens", "2 to 10"),
    (EMBED, {"model": "short", "dimensions": 64}, "dimensions", "32"),
    (EMBED, {"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "not offered"),
    (COMPLETE, {"prompt": None}, "prompt", "required"),
    (COMPLETE, {"prompt": ""}, "prompt", "empty"),
    (COMPLETE, {"prompt": [2000]}, "prompt[0]", "999"),
    (COMPLETE, {"prompt": [[1], [-5]]}, "prompt[1][0]", "999"),
    (COMPLETE, {"prompt": [1] * 256}, "prompt", "255"),
    (COMPLETE, {"prompt": ["a"] * 9, "n": 4}, "n", "36"),
    (COMPLETE, {"logprobs": 21}, "logprobs", "20"),
    (COMPLETE, {"logprobs": True}, "logprobs", "integer"),
    (COMPLETE, {"logprobs": -1}, "logprobs", "20"),
    (COMPLETE, {"model": "orthrus-embed"}, "model", "embeds"),
    (COMPLETE, {"prompt_embeds": "AAAA"}, "prompt_embeds", "not offered"),
    (CHAT, {"model": "orthrus-embed"}, "model", "embeds"),
    (CHAT, {"messages": None}, "messages", "list"),
    (CHAT, {"messages": []}, "messages", "empty"),
    (CHAT, {"messages": "hi"}, "messages", "list"),
    (CHAT, {"messages": ["hi"]}, "messages[0]", "object"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "string"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text"),
    (CHAT, {"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content", "surrogate"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 33}, "messages", "32"),
    (CHAT, {"n": 0}, "n", "8"),
    (CHAT, {"n": 9}, "n", "8"),
    (CHAT, {"n": 10**40}, "n", "8"),
    (CHAT, {"n": "2"}, "n", "integer"),
    (CHAT, {"n": 2.0}, "n", "integer"),
    (CHAT, {"n": True}, "n", "integer"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "256"),
    (CHAT, {"max_tokens": -1}, "max_tokens", "256"),
    (CHAT, {"max_tokens": 257}, "max_tokens", "256"),
    (CHAT, {"max_completion_tokens": 10**9}, "max_completion_tokens", "256"),
    (CHAT, {"min_tokens": -1}, "min_tokens", "256"),
    (CHAT, {"top_logprobs": 21}, "top_logprobs", "20"),
    (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs", "20"),
    (CHAT, {"temperature": 2.5}, "temperature", "2"),
    (CHAT, {"temperature": -0.1}, "temperature", "2"),
    (CHAT, {"temperature": "hot"}, "temperature", "number"),
    (CHAT, {"temperature": 10**400}, "temperature", "2"),
    (CHAT, {"top_p": 0}, "top_p", "above 0"),
    (CHAT, {"top_p": 1.1}, "top_p", "1"),
    (CHAT, {"top_k": 2**40}, "top_k", str(2**31 - 1)),
    (CHAT, {"seed": 2**64}, "seed", str(2**63 - 1)),
    (CHAT, {"stream_interval": 2**70}, "stream_interval", str(2**31 - 1)),
    (CHAT, {"presence_penalty": 3}, "presence_penalty", "2"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    (CHAT, {"stop_token_ids": [1000]}, "stop_token_ids[0]", "999"),
    (CHAT, {"stop_token_ids": 5}, "stop_token_ids", "list"),
    (CHAT, {"allowed_token_ids": [-1]}, "allowed_token_ids[0]", "999"),
    (CHAT, {"structured_outputs": []}, "structured_outputs", "object"),
    (COMPLETE, {"structured_outputs": "x"}, "structured_outputs", "object"),
    (CHAT, {"logit_bias": {"1000": 1}}, "logit_bias", "999"),
    (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias", "999"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "999"),
    (CHAT, {"logit_bias": {"²": 1}}, "logit_bias", "999"),
    (CHAT, {"logit_bias": {"1": 101}}, "logit_bias.1", "100"),
    (CHAT, {"logit_bias": [1]}, "logit_bias", "object"),
    (CHAT, {"dimensions": 64}, "dimensions", "embeddings"),
    (CHAT, {"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params", "not offered"),
    (COMPLETE, {"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params", "not offered"),
    (CHAT, {"use_beam_search": True}, "use_beam_search", "not offered"),
    (CHAT, {"truncate_prompt_tokens": 10**30}, "truncate_prompt_tokens", "255"),
    ("/tokenize", {"prompt": 5}, "prompt", "text"),
    ("/tokenize", {"prompt": "\ud800"}, "prompt", "surrogate"),
    ("/detokenize", {"tokens": "1"}, "tokens", "list"),
    ("/detokenize", {"tokens": [1000]}, "tokens[0]", "999"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]", "999"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "changes", "field", "text"), REFUSED)
def test_a_wrong_field_is_a_400_that_names_it_and_the_limit(
    path: str, changes: dict[str, Any], field: str, text: str
) -> None:
    error = refused(path, json.dumps({**MINIMAL[path], **changes}).encode())
    assert (error.status, error.param) == (400, field)
    assert text in error.message
    assert field.split("[")[0].split(".")[0] in error.message
    assert len(error.message) < 300
    assert error.body()["error"]["type"] == "invalid_request_error"


def test_a_number_beyond_floats_names_its_field() -> None:
    error = refused(CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}')
    assert (error.status, error.param) == (400, "temperature")


@pytest.mark.parametrize("path", MINIMAL)
def test_an_unknown_model_is_a_404_with_the_clients_code(path: str) -> None:
    error = refused(path, json.dumps({**MINIMAL[path], "model": "nope"}).encode())
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "orthrus-embed" in error.message


def test_the_limits_themselves_are_allowed() -> None:
    checked(EMBED, input=[[999] * 255] * 32)
    checked(EMBED, padding="do_not_pad", encoding_format="base64")
    checked(CHAT, n=8, max_tokens=256, temperature=2, top_p=1, top_logprobs=20, logit_bias={"999": -100})
    checked(COMPLETE, prompt=["a"] * 4, n=8, logprobs=20, seed=-(2**63), top_k=-1)
    checked(CHAT, n=None, max_tokens=None, temperature=None, stop=None, logit_bias=None)


def test_adapters_that_generate_are_served_under_their_own_names() -> None:
    assert checked(CHAT, model="storyteller")["model"] == "storyteller"
    assert checked(COMPLETE, model="storyteller")["model"] == "storyteller"
    assert checked("/tokenize", model="storyteller")["model"] == "storyteller"


def test_dimensions_longer_than_the_vectors_stop_the_start() -> None:
    args = AppArgs.model_validate(
        {"topology": "orthrus", "model": {"path": "/m"}, "adapters": {"e": {"path": "/a", "dimensions": [8, 16]}}}
    )
    facts: dict[str, Any] = {"base_name": "orthrus", "vocab_size": 9, "max_model_len": 9}
    assert served_by(args, **facts, vector_sizes={"e": 16}).adapters["e"].size == 16
    with pytest.raises(ConfigError, match="adapters.e.dimensions: 16"):
        served_by(args, **facts, vector_sizes={"e": 15})


@pytest.mark.parametrize("name", ["orthrus", None])
def test_the_base_name_embeds_with_its_adapter(name: str | None) -> None:
    assert checked(EMBED, model=name)["model"] == "orthrus-embed"


def test_the_base_name_is_refused_for_embeddings_when_no_adapter_is_its_own() -> None:
    served = replace(SERVED, adapters={"a": ServedAdapter(8), "b": ServedAdapter(8)}, base_name_adapter=None)
    with pytest.raises(RequestError, match="a, b") as caught:
        checked(EMBED, served, model="orthrus")
    assert (caught.value.status, caught.value.param) == (400, "model")


@pytest.mark.parametrize(("asked", "sent"), [(-1, 254), (255, 254), (2, 1)])
def test_a_truncated_input_keeps_room_for_the_end_of_sequence_token(asked: int, sent: int) -> None:
    assert checked(EMBED, truncate_prompt_tokens=asked)["truncate_prompt_tokens"] == sent
    without = replace(SERVED, adapters={"orthrus-embed": ServedAdapter(576, appends_eos=False)})
    assert checked(EMBED, without, truncate_prompt_tokens=asked)["truncate_prompt_tokens"] == sent + 1
    assert checked(CHAT, truncate_prompt_tokens=asked)["truncate_prompt_tokens"] == asked


@pytest.mark.parametrize("path", MINIMAL)
def test_null_counts_as_absent(path: str) -> None:
    fields = (
        "encoding_format",
        "dimensions",
        "user",
        "n",
        "truncate_prompt_tokens",
        "stop",
        "tools",
        "embed_dtype",
        "x",
    )
    assert checked(path, **dict.fromkeys(fields)) == MINIMAL[path]
    assert checked(COMPLETE, max_tokens=None)["max_tokens"] is None  # not vLLM's 16, but all that fits


def test_an_adapter_that_does_not_normalise_says_so_unless_the_request_does() -> None:
    raw = replace(SERVED, adapters={"orthrus-embed": ServedAdapter(576, normalizes=False)})
    assert checked(EMBED, raw)["use_activation"] is False
    assert checked(EMBED, raw, use_activation=None)["use_activation"] is False
    assert checked(EMBED, raw, use_activation=True)["use_activation"] is True
    assert "use_activation" not in checked(EMBED)


def test_a_truncated_input_may_be_longer_than_the_longest_and_keeps_its_beginning() -> None:
    assert checked(EMBED, truncate_prompt_tokens=10, input=[5] * 1000)["truncation_side"] == "right"
    assert checked(EMBED, truncate_prompt_tokens=10, truncation_side="left")["truncation_side"] == "left"
    assert "truncation_side" not in checked(EMBED)
    sent = checked(COMPLETE, truncate_prompt_tokens=10, prompt=[5] * 1000)
    assert len(sent["prompt"]) == 1000
    assert "truncation_side" not in sent  # of a prompt, the end matters: as in vLLM


def test_a_model_of_its_own_that_embeds_is_left_to_cut_as_its_tokenizer_does() -> None:
    own = replace(
        SERVED, adapters={"orthrus-embed": ServedAdapter(64, appends_eos=False, vocab_size=600, max_input_tokens=128)}
    )
    sent = checked(EMBED, own, truncate_prompt_tokens=-1, input="w3 " * 300)
    assert sent["truncate_prompt_tokens"] == 128
    assert "truncation_side" not in sent


@pytest.mark.parametrize(("asked", "cut"), [(64, 64), (128, 128), (576, None), (None, None)])
def test_dimensions_leave_the_body_and_are_handed_on(asked: int | None, cut: int | None) -> None:
    raw = json.dumps({**MINIMAL[EMBED], "dimensions": asked}).encode()
    result = check_request(EMBED, raw, SERVED)
    assert result.dimensions == cut
    assert "dimensions" not in json.loads(result.body)


@pytest.mark.parametrize("path", MINIMAL)
def test_priority_and_request_ids_in_the_body_never_reach_the_engine(path: str) -> None:
    assert checked(path, priority=-5, request_id="mine") == MINIMAL[path]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["model", "input", "prompt", "messages", "tokens", "n", "max_tokens", "temperature", "logit_bias", "stop_token_ids",
     "dimensions", "truncate_prompt_tokens", "top_logprobs", "logprobs", "encoding_format", "priority", "seed"]
)  # fmt: skip


@given(st.sampled_from(sorted(CHECKED_PATHS)), st.dictionaries(FIELDS, JSON_VALUES, max_size=5))
def test_whatever_a_body_holds_it_is_passed_on_or_refused_in_shape(path: str, changes: dict[str, Any]) -> None:
    raw = json.dumps({**MINIMAL[path], **changes}).encode()
    error = None
    try:
        json.loads(check_request(path, raw, SERVED).body)
    except RequestError as caught:
        error = caught
    if error is not None:
        assert error.status in (400, 404)
        assert set(json.loads(json.dumps(error.body()))["error"]) == {"message", "type", "param", "code"}


@given(st.sampled_from(sorted(CHECKED_PATHS)), st.binary(max_size=40))
def test_any_bytes_are_refused_in_shape_or_passed_on(path: str, raw: bytes) -> None:
    with pytest.raises(RequestError):
        check_request(path, raw, SERVED)
