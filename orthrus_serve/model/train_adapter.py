"""Trains the demo embedding adapter: a LoRA on the generator, distilled from a small sentence encoder.

Decides optimiser, schedule and what is saved. Leaves out the texts (`train_texts.py`), the loss and the choice of
batches (`distil_loss.py`). Needs torch, transformers, peft, safetensors and numpy, neither vLLM nor Ray, so that it runs
on any machine with a GPU: `python -m orthrus_serve.model.train_adapter --base DIR --teacher DIR --texts FILE --out DIR`.
Weights are bf16, their masters float32; keys are saved under the names that a generate engine binds.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from orthrus_serve.model.distil_loss import LossParts, batch_loss, choose_passages
from orthrus_serve.model.reference_embedder import ReferenceEmbedder, score_embedder
from orthrus_serve.model.retrieval_eval import PASSAGE_PREFIX, QUERY_PREFIX
from orthrus_serve.reference.pooling import pad, pool

_MODULES = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
_EVAL_SEED = 1
_WARMUP_STEPS = 10
_NUM_CHUNKS = 3  # a side of a batch is padded in this many pieces of like length, which halves the padding


@dataclass(frozen=True)
class TrainSettings:
    """Everything that shapes one run; written beside the adapter. Training stops at `seconds` or at `max_steps`."""

    rank: int
    alpha: int
    modules: str
    learning_rate: float
    batch: int
    max_tokens: int
    seconds: float
    max_steps: int
    wiki_share: float
    cluster_share: float
    contrast_weight: float
    temperature: float
    seed: int


@dataclass(frozen=True)
class TrainData:
    """Texts as token ids, and the teacher's unit vectors (float16). Query j belongs to passage `query_passage[j]`.

    `first_query[i]` and `num_queries[i]` say which queries passage i has: they lie next to each other.
    """

    passage_ids: list[list[int]]
    query_ids: list[list[int]]
    teacher_passages: Tensor
    teacher_queries: Tensor
    first_query: NDArray[np.int64]
    num_queries: NDArray[np.int64]
    pools: list[NDArray[np.int64]]
    neighbours: NDArray[np.int64]


def nearest(vectors: Tensor, count: int, block: int = 2048) -> NDArray[np.int64]:
    """Indices [rows, count] of each row's most similar other rows."""
    found: list[Tensor] = []
    for start in range(0, len(vectors), block):
        similarity = vectors[start : start + block] @ vectors.T
        rows = torch.arange(len(similarity), device=vectors.device)
        similarity[rows, rows + start] = -2
        found.append(similarity.topk(count, dim=1).indices.cpu())
    return torch.cat(found).numpy()


def load_data(args: argparse.Namespace, tokenizer: Any) -> TrainData:
    """Reads the texts, asks the teacher for its vectors (kept in `--cache`, if given), and tokenises for the student."""
    with args.texts.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][:: args.every]
    passages = [row["passage"] for row in rows]
    queries = [query for row in rows for query in row["queries"]]
    vectors = _teacher_vectors(args, passages, queries)
    counts = np.array([len(row["queries"]) for row in rows], dtype=np.int64)
    is_wiki = np.array([row["source"] == "wiki" for row in rows])
    num_neighbours = min(15, len(passages) - 1)
    return TrainData(
        passage_ids=tokenizer([PASSAGE_PREFIX + text for text in passages]).input_ids,
        query_ids=tokenizer([QUERY_PREFIX + text for text in queries]).input_ids,
        teacher_passages=vectors["passages"],
        teacher_queries=vectors["queries"],
        first_query=np.cumsum(counts) - counts,
        num_queries=counts,
        pools=[np.flatnonzero(is_wiki), np.flatnonzero(~is_wiki)],
        neighbours=nearest(vectors["passages"].to(args.device).to(_matmul_dtype(args.device)), num_neighbours),
    )


def _matmul_dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.float16


