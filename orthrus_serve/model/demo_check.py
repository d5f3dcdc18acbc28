"""Checks the demo files against what they must be: weights, tokenizer, adapter, corpus.

Pure but for reading; imports neither torch nor Transformers, so that `fetch` stays quick. Whether the model also *answers*
is `demo_answer.py`'s question.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from orthrus_serve.errors import ModelError

NUM_TENSORS = 272
NUM_ARTICLES = 10033
# Over names and bytes in name order, so that another layout of the same tensors has the same digest.
WEIGHT_DIGESTS = {
    "bfloat16": "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd",
    "float32": "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154",
}
EMBEDDER_DIGEST = (
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of all-MiniLM-L6-v2's model.safetensors
)
_DTYPE_NAMES = {"bfloat16": "BF16", "float32": "F32"}
_ROUND_TRIP = "In 1984, Zoë paid €12.50 for <|im_start|>naïve\tcode:\n  x = 3.14159  "
_KNOWN_IDS = {"The year 1984.": [504, 713, 216, 33, 41, 40, 36, 30]}


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's entries by tensor name, and the offset in bytes at which its data starts."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
    header.pop("__metadata__", None)
    return header, 8 + length


def expected_shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Name → shape of every tensor of a tied Llama with this `config.json`."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm": [hidden],
        "mlp.down_proj": [hidden, inner],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "post_attention_layernorm": [hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries],
        "self_attn.q_proj": [queries, hidden],
        "self_attn.v_proj": [keys, hidden],
    }
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def weight_digest(path: Path) -> str:
    """SHA-256 over every tensor's name and bytes, in name order."""
    header, start = read_header(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for name in sorted(header):
            begin, end = header[name]["data_offsets"]
            file.seek(start + begin)
            digest.update(name.encode())
            digest.update(file.read(end - begin))
    return digest.hexdigest()


def check_model(folder: Path, dtype: str) -> None:
    """Raises ModelError unless `folder` holds the demo generator in `dtype`, bit for bit, and its tokenizer works."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    header, _ = read_header(folder / "model.safetensors")
    shapes = {name: entry["shape"] for name, entry in header.items()}
    if len(shapes) != NUM_TENSORS or shapes != expected_shapes(config):
        raise ModelError(f"{folder}: {len(shapes)} tensors, or other shapes than the {NUM_TENSORS} expected")
    if {entry["dtype"] for entry in header.values()} != {_DTYPE_NAMES[dtype]}:
        raise ModelError(f"{folder}: weights are not all {dtype}")
    if (actual := weight_digest(folder / "model.safetensors")) != WEIGHT_DIGESTS[dtype]:
        raise ModelError(f"{folder}: weights have digest {actual}, expected {WEIGHT_DIGESTS[dtype]}")
    check_tokenizer(folder / "tokenizer.json")


def check_tokenizer(path: Path) -> None:
    """Raises ModelError unless text survives the tokenizer and a known sentence has its known ids (digits one by one)."""
    tokenizer = Tokenizer.from_file(str(path))
    restored = tokenizer.decode(tokenizer.encode(_ROUND_TRIP).ids, skip_special_tokens=False)
    if restored != _ROUND_TRIP:
        raise ModelError(f"{path}: {_ROUND_TRIP!r} came back as {restored!r}")
    for text, ids in _KNOWN_IDS.items():
        if (actual := tokenizer.encode(text).ids) != ids:
            raise ModelError(f"{path}: {text!r} became {actual}, expected {ids}")


def check_adapter(folder: Path) -> None:
    """Raises ModelError unless `folder` holds a LoRA whose names bind in a generate engine."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    names, _ = read_header(folder / "adapter_model.safetensors")
    unbound = [name for name in names if not name.startswith("base_model.model.model.layers.")]
    if config.get("peft_type") != "LORA" or not names or unbound:
        raise ModelError(f"{folder} is not a LoRA that a generate engine binds (first: {next(iter(unbound), 'none')})")


def check_embedder(folder: Path) -> None:
    """Raises ModelError unless `folder` holds all-MiniLM-L6-v2: its weights, and the files that say how it pools."""
    missing = [
        name
        for name in ("model.safetensors", "config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json")
        if not (folder / name).is_file()
    ]
    if missing:
        raise ModelError(f"{folder} holds no {missing[0]}")
    with (folder / "model.safetensors").open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != EMBEDDER_DIGEST:
        raise ModelError(f"{folder}: weights have digest {actual}, expected {EMBEDDER_DIGEST}")


def check_corpus(path: Path) -> None:
    """Raises ModelError unless every line is a passage with a title and a text, and none is missing."""
    count = 0
    with path.open(encoding="utf-8") as lines:
        for count, line in enumerate(lines, start=1):
            row = json.loads(line)
            if row.keys() != {"title", "text"} or not row["title"] or not row["text"]:
                raise ModelError(f"{path}, line {count}: expected a title and a text")
    if count != NUM_ARTICLES:
        raise ModelError(f"{path} holds {count} passages, expected {NUM_ARTICLES}")
