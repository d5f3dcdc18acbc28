"""The real engine on CPU (a tiny model with random weights) behind the whole serving side, met as clients meet it."""

import base64
import json
import math
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.serve.conftest import App
from tests.serve.neighbour import Neighbour, cosine
from tests.serve.test_fake_app import in_engine, leave_when, until

EMBED, COMPLETE, CHAT = "/v1/embeddings", "/v1/completions", "/v1/chat/completions"
LONG = " ".join(["w3"] * 600)  # the model's context is 512 tokens
SAY = [{"role": "user", "content": "w5 w6 w7"}]


@pytest.fixture(scope="module")
def http(real: App) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real.url, timeout=60) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(real: App) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real.url}/v1", api_key="unused", max_retries=0)


# --- good input -----------------------------------------------------------------------------------------------------


def test_the_stock_client_embeds_in_float_and_base64(client: openai.OpenAI, http: httpx.Client, tiny: Any) -> None:
    texts = ["w3 w4 w5", "w9"]
    by_default = client.embeddings.create(model="orthrus-embed", input=texts)  # the client asks for base64 and decodes
    in_float = client.embeddings.create(model="orthrus-embed", input=texts, encoding_format="float")
    raw = http.post(EMBED, json={"model": "orthrus-embed", "input": texts, "encoding_format": "base64"}).json()
    for row, ids in enumerate(([3, 4, 5, 2], [9, 2])):  # 2 is the end-of-sequence token
        reference = tiny.vector(ids, "last").tolist()
        decoded = list(struct.unpack("<128f", base64.b64decode(raw["data"][row]["embedding"])))
        for vector in (by_default.data[row].embedding, in_float.data[row].embedding, decoded):
            assert cosine(vector, reference) > 0.9999
    assert by_default.usage.prompt_tokens == 6
    assert by_default.model == "orthrus-embed"


def test_the_base_name_and_token_ids_give_the_same_vector_as_the_adapters_name(client: openai.OpenAI) -> None:
    vectors = [
        client.embeddings.create(model=model, input=value).data[0].embedding
        for model, value in (("orthrus-embed", "w3 w4"), ("orthrus", "w3 w4"), ("orthrus", [3, 4]), ("orthrus", [[3, 4, 2]]))
    ]  # fmt: skip
    assert all(cosine(vectors[0], vector) > 0.99999 for vector in vectors)


def test_allowed_dimensions_are_cut_and_normalised(client: openai.OpenAI, tiny: Any) -> None:
    for dimensions in (32, 64, 128):
        vector = client.embeddings.create(model="orthrus-embed", input="w3 w4", dimensions=dimensions).data[0].embedding
        assert len(vector) == dimensions
        assert math.isclose(math.hypot(*vector), 1, abs_tol=1e-4)
        assert cosine(vector, tiny.vector([3, 4, 2], "last", dimensions=dimensions).tolist()) > 0.9999


@pytest.mark.parametrize(("asked", "kept"), [(-1, 511), (511, 511), (10, 10), (2, 2)])
def test_a_truncated_input_counts_its_end_of_sequence_token(client: openai.OpenAI, asked: int, kept: int) -> None:
    extra = {"truncate_prompt_tokens": asked}
    answer = client.embeddings.create(model="orthrus-embed", input=LONG, extra_body=extra)
    assert answer.usage.prompt_tokens == kept


def test_a_truncated_input_keeps_its_first_tokens(http: httpx.Client, tiny: Any) -> None:
    ids = [3 + index % 500 for index in range(600)]  # longer than the model's context
    text = " ".join(f"w{token}" for token in ids)
    for sent in (text, ids):
        answer = http.post(EMBED, json={"input": sent, "truncate_prompt_tokens": 20}).json()
        assert cosine(answer["data"][0]["embedding"], tiny.vector([*ids[:19], 2], "last").tolist()) > 0.9999
        last = http.post(EMBED, json={"input": sent, "truncate_prompt_tokens": 20, "truncation_side": "left"}).json()
        assert cosine(last["data"][0]["embedding"], tiny.vector([*ids[-19:], 2], "last").tolist()) > 0.9999


def test_the_longest_inputs_are_answered(http: httpx.Client) -> None:
    assert http.post(EMBED, json={"input": [3] * 510}).json()["usage"]["prompt_tokens"] == 511
    assert http.post(COMPLETE, json={"prompt": [3] * 511, "max_tokens": 5}).json()["usage"]["completion_tokens"] == 1