def _teacher_vectors(args: argparse.Namespace, passages: list[str], queries: list[str]) -> dict[str, Tensor]:
    if args.cache is not None and args.cache.exists():
        return torch.load(args.cache, weights_only=True)
    dtype = _matmul_dtype(args.device)
    teacher = ReferenceEmbedder.load(args.teacher, device=args.device, dtype=dtype, max_tokens=128)
    size = 32 if args.device == "cpu" else 1024
    vectors = {"passages": teacher(passages, size).half(), "queries": teacher(queries, size).half()}
    if args.cache is not None:
        torch.save(vectors, args.cache)
    return vectors


def embed_rows(model: torch.nn.Module, rows: Sequence[Sequence[int]], eos_id: int, max_tokens: int) -> Tensor:
    """Unit vectors [rows, width] of token ids, the end-of-sequence token appended; gradients flow.

    Rows are padded on the right and the model is causal, so no mask is needed: a real token never sees padding.
    """
    device = next(model.parameters()).device
    cut = [[*row[: max_tokens - 1], eos_id] for row in rows]
    order = np.argsort([len(row) for row in cut], kind="stable")
    parts: list[Tensor] = []
    for chunk in np.array_split(order, min(_NUM_CHUNKS, len(order))):
        ids, lengths = pad([cut[i] for i in chunk], eos_id, device)
        pooled = pool(model(input_ids=ids, use_cache=False).last_hidden_state, lengths, "last")
        parts.append(torch.nn.functional.normalize(pooled, dim=-1))
    inverse = torch.from_numpy(np.argsort(order, kind="stable")).to(device)
    return torch.cat(parts)[inverse]


