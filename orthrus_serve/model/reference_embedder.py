"""Embeds many texts at once with Transformers and peft alone: how well a model retrieves, apart from any engine.

Decides nothing about serving. As a command it scores a model on a retrieval sample:
`python -m orthrus_serve.model.reference_embedder --model DIR --adapter DIR --eval-data FILE --json OUT`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer

from orthrus_serve.model.retrieval_eval import (
    PASSAGE_PREFIX,
    QUERY_PREFIX,
    bm25_similarities,
    evaluate,
    load_task,
    rank,
    scores,
)
from orthrus_serve.reference.decoder import ReferenceDecoder
from orthrus_serve.reference.pooling import pad, pool


class ReferenceEmbedder:
    """A loaded model with how its tokens become a vector. Call it with texts; it gives a float32 tensor on the CPU."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, *, pooling: Literal["last", "mean"], append_eos: bool, max_tokens: int
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.pooling: Literal["last", "mean"] = pooling
        self.append_eos = append_eos
        self.max_tokens = max_tokens

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        adapter_dir: str | Path | None = None,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        max_tokens: int = 512,
    ) -> Self:
        """A decoder (last token, end-of-sequence appended), with its adapter if given, or an encoder (mean)."""
        config = AutoConfig.from_pretrained(model_dir)
        is_decoder = str((config.architectures or [""])[0]).endswith("ForCausalLM")
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        if not is_decoder:
            encoder = AutoModel.from_pretrained(model_dir, dtype=dtype).to(device).eval()
            return cls(encoder, tokenizer, pooling="mean", append_eos=False, max_tokens=max_tokens)
        adapters = {} if adapter_dir is None else {"adapter": adapter_dir}
        reference = ReferenceDecoder.load(model_dir, adapters, device=device, dtype=dtype)
        # peft wraps the layers in place and leaves its only adapter on; it stays unmerged, as in the engine
        backbone = reference.decoder.base_model
        return cls(backbone, tokenizer, pooling="last", append_eos=True, max_tokens=max_tokens)

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, cut to `max_tokens` with the end-of-sequence token counted."""
        room = self.max_tokens - int(self.append_eos)
        rows = self.tokenizer(list(texts), truncation=True, max_length=room).input_ids
        return [[*row, self.tokenizer.eos_token_id] for row in rows] if self.append_eos else rows

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], batch_size: int = 32) -> Tensor:
        """Unit vectors [texts, width], in the order of the texts."""
        rows = self.token_ids(texts)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        device = next(self.model.parameters()).device
        parts: list[Tensor] = []
        for start in range(0, len(order), batch_size):
            chunk = [rows[i] for i in order[start : start + batch_size]]
            ids, lengths = pad(chunk, self.tokenizer.pad_token_id, device)
            mask = (torch.arange(ids.shape[1], device=device)[None] < lengths[:, None]).long()
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            parts.append(nn.functional.normalize(pool(hidden, lengths, self.pooling), dim=-1))
        vectors = torch.cat(parts)
        result = torch.empty_like(vectors)
        result[torch.tensor(order, device=device)] = vectors
        return result.cpu()


def score_embedder(
    embedder: ReferenceEmbedder, eval_data: Path, sizes: Sequence[int], seed: int
) -> dict[str, dict[str, float]]:
    """`retrieval_eval.evaluate` for samples of several sizes, keyed by size. Encoders get no prefixes."""
    prefixes = (QUERY_PREFIX, PASSAGE_PREFIX) if embedder.append_eos else ("", "")
    result: dict[str, dict[str, float]] = {}
    for size in sizes:
        found = evaluate(
            lambda texts: embedder(texts).numpy(),
            eval_data,
            size,
            seed,
            query_prefix=prefixes[0],
            passage_prefix=prefixes[1],
        )
        result[str(size)] = {key: value for key, value in found.items() if key != "top1"}
    return result


def score_bm25(eval_data: Path, sizes: Sequence[int], seed: int) -> dict[str, dict[str, float]]:
    """The same scores for word matching alone."""
    tasks = {str(size): load_task(eval_data, size, seed) for size in sizes}
    return {size: scores(rank(bm25_similarities(t.questions, t.passages)), t.gold) for size, t in tasks.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: scores one model (or, without --model, BM25) and prints JSON keyed by the number of questions."""
    parser = argparse.ArgumentParser(description="Score an embedder on a retrieval sample.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--eval-data", type=Path, required=True)
    parser.add_argument("--eval-questions", type=int, nargs="+", default=[60, 500])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args(argv)
    if args.model is None:
        result = score_bm25(args.eval_data, args.eval_questions, args.seed)
    else:
        dtype = torch.float32 if args.dtype == "float32" else torch.bfloat16
        embedder = ReferenceEmbedder.load(
            args.model, args.adapter, device=args.device, dtype=dtype, max_tokens=args.max_tokens
        )
        result = score_embedder(embedder, args.eval_data, args.eval_questions, args.seed)
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
