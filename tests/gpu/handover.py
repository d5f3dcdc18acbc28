"""disagg_pd on two cards: the same answers as the same engines give without it. `python -m tests.gpu.handover --json FILE`.

Starts the tiny model as one prefill and one decode replica with NIXL between them, asks for greedy completions (whole and
streamed) and embeddings, switches to `orthrus`, asks again, and compares. `verify` against Transformers comes after. A tool:
random weights in fp16 have near ties, so some texts may differ: told is how far apart the two best tokens were where two texts
part. First logprobs and vectors may not differ. `--on-cpu` rehearses it.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

import tests.engine.conftest  # noqa: F401  sets vLLM's switches before anything imports it
from orthrus_serve.ops.local_server import Paths, start, stop
from orthrus_serve.verify.compare import cosine
from tests.engine.harness import VOCAB_SIZE, make_tiny_model
from tests.gpu.engines import say
from tests.gpu.fleet import REPOSITORY, URL, switch

PROMPTS, STREAMED, EMBEDDED = 200, 100, 60


def serve_file(folder: Path, *, on_cpu: bool) -> Path:
    """`configs/disagg_pd.yaml` with the tiny model on two replicas. Returns its path."""
    tiny = make_tiny_model(folder)
    content = yaml.safe_load((REPOSITORY / "configs" / "disagg_pd.yaml").read_text())
    args = content["applications"][0]["args"]
    args["model"] = {"name": "orthrus", "path": str(tiny.model)}
    args["adapters"] = {"orthrus-embed": {"path": str(tiny.adapter), "pooling": "last"}}
    args |= {"num_replicas": 2, "disagg_pd": {"prefill": 1, "decode": 1}}
    args["vllm"] = {
        "dtype": "float32" if on_cpu else "float16",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 2**26 if on_cpu else 2**29,
    }
    if on_cpu:
        args |= {"num_gpus_per_replica": 0, "num_cpus_per_replica": 0.3}
    else:
        args["vllm"]["gpu_memory_utilization"] = 0.05
    file = folder / "handover.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


async def answers(seed: int) -> dict[str, Any]:
    """What the running server says to the same questions each time."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(20, 400))] for _ in range(PROMPTS)]
    gate = asyncio.Semaphore(16)

    async def post(path: str, body: dict[str, Any]) -> Any:
        async with gate:
            answer = await client.post(path, json=body)
            answer.raise_for_status()
            return answer.json()

    async def stream(body: dict[str, Any]) -> str:
        text = ""
        async with gate, client.stream("POST", "/v1/completions", json={**body, "stream": True}) as lines:
            async for line in lines.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    greedy = {"model": "orthrus", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    bodies = [{**greedy, "prompt": prompt} for prompt in prompts]
    began_s = time.monotonic()
    async with httpx.AsyncClient(base_url=URL, timeout=120, trust_env=False) as client:
        whole, vectors = await asyncio.gather(
            asyncio.gather(*[post("/v1/completions", body) for body in bodies]),
            asyncio.gather(
                *[post("/v1/embeddings", {"model": "orthrus-embed", "input": prompt}) for prompt in prompts[:EMBEDDED]]
            ),
        )
        streams = await asyncio.gather(*[stream(body) for body in bodies[:STREAMED]])
        page = (await client.get("/metrics")).text
    choices = [answer["choices"][0] for answer in whole]
    return {
        "texts": [choice["text"] for choice in choices],
        "logprobs": [choice["logprobs"] for choice in choices],
        "streams": streams,
        "vectors": [answer["data"][0]["embedding"] for answer in vectors],
        "took_s": round(time.monotonic() - began_s, 2),
        "fetched_tokens": sum(
            float(line.rpartition(" ")[2]) for line in page.splitlines() if "external_prefix_cache_hits_total{" in line
        ),
    }


def compared(handed: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """How far answers through two replicas are from those of one."""

    def pairs(name: str) -> Any:
        return zip(handed[name], plain[name], strict=True)

    return {
        "texts_equal": sum(a == b for a, b in pairs("texts")),
        "texts": len(handed["texts"]),
        "streams_equal_to_whole": sum(a == b for a, b in zip(handed["streams"], handed["texts"], strict=False)),
        "streams": len(handed["streams"]),
        "worst_first_logprob_difference": max(
            abs(a["token_logprobs"][0] - b["token_logprobs"][0]) for a, b in pairs("logprobs")
        ),
        "leads_where_texts_part": [
            lead for a, b in pairs("logprobs") if (lead := lead_at_first_difference(a, b)) is not None
        ],
        "worst_cosine": min(cosine(np.array(a), np.array(b)) for a, b in pairs("vectors")),
        "prompt_tokens_fetched": handed["fetched_tokens"],
        "took_s": [handed["took_s"], plain["took_s"]],
    }


def lead_at_first_difference(a: dict[str, Any], b: dict[str, Any]) -> float | None:
    """By how much the chosen token led, in logprob, where two answers first differ; of the two the larger. None: they don't."""
    for i, (one, other) in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
        if one != other:
            best = [sorted(answer["top_logprobs"][i].values(), reverse=True) for answer in (a, b)]
            return round(max(leads[0] - leads[-1] for leads in best), 6)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path(".make/handover"), help="model, Serve file and log")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--on-cpu", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    paths = Paths(options.folder.resolve())
    paths.folder.mkdir(parents=True, exist_ok=True)
    file = serve_file(paths.folder, on_cpu=options.on_cpu)
    start(str(file), paths, lambda line: say({"server": line}))
    try:
        handed = asyncio.run(answers(options.seed))
        switch("orthrus", 2)
        result = compared(handed, asyncio.run(answers(options.seed)))
        options.json.write_text(json.dumps(result) + "\n")
        say(result)
        switch("disagg_pd", 2)
        command = [sys.executable, "-m", "orthrus_serve.cli", "verify", URL, "--config", str(file)]
        verified = subprocess.run(command, check=False, timeout=600)
    finally:
        stop(paths, lambda line: say({"server": line}))
    return verified.returncode


if __name__ == "__main__":
    sys.exit(main())
