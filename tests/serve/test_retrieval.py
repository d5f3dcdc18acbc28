"""Retrieval through HTTP equals the same model and adapter in Transformers, on a sample of real questions, beside chats."""

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from ray import serve

from orthrus_serve.app import build
from orthrus_serve.model import fetch
from orthrus_serve.model.reference_embedder import ReferenceEmbedder
from orthrus_serve.model.retrieval_eval import evaluate
from tests.serve.conftest import App

NUM_QUESTIONS = 6
MAX_MODEL_LEN = 1024
SEED = 1
DEMO = Path(fetch.DEFAULT_DEST).expanduser()
MODEL, ADAPTER = DEMO / "smollm2-135m-instruct", DEMO / "orthrus-embed"


@pytest.fixture
def demo(serve_url: str, eval_data: Path) -> Iterator[App]:
    """One replica with the demo model and the adapter that ships, in float32, so that no ranking hangs on a rounding."""
    assert fetch.main([]) == 0
    args = {
        "topology": "orthrus",
        "model": {"path": str(MODEL)},
        "adapters": {"orthrus-embed": {"path": str(ADAPTER)}},
        "num_gpus_per_replica": 0,
        "num_cpus_per_replica": 1,
        "vllm": {
            "dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 32, "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": 512 * 2**20,
        },
    }  # fmt: skip
    serve.run(build(args), name="demo", route_prefix="/demo")
    yield App("demo", f"{serve_url}/demo")
    serve.delete("demo")


def test_top_passages_and_scores_equal_the_reference(demo: App, eval_data: Path) -> None:
    questions = eval_data / "2wikimultihopqa_dev500.jsonl"
    with httpx.Client(timeout=300) as client, concurrent.futures.ThreadPoolExecutor(5) as pool:

        def embed(texts: list[str]) -> list[list[float]]:
            parts = [texts[i : i + 32] for i in range(0, len(texts), 32)]
            bodies = [{"model": "orthrus-embed", "input": part} for part in parts]
            answers = [r.json() for r in pool.map(lambda b: client.post(f"{demo.url}/v1/embeddings", json=b), bodies)]
            return [row["embedding"] for answer in answers for row in answer["data"]]

        def chat(_: int) -> int:
            body = {"model": "orthrus", "messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 40}
            return client.post(f"{demo.url}/v1/chat/completions", json=body).status_code

        chats = [pool.submit(chat, i) for i in range(2)]
        through_http = evaluate(embed, questions, NUM_QUESTIONS, SEED)
        assert [c.result() for c in chats] == [200, 200]
    # Nothing is cut: the longest of these passages has over 512 tokens, and the server embeds it whole.
    reference = ReferenceEmbedder.load(MODEL, ADAPTER, dtype=torch.float32, max_tokens=MAX_MODEL_LEN - 1)
    expected = evaluate(lambda texts: reference(texts, batch_size=8), questions, NUM_QUESTIONS, SEED)
    assert through_http == expected
    assert through_http["hit@1"] >= 0.75
