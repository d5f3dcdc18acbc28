"""Plain `vllm serve` with our worker, scheduler and middleware: the printed command line, and what the server then answers."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import yaml
from vllm import PoolingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from orthrus_serve.cli import main
from orthrus_serve.config.load import read_serve_file
from orthrus_serve.engine.args import engine_args
from orthrus_serve.engine.engine_kwargs import engine_kwargs
from orthrus_serve.errors import ConfigError
from orthrus_serve.ops.vllm_args import vllm_arguments, vllm_command_line
from orthrus_serve.serving.vllm_middleware import OrthrusMiddleware, upgrade
from tests.engine.harness import Engine, TinyModel, token_ids
from tests.engine.test_llm import EOS
from tests.ports import free_port

START_TIMEOUT_S = 180


def write_serve_file(folder: Path, tiny: TinyModel, port: int = 8000, **vllm: Any) -> Path:
    args = {
        "topology": "orthrus",
        "model": {"path": str(tiny.model)},
        "adapters": {"orthrus-embed": {"path": str(tiny.adapter), "dimensions": [32]}},
        "generate_adapters": {"tuned": {"path": str(tiny.adapter)}},
        "num_gpus_per_replica": 0,
        "vllm": {
            "dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 16,
            "kv_cache_memory_bytes": 64 * 2**20, "block_size": 32, **vllm,
        },
    }  # fmt: skip
    application = {"name": "orthrus", "route_prefix": "/", "import_path": "orthrus_serve.app:build", "args": args}
    file = folder / "serve.yaml"
    http = {"host": "127.0.0.1", "port": port}
    file.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
    return file


# --- the command line -----------------------------------------------------------------------------------------------


def test_the_printed_arguments_give_the_engine_of_a_replica(tiny: TinyModel, tmp_path: Path) -> None:
    extra = {"enable_prefix_caching": False, "max_loras": 2, "seed": 3, "limit_mm_per_prompt": {"image": 0}}
    application = read_serve_file(write_serve_file(tmp_path, tiny, **extra)).applications[0]
    parser = make_arg_parser(FlexibleArgumentParser())
    parsed = parser.parse_args(vllm_arguments(application))
    ours, theirs = vars(engine_args(application.args)), vars(AsyncEngineArgs.from_cli_args(parsed))
    set_by_us = engine_kwargs(application.args, on_cpu=True)
    assert set_by_us.keys() > application.args.vllm.keys()
    assert {name for name in set_by_us if theirs[name] != ours[name]} == {
        "additional_config"
    }  # the front's part is extra
    assert theirs["additional_config"]["orthrus"] == ours["additional_config"]["orthrus"]
    assert theirs["scheduler_cls"] == "orthrus_serve.engine.scheduler.MixedScheduler"
    modules = [(module.name, module.path) for module in parsed.lora_modules]
    assert modules == [(name, str(tiny.adapter)) for name in ("orthrus-embed", "tuned")]


def test_the_live_settings_of_the_file_hold_from_the_start(tiny: TinyModel, tmp_path: Path) -> None:
    file = write_serve_file(tmp_path, tiny)
    text = yaml.safe_load(file.read_text())
    text["applications"][0]["deployments"] = [{"name": "Engine", "user_config": {"policy": "unified_homo"}}]
    file.write_text(yaml.safe_dump(text))
    words = vllm_arguments(read_serve_file(file).applications[0])
    settings = json.loads(words[words.index("--additional-config") + 1])
    assert settings["orthrus"]["live"]["policy"] == "unified_homo"


def test_the_verb_prints_one_shell_command(tiny: TinyModel, tmp_path: Path, capsys) -> None:
    assert main(["vllm-args", str(write_serve_file(tmp_path, tiny, 8123))]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "env"
    assert words[words.index("python") + 1 : words.index("python") + 3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--model") + 1] == str(tiny.model)
    assert words[-2:] == ["--port", "8123"]


def test_a_gpu_is_served_by_vllms_own_command_with_overlapping_steps(tiny: TinyModel, tmp_path: Path) -> None:
    file = write_serve_file(tmp_path, tiny, cudagraph_capture_sizes=[1, 2, 64])
    file.write_text(file.read_text().replace("num_gpus_per_replica: 0", "num_gpus_per_replica: 1"))
    words = shlex.split(vllm_command_line(read_serve_file(file)))
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in words
    assert words[words.index("vllm") + 1 : words.index("vllm") + 3] == ["serve", str(tiny.model)]
    assert words[words.index("--worker-cls") + 1].endswith("MixedGPUWorker")
    assert words[words.index("--scheduler-cls") + 1].endswith("MixedAsyncScheduler")
    assert "--async-scheduling" in words
    assert words[words.index("--cudagraph-capture-sizes") + 1 :][:3] == ["1", "2", "64"]


def test_several_applications_are_refused(tiny: TinyModel, tmp_path: Path) -> None:
    file = write_serve_file(tmp_path, tiny)
    text = yaml.safe_load(file.read_text())
    text["applications"].append({**text["applications"][0], "name": "second", "route_prefix": "/second"})
    file.write_text(yaml.safe_dump(text))
    with pytest.raises(ConfigError, match="2 applications"):
        vllm_command_line(read_serve_file(file))


# --- the server -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server that was started with the printed line, as a shell would."""
    folder = tmp_path_factory.mktemp("server")
    port = free_port()
    line = vllm_command_line(read_serve_file(write_serve_file(folder, tiny, port)))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    try:
        wait_until_healthy(client, process, folder / "log")
        yield client
    finally:
        client.close()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_healthy(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.3)
    pytest.fail(f"vllm serve did not start:\n{log.read_text()[-4000:]}")