def learning_rate_at(settings: TrainSettings, step: int, done: float) -> float:
    """Linear warm-up over the first steps, then a cosine to a twentieth; `done` is the part of the run behind us."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return settings.learning_rate * min(1.0, (step + 1) / _WARMUP_STEPS) * max(0.05, cosine)


class Trainer:
    """One run: the wrapped model, its float32 master weights and the optimiser."""

    def __init__(self, base: Any, settings: TrainSettings, data: TrainData, device: str) -> None:
        self.settings = settings
        self.data = data
        self.device = device
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=0.0,
            target_modules=list(_MODULES[settings.modules]),
            task_type="CAUSAL_LM",
        )
        torch.manual_seed(settings.seed)
        self.peft_model: Any = get_peft_model(base, config, autocast_adapter_dtype=False).to(device)
        self.eos_id = int(base.config.eos_token_id)
        self.weights = [p for p in self.peft_model.parameters() if p.requires_grad]
        self.masters = [torch.nn.Parameter(p.detach().float().clone()) for p in self.weights]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
        )
        self.rng = np.random.default_rng(settings.seed)

    @property
    def backbone(self) -> torch.nn.Module:
        """The decoder without its vocabulary head; the adapter's modules are in it."""
        return self.peft_model.base_model.model.model

    def step(self, step: int, done: float) -> LossParts:
        """One update on a fresh batch."""
        settings, data = self.settings, self.data
        chosen = choose_passages(
            data.pools,
            [settings.wiki_share, 1 - settings.wiki_share],
            data.neighbours,
            settings.batch,
            settings.cluster_share,
            self.rng,
        )
        asked = data.first_query[chosen] + self.rng.integers(0, data.num_queries[chosen])
        queries = embed_rows(self.backbone, [data.query_ids[j] for j in asked], self.eos_id, settings.max_tokens)
        passages = embed_rows(self.backbone, [data.passage_ids[i] for i in chosen], self.eos_id, settings.max_tokens)
        parts = batch_loss(
            queries,
            passages,
            data.teacher_queries[asked].to(self.device).float(),
            data.teacher_passages[chosen].to(self.device).float(),
            temperature=settings.temperature,
            contrast_weight=settings.contrast_weight,
        )
        self._update(parts.total, learning_rate_at(settings, step, done))
        return parts

    def _update(self, loss: Tensor, learning_rate: float) -> None:
        for weight in self.weights:
            weight.grad = None
        loss.backward()
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad.float() if weight.grad is not None else None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)

    def run(self) -> dict[str, float]:
        """Trains to the end of the schedule and returns what the last steps looked like."""
        self.peft_model.train()
        start, step, done = time.monotonic(), 0, 0.0
        last: dict[str, float] = {}
        while done < 1:
            parts = self.step(step, done)
            step += 1
            elapsed = time.monotonic() - start
            done = max(elapsed / self.settings.seconds, step / self.settings.max_steps)
            if step % 20 == 0 or done >= 1:
                last = {"steps": step, "train_s": round(elapsed, 1)} | {
                    key: round(float(value.detach()), 4) for key, value in vars(parts).items()
                }
                sys.stderr.write(f"{json.dumps(last)}\n")
        return last

    def save(self, out_dir: Path) -> None:
        """`adapter_model.safetensors` (bf16) and `adapter_config.json`, as a generate engine expects them."""
        out_dir.mkdir(parents=True, exist_ok=True)
        state = get_peft_model_state_dict(self.peft_model)
        tensors = {key: value.detach().to("cpu", torch.bfloat16).contiguous() for key, value in sorted(state.items())}
        weights_path = out_dir / "adapter_model.safetensors"
        save_file(tensors, weights_path, metadata={"format": "pt"})
        weights_path.chmod(0o644)  # safetensors writes 0600
        config = {
            "base_model_name_or_path": "SmolLM2-135M-Instruct",
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "lora_alpha": self.settings.alpha,
            "lora_dropout": 0.0,
            "peft_type": "LORA",
            "r": self.settings.rank,
            "target_modules": sorted(_MODULES[self.settings.modules]),
            "task_type": "CAUSAL_LM",
        }
        (out_dir / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line; defaults are the recipe of the adapter that ships."""
    parser = argparse.ArgumentParser(description="Train the demo embedding adapter.")
    parser.add_argument("--base", type=Path, required=True, help="model folder of the generator")
    parser.add_argument("--teacher", type=Path, required=True, help="model folder of all-MiniLM-L6-v2")
    parser.add_argument("--texts", type=Path, required=True, help="written by orthrus_serve.model.train_texts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="file that keeps the teacher's vectors between runs")
    parser.add_argument("--only-cache", action="store_true", help="write --cache and stop")
    parser.add_argument("--eval-data", type=Path, help="questions to score the result on; never trained on")
    parser.add_argument("--eval-questions", type=int, nargs="+", default=[60, 500])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--every", type=int, default=1, help="use every n-th passage only (for a rehearsal)")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=int, default=16)
    parser.add_argument("--modules", choices=sorted(_MODULES), default="all")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--max-steps", type=int, default=10**6)
    parser.add_argument("--wiki-share", type=float, default=0.65)
    parser.add_argument("--cluster-share", type=float, default=0.5)
    parser.add_argument("--contrast-weight", type=float, default=1.0)
    parser.add_argument("--temperature", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, saves the adapter, and writes `train.json` (settings, versions, last losses, scores) beside it."""
    args = parse_args(argv)
    settings = TrainSettings(**{name: getattr(args, name) for name in TrainSettings.__dataclass_fields__})
    start = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    data = load_data(args, tokenizer)
    if args.only_cache:
        return 0
    base = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.bfloat16)
    trainer = Trainer(base, settings, data, args.device)
    sys.stderr.write(f"ready after {time.monotonic() - start:.0f} s: {len(data.passage_ids)} passages\n")
    report: dict[str, Any] = {"settings": asdict(settings), "device": _device_name(args.device)}
    report["versions"] = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    report["last_step"] = trainer.run()
    trainer.save(args.out)
    report["adapter_bytes"] = (args.out / "adapter_model.safetensors").stat().st_size
    if args.eval_data is not None:
        report["scores"] = score_saved(args)
    text = json.dumps(report, indent=1)
    (args.out / "train.json").write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")
    return 0


def score_saved(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Retrieval scores of the adapter as it was saved, by number of questions."""
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    embedder = ReferenceEmbedder.load(args.base, args.out, device=args.device, dtype=dtype)
    return score_embedder(embedder, args.eval_data, args.eval_questions, _EVAL_SEED)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"


if __name__ == "__main__":
    sys.exit(main())
