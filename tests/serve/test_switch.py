"""A live switch drops nothing and holds from then on: on fake engines in full detail, and as a user does it on real ones."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from orthrus_serve.cli import main
from orthrus_serve.config.load import IMPORT_PATH
from orthrus_serve.ops.deployed_config import parse_wanted
from orthrus_serve.ops.serve_api import ServeApi
from orthrus_serve.ops.switch import SwitchError, status_page, switch
from tests.ports import free_port
from tests.serve.conftest import FAKE_ARGS, REPOSITORY
from tests.serve.test_fake_app import until

EMBED, COMPLETE = "/v1/embeddings", "/v1/completions"


@dataclass
class Answer:
    """How one request of the load ended."""

    kind: str
    began_s: float
    status: int | str
    pid: int | None


@dataclass
class Load:
    """Clients that ask for embeddings and for streamed completions, over and over, from a thread of its own."""

    url: str
    num_clients: int = 4
    answers: list[Answer] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def since(self, began_s: float) -> list[Answer]:
        return [answer for answer in self.answers if answer.began_s >= began_s]

    @contextmanager
    def running(self) -> Iterator["Load"]:
        thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()
        assert Counter(answer.status for answer in self.answers) == {200: len(self.answers)}

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
            ask = [self._ask(client, kind) for kind in ("embed", "generate") for _ in range(self.num_clients)]
            await asyncio.gather(*ask)

    async def _ask(self, client: httpx.AsyncClient, kind: str) -> None:
        path = EMBED if kind == "embed" else COMPLETE
        body: dict[str, Any] = {"input": "w3 w4 w5 " * 20, "fake": {"delay_s": 0.02}}
        if kind == "generate":
            body = {"prompt": "w3 w4", "max_tokens": 8, "stream": True, "ignore_eos": True, "fake": {"gap_s": 0.01}}
        while not self._stop.is_set():
            began_s = time.monotonic()
            status: int | str = "no answer"
            text = ""
            try:
                answer = await client.post(path, json=body)
                status, text = answer.status_code, answer.text
                if kind == "generate" and not text.rstrip().endswith("[DONE]"):
                    status = f"cut: {text[-200:]}"
            except httpx.HTTPError as error:
                status = repr(error)
            pid = re.search(r'"pid": ?(\d+)', text)
            self.answers.append(Answer(kind, began_s, status, int(pid[1]) if pid else None))


def pids(answers: list[Answer], kind: str) -> set[int | None]:
    return {answer.pid for answer in answers if answer.kind == kind}


# --- fake engines ---------------------------------------------------------------------------------------------------

FAKE_BUILDER = "tests.serve.fakes:build_fake"


class InProcessApi(ServeApi):
    """Serve's API without a dashboard: the same two calls, made to the controller. The fakes' builder passes for ours."""

    def __init__(self) -> None:
        super().__init__("http://unused")

    def details(self) -> dict[str, Any]:
        controller: Any = _get_global_client()._controller
        details = json.dumps(ray.get(controller.get_serve_instance_details.remote()))
        return json.loads(details.replace(FAKE_BUILDER, IMPORT_PATH))

    def deploy(self, config: dict[str, Any]) -> None:
        text = json.dumps(config).replace(IMPORT_PATH, FAKE_BUILDER)
        client: Any = _get_global_client()
        client.deploy_apps(ServeDeploySchema.model_validate_json(text))


@pytest.fixture(scope="module")
def four(serve_url: str) -> Iterator[str]:
    """The address of four fake engines behind two Fronts, started from a configuration as `serve run FILE` does."""
    args = {**FAKE_ARGS, "num_replicas": 4, "dedicated": {"embed": 1, "generate": 3}}
    config = {
        "name": "four", "route_prefix": "/four", "import_path": FAKE_BUILDER, "args": args,
        "runtime_env": {"env_vars": {"PYTHONPATH": str(REPOSITORY)}},
        "deployments": [{"name": "Front"}, {"name": "Engine"}],
    }  # fmt: skip
    client: Any = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [config]}))
    url = f"{serve_url}/four"
    until(lambda: num_listed(url) == 4, limit_s=120)
    yield url
    client.delete_apps(["four"], blocking=False)


def switch_four(url: str, topology: str, rule: str | None = None, split: str | None = None) -> float:
    said: list[str] = []
    took_s = switch(parse_wanted(topology, rule, split), InProcessApi(), said.append, app="four", base_url=url)
    assert said[0].split(";")[0].endswith(f"→ {topology}")
    return took_s


def test_a_switch_under_load_drops_nothing_and_roles_hold_from_then_on(four: str) -> None:
    replicas = {engine["replica"] for engine in status_page(four)["engines"]}
    with Load(four).running() as load:
        for topology, rule, split, num_embed in [
            ("dedicated", None, None, 1),
            ("unified_homo", None, None, None),
            ("dedicated", "round_robin", "2:2", 2),
            ("orthrus", None, None, None),
        ]:
            time.sleep(0.5)
            assert switch_four(four, topology, rule, split) < 10
            switched_s = time.monotonic()
            time.sleep(1.5)
            answers = load.since(switched_s)
            embed, generate = pids(answers, "embed"), pids(answers, "generate")
            page = status_page(four)
            assert (page["topology"], page["rule"]) == (topology, rule or "least_remaining_tokens")
            assert {engine["replica"] for engine in page["engines"]} == replicas  # nothing was restarted
            assert {front["topology"] for front in page["fronts"]} == {topology}
            if num_embed is None:
                assert len(embed | generate) == 4
                assert embed & generate
            else:
                assert (len(embed), len(generate)) == (num_embed, 4 - num_embed)
                assert not embed & generate
    metrics = httpx.get(f"{four}/metrics").text
    for name in ("orthrus_requests_total", "orthrus_engine_steps_total"):
        lines = [line for line in metrics.splitlines() if line.startswith(f"{name}{{")]
        assert {re.search(r'topology="(\w+)"', line)[1] for line in lines} >= {"dedicated", "orthrus"}  # type: ignore[index]
    until(lambda: all(front["open"] == front["tokens"] == 0 for front in status_page(four)["fronts"]))


def test_what_an_engine_refuses_is_told_and_changes_nothing(four: str) -> None:
    api = InProcessApi()
    config = api.details()["applications"]["four"]["deployed_app_config"]
    engine = next(one for one in config["deployments"] if one["name"] == "Engine")
    engine["user_config"]["step_tokens"] = 12  # the fake engine refuses this one
    api.deploy({"applications": [config]})
    with pytest.raises(SwitchError, match=r"engine \w+ refused: step_tokens 12 is not known"):
        switch_four(four, "hetero_fcfs")
    assert {one["policy"] for one in status_page(four)["engines"]} == {"orthrus"}
    del engine["user_config"]["step_tokens"]
    api.deploy({"applications": [config]})
    switch_four(four, "hetero_fcfs")
    switch_four(four, "orthrus")


# --- real engines, as a user does it --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A server that `serve run FILE` started, with a Ray and a dashboard of its own."""

    url: str
    dashboard: str
    token_file: Path