def test_a_streamed_chat_equals_the_whole_one_and_ends_with_usage(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "orthrus", "messages": SAY, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20


def test_an_adapter_that_generates_answers_under_its_own_name_and_differently(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0}
    tuned, base = (client.completions.create(model=name, **asked) for name in ("tuned", "orthrus"))
    assert (tuned.model, base.model) == ("tuned", "orthrus")
    assert tuned.choices[0].text != base.choices[0].text


def test_an_adapter_with_a_head_has_vectors_and_a_longest_input_of_its_own(client: openai.OpenAI) -> None:
    lengths = {
        asked: len(client.embeddings.create(model="headed", input="w3 w4", **asked_for).data[0].embedding)
        for asked, asked_for in ((0, {}), (20, {"dimensions": 20}), (40, {"dimensions": 40}))
    }
    assert lengths == {0: 40, 20: 20, 40: 40}
    kept = client.embeddings.create(model="headed", input=LONG, extra_body={"truncate_prompt_tokens": -1})
    assert kept.usage.prompt_tokens == 50


def test_models_tokenize_and_detokenize(client: openai.OpenAI, http: httpx.Client) -> None:
    assert {model.id for model in client.models.list()} == {"orthrus", "orthrus-embed", "headed", "tuned"}
    assert http.post("/tokenize", json={"prompt": "w3 w4"}).json()["tokens"] == [3, 4]
    assert http.post("/detokenize", json={"tokens": [3, 4]}).json()["prompt"] == "w3 w4"


def test_chats_and_embeddings_at_once_share_steps_and_get_their_own_answers(real: App, http: httpx.Client) -> None:
    def chat(number: int) -> str:
        body = {"messages": [{"role": "user", "content": f"w{number + 3}"}], "max_tokens": 40, "temperature": 0}
        return http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]

    def embed(number: int) -> list[float]:
        return http.post(EMBED, json={"input": f"w{number + 3} w9 " * 20}).json()["data"][0]["embedding"]

    alone = [chat(number) for number in range(3)], [embed(number) for number in range(12)]
    before = real.info("Engine")[0]["report"]["totals"]["mixed_steps"]
    with ThreadPoolExecutor(15) as pool:
        chats = [pool.submit(chat, number) for number in range(3)]
        vectors = [pool.submit(embed, number) for number in range(12)]
        assert [future.result() for future in chats] == alone[0]
        for future, expected in zip(vectors, alone[1], strict=True):
            assert cosine(future.result(), expected) > 0.9999
    until(lambda: real.info("Engine")[0]["report"]["totals"]["mixed_steps"] > before)


SAMPLING: list[dict[str, Any]] = [
    {"seed": 5}, {"temperature": 2, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"presence_penalty": 1, "frequency_penalty": 1},
    {"repetition_penalty": 1.5}, {"logit_bias": {"7": 5}}, {"logprobs": 3}, {"prompt_logprobs": 2}, {"n": 8}, {"min_tokens": 3},
    {"echo": True, "logprobs": 1}, {"allowed_token_ids": [5, 6]}, {"stop": ["w5"]}, {"bad_words": ["w5"]},
    {"stop_token_ids": [9]},
]  # fmt: skip


def test_sampling_options_work_beside_chunked_prompts(http: httpx.Client) -> None:
    """Each option on a prompt of several chunks: none may fail, or stop the others for long."""
    for options in SAMPLING:
        began_s = time.monotonic()
        answer = http.post(COMPLETE, json={"prompt": [5, 6, 7] * 100, "max_tokens": 4, **options})
        assert answer.status_code == 200, (options, answer.text)
        assert time.monotonic() - began_s < 10, options


# --- bad input ------------------------------------------------------------------------------------------------------

