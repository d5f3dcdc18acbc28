"""Finds the fastest settings of vLLM's LoRA kernels on this card: `python -m tests.gpu.lora_tuning --json DIR`.

vLLM's own defaults are one guess for every card; it reads better ones from the folder that VLLM_TUNED_CONFIG_FOLDER names, in
the format described beside its kernels (`vllm/lora/ops/triton_ops/README_TUNING.md`). This writes such files, and how much
each setting gained. A setting counts only when its result equals the default's within bf16 rounding.

Kernels are compiled in several processes first (`--compile PART/PARTS`), since one setting takes the compiler up to a second.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError
from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

Config = dict[str, Any]
Tuned = dict[str, Any]

MAX_LORAS = 1
# Twice the rounding of bf16 sums of this size: split sums add in another order.
TOLERANCE = 0.02
# What the compiler or the launcher says of a setting that does not fit the card.
UNFIT = (TritonError, RuntimeError)


@dataclass(frozen=True)
class Case:
    """One kernel call: `slices` weights packed in one layer, `sizes` the output length of each (expand) or of none (shrink)."""

    op: str
    num_tokens: int
    hidden: int
    rank: int
    sizes: tuple[int, ...]

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Where vLLM looks a setting up: slices, tokens, K, N."""
        k, n = (self.hidden, self.rank) if self.op == "shrink" else (self.rank, max(self.sizes))
        return str(len(self.sizes)), str(self.num_tokens), str(k), str(n)


def cases(ops: list[str], rank: int, sizes: tuple[int, ...], *, hidden: int, inner: int, keys: int) -> Iterator[Case]:
    """Every LoRA call of one decoder layer, at each number of tokens. The second product goes part by part."""
    packed = ((hidden, (hidden, keys, keys)), (hidden, (hidden,)), (hidden, (inner, inner)), (inner, (hidden,)))
    for num_tokens in sizes:
        if "shrink" in ops:
            yield from (Case("shrink", num_tokens, width, rank, outputs) for width, outputs in packed)
        if "expand" in ops:
            yield from (Case("expand", num_tokens, hidden, rank, (output,)) for output in (keys, hidden, inner))


def settings(op: str, rank: int) -> Iterator[Config]:
    """The search space, small on purpose: what a first wide search kept."""
    base: Config = {"num_ctas": 1, "max_nreg": None}
    if op == "shrink":
        block_n = min(64, max(16, rank))
        for m, k, split, warps, stages in itertools.product((16, 32, 64), (64, 128, 256), (1, 2, 4, 8), (4, 8), (3,)):
            if m * k <= 64 * 128 or warps == 8:
                shape = {"block_m": m, "block_n": block_n, "block_k": k, "split_k": split, "group_size_m": 8}
                yield base | shape | {"num_warps": warps, "num_stages": stages}
        return
    block_k = min(64, max(16, rank))
    for m, n, warps, stages in itertools.product((16, 32, 64, 128), (64, 128, 256), (4, 8), (1, 2)):
        if 1024 <= m * n <= 128 * 128:
            yield base | {"block_m": m, "block_n": n, "block_k": block_k, "num_warps": warps, "num_stages": stages}


class Bench:
    """Runs the kernels of one case on random data."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(0)
        meta = LoRAKernelMeta.make(MAX_LORAS, case.num_tokens, "cuda")
        meta.prepare_tensors(torch.zeros(case.num_tokens, dtype=torch.int32))
        self._meta = meta.meta_args(case.num_tokens, False)
        self._x = torch.randn(case.num_tokens, case.hidden, device="cuda").bfloat16()
        self._low = torch.randn(len(case.sizes), case.num_tokens, case.rank, device="cuda")
        self._a = [self._weight(case.rank, case.hidden) for _ in case.sizes]
        self._b = [self._weight(size, case.rank) for size in case.sizes]
        self._y = torch.zeros(case.num_tokens, sum(case.sizes), device="cuda").bfloat16()

    @staticmethod
    def _weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(MAX_LORAS, 1, rows, columns, device="cuda") * 0.02).bfloat16()

    def once(self, config: Config | None) -> torch.Tensor:
        """One call with this setting (None: vLLM's default); its result."""
        module = lora_shrink_op if self.case.op == "shrink" else lora_expand_op
        stock = module.get_lora_op_configs
        if config is not None:
            module.get_lora_op_configs = lambda *_a, **_k: config
        try:
            if self.case.op == "shrink":
                module._lora_shrink(self._x, self._a, self._low, *self._meta, 1.0)
                return self._low
            module._lora_expand(self._low, self._b, self._y, *self._meta, 0, True)
            return self._y
        finally:
            module.get_lora_op_configs = stock

    def result(self, config: Config | None) -> torch.Tensor:
        """The result from a clean start."""
        self._y.zero_()
        torch.manual_seed(1)
        if self.case.op == "expand":
            self._low.copy_(torch.randn_like(self._low))
        return self.once(config).float().clone()

    def micros(self, config: Config | None, repeats: int = 20) -> float:
        """Time of one call inside a CUDA graph, in µs: the best of five replays of `repeats` calls."""
        self.once(config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                self.once(config)
        best = float("inf")
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end))
        return 1e3 * best / repeats