@pytest.fixture(scope="module")
def server(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("run")
    port = free_port()
    args = {
        "topology": "orthrus",
        "num_replicas": 2,
        "num_gpus_per_replica": 0,
        "num_cpus_per_replica": 0.5,
        "model": {"path": str(tiny.model)},
        "adapters": {"orthrus-embed": {"path": str(tiny.adapter)}},
        "vllm": {
            "dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 128,
            "kv_cache_memory_bytes": 64 * 2**20,
        },
    }  # fmt: skip
    application = {"name": "tiny", "route_prefix": "/", "import_path": IMPORT_PATH, "args": args}
    document = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "grpc_options": {"port": free_port()},
        "applications": [application],
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    log = folder / "log"
    process = start_serve(folder / "serve.yaml", log)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: process.poll() is not None or num_listed(url, after_s=1) == 2, limit_s=300)
        assert process.poll() is None, log.read_text(encoding="utf-8")[-3000:]
        dashboard = re.search(r"http://127\.0\.0\.1:\d+", log.read_text(encoding="utf-8"))
        assert dashboard is not None
        yield Server(url, dashboard[0], folder / ".ray" / "auth_token")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def start_serve(file: Path, log: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0",
        # As `make run` starts it: Ray asks for a token, and makes one in the home folder.
        "RAY_AUTH_MODE": "token", "HOME": str(log.parent),
    }  # fmt: skip
    environment.pop("RAY_ADDRESS", None)
    serve = str(Path(sys.executable).parent / "serve")
    with log.open("wb") as output:
        return subprocess.Popen(
            [serve, "run", "--address", "local", str(file)], stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True, env=environment,
        )  # fmt: skip