# (path, body, status, field that the error names, text that the message holds). Bytes are sent as they are.
BAD: list[tuple[str, Any, int, str | None, str]] = [
    (EMBED, b"{", 400, None, "JSON"),
    (CHAT, b"[1]", 400, None, "object"),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, None, "NaN"),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', 400, "temperature", "2"),
    (CHAT, b"[" * 50_000, 400, None, "nested"),
    (EMBED, {"input": "w3", "model": "nope"}, 404, "model", "orthrus-embed"),
    (CHAT, {"messages": SAY, "model": "nope"}, 404, "model", "orthrus"),
    (CHAT, {"messages": SAY, "model": "orthrus-embed"}, 400, "model", "embeds"),
    (COMPLETE, {"prompt": "w3", "model": "orthrus-embed"}, 400, "model", "embeds"),
    (EMBED, {"input": "w3", "model": "tuned"}, 400, "model", "orthrus-embed"),
    (EMBED, {"input": [3] * 51, "model": "headed"}, 400, "input", "50"),
    (EMBED, {"input": " ".join(["w3"] * 50), "model": "headed"}, 400, "input", "50"),
    (EMBED, {"input": "w3", "model": "headed", "dimensions": 128}, 400, "dimensions", "20, 40"),
    (EMBED, {}, 400, "input", "required"),
    (EMBED, {"input": ""}, 400, "input", "empty"),
    (EMBED, {"input": "   "}, 400, "input", "at least one token"),
    (EMBED, {"input": []}, 400, "input", "empty"),
    (EMBED, {"input": [[]]}, 400, "input[0]", "empty"),
    (EMBED, {"input": ["w3", ""]}, 400, "input[1]", "empty"),
    (EMBED, {"input": 7}, 400, "input", "text"),
    (EMBED, {"input": [-1]}, 400, "input[0]", "511"),
    (EMBED, {"input": [512]}, 400, "input[0]", "511"),
    (EMBED, {"input": [10**30]}, 400, "input[0]", "511"),
    (EMBED, {"input": ["w3"] * 65}, 400, "input", "64"),
    (EMBED, {"input": LONG}, 400, "input", "512"),
    (EMBED, {"input": [3] * 512}, 400, "input", "511"),
    (EMBED, {"input": [3] * 511}, 400, "input", "511"),
    (EMBED, {"input": ["w3", LONG]}, 400, "input", "512"),
    (EMBED, {"input": "w3", "dimensions": 100}, 400, "dimensions", "32, 64, 128"),
    (EMBED, {"input": "w3", "encoding_format": "hex"}, 400, "encoding_format", "base64"),
    (EMBED, {"input": "w3", "truncate_prompt_tokens": 10**9}, 400, "truncate_prompt_tokens", "511"),
    (EMBED, {"input": "w3", "embed_dtype": "int7"}, 400, "embed_dtype", "float16"),
    (EMBED, {"input": "w3", "user": 5}, 400, "user", "string"),
    (EMBED, {"input": "w3", "padding": "max_length"}, 400, "padding", "not offered"),
    (COMPLETE, {"prompt": ""}, 400, "prompt", "empty"),
    (COMPLETE, {"prompt": "  "}, 400, "prompt", "empty"),
    (COMPLETE, {"prompt": [700]}, 400, "prompt[0]", "511"),
    (COMPLETE, {"prompt": LONG}, 400, "prompt", "512"),
    (COMPLETE, {"prompt": [3] * 512}, 400, "prompt", "511"),
    (COMPLETE, {"prompt": " ".join(["w3"] * 512)}, 400, "prompt", "context"),
    (COMPLETE, {"prompt": "w3", "n": 9}, 400, "n", "8"),
    (COMPLETE, {"prompt": ["w3"] * 60, "n": 2}, 400, "n", "64"),
    (COMPLETE, {"prompt": "w3", "max_tokens": 0}, 400, "max_tokens", "512"),
    (COMPLETE, {"prompt": "w3", "max_tokens": 10**20}, 400, "max_tokens", "512"),
    (COMPLETE, {"prompt": "w3", "logprobs": 1000}, 400, "logprobs", "20"),
    (COMPLETE, {"prompt": "w3", "suffix": "w4"}, 400, "suffix", "suffix"),
    (CHAT, {"messages": []}, 400, "messages", "empty"),
    (CHAT, {"messages": "w3"}, 400, "messages", "list"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "empty"),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, 400, "messages", "512"),
    (CHAT, {"messages": SAY, "max_completion_tokens": 513}, 400, "max_completion_tokens", "512"),
    (CHAT, {"messages": SAY, "top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
    (CHAT, {"messages": SAY, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"),
    (CHAT, {"messages": SAY, "temperature": 1e300}, 400, "temperature", "2"),
    (CHAT, {"messages": SAY, "temperature": "hot"}, 400, "temperature", "number"),
    (CHAT, {"messages": SAY, "top_k": 2**35}, 400, "top_k", "2147483647"),
    (CHAT, {"messages": SAY, "seed": 2**70}, 400, "seed", "9223372036854775807"),
    (CHAT, {"messages": SAY, "logit_bias": {"600": 1}}, 400, "logit_bias", "511"),
    (CHAT, {"messages": SAY, "stop_token_ids": [-3]}, 400, "stop_token_ids[0]", "511"),
    (CHAT, {"messages": SAY, "allowed_token_ids": []}, 400, "allowed_token_ids", "empty"),
    (CHAT, {"messages": SAY, "stop": ["a"] * 99}, 400, "stop", "stop"),
    (CHAT, {"messages": SAY, "stop": ""}, 400, None, "stop"),
    (CHAT, {"messages": SAY, "stream": "perhaps"}, 400, "stream", "boolean"),
    (CHAT, {"messages": SAY, "stream_options": {"include_usage": True}}, 400, "stream_options", "stream"),
    (CHAT, {"messages": SAY, "tools": "x"}, 400, "tools", "list"),
    (CHAT, {"messages": SAY, "tool_choice": "required"}, 400, "tool_choice", "tools"),
    (CHAT, {"messages": SAY, "response_format": {"type": "poem"}}, 400, "response_format.type", "json_schema"),
    (CHAT, {"messages": SAY, "response_format": {"type": "json_schema"}}, 400, "response_format", "json_schema"),
    (
        CHAT,
        {"messages": SAY, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}},
        400, None, "Grammar",
    ),
    (CHAT, {"messages": SAY, "structured_outputs": {"regex": "(["}}, 400, None, "regex"),
    (CHAT, {"messages": SAY, "chat_template": "{{ 1 / 0 }}"}, 400, None, "template"),
    (CHAT, {"messages": SAY, "min_tokens": 9, "max_tokens": 3}, 400, None, "min_tokens"),
    (CHAT, {"messages": SAY, "vllm_xargs": {"a": 1}}, 400, "vllm_xargs", "not offered"),
    (CHAT, {"messages": SAY, "kv_transfer_params": {"a": 1}}, 400, "kv_transfer_params", "not offered"),
    (
        CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]}]},
        400, None, "multimodal",
    ),
    ("/tokenize", {"prompt": 5}, 400, "prompt", "text"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]", "511"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "field", "text"), BAD)
def test_bad_input_is_refused_in_openai_shape_and_disturbs_nobody(
    http: httpx.Client, neighbour: Neighbour, path: str, body: Any, status: int, field: str | None, text: str
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post(path, content=raw, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, field)
    assert set(error) == {"message", "type", "param", "code"}
    assert text in error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert error["code"] is None or isinstance(error["code"], str)
    assert neighbour.wrong == []


def test_the_stock_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="nope", input="w3")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="orthrus", messages=[{"role": "user", "content": "w3"}], n=99)
    assert bad.value.param == "n"


def test_one_request_id_for_many_requests_mixes_nothing_up(http: httpx.Client) -> None:
    def embed(number: int) -> list[float]:
        answer = http.post(EMBED, json={"input": f"w{number + 3}"}, headers={"x-request-id": "same"})
        return answer.json()["data"][0]["embedding"]

    alone = [embed(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for vector, expected in zip(pool.map(embed, range(8)), alone, strict=True):
            assert cosine(vector, expected) > 0.9999


# --- clients that leave, settings, the end --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": SAY, "max_tokens": 500, "ignore_eos": True, "stream": True}),
        (CHAT, {"messages": SAY, "max_tokens": 500, "ignore_eos": True}),
        (EMBED, {"input": ["w3 w4 " * 250] * 60}),
    ],
)
def test_a_client_that_leaves_empties_the_engine(real: App, path: str, body: Any) -> None:
    leave_when(lambda: in_engine(real) > 0, real.url, path, body)
    assert until(lambda: in_engine(real) == 0) < 1.0
    until(lambda: real.info("Front")[0]["open"] == 0)


def test_the_metrics_of_the_engine_are_there(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    for name in ("orthrus_engine_mixed_steps_total", "orthrus_engine_remaining_tokens", "vllm:generation_tokens_total"):
        assert any(line.startswith(name) and 'replica="' in line for line in text.splitlines()), name