def vector_of(reply: httpx.Response) -> torch.Tensor:
    assert reply.status_code == 200, reply.text
    return torch.tensor(reply.json()["data"][0]["embedding"])


def cosine(vector: torch.Tensor, reference: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(vector, reference, dim=0))


def test_one_server_answers_both_tasks_at_once(server: httpx.Client, tiny: TinyModel, rng) -> None:
    prompts = [token_ids(rng, n) for n in (5, 40, 120)]
    inputs = [token_ids(rng, n) for n in (3, 64, 200, 400)]

    def generate(prompt: list[int]) -> list[int]:
        body = {"model": "orthrus", "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        reply = server.post("/v1/completions", json={**body, "return_token_ids": True})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["token_ids"]

    with ThreadPoolExecutor(8) as pool:
        generations = [pool.submit(generate, prompt) for prompt in prompts]
        embeddings = [pool.submit(server.post, "/v1/embeddings", json=embed_body(tokens)) for tokens in inputs]
        tokens = [future.result() for future in generations]
        replies = [future.result() for future in embeddings]
    assert tokens == [tiny.greedy(prompt, 20) for prompt in prompts]
    for ids, reply in zip(inputs, replies, strict=True):
        assert cosine(vector_of(reply), tiny.vector([*ids, EOS], "last")) > 0.99999
        assert reply.json()["usage"]["prompt_tokens"] == len(ids) + 1


def embed_body(tokens: list[int], **fields: Any) -> dict[str, Any]:
    return {"model": "orthrus-embed", "input": tokens, **fields}


def test_an_adapter_that_generates_is_served_beside(server: httpx.Client, tiny: TinyModel) -> None:
    body = {"model": "tuned", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = server.post("/v1/completions", json={**body, "return_token_ids": True})
    assert reply.json()["choices"][0]["token_ids"] == tiny.greedy([5, 6, 7], 8, adapted=True)
    refused = server.post("/v1/embeddings", json={"model": "tuned", "input": [5, 6]})
    assert refused.status_code == 400
    assert "generates" in refused.text


def test_the_base_name_embeds_through_the_only_adapter(server: httpx.Client, tiny: TinyModel) -> None:
    reply = server.post("/v1/embeddings", json={"model": "orthrus", "input": "w20 w301"})
    assert cosine(vector_of(reply), tiny.vector([20, 301, EOS], "last")) > 0.99999


def test_dimensions_are_cut_then_normalised(server: httpx.Client, tiny: TinyModel) -> None:
    vector = vector_of(server.post("/v1/embeddings", json=embed_body([5, 6, 7], dimensions=32)))
    assert vector.shape == (32,)
    assert cosine(vector, tiny.vector([5, 6, 7, EOS], "last", dimensions=32)) > 0.99999


def test_truncation_counts_the_end_token(server: httpx.Client, tiny: TinyModel, rng) -> None:
    tokens = token_ids(rng, 20)
    reply = server.post("/v1/embeddings", json=embed_body(tokens, truncate_prompt_tokens=6))
    assert reply.json()["usage"]["prompt_tokens"] == 6
    assert cosine(vector_of(reply), tiny.vector([*tokens[:5], EOS], "last")) > 0.99999


def test_verify_finds_nothing_wrong_with_it(
    server: httpx.Client, tiny: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["verify", str(server.base_url), "--config", str(write_serve_file(tmp_path, tiny))])
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"dimensions": 33}, "must be one of 32, 128"),
        ("/v1/embeddings", {"input": []}, "empty"),
        ("/v1/embeddings", {"input": [5] * 511}, "512 tokens"),
        ("/v1/embeddings", {"input": [9999]}, "vocabulary"),
        ("/pooling", {"model": "orthrus"}, "one of ['orthrus-embed']"),
    ],
)
def test_what_would_be_wrong_is_a_400(server: httpx.Client, path: str, body: dict[str, Any], words: str) -> None:
    reply = server.post(path, json=embed_body([5, 6]) | body)
    assert reply.status_code == 400
    assert words in reply.text


