"""`orthrus-serve verify` against the real server: it finds nothing there, and every sabotage of it."""

import base64
import json
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
import yaml
from ray import serve

from orthrus_serve.app import build
from orthrus_serve.cli import main
from orthrus_serve.config.embedder import EmbedderSpec
from orthrus_serve.errors import ConfigError
from orthrus_serve.reference.embedder import how_it_pools
from tests.serve.conftest import TINY_VLLM, App

EMBED = "/v1/embeddings"


def app_args(tiny: Any) -> dict[str, Any]:
    """Every pooling kind, an adapter without end-of-sequence token, one that does not normalise, one that generates."""
    path = str(tiny.adapter)
    head = {"path": str(tiny.model.parent / "verify-head.safetensors"), "max_input_tokens": 50, "activation": "tanh"}
    return {
        "topology": "orthrus",
        "model": {"path": str(tiny.model)},
        "adapters": {
            "orthrus-embed": {"path": path, "dimensions": [32, 64]},
            "mean": {"path": path, "pooling": "mean", "dimensions": [20]},
            "weighted": {"path": path, "pooling": "weighted_mean", "append_eos": False},
            "cls": {"path": path, "pooling": "cls", "normalize": False},
            "headed": {"path": path, "pooling": "all", "head": head},
        },
        "embed_adapter": "orthrus-embed",
        "generate_adapters": {"tuned": {"path": path}},
        "num_gpus_per_replica": 0,
        "num_cpus_per_replica": 1,
        "vllm": TINY_VLLM,
    }


@pytest.fixture(scope="module")
def server(serve_url: str, tiny: Any) -> Iterator[App]:
    args = app_args(tiny)
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(3))
    safetensors.torch.save_file({"weight": weight}, args["adapters"]["headed"]["head"]["path"])
    serve.run(build(args), name="verify", route_prefix="/verify")
    yield App("verify", f"{serve_url}/verify")
    serve.delete("verify")


def serve_file(folder: Path, args: dict[str, Any]) -> str:
    """A Serve file with these `args`."""
    file = folder / "serve.yaml"
    application = {"name": "verify", "import_path": "orthrus_serve.app:build", "args": args}
    file.write_text(yaml.safe_dump({"applications": [application]}), encoding="utf-8")
    return str(file)


def verify(url: str, folder: Path, args: dict[str, Any]) -> tuple[int, dict[str, str]]:
    """The exit code, and what is wrong with each case that deviates."""
    report = folder / "report.json"
    code = main(["verify", url, "--config", serve_file(folder, args), "--json", str(report)])
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
    return code, {f"{row['case']} {row['model']}": row["problem"] for row in rows if row["problem"] is not None}


