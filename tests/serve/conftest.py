"""One local Ray for the whole suite, with its own folder and ports, so that no other cluster on the machine is met."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

# Before Ray is imported: by default it would ask for a token, also between the processes of a local cluster.
os.environ["RAY_AUTH_MODE"] = "disabled"
# By default Ray's workers yield to everybody else, here to the clients: an engine that starts beside them would starve.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - as Ray spells it

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError

from orthrus_serve.app import build, compose
from orthrus_serve.config.schema import AppArgs
from tests.ports import free_port
from tests.serve.collector import Collector, running_collector
from tests.serve.fakes import start_fake
from tests.serve.neighbour import Neighbour

REPOSITORY = Path(__file__).parents[2]
FAKE_ARGS: dict[str, Any] = {
    "topology": "orthrus",
    "model": {"path": "/nowhere"},
    "adapters": {"orthrus-embed": {"path": "/nowhere", "dimensions": [4]}},
    "num_replicas": 2,
    "num_gpus_per_replica": 0,
    "num_cpus_per_replica": 0.1,
    "limits": {"max_body_bytes": 100_000, "max_inputs": 64},
}
# How a real engine serves the tiny model.
TINY_VLLM: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "kv_cache_memory_bytes": 64 * 2**20,
}


def log_folder() -> Path:
    """Where this Ray and everything that runs in it writes its logs."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())


@dataclass(frozen=True)
class App:
    """A running application."""

    name: str
    url: str

    def info(self, deployment: str) -> list[dict[str, Any]]:
        """`info()` of every replica of that deployment that answers."""
        try:
            asked = serve.get_deployment_handle(deployment, self.name).broadcast("info")
            return [info for info in asked.results(timeout_s=10, return_exceptions=True) if isinstance(info, dict)]
        except DeploymentUnavailableError:
            return []


def computed_tokens(app: App, num_engines: int) -> dict[str, int]:
    """All tokens that each of so many engines has computed, by replica. To be asked at rest.

    A replica looks at an idle core four times a second only: what it says may be older than the last request. So two looks, a
    second apart, must agree.
    """
    parts = ("decode_tokens", "prefill_tokens", "embed_tokens")
    before: dict[str, int] | None = None
    for _ in range(60):
        engines = [engine for engine in app.info("Engine") if engine["report"] and engine["in_engine"] == 0]
        now = {engine["replica"]: sum(engine["report"]["totals"][part] for part in parts) for engine in engines}
        if now == before and len(now) == num_engines:
            return now
        before = now
        time.sleep(1)
    raise AssertionError("the engines do not come to rest")


@contextlib.contextmanager
def local_serve(num_cpus: int = 4, metrics_port: int | None = None) -> Iterator[str]:
    """A Ray and a Serve of our own; yields the address of its proxy. `num_cpus` are logical. Ray publishes its metrics at
    `metrics_port`."""
    folder = tempfile.mkdtemp(prefix="orthrus-ray-")  # short: Ray puts sockets below it
    ray.init(
        address="local",
        num_cpus=num_cpus,
        object_store_memory=200 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        namespace="serve",
        _metrics_export_port=metrics_port,
        runtime_env={"env_vars": {"PYTHONPATH": str(REPOSITORY)}},
        _temp_dir=folder,
    )
    port = free_port()
    serve.start(
        proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port}, grpc_options={"port": free_port()}
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_metrics_port() -> int:
    """Where the local Ray publishes its metrics."""
    return free_port()


@pytest.fixture(scope="session")
def serve_url(ray_metrics_port: int) -> Iterator[str]:
    """The address of a local Serve."""
    with local_serve(metrics_port=ray_metrics_port) as url:
        yield url


@pytest.fixture(scope="session")
def fake(serve_url: str) -> App:
    """Two replicas with fake engines."""
    serve.run(compose(AppArgs.model_validate(FAKE_ARGS), start_fake), name="fake", route_prefix="/fake")
    return App("fake", f"{serve_url}/fake")


@pytest.fixture
def client(fake: App) -> Iterator[httpx.Client]:
    """An HTTP client of the fake application."""
    with httpx.Client(base_url=fake.url, timeout=30) as opened:
        yield opened


@pytest.fixture(scope="module")
def neighbour(http: httpx.Client) -> Iterator[Neighbour]:
    """Asks the module's own server (`http`) the same all the while, and must get the same."""
    asking = Neighbour(http)
    yield asking
    asking.stop()
    assert asking.wrong == []
    assert asking.num_asked > 3


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of a tiny model with random weights and its adapter."""
    from tests.engine.harness import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where the traces of the real application go."""
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="session")
def real(serve_url: str, tiny: Any, collector: Collector) -> App:
    """One replica with the real engine over the tiny model; two adapters embed (one by a head), one generates."""
    import safetensors.torch
    import torch

    head = tiny.model.parent / "head.safetensors"
    safetensors.torch.save_file({"weight": torch.randn(40, 128, generator=torch.Generator().manual_seed(3))}, head)
    args = {
        "topology": "orthrus",
        "model": {"path": str(tiny.model)},
        "adapters": {
            "orthrus-embed": {"path": str(tiny.adapter), "dimensions": [32, 64]},
            "headed": {
                "path": str(tiny.adapter),
                "pooling": "all",
                "head": {"path": str(head), "max_input_tokens": 50},
                "dimensions": [20],
            },
        },
        "embed_adapter": "orthrus-embed",
        "generate_adapters": {"tuned": {"path": str(tiny.adapter)}},
        "num_replicas": 1,
        "num_gpus_per_replica": 0,
        "num_cpus_per_replica": 1,
        "limits": {"max_inputs": 64, "max_n": 8},
        # Far above what a step takes here, and what a CPU does: both are there to be measured by.
        "engine": {"target_tpot_ms": 30_000, "peak_tflops": 0.1},
        "tracing": {"endpoint": collector.url},
        "log": {"requests": True},
        "vllm": TINY_VLLM,
    }
    serve.run(build(args), name="real", route_prefix="/real")
    return App("real", f"{serve_url}/real")