def tune(case: Case) -> tuple[Config | None, float, float]:
    """The best setting (None: the default is as good), its time and the default's, in µs."""
    bench = Bench(case)
    expected = bench.result(None)
    scale = float(expected.abs().max())
    default_us = bench.micros(None)
    best: Config | None = None
    best_us = default_us
    for config in settings(case.op, case.rank):
        try:
            wrong = float((bench.result(config) - expected).abs().max())
        except UNFIT:  # too large for shared memory: the next one
            continue
        if wrong > TOLERANCE * scale:
            continue
        took_us = bench.micros(config)
        # Without a split the sum has one order, and the same input gives the same bits: worth two per cent.
        if took_us < best_us * (
            0.98 if case.op == "shrink" and config["split_k"] > 1 and best and best.get("split_k") == 1 else 1
        ):
            best, best_us = config, took_us
    return best, best_us, default_us


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="folder for the files")
    parser.add_argument("--ranks", type=int, nargs="*", default=[16])
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--ops", nargs="*", default=["shrink", "expand"])
    parser.add_argument("--compile", default=None, metavar="PART/PARTS", help="only compile this part of the settings")
    options = parser.parse_args()
    options.json.mkdir(parents=True, exist_ok=True)
    shape = {"hidden": 4096, "inner": 14336, "keys": 1024}
    todo = [case for rank in options.ranks for case in cases(options.ops, rank, tuple(options.sizes), **shape)]
    if options.compile:
        part, parts = map(int, options.compile.split("/"))
        for case in [c for c in todo if c.num_tokens == options.sizes[0]]:
            bench = Bench(case)
            for config in list(settings(case.op, case.rank))[part::parts]:
                try:
                    bench.once(config)
                except UNFIT:
                    continue
        return 0
    parts = 12
    command = [sys.executable, "-m", "tests.gpu.lora_tuning", "--json", str(options.json)]
    common = ["--ranks", *map(str, options.ranks), "--sizes", *map(str, options.sizes), "--ops", *options.ops]
    compilers = [subprocess.Popen([*command, *common, "--compile", f"{part}/{parts}"]) for part in range(parts)]
    for compiler in compilers:
        compiler.wait()
    write(options.json, todo)
    return 0


def write(folder: Path, todo: list[Case]) -> None:
    """Tunes every case and writes vLLM's files and a table of gains."""
    name = torch.cuda.get_device_name().replace(" ", "_").replace("-", "_")
    # What was found before, for other cases, stays.
    files: dict[str, Tuned] = {file.name: json.loads(file.read_text()) for file in folder.glob(f"{name}_*.json")}
    table = []
    for case in dict.fromkeys(todo):
        best, best_us, default_us = tune(case)
        table.append({**vars(case), "default_us": round(default_us, 2), "tuned_us": round(best_us, 2), "config": best})
        sys.stdout.write(f"{case.op} {case.key} {default_us:.1f} -> {best_us:.1f} us {best}\n")
        sys.stdout.flush()
        file = f"{name}_SHRINK.json" if case.op == "shrink" else f"{name}_EXPAND_TRUE.json"
        slices, m, k, n = case.key
        if best is None:
            from vllm.lora.ops.triton_ops.utils import get_lora_op_configs

            best = dict(
                get_lora_op_configs(case.op, MAX_LORAS + 1, case.num_tokens, max(case.hidden, *case.sizes), case.rank,
                                    len(case.sizes), True if case.op == "expand" else None)
            )  # fmt: skip
        tree = files.setdefault(file, {}).setdefault(str(MAX_LORAS + 1), {}).setdefault(slices, {})
        tree.setdefault(m, {}).setdefault(k, {})[n] = best
    for file, data in files.items():
        (folder / file).write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    (folder / f"lora-tuning-{todo[0].op}.json").write_text(json.dumps(table) + "\n")


if __name__ == "__main__":
    sys.exit(main())