# --- a command line that lacks a part -------------------------------------------------------------------------------


def test_without_the_middleware_an_embedding_ends_the_engine_with_a_sentence(
    make_engine: Callable[..., Engine], tiny: TinyModel
) -> None:
    engine = make_engine()
    lora = LoRARequest("orthrus-embed", 1, str(tiny.adapter))
    engine.llm.add_request("e", {"prompt_token_ids": [5, 6]}, PoolingParams(task="embed"), lora_request=lora)
    with pytest.raises(RuntimeError, match="--middleware"):
        engine.run()


def half_mixed(tiny: TinyModel, folder: Path, **changes: Any) -> Any:
    """What the middleware sees of an engine whose command line has these parts changed."""
    words = vllm_arguments(read_serve_file(write_serve_file(folder, tiny)).applications[0])
    value = {name: words[words.index(f"--{name}") + 1] for name in ("worker-cls", "scheduler-cls", "additional-config")}
    value |= {name.replace("_", "-"): given for name, given in changes.items()}
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            additional_config=json.loads(value["additional-config"]),
            parallel_config=SimpleNamespace(worker_cls=value["worker-cls"]),
            scheduler_config=SimpleNamespace(scheduler_cls=value["scheduler-cls"], async_scheduling=False),
        )
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "--worker-cls: must be one of"),
        ({"scheduler_cls": "orthrus_serve.engine.scheduler.MixedAsyncScheduler"}, "--scheduler-cls: must be orthrus"),
        ({"additional_config": "{}"}, "--additional-config: lacks 'orthrus_front'"),
        ({"additional_config": '{"orthrus_front": {"topolgy": "orthrus"}}'}, "did you mean 'topology'"),
    ],
)
def test_a_command_line_that_lacks_a_part_is_refused(
    tiny: TinyModel, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        upgrade(half_mixed(tiny, tmp_path, **changes))
    assert words in str(caught.value)


async def test_a_refusal_stops_the_start(tiny: TinyModel, tmp_path: Path) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(*_: Any) -> None:
        raise AssertionError("the app was started")

    engine = half_mixed(tiny, tmp_path, additional_config="{}")
    state = SimpleNamespace(engine_client=engine)
    await OrthrusMiddleware(app)({"type": "lifespan", "app": SimpleNamespace(state=state)}, receive, send)
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert "orthrus-serve vllm-args" in sent[0]["message"]
