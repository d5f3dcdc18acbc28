"""Where a step's time goes and how policies compare, on a card with 7B shapes: `python -m tests.gpu.speed PART… --json FILE`.

Parts, in this order, on one engine in this process, without HTTP:

`matrix`    the layer's matrix products alone, without an engine: what the card does at the step's own shapes.
`curve`     time of a step by its tokens: prefill without an adapter, embeddings with one, decodes.
`profile`   GPU time by kernel of embedding, prefill, mixed and decode steps, and the time in which the GPU was idle.
`policies`  closed loops at saturation by ratio and policy.
`hops`      Iter-RetGen in its short form by policy.

`--sync` compares the LoRA row tables made on the host with stock's, which wait for the GPU. `--on-cpu` rehearses all of it.
"""

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tests.engine.conftest  # noqa: F401  sets vLLM's switches before anything imports it
from tests.engine.harness import VOCAB_SIZE, Engine, make_tiny_model
from tests.gpu.closed_loop import ClosedLoop, Load
from tests.gpu.engines import engine_on_device, random_model, say, token_ids, vocabulary_of
from tests.gpu.hops import HopLoad, run_hops

Row = dict[str, Any]

# Kernel name → what it is for; the first match counts.
GROUPS = (
    ("lora", r"_lora_"),
    ("attention", r"flash|fmha|attn|prepare_varlen"),
    ("matrix", r"nvjet|gemm|cutlass|xmma|cublas|splitK"),
    ("kv cache", r"reshape_and_cache"),
    ("copies", r"(?i)memcpy|memset"),
    ("norm, rope, activation", r"(?i)triton_|norm|rotary|silu|act_and_mul"),
)
PROMPT, OUTPUT = 640, 150
ARMS = [
    "1.0:orthrus:10:20", "0.0:orthrus:10:25",
    "0.9:orthrus:10:30", "0.9:unified_homo:10:30", "0.9:hetero_fcfs:10:30",
    "0.5:orthrus:14:42", "0.5:unified_homo:14:42", "0.5:hetero_fcfs:14:42",
    "0.1:orthrus:8:25", "0.1:unified_homo:8:25", "0.1:hetero_fcfs:8:25",
]  # fmt: skip


