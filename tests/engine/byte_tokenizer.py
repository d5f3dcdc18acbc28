"""A tokenizer whose tokens are single bytes, so that the tiny model can be held to a grammar and stopped at a string."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.engine.harness import VOCAB_SIZE

FIRST_BYTE = 3


def make_byte_tokenizer(folder: Path) -> Path:
    """Ids 3 to 258 are the 256 bytes; the rest of the tiny model's vocabulary are words that no text holds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {char: FIRST_BYTE + i for i, char in enumerate(alphabet)}
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder
