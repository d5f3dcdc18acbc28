"""A generator and an embedder in two engines behind one address: names, fields, status, and a core that dies."""

import asyncio
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ray import serve

from orthrus_serve.app import build
from tests.serve.conftest import TINY_VLLM, App, computed_tokens
from tests.serve.soak_faults import cores_of
from tests.serve.test_fake_app import until
from tests.serve.test_routing import client_of
from tests.serve.test_verify import verify

EMBED, COMPLETE, CHAT = "/v1/embeddings", "/v1/completions", "/v1/chat/completions"
SAY = [{"role": "user", "content": "w5 w6 w7"}]
CLS, SEP = 101, 102
# Two engines start one after the other, and once more after one of them was killed.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.engine.tiny_embedder import make_tiny_embedder

    return make_tiny_embedder(tmp_path_factory.mktemp("embedder"))


def args_of(tiny: Any, embedder: Any) -> dict[str, Any]:
    return {
        "topology": "separate_models",
        "model": {"path": str(tiny.model)},
        "embedder": {
            "path": str(embedder.model),
            "dimensions": [16],
            "vllm": {key: value for key, value in TINY_VLLM.items() if key != "max_model_len"},
        },
        "num_gpus_per_replica": 0,
        "num_cpus_per_replica": 1,
        "limits": {"max_inputs": 64},
        "vllm": TINY_VLLM,
    }


@pytest.fixture(scope="module")
def app(serve_url: str, tiny: Any, embedder: Any) -> Iterator[App]:
    serve.run(build(args_of(tiny, embedder)), name="separate", route_prefix="/separate")
    yield App("separate", f"{serve_url}/separate")
    serve.delete("separate", _blocking=False)


@pytest.fixture
def http(app: App) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=app.url, timeout=60) as opened:
        yield opened


def cosine(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True)) / math.hypot(*left) / math.hypot(*right)


def vector_of(http: httpx.Client, **body: Any) -> list[float]:
    answer = http.post(EMBED, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][0]["embedding"]


def test_the_stock_client_generates_and_embeds(app: App, tiny: Any, embedder: Any) -> None:
    client = openai.OpenAI(base_url=f"{app.url}/v1", api_key="unused", max_retries=0)
    by_name = client.embeddings.create(model="orthrus-embed", input="w20 w301")
    by_base_name = client.embeddings.create(model="orthrus", input="w20 w301")
    for answer in (by_name, by_base_name):
        assert cosine(answer.data[0].embedding, embedder.vector([CLS, 20, 301, SEP]).tolist()) > 0.9999
        assert (answer.model, answer.usage.prompt_tokens) == ("orthrus-embed", 4)
    text = client.completions.create(model="orthrus", prompt=[9, 8, 7], max_tokens=8, temperature=0)
    expected = [f"w{token}" for token in tiny.greedy([9, 8, 7], 8)]
    assert [word for word in text.choices[0].text.split() if word.startswith("w")] == [
        word for word in expected if int(word[1:]) > 2
    ]
    chunks = client.chat.completions.create(
        model="orthrus", messages=[{"role": "user", "content": "w5"}], max_tokens=8, stream=True
    )
    assert sum(1 for _ in chunks) > 1
    assert [model.id for model in client.models.list().data] == ["orthrus", "orthrus-embed"]


def test_fields_are_judged_by_the_model_that_they_are_for(http: httpx.Client, embedder: Any) -> None:
    whole = embedder.vector([CLS, 20, SEP], dimensions=16).tolist()
    assert cosine(vector_of(http, model="orthrus", input="w20", dimensions=16), whole) > 0.9999
    assert (
        len(vector_of(http, input=[599] * 128)) == 64
    )  # the embedder's last token and longest input, not the generator's
    truncated = http.post(EMBED, json={"input": " ".join(["w20"] * 300), "truncate_prompt_tokens": -1})
    assert truncated.json()["usage"]["prompt_tokens"] == 128
    for path, body, status, field, text in (
        (EMBED, {"input": [600]}, 400, "input[0]", "599"),
        (EMBED, {"input": [5] * 129}, 400, "input", "128"),
        (EMBED, {"input": "w5", "dimensions": 32}, 400, "dimensions", "16, 64"),
        (EMBED, {"input": "w5", "truncate_prompt_tokens": 129}, 400, "truncate_prompt_tokens", "128"),
        (COMPLETE, {"prompt": "w5", "model": "orthrus-embed"}, 400, "model", "embeds"),
        (COMPLETE, {"prompt": [599]}, 400, "prompt[0]", "511"),
        (CHAT, {"messages": SAY, "model": "nope"}, 404, "model", "orthrus-embed"),
    ):
        answer = http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, field), answer.text
        assert text in answer.json()["error"]["message"]


def test_each_name_has_its_own_tokenizer(http: httpx.Client) -> None:
    for name, ids in (("orthrus-embed", [CLS, 577, SEP]), ("orthrus", [0])):
        assert http.post("/tokenize", json={"model": name, "prompt": "w577"}).json()["tokens"] == ids
    assert http.post("/detokenize", json={"model": "orthrus-embed", "tokens": [577]}).json()["prompt"] == "w577"
    assert http.post("/detokenize", json={"model": "orthrus", "tokens": [577]}).status_code == 400


def is_at_rest(app: App) -> bool:
    fronts, engines = app.info("Front"), app.info("Engine")
    is_settled = all((front["open"], front["tokens"], front["loads"]) == (0, 0, {}) for front in fronts)
    return is_settled and all(engine["open"] == engine["in_engine"] == 0 for engine in engines)


async def test_a_mixed_load_is_answered_and_counted_and_leaves_nothing(app: App) -> None:
    async with client_of(app) as client:
        embeds = [client.post(EMBED, json={"input": [[5] * 60] * 8}) for _ in range(10)]
        texts = [
            client.post(COMPLETE, json={"prompt": [5] * 50, "max_tokens": 40, "ignore_eos": True}) for _ in range(10)
        ]
        answers = await asyncio.gather(*embeds, *texts)
        assert {answer.status_code for answer in answers} == {200}
        await asyncio.to_thread(computed_tokens, app, 1)  # what the page says is then of after the last request
        page = (await client.get("/status")).json()
        metrics = (await client.get("/metrics")).text
    totals = page["engines"][0]["totals"]
    assert totals["embed_tokens"] >= 10 * 8 * 60
    assert totals["decode_tokens"] >= 10 * 39
    assert totals["mixed_steps"] == 0
    assert page["engines"][0]["settings"]["card_share"] == "remaining"
    for name in ("orthrus", "orthrus-embed"):
        found = [line for line in metrics.splitlines() if line.startswith("vllm:prompt_tokens_total")]
        assert any(f'model_name="{name}"' in line and 'replica="' in line for line in found), name
    assert 'orthrus_engine_step_tokens_total{part="embed"' in metrics or "embed" in metrics
    await asyncio.to_thread(until, lambda: is_at_rest(app))


def test_a_switch_out_of_it_is_refused_by_the_replica_and_it_goes_on(app: App, http: httpx.Client) -> None:
    engine = serve.get_deployment_handle("Engine", app.name)
    front = serve.get_deployment_handle("Front", app.name)
    for handle, name in ((engine, "Engine"), (front, "Front")):
        handle.reconfigure.remote({"topology": "orthrus"}).result(timeout_s=20)
        (info,) = app.info(name)
        refused = info["settings"]["refused"] if name == "Engine" else info["refused"]
        assert "runs other engines" in refused
        assert info["topology"] == "separate_models"
    engine.reconfigure.remote({"topology": "separate_models", "card_share": "static"}).result(timeout_s=20)
    front.reconfigure.remote({"topology": "separate_models"}).result(timeout_s=20)
    (info,) = app.info("Engine")
    assert (info["settings"]["refused"], info["settings"]["applied"]["card_share"]) == (None, "static")
    assert len(vector_of(http, input="w5")) == 64


def test_verify_holds_both_models_against_their_own_references(
    app: App, tiny: Any, embedder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = args_of(tiny, embedder)
    assert verify(app.url, tmp_path, args) == (0, {})
    printed = capsys.readouterr().out
    assert f"orthrus-embed: another model, in {embedder.model}, pooling mean" in printed
    args["embedder"]["pooling"] = "cls"  # not as the server pools
    code, problems = verify(app.url, tmp_path, args)
    assert code == 1
    assert "cosine" in problems["alone orthrus-embed"]
    assert "alone orthrus" not in problems


def test_a_core_that_dies_takes_its_replica_along_and_another_one_comes(app: App, http: httpx.Client) -> None:
    """Either is enough: here the embedder's, while both work. The generator's must not stay behind."""
    (before,) = app.info("Engine")
    cores = [core.pid for core in cores_of(before["pid"])]
    assert len(cores) == 2
    os.kill(cores[0], signal.SIGKILL)  # the embedder is started first

    def is_replaced() -> bool:
        infos = app.info("Engine")
        return len(infos) == 1 and infos[0]["pid"] != before["pid"]

    until(is_replaced, 400.0)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (*cores, before["pid"])), 30.0)
    assert len(vector_of(http, input="w5")) == 64
    assert http.post(COMPLETE, json={"prompt": [5], "max_tokens": 2}).status_code == 200
    assert http.get("/health").status_code == 200
    assert json.loads(http.get("/status").text)["engines"][0]["quarantined"] is None
