"""What rounding alone does to vectors and next tokens: Transformers in bfloat16 and float16 against itself in float32.

A tool, not a test: `python -m tests.engine.rounding --json FILE`. `orthrus-serve verify` takes its tolerances from it.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from orthrus_serve.reference.decoder import ReferenceDecoder

DEMO = Path("~/.cache/orthrus_serve/demo").expanduser()
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def prompts(count: int, longest: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random tokens, short ones as likely as long ones: `verify` asks such."""
    rng = random.Random(seed)
    return [
        [rng.randrange(20, vocabulary) for _ in range(max(1, round(longest ** rng.random())))] for _ in range(count)
    ]


def compared(exact: ReferenceDecoder, rounded: ReferenceDecoder, asked: list[list[int]]) -> dict[str, Any]:
    """How far the rounded model is from the exact one."""
    lacks, deficits, worst = [], [], (0.0, 0)
    for ids in asked:
        ended = [*ids, exact.decoder.config.eos_token_id]  # as the server appends it
        one, other = (model.vector(ended, "adapter", pooling="last") for model in (exact, rounded))
        lacks.append(1.0 - float(torch.nn.functional.cosine_similarity(one.float(), other.float(), dim=0)))
        worst = max(worst, (lacks[-1], len(ended)))
        chosen = int(rounded.next_logits(ids, [0], None)[0].argmax())
        logits = exact.next_logits(ids, [0], None)[0].float()
        deficits.append(float(logits.max() - logits[chosen]))
    lacks.sort()
    deficits.sort()
    last = len(asked) - 1
    return {
        "prompts": len(asked),
        "tokens_of_the_worst": worst[1],
        "cosine_lacks": {
            q: round(lacks[int(share * last)], 6) for q, share in (("p50", 0.5), ("p99", 0.99), ("max", 1))
        },
        "logit_deficit": {q: round(deficits[int(share * last)], 4) for q, share in (("p99", 0.99), ("max", 1))},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=DEMO / "smollm2-135m-instruct")
    parser.add_argument("--adapter", type=Path, default=DEMO / "orthrus-embed")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--longest", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    exact = ReferenceDecoder.load(options.model, {"adapter": options.adapter})
    asked = prompts(options.count, options.longest, exact.decoder.config.vocab_size, options.seed)
    result: dict[str, Any] = {"torch": torch.__version__, "options": {k: str(v) for k, v in vars(options).items()}}
    for name, dtype in DTYPES.items():
        result[name] = compared(
            exact, ReferenceDecoder.load(options.model, {"adapter": options.adapter}, dtype=dtype), asked
        )
        sys.stdout.write(f"{name}: {json.dumps(result[name])}\n")
        sys.stdout.flush()
    options.json.write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
