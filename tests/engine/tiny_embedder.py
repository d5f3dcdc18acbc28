"""A tiny BERT with random weights, its tokenizer, the files of sentence-transformers, and the vectors that it should give."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

# Smaller and larger than the tiny generator's, so that whoever takes one for the other is found out.
VOCAB_SIZE, HIDDEN_SIZE, MAX_TOKENS = 600, 64, 128
CLS, SEP = 101, 102


@dataclass(frozen=True)
class TinyEmbedder:
    """The folder of the model, and what it should answer."""

    model: Path

    @cached_property
    def _reference(self) -> Any:
        return BertModel.from_pretrained(self.model, dtype=torch.float32).eval()

    @torch.no_grad()
    def vector(self, token_ids: list[int], *, normalize: bool = True, dimensions: int | None = None) -> torch.Tensor:
        """Mean over all positions, as sentence-transformers pools, by Transformers; fp32 `[dimensions or hidden size]`."""
        hidden = self._reference(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
        vector = hidden.mean(0)[:dimensions]
        return torch.nn.functional.normalize(vector, dim=-1) if normalize else vector


def make_tiny_embedder(folder: Path) -> TinyEmbedder:
    """Two layers; `wN` is token N, and texts get CLS and SEP around them."""
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=MAX_TOKENS,
    )  # fmt: skip
    model = BertModel(config).to(torch.float32)
    with torch.no_grad():  # as initialised, all vectors point the same way, and any mistake has a good cosine
        for weight in model.parameters():
            weight.normal_(0, 0.3)
    model.save_pretrained(folder)
    special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": CLS, "[SEP]": SEP}
    words = special | {f"w{i}": i for i in range(2, VOCAB_SIZE) if i not in (CLS, SEP)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_TOKENS, "do_lower_case": True}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": HIDDEN_SIZE, "pooling_mode_mean_tokens": True})
    )
    return TinyEmbedder(folder)