def test_a_good_server_equals_the_reference_in_every_case(
    server: App, tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(server.url, tmp_path, app_args(tiny)) == (0, {})
    printed = capsys.readouterr().out
    assert "EQUALS THE REFERENCE" in printed
    for name in (*app_args(tiny)["adapters"], "orthrus", "tuned"):
        assert any(f"  {name} " in line for line in printed.splitlines()), name


def one_adapter(tiny: Any, **changed: Any) -> dict[str, Any]:
    """The same server as `app_args`, seen through one adapter of it."""
    args = app_args(tiny)
    embed = {**args["adapters"]["orthrus-embed"], **changed}
    return {**args, "adapters": {"orthrus-embed": embed}, "generate_adapters": {}}


@pytest.mark.parametrize("pooling", ["mean", "weighted_mean", "cls"])
def test_another_pooling_than_the_files_say_is_found(server: App, tiny: Any, tmp_path: Path, pooling: str) -> None:
    code, problems = verify(server.url, tmp_path, one_adapter(tiny, pooling=pooling))
    assert code == 1
    assert "cosine" in problems["alone orthrus-embed"]


def test_another_adapter_than_the_files_say_is_found(server: App, tiny: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.engine.harness import add_tiny_adapter

    other = add_tiny_adapter(AutoModelForCausalLM.from_pretrained(tiny.model), tmp_path / "other", 7)
    code, problems = verify(server.url, tmp_path, one_adapter(tiny, path=str(other)))
    assert code == 1
    assert "cosine" in problems["alone orthrus-embed"]
    assert "alone orthrus" not in problems  # the bare model is right


def test_a_missing_end_of_sequence_token_is_found(server: App, tiny: Any, tmp_path: Path) -> None:
    code, problems = verify(server.url, tmp_path, one_adapter(tiny, append_eos=False))
    assert code == 1
    assert "cosine" in problems["alone orthrus-embed"]


def test_a_vector_that_is_not_normalised_is_found(server: App, tiny: Any, tmp_path: Path) -> None:
    code, problems = verify(server.url, tmp_path, one_adapter(tiny, normalize=False))
    assert code == 1
    assert "length" in problems["alone orthrus-embed"]


# --- a server that is right but for one thing -----------------------------------------------------------------------

# Takes the path, the request, the number of requests in flight and the answer, and spoils the answer.
Spoil = Callable[[str, dict[str, Any], int, dict[str, Any]], None]


@contextmanager
def spoiled(url: str, spoil: Spoil) -> Iterator[str]:
    """A proxy before the server; yields its address."""
    num_open = 0
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(httpx.get(f"{url}{self.path}", timeout=60))

        def do_POST(self) -> None:
            nonlocal num_open
            raw = self.rfile.read(int(self.headers["content-length"]))
            with lock:
                num_open += 1
                most = num_open
            answer = httpx.post(
                f"{url}{self.path}", content=raw, headers={"content-type": "application/json"}, timeout=60
            )
            with lock:
                num_open -= 1
            self._reply(answer, lambda body: spoil(self.path, json.loads(raw), most, body))

        def _reply(self, answer: httpx.Response, change: Callable[[dict[str, Any]], None] | None = None) -> None:
            body = answer.json()
            if change is not None and answer.status_code == 200:
                change(body)
            raw = json.dumps(body).encode()
            self.send_response(answer.status_code)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            pass

    class Proxy(ThreadingHTTPServer):
        request_queue_size = 256

    proxy = Proxy(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def swapped_in_a_crowd(path: str, _asked: dict[str, Any], num_open: int, answer: dict[str, Any]) -> None:
    if path == EMBED and num_open > 4 and isinstance(answer["data"][0]["embedding"], list):
        answer["data"][0]["embedding"].reverse()


def big_endian(path: str, _asked: dict[str, Any], _open: int, answer: dict[str, Any]) -> None:
    for row in answer["data"] if path == EMBED else ():
        if isinstance(row["embedding"], str):
            raw = base64.b64decode(row["embedding"])
            numbers = struct.unpack(f"<{len(raw) // 4}f", raw)
            row["embedding"] = base64.b64encode(struct.pack(f">{len(numbers)}f", *numbers)).decode()


def inputs_in_reverse(path: str, _asked: dict[str, Any], _open: int, answer: dict[str, Any]) -> None:
    if path == EMBED and len(answer["data"]) > 1:
        vectors = [row["embedding"] for row in answer["data"]]
        for row, vector in zip(answer["data"], reversed(vectors), strict=True):
            row["embedding"] = vector


def one_token_wrong_after_chunks(path: str, asked: dict[str, Any], _open: int, answer: dict[str, Any]) -> None:
    if path != EMBED and len(asked["prompt"]) > 128:
        tokens = answer["choices"][0]["token_ids"]
        tokens[-1] = (tokens[-1] + 1) % 512


def uncounted(path: str, _asked: dict[str, Any], _open: int, answer: dict[str, Any]) -> None:
    if path == EMBED:
        answer["usage"]["prompt_tokens"] -= 1


@pytest.mark.parametrize(
    ("spoil", "cases"),
    [
        (swapped_in_a_crowd, {"mixed orthrus-embed", "mixed, repeated orthrus-embed"}),
        (big_endian, {"float and base64 orthrus-embed"}),
        (inputs_in_reverse, {"many inputs orthrus-embed"}),
        (one_token_wrong_after_chunks, {"in chunks orthrus", "exactly the longest orthrus"}),
        (uncounted, {"alone orthrus-embed", "truncated orthrus-embed"}),
    ],
)
def test_a_sabotage_is_found_where_it_is(server: App, tiny: Any, tmp_path: Path, spoil: Spoil, cases: set[str]) -> None:
    with spoiled(server.url, spoil) as url:
        code, problems = verify(url, tmp_path, one_adapter(tiny))
    assert code == 1
    assert cases <= set(problems)
    if spoil is not uncounted:
        assert "alone orthrus-embed" not in problems


# --- servers that cannot be verified --------------------------------------------------------------------------------


def test_a_server_of_other_names_is_refused_with_a_sentence(
    server: App, tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = one_adapter(tiny)
    args["adapters"] = {"another": args["adapters"]["orthrus-embed"]}
    del args["embed_adapter"]
    assert main(["verify", server.url, "--config", serve_file(tmp_path, args)]) == 2
    assert "and not another" in capsys.readouterr().err


def test_an_address_where_nobody_answers_is_refused_with_a_sentence(tiny: Any, tmp_path: Path) -> None:
    assert main(["verify", "http://127.0.0.1:9", "--config", serve_file(tmp_path, one_adapter(tiny))]) == 2


def test_the_model_and_its_adapter_may_be_named_without_a_file(server: App, tiny: Any) -> None:
    named = ["--model", str(tiny.model), "--adapter", f"orthrus-embed={tiny.adapter}", "--dtype", "float32"]
    assert main(["verify", server.url, *named, "--max-tokens", "100"]) == 0


def test_an_arm_that_the_file_does_not_have_is_refused_with_a_sentence(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = {key: value for key, value in one_adapter(tiny).items() if key != "topology"}
    file = serve_file(tmp_path, {**args, "arms": {"old": {"topology": "hetero_fcfs"}, "new": {"topology": "orthrus"}}})
    assert main(["verify", "http://127.0.0.1:9", "--config", file, "--arm", "older"]) == 2
    assert "--arm: 'older' is none of the file's arms (new, old)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "modes", "found"),
    [
        ({}, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean", True)),
        ({}, {"pooling_mode_lasttoken": True}, ("last", True)),
        ({"pooling": "cls", "normalize": False}, {"pooling_mode_mean_tokens": True}, ("cls", False)),
        ({}, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, None),
        ({}, {"pooling_mode_max_tokens": True}, None),
    ],
)
def test_how_an_embedder_pools_is_read_from_the_file_or_from_its_folder_and_never_guessed(
    tmp_path: Path, settings: dict[str, Any], modes: dict[str, bool], found: tuple[str, bool] | None
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes), encoding="utf-8")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    spec = EmbedderSpec.model_validate({"path": str(tmp_path), **settings})
    if found is None:
        with pytest.raises(ConfigError, match=r"embedder\.pooling"):
            how_it_pools(spec)
    else:
        assert how_it_pools(spec) == found
