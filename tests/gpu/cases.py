"""Groups of cases on one card, each run in a process of its own: `python -m tests.gpu.cases GROUP --json FILE`.

`tiny`: fp16 (vLLM's LoRA kernels take no fp32), random weights: the CPU suite's cases on the V2 runner with CUDA graphs.
`demo`: the real demo model in bf16, vectors against Transformers in fp32.
`mistral`: Mistral-7B shapes, random weights, bf16: chunks of 256, 512 and 1024 against whole, every pooling, beside decodes.
With `--bench` it then compares policies at saturation on the same engine (`closed_loop.py`), once the file `--bench-after` is
there. With `--on-cpu` a group runs small on CPU: a rehearsal, nothing more.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tests.engine.conftest  # noqa: F401  sets vLLM's switches before anything imports it
from tests.engine.harness import POOLINGS, VOCAB_SIZE, Engine, TinyModel, make_tiny_model
from tests.gpu.closed_loop import ClosedLoop, Load
from tests.gpu.engines import engine_on_device, random_model, token_ids

Result = dict[str, Any]


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.float(), b.float().cpu(), dim=0))


def tiny(folder: Path, options: argparse.Namespace) -> Result:
    """Tokens and vectors of every pooling at several budgets and policies; preemption; abort; nothing left behind."""
    model, rng = make_tiny_model(folder), random.Random(0)
    prompts = [token_ids(rng, n, VOCAB_SIZE) for n in (5, 40, 100, 17, 200, 64)]
    inputs = [token_ids(rng, n, VOCAB_SIZE) for n in (1, 30, 64, 65, 150, 333, 500, 20)]
    common: dict[str, Any] = {"gpu_memory_utilization": 0.05, "budget": 2048, "max_num_seqs": 32}
    common["dtype"] = "float32" if options.on_cpu else "float16"
    stock = engine_on_device(model, folder / "none", on_cpu=options.on_cpu, mixed=False, enable_lora=False, **common)
    for i, prompt in enumerate(prompts):
        stock.generate(f"g{i}", prompt)
        stock.run()
    expected = [stock.tokens(f"g{i}") for i in range(len(prompts))]
    stock.close()
    engine = engine_on_device(model, folder / "steps", on_cpu=options.on_cpu, **common)
    pooled_steps = _refuse_waiting(engine, on_cpu=options.on_cpu)
    rows = []
    for policy in ("orthrus", "hetero_fcfs", "unified_homo"):
        for budget in (40, 64, 256, 2048):
            engine.scheduler.answer("set", {"policy": policy, "step_tokens": budget})
            name = f"{policy}-{budget}"
            for i, prompt in enumerate(prompts):
                engine.generate(f"{name}-g{i}", prompt)
            for i, tokens in enumerate(inputs):
                for pooling in POOLINGS:
                    engine.embed(f"{name}-{i}-{pooling}", tokens, pooling)
            _run_with_preemptions(engine, every=25 if budget == 64 else 0)
            worst = min(
                engine.cosine(f"{name}-{i}-{p}", tokens, p) for i, tokens in enumerate(inputs) for p in POOLINGS
            )
            equal = [engine.tokens(f"{name}-g{i}") for i in range(len(prompts))] == expected
            rows.append({"policy": policy, "budget": budget, "tokens_equal_stock": equal, "worst_cosine": worst})
    engine.embed("doomed", inputs[6], "mean")
    engine.step()
    engine.llm.abort_request(["doomed"])
    engine.run()
    return {
        "rows": rows,
        "pooled_steps": len(pooled_steps),
        "leaks": engine.leaks(),
        "totals": engine.totals(),
        "runner": str(type(engine.runner).__mro__[2]),
    }


def demo(folder: Path, options: argparse.Namespace) -> Result:
    """Real texts through the demo model and its adapter in bf16, alone and beside generations, against Transformers fp32.

    Position 0 has huge activations in this model, so CLS differs in bf16 by its own rounding; it is reported, not judged.
    """
    from transformers import AutoTokenizer

    model = TinyModel(options.demo_model, options.demo_adapter)
    tokenizer = AutoTokenizer.from_pretrained(model.model)
    texts = [f"query: Who wrote book number {i}?" for i in range(8)] + ["passage: " + "The river flows north. " * 60]
    inputs = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts]
    chats = [[{"role": "user", "content": f"Name {i + 2} colours."}] for i in range(6)]
    prompts = [
        tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats
    ]
    engine = engine_on_device(
        model, folder / "steps", on_cpu=options.on_cpu, dtype="bfloat16", budget=512, max_num_seqs=32,
        gpu_memory_utilization=0.06, max_lora_rank=16, kv_cache_memory_bytes=2**28 if options.on_cpu else None,
    )  # fmt: skip
    for i, prompt in enumerate(prompts):
        engine.generate(f"alone{i}", prompt, 32)
    engine.run()
    for i, prompt in enumerate(prompts):
        engine.generate(f"beside{i}", prompt, 32)
    for i, tokens in enumerate(inputs):
        for pooling in POOLINGS:
            engine.embed(f"{i}-{pooling}", tokens, pooling)
    engine.run()
    worst = {p: min(engine.cosine(f"{i}-{p}", tokens, p) for i, tokens in enumerate(inputs)) for p in POOLINGS}
    equal = [engine.tokens(f"alone{i}") == engine.tokens(f"beside{i}") for i in range(len(prompts))]
    same = [_common_prefix(engine.tokens(f"alone{i}"), engine.tokens(f"beside{i}")) for i in range(len(prompts))]
    texts_out = [tokenizer.decode(engine.tokens(f"beside{i}")) for i in range(2)]
    return {
        "worst_cosine_to_fp32": worst, "tokens_equal_alone": equal, "tokens_in_common": same, "of": 32, "texts": texts_out,
        "leaks": engine.leaks(), "totals": engine.totals(),
    }  # fmt: skip


def mistral(folder: Path, options: argparse.Namespace) -> Result:
    """Chunked against whole for every pooling, alone and beside decodes, on Mistral-7B shapes."""
    if options.on_cpu:
        model, vocabulary, lengths, chunks, extra = make_tiny_model(folder), VOCAB_SIZE, (300, 700), (64, 128), {}
    else:
        model, vocabulary, lengths = random_model(folder, "mistral-7b-v0.1"), 32000, (900, 1500, 2047, 3000)
        chunks = (64, 256, 512, 1024)
        extra = {
            "dtype": "bfloat16",
            "load_format": "dummy",
            "max_model_len": 4096,
            "max_lora_rank": 16,
            "kv_cache_memory_bytes": 60 * 2**30,
        }
    budget = 1024 if options.on_cpu else 4096
    engine = engine_on_device(
        model,
        folder / "steps",
        on_cpu=options.on_cpu,
        budget=budget,
        max_num_seqs=256,
        gpu_memory_utilization=0.7,
        **extra,
    )
    rng = random.Random(0)
    inputs = [token_ids(rng, n, vocabulary) for n in lengths]
    whole: dict[str, torch.Tensor] = {}
    rows = []
    for chunk in (budget, *chunks):
        engine.scheduler.answer("set", {"step_tokens": chunk})
        for beside in (False, True):
            name = f"{chunk}-{beside}"
            for i in range(24 if beside else 0):
                engine.generate(f"{name}-g{i}", token_ids(rng, 50, vocabulary), 60)
            for i, tokens in enumerate(inputs):
                for pooling in POOLINGS:
                    engine.embed(f"{name}-{i}-{pooling}", tokens, pooling)
            engine.run()
            vectors = {f"{i}-{p}": engine.vector(f"{name}-{i}-{p}") for i in range(len(inputs)) for p in POOLINGS}
            whole = whole or vectors
            worst = {p: min(cosine(vectors[k], whole[k]) for k in vectors if k.endswith(f"-{p}")) for p in POOLINGS}
            rows.append({"chunk": chunk, "beside_decodes": beside, "worst_cosine_to_whole": worst})
    sys.stdout.write(json.dumps(rows) + "\n")
    bench = _bench(engine, options, vocabulary) if options.bench else []
    spread = {p: cosine(whole[f"0-{p}"], whole[f"1-{p}"]) for p in POOLINGS}
    return {
        "rows": rows,
        "bench": bench,
        "cosine_of_two_inputs": spread,
        "leaks": engine.leaks(),
        "totals": engine.totals(),
    }


def _bench(engine: Engine, options: argparse.Namespace, vocabulary: int) -> list[Result]:
    """Each kind alone, then the policies at 5:5, all on one engine and one step size."""
    while options.bench_after and not options.bench_after.exists():
        time.sleep(1.0)
    size: dict[str, Any] = {"clients": 256, "vocabulary": vocabulary, "measured_s": options.bench}
    if options.on_cpu:
        size |= {"clients": 16, "prompt_tokens": 100, "output_tokens": 20, "warm_s": 2.0}
    step = {"step_tokens": 256 if options.on_cpu else 2048}
    loop, rows = ClosedLoop(engine), []
    for share, policy in (
        (1.0, "orthrus"),
        (0.0, "orthrus"),
        (0.5, "orthrus"),
        (0.5, "unified_homo"),
        (0.5, "hetero_fcfs"),
    ):
        rows.append(loop.run(Load(embed_share=share, **size), {"policy": policy, **step}))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
    return rows


def _refuse_waiting(engine: Engine, *, on_cpu: bool) -> list[int]:
    """CUDA now refuses whatever would make the host wait for it while a step is pooled. Gains an entry per such step."""
    pool, steps = engine.runner._pool, []

    def pool_without_waiting(*args: Any) -> Any:
        steps.append(len(steps))
        if on_cpu:
            return pool(*args)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return pool(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner._pool = pool_without_waiting
    return steps


def _run_with_preemptions(engine: Engine, every: int) -> None:
    steps = 0
    while engine.llm.has_unfinished_requests():
        steps += 1
        if every and steps % every == 0:
            engine.llm.reset_prefix_cache(reset_running_requests=True)
        engine.step()
    engine.run()


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


GROUPS: dict[str, Callable[[Path, argparse.Namespace], Result]] = {"tiny": tiny, "demo": demo, "mistral": mistral}


def main() -> int:
    """Runs one group and writes what it saw; judging is the test's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--demo-model", type=Path, default=Path.home() / ".cache/orthrus_serve/demo/smollm2-135m-instruct"
    )
    parser.add_argument("--demo-adapter", type=Path, default=Path("orthrus_serve/model/demo_adapter"))
    parser.add_argument("--bench", type=float, default=0.0, metavar="SECONDS", help="measured seconds per arm")
    parser.add_argument("--bench-after", type=Path, default=None)
    parser.add_argument("--on-cpu", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = GROUPS[options.group](Path(name), options)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(json.dumps(result)[:3000] + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
