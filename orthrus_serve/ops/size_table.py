"""`orthrus-serve size`: what fits on which GPU, as a Markdown table. Reads model folders, or takes models that are known.

Leaves out the arithmetic (`policy/sizing.py`) and everything measured.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from orthrus_serve.errors import ConfigError
from orthrus_serve.policy.sizing import Gpu, ModelShape, fit

GB, TERA = 10**9, 10**12
# name, memory in GB, dense bf16 TFLOP/s: the vendor's data sheets.
GPUS = (
    Gpu("L4 24 GB", 24 * GB, 121 * TERA),
    Gpu("A100 40 GB", 40 * GB, 312 * TERA),
    Gpu("L40S 48 GB", 48 * GB, 362 * TERA),
    Gpu("H100 80 GB", 80 * GB, 989 * TERA),
    Gpu("H200 141 GB", 141 * GB, 989 * TERA),
)
MODELS = (
    ModelShape("Mistral-7B-v0.1", 32, 4096, 14336, 32, 8, 128, 32000, ties_embeddings=False),
    ModelShape("Qwen2-7B", 28, 3584, 18944, 28, 4, 128, 152064, ties_embeddings=False),
    ModelShape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256, ties_embeddings=False),
)
REQUEST_TOKENS = 800


def main(argv: list[str]) -> int:
    """Prints the table. Returns 0.

    Raises:
        ConfigError: a folder has no usable config.json.
    """
    parser = argparse.ArgumentParser(prog="orthrus-serve size", description="What fits on which GPU: arithmetic only.")
    parser.add_argument("folder", nargs="*", type=Path, help="model folders with a config.json (three known models)")
    parser.add_argument(
        "--tokens", type=int, default=REQUEST_TOKENS, help=f"prompt and output of one request ({REQUEST_TOKENS})"
    )
    args = parser.parse_args(argv)
    if args.tokens < 1:
        raise ConfigError(f"--tokens: must be at least 1, got {args.tokens}")
    print("\n".join(table([read_shape(folder) for folder in args.folder] or MODELS, args.tokens)))
    return 0


def table(shapes: Sequence[ModelShape], request_tokens: int = REQUEST_TOKENS) -> list[str]:
    """The lines of a Markdown table: a row for each model, a column for each card."""
    lines = [
        f"| model | weights | KV of 1,000 tokens | {' | '.join(gpu.name for gpu in GPUS)} |",
        "|---" * (3 + len(GPUS)) + "|",
    ]
    for shape in shapes:
        cells = [_cell(shape, gpu, request_tokens) for gpu in GPUS]
        facts = f"{shape.weight_bytes / GB:.1f} GB | {shape.kv_bytes_per_token * 1000 / 10**6:.0f} MB"
        lines.append(f"| {shape.name} | {facts} | {' | '.join(cells)} |")
    return lines


def _cell(shape: ModelShape, gpu: Gpu, request_tokens: int) -> str:
    found = fit(shape, gpu, request_tokens=request_tokens)
    if not found.kv_tokens:
        return "does not fit"
    return f"{_thousands(found.kv_tokens)} tokens, {found.requests} requests, {_thousands(found.tokens_per_s)}/s"


def _thousands(number: int) -> str:
    return f"{round(number, -3):,}" if number >= 10_000 else f"{round(number, -2):,}"


def read_shape(folder: Path) -> ModelShape:
    """The shape that a model folder's `config.json` gives.

    Raises:
        ConfigError: it cannot be read, or is not that of a plain decoder.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        num_heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
        return ModelShape(
            name=folder.resolve().name,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_size=int(config.get("head_dim") or hidden_size // num_heads),
            vocab_size=int(config["vocab_size"]),
            ties_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: is not the config.json of a decoder: {error!r}") from error
