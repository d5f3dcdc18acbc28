"""Training: batches, the loss, and a whole small run on a random model, whose adapter then serves as trained."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import normalize
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from orthrus_serve.engine.adapter_keys import rename_keys
from orthrus_serve.model import train_adapter
from orthrus_serve.model.distil_loss import batch_loss, choose_passages, contrast_loss, distil_loss
from orthrus_serve.model.reference_embedder import ReferenceEmbedder
from orthrus_serve.model.train_adapter import TrainSettings, embed_rows, learning_rate_at, nearest

WORDS = [f"w{i}" for i in range(60)]


def make_tokenizer(folder: Path) -> None:
    vocab = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[EOS]", "query", "passage", ":", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]", model_max_length=64
    )
    wrapped.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random decoder, a random encoder as its teacher, and thirty passages with a query each."""
    root = tmp_path_factory.mktemp("train")
    torch.manual_seed(0)
    sizes = {"vocab_size": 70, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    decoder = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=2)
    LlamaForCausalLM(decoder).save_pretrained(root / "base")
    BertModel(BertConfig(**sizes, num_attention_heads=4, pad_token_id=0)).save_pretrained(root / "teacher")
    for name in ("base", "teacher"):
        make_tokenizer(root / name)
    rng = np.random.default_rng(0)
    with (root / "texts.jsonl").open("w") as out:
        for i in range(30):
            words = [str(word) for word in rng.choice(WORDS, 8, replace=False)]
            source = "wiki" if i % 2 else "wordnet"
            out.write(
                json.dumps({"source": source, "passage": " ".join(words), "queries": [" ".join(words[:3])]}) + "\n"
            )
    return root


def trained(folders: Path, out: str, *options: str) -> dict:
    arguments = ["--base", folders / "base", "--teacher", folders / "teacher", "--texts", folders / "texts.jsonl"]
    arguments += ["--out", folders / out, "--device", "cpu", "--rank", "4", "--batch", "12", "--cluster-share", "0"]
    assert train_adapter.main([*map(str, arguments), *options]) == 0
    return json.loads((folders / out / "train.json").read_text())


def test_training_brings_queries_to_their_passages(folders: Path) -> None:
    first = trained(folders, "first", "--max-steps", "1", "--learning-rate", "1e-2")["last_step"]
    last = trained(folders, "last", "--max-steps", "50", "--learning-rate", "1e-2")["last_step"]
    assert last["contrast"] < 0.7 * first["contrast"]
    assert last["accuracy"] > first["accuracy"]


def test_the_same_seed_trains_the_same_adapter(folders: Path) -> None:
    for name in ("one", "two"):
        trained(folders, name, "--max-steps", "3")
    one, two = (load_file(folders / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_saved_adapter_has_names_that_a_generate_engine_binds_and_a_file_that_others_may_read(folders: Path) -> None:
    trained(folders, "named", "--max-steps", "1")
    weights = folders / "named" / "adapter_model.safetensors"
    keys = list(load_file(weights))
    assert rename_keys(keys) == {key: key for key in keys}
    assert len(keys) == 2 * 7 * 2  # layers, modules, A and B
    assert weights.stat().st_mode & 0o777 == 0o644


def test_the_reference_embedder_computes_what_training_computed(folders: Path) -> None:
    reference = ReferenceEmbedder.load(folders / "base", dtype=torch.float32)
    texts = ["query: w1 w2 w3", "passage: w4", "w5 w6 w7 w8 w9 w10 w11"]
    rows = reference.tokenizer(texts).input_ids
    with torch.no_grad():
        found = embed_rows(reference.model, rows, eos_id=2, max_tokens=64)
    torch.testing.assert_close(found, reference(texts), atol=1e-5, rtol=0)


def test_an_adapter_changes_the_reference_embedding(folders: Path) -> None:
    trained(folders, "changed", "--max-steps", "20", "--learning-rate", "1e-2")
    bare = ReferenceEmbedder.load(folders / "base", dtype=torch.float32)
    adapted = ReferenceEmbedder.load(folders / "base", folders / "changed", dtype=torch.float32)
    assert (bare(["w1 w2"]) - adapted(["w1 w2"])).abs().max() > 1e-2


def test_a_text_longer_than_the_limit_keeps_its_end_of_sequence_token(folders: Path) -> None:
    embedder = ReferenceEmbedder.load(folders / "base", max_tokens=4)
    rows = embedder.token_ids(["w1 w2 w3 w4 w5 w6", "w1"])
    assert [len(row) for row in rows] == [4, 2]
    assert all(row[-1] == 2 for row in rows)


def test_a_student_that_equals_its_teacher_has_no_distillation_loss() -> None:
    rows = normalize(torch.randn(6, 8), dim=-1)
    assert distil_loss(rows @ rows.T, rows @ rows.T, 0.05, has_self=True).item() == pytest.approx(0, abs=1e-5)
    assert batch_loss(rows, rows, rows, rows, contrast_weight=0.0).total.item() == pytest.approx(0, abs=1e-5)


def test_a_likely_second_answer_is_no_negative() -> None:
    similarity = torch.tensor([[0.5, 0.9], [0.0, 0.5]])
    teacher = torch.tensor([[0.5, 0.8], [0.0, 0.5]])  # passage 1 answers query 0 better than its own
    own = contrast_loss(similarity, teacher, 0.05)
    strict = contrast_loss(similarity, torch.eye(2), 0.05)
    assert own < 0.01 < strict


def test_a_batch_holds_distinct_passages_and_the_neighbours_of_its_seeds() -> None:
    pools = [np.arange(0, 50), np.arange(50, 100)]
    neighbours = (np.arange(100)[:, None] + np.arange(1, 4)) % 100
    chosen = choose_passages(pools, [1.0, 0.0], neighbours, 20, 1.0, np.random.default_rng(0))
    assert len(set(chosen.tolist())) == len(chosen) <= 20
    assert any(set(neighbours[i]) <= set(chosen.tolist()) for i in chosen)


def test_the_nearest_others_do_not_include_the_row_itself() -> None:
    vectors = normalize(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), dim=-1)
    assert nearest(vectors, 1, block=2).ravel().tolist() == [1, 0, 1]


def test_the_learning_rate_warms_up_and_ends_at_a_twentieth() -> None:
    settings = TrainSettings(8, 16, "all", 1e-3, 8, 64, 1.0, 10, 0.5, 0.5, 1.0, 0.05, 0)
    assert learning_rate_at(settings, 0, 0.0) == pytest.approx(1e-4)
    assert learning_rate_at(settings, 50, 0.0) == pytest.approx(1e-3)
    assert learning_rate_at(settings, 50, 1.0) == pytest.approx(5e-5)