def matrix(options: argparse.Namespace) -> list[Row]:
    """Time of each product of a decoder layer, and of one step made of them alone."""
    if options.on_cpu:
        return []
    rows = []
    for tokens in (64, 256, 512, 1024, 2048, 4096):
        total_us = 0.0
        for name, n, k in (("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336)):
            weights = [(torch.randn(n, k, device="cuda") * 0.02).bfloat16() for _ in range(8)]
            x = torch.randn(tokens, k, device="cuda").bfloat16()
            took_us = graph_micros(lambda: [torch.nn.functional.linear(x, w) for w in weights]) / len(weights)  # noqa: B023
            rows.append({"tokens": tokens, "product": name, "us": took_us, "tflops": 2e-6 * tokens * n * k / took_us})
            total_us += took_us
        flops = 2 * tokens * (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336)
        rows.append({"tokens": tokens, "product": "32 layers", "us": 32 * total_us, "tflops": 1e-6 * flops / total_us})
        say(rows[-1])
    return rows


def graph_micros(run: Callable[[], Any]) -> float:
    """Time of `run` inside a CUDA graph, in µs: the median of ten replays."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    took = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(1e3 * start.elapsed_time(end))
    return statistics.median(took)


class Lab:
    """One engine and the ways to fill its steps."""

    def __init__(self, engine: Engine, vocabulary: int, *, small: bool) -> None:
        self.engine = engine
        self._vocabulary = vocabulary
        self._rng = random.Random(1)
        self._count = 0
        self.prompt, self.output = (100, 20) if small else (PROMPT, OUTPUT)

    def set(self, **live: Any) -> None:
        answer = self.engine.scheduler.answer("set", live)
        if answer["refused"]:
            raise ValueError(answer["refused"])

    def add(self, kind: str, count: int, *, output: int = 1, length: int | None = None) -> None:
        """`embed`, or `generate` without an adapter."""
        for _ in range(count):
            self._count += 1
            prompt = token_ids(self._rng, length or self.prompt, self._vocabulary)
            if kind == "embed":
                self.engine.embed(f"lab{self._count}", prompt, "last")
            else:
                self.engine.generate(f"lab{self._count}", prompt, output, temperature=0.7)

    def until_decoding(self) -> None:
        """Steps until every request has its first token."""
        while any(r.num_output_tokens == 0 for r in self.engine.scheduler.requests.values()):
            self.engine.step()

    def drop(self) -> None:
        """Ends everything."""
        self.engine.llm.abort_request(list(self.engine.llm.output_processor.request_states))
        self.engine.run()
        self.engine.results.clear()
        self.engine.finish_order.clear()

    def step_ms(self, steps: int) -> float:
        """Median time of a step, in ms."""
        took = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.engine.step()
            took.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(took)

    def fill(self, state: str, steps: int, *, decodes: int = 0) -> None:
        """Work for at least `steps` full steps of that state, the first few already done."""
        budget = self.engine.scheduler.live.step_tokens
        wanted = -(-(steps + 6) * budget // self.prompt)
        if state in ("mixed", "decode"):
            self.add("generate", decodes, output=400 if self.prompt == PROMPT else 200)
            self.until_decoding()
        if state in ("embed", "mixed"):
            self.add("embed", wanted)
        elif state == "prefill":
            self.add("generate", wanted)
        for _ in range(4):
            self.engine.step()


def curve(lab: Lab, options: argparse.Namespace) -> list[Row]:
    """Step time by size and content."""
    rows = []
    sizes = (64, 128) if options.on_cpu else (256, 512, 1024, 1536, 2048, 4096)
    for wait in options.waits:
        use_stock_tables(lab.engine, wait)
        for state in ("prefill", "embed"):
            for size in sizes:
                lab.set(policy="orthrus", step_tokens=size)
                lab.fill(state, 12)
                rows.append({"state": state, "tokens": size, "stock_tables": wait, "ms": round(lab.step_ms(12), 3)})
                say(rows[-1])
                lab.drop()
        for decodes in (4, 8) if options.on_cpu else (16, 64, 128, 240):
            lab.set(policy="orthrus", step_tokens=sizes[-1])
            lab.fill("decode", 0, decodes=decodes)
            rows.append({"state": "decode", "tokens": decodes, "stock_tables": wait, "ms": round(lab.step_ms(40), 3)})
            say(rows[-1])
            lab.set(step_tokens=sizes[-2])
            lab.fill("mixed", 12)
            ms = round(lab.step_ms(12), 3)
            rows.append({"state": "mixed", "tokens": sizes[-2], "decodes": decodes, "stock_tables": wait, "ms": ms})
            say(rows[-1])
            lab.drop()
    use_stock_tables(lab.engine, False)
    return rows


def profile(lab: Lab, options: argparse.Namespace) -> list[Row]:
    """Kernel times of eight steps of each state."""
    rows = []
    budget, decodes, steps = (128, 8, 3) if options.on_cpu else (2048, 200, 8)
    for wait in options.waits:
        use_stock_tables(lab.engine, wait)
        for state in ("embed", "prefill", "mixed", "decode"):
            lab.set(policy="orthrus", step_tokens=budget)
            lab.fill(state, steps, decodes=decodes)
            with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as trace:
                begin = time.perf_counter()
                for _ in range(steps):
                    lab.engine.step()
                wall_ms = 1e3 * (time.perf_counter() - begin) / steps
            rows.append({"state": state, "stock_tables": wait, "wall_ms": round(wall_ms, 2), **kernels(trace, steps)})
            say({k: v for k, v in rows[-1].items() if k != "kernels"})
            lab.drop()
    use_stock_tables(lab.engine, False)
    return rows


def kernels(trace: Any, steps: int) -> Row:
    """GPU time of a step by group and by kernel, in ms, and the time between first and last kernel in which none ran."""
    spans, by_name = [], Counter[str]()
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            by_name[event.name] += event.time_range.elapsed_us()
    spans.sort()
    idle_us, edge = 0.0, spans[0][0] if spans else 0.0
    gaps = []
    for start, end in spans:
        if start > edge:
            idle_us += start - edge
            gaps.append(start - edge)
        edge = max(edge, end)
    groups = Counter[str]()
    for name, us in by_name.items():
        groups[next((group for group, pattern in GROUPS if re.search(pattern, name)), "other")] += us
    per_step = 1e-3 / steps
    return {
        "idle_ms": round(idle_us * per_step, 3),
        "largest_gaps_ms": [round(1e-3 * gap, 3) for gap in sorted(gaps)[-2 * steps :]],
        "groups_ms": {name: round(us * per_step, 3) for name, us in groups.most_common()},
        "kernels": {name[:120]: round(us * per_step, 4) for name, us in by_name.most_common(40)},
    }


def use_stock_tables(engine: Engine, wanted: bool) -> None:
    """Switches between our LoRA row tables and stock's, on the running engine. CUDA only."""
    if not torch.cuda.is_available():
        return
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    from orthrus_serve.engine.gpu_lora import HostSortedPunicaWrapperGPU

    manager = engine.runner.lora_manager._adapter_manager
    for wrapper in manager.punica_wrapper_mapping.values():
        wrapper.__class__ = PunicaWrapperGPU if wanted else HostSortedPunicaWrapperGPU


def policies(lab: Lab, options: argparse.Namespace) -> list[Row]:
    """Closed loops, one arm after the other on the same engine."""
    size: Row = {"clients": options.clients, "vocabulary": lab._vocabulary}
    size |= {"prompt_tokens": lab.prompt, "output_tokens": lab.output}
    loop, rows = ClosedLoop(lab.engine), []
    for arm in options.arms:
        share, policy, warm_s, measured_s, *more = arm.split(":")
        load = Load(embed_share=float(share), warm_s=float(warm_s), measured_s=float(measured_s), **size)
        settings: Row = {"policy": policy, "step_tokens": options.step_tokens, "target_tpot_ms": None}
        settings |= {name: float(value) for name, value in (setting.split("=") for setting in more)}
        rows.append({"arm": arm, **loop.run(load, {} if options.stock else settings)})
        say(rows[-1])
    return rows


def hops(lab: Lab, options: argparse.Namespace) -> list[Row]:
    """Iter-RetGen by policy."""
    rows = []
    load = (
        HopLoad(sessions=8, seconds=3.0, prompt=60, output=20, documents=3, document=30)
        if options.on_cpu
        else HopLoad()
    )
    for name in options.policies:
        lab.set(policy=name, step_tokens=options.hop_step_tokens)
        rows.append({"policy": name, **run_hops(lab.engine, load, lab._vocabulary)})
        say(rows[-1])
        lab.drop()
    return rows


PARTS: dict[str, Callable[[Lab, argparse.Namespace], list[Row]]] = {
    "curve": curve, "profile": profile, "policies": policies, "hops": hops,
}  # fmt: skip


def make_lab(folder: Path, options: argparse.Namespace) -> Lab:
    if options.on_cpu:
        model, vocabulary, extra = make_tiny_model(folder), VOCAB_SIZE, {"budget": 256, "max_num_seqs": 32}
        options.step_tokens, options.hop_step_tokens, options.clients = 128, 64, 16
    else:
        model, vocabulary = random_model(folder, options.shape, rank=options.rank), vocabulary_of(options.shape)
        extra = {
            "dtype": "bfloat16", "load_format": "dummy", "max_model_len": 4096, "max_lora_rank": options.rank,
            "budget": 4096, "max_num_seqs": 256, "kv_cache_memory_bytes": options.kv_gib * 2**30,
            "gpu_memory_utilization": options.memory,
        }  # fmt: skip
    if options.stock:
        extra |= {"mixed": False, "budget": options.step_tokens}
    if options.stock in ("embed", "embed_merged"):
        extra |= {"runner": "pooling", "convert": "embed", "pooler_config": {"seq_pooling_type": "LAST"}}
    if options.stock in ("generate", "embed_merged"):
        extra |= {"enable_lora": False}
        extra.pop("max_lora_rank", None)
    engine = engine_on_device(model, folder / "steps", on_cpu=options.on_cpu, **extra)
    return Lab(engine, vocabulary, small=options.on_cpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("matrix", *PARTS))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--after", type=Path, default=None, help="start measuring once this file is there")
    parser.add_argument("--sync", dest="waits", action="store_const", const=[False, True], default=[False])
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--hop-step-tokens", type=int, default=1024)
    parser.add_argument("--arms", nargs="*", default=ARMS, metavar="SHARE:POLICY:WARM_S:MEASURED_S[:SETTING=VALUE]…")
    parser.add_argument("--shape", default="mistral-7b-v0.1", help="a folder of tests/gpu/shapes")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--kv-gib", type=int, default=80)
    parser.add_argument("--memory", type=float, default=0.8, help="share of the card that must be free at the start")
    parser.add_argument(
        "--stock", choices=("generate", "embed", "embed_merged"),
        help="vLLM's own engine: generations without LoRA, embeddings with it, or with the adapter merged into the weights",
    )  # fmt: skip
    parser.add_argument("--policies", nargs="*", default=["orthrus", "unified_homo", "hetero_fcfs"])
    parser.add_argument("--on-cpu", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "versions": {"torch": torch.__version__},
        "options": {k: str(v) for k, v in vars(options).items()},
    }
    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        lab = make_lab(Path(name), options) if set(options.parts) - {"matrix"} else None
        say({"engine_start_s": round(time.perf_counter() - began, 1)})
        while options.after and not options.after.exists():
            time.sleep(0.5)
        for part in options.parts:
            began = time.perf_counter()
            result[part] = matrix(options) if lab is None or part == "matrix" else PARTS[part](lab, options)
            say({"part": part, "took_s": round(time.perf_counter() - began, 1)})
            options.json.write_text(json.dumps(result) + "\n")
        if lab is not None and not options.stock:
            result["leaks"] = lab.engine.leaks()
    options.json.write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