def num_listed(url: str, after_s: float = 0.0) -> int:
    time.sleep(after_s)  # whoever starts needs the processor
    try:
        return sum(engine["listed"] and engine["answered"] for engine in status_page(url)["engines"])
    except SwitchError:
        return 0


def totals(url: str) -> dict[str, dict[str, Any]]:
    return {engine["replica"]: {**engine["totals"], **engine} for engine in status_page(url)["engines"]}


def grown(url: str, during: Callable[[], None]) -> dict[str, dict[str, Any]]:
    """By replica: what its step totals grew by, and what it said of itself afterwards."""
    before = totals(url)
    during()
    after = totals(url)
    names = ("steps", "mixed_steps", "embed_tokens", "decode_tokens")
    return {one: {**after[one], **{name: after[one][name] - before[one][name] for name in names}} for one in after}


@pytest.mark.timeout(500)
def test_the_command_switches_real_engines_there_and_back_under_load(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(server.token_file))
    command = ["--address", server.dashboard]
    with Load(server.url, num_clients=3).running() as load:
        until(lambda: len(load.answers) > 10, limit_s=60)
        for topology, policy in (
            ("dedicated", "hetero_fcfs"),
            ("orthrus", "orthrus"),
            ("unified_homo", "unified_homo"),
        ):
            assert main(["switch", topology, *command]) == 0
            assert re.search(r"followed in \d+\.\d\d s", capsys.readouterr().out)
            time.sleep(0.7)  # steps and reports of before end
            growth = grown(server.url, lambda: wait_for_answers(load, 12))
            assert {engine["policy"] for engine in growth.values()} == {policy}
            assert sum(engine["steps"] for engine in growth.values()) > 0
            if topology == "dedicated":
                by_role = {tuple(engine["kinds"]): engine for engine in growth.values()}
                assert set(by_role) == {("embed",), ("generate",)}
                assert by_role[("embed",)]["decode_tokens"] == 0 < by_role[("embed",)]["embed_tokens"]
                assert by_role[("generate",)]["embed_tokens"] == 0 < by_role[("generate",)]["decode_tokens"]
            if topology == "unified_homo":
                assert {engine["mixed_steps"] for engine in growth.values()} == {0}
        assert main(["switch", "orthrus", "--set", "embed_weight=4", "step_tokens=48", *command]) == 0
        assert "engines      embed_weight=4.0, step_tokens=48" in capsys.readouterr().out
        applied = [engine["settings"] for engine in status_page(server.url)["engines"]]
        assert {(one["embed_weight"], one["step_tokens"]) for one in applied} == {(4.0, 48)}
    refused_in_a_sentence(server, capsys)


def wait_for_answers(load: Load, count: int) -> None:
    began_s = time.monotonic()
    for kind in ("embed", "generate"):
        until(lambda kind=kind: sum(one.kind == kind for one in load.since(began_s)) >= count, limit_s=60)


def refused_in_a_sentence(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in [
        (["dedicatd", "--address", server.dashboard], "did you mean 'dedicated'?"),
        (["orthrus", "--address", server.dashboard, "--app", "other"], "no application 'other'"),
        (["orthrus", "--address", f"http://127.0.0.1:{free_port()}"], "dashboard does not answer"),
        (["orthrus", "--address", server.dashboard, "--base-url", "http://127.0.0.1:9"], "/status does not answer"),
    ]:
        assert main(["switch", *words]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert reason in captured.err
        assert len(captured.err.splitlines()) == 1
