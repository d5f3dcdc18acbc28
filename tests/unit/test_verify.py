"""What verify asks, what it calls near enough, and how it says so. No server, no model."""

from typing import Any

import numpy as np
import pytest

from orthrus_serve.config.schema import AdapterSpec, AppArgs
from orthrus_serve.verify.cases import Ask, EmbedAsk, GenerateAsk, RefusedAsk
from orthrus_serve.verify.compare import TOLERANCES, Finding, Tolerance, compare_tokens, compare_vector
from orthrus_serve.verify.plan import Embeds, Prompts, Server, plan
from orthrus_serve.verify.report import make_row, table, verdict

NEAR = Tolerance(cosine=1e-3, length=1e-2, logit=0.5)
EOS = 2


def vector(*numbers: float) -> Any:
    return np.array(numbers, dtype=np.float32)


@pytest.mark.parametrize(
    ("got", "problem"),
    [
        (vector(0.6, 0.8), None),
        (vector(0.601, 0.799), None),
        (vector(0.8, 0.6), "cosine"),
        (vector(-0.6, -0.8), "cosine"),
        (vector(0.0, 0.0), "cosine"),
        (vector(6.0, 8.0), "length"),
        (vector(0.6, 0.8, 0.0), "numbers"),
        (vector(), "numbers"),
        (vector(0.6, float("nan")), "finite"),
        (vector(0.6, float("inf")), "finite"),
    ],
)
def test_a_vector_is_near_when_its_angle_and_its_length_are(got: Any, problem: str | None) -> None:
    found = compare_vector(got, vector(0.6, 0.8), NEAR).problem
    assert found is None if problem is None else problem in (found or "")


LOGITS = np.array([[0.0, 3.0, 2.8], [1.0, 0.0, 0.9]], dtype=np.float32)


def test_a_token_of_a_near_tie_is_no_deviation_and_is_counted() -> None:
    assert compare_tokens([1, 0], LOGITS, 2, NEAR) == Finding(num_tokens=2, num_ties=0)
    assert compare_tokens([2, 2], LOGITS, 2, NEAR) == Finding(num_tokens=2, num_ties=2)


def test_a_token_that_the_reference_finds_unlikely_is_a_deviation_at_its_place() -> None:
    assert compare_tokens([1, 1], LOGITS, 2, NEAR).problem == "token 1: 1, expected 0 (gap 1)"


def test_too_few_tokens_and_tokens_outside_the_vocabulary_are_deviations() -> None:
    assert compare_tokens([1], LOGITS[:1], 2, NEAR).problem == "1 tokens, expected 2"
    assert "not in the vocabulary" in (compare_tokens([1, 9], LOGITS, 2, NEAR).problem or "")


def test_the_tolerance_grows_with_the_coarseness_of_the_number_format() -> None:
    exact, half, brain = (TOLERANCES[name] for name in ("float32", "float16", "bfloat16"))
    assert exact.cosine < half.cosine <= brain.cosine < 0.01
    assert exact.logit < half.logit <= brain.logit


def test_one_deviation_among_many_good_answers_is_in_the_table_and_in_the_verdict() -> None:
    good = make_row("alone", "orthrus", [Finding(num_tokens=8, num_ties=1), Finding(num_tokens=8)])
    bad = make_row("mixed", "orthrus-embed", [Finding(cosine=0.9999999), Finding("cosine 0.5", cosine=0.5)])
    lines = table([good, bad])
    assert [text.strip() for text in lines[1].split("  ") if text.strip()][2:] == ["16 tokens", "1 near tie", "equal"]
    assert "2 vectors" in lines[2]
    assert "cosine 0.5000000" in lines[2]
    assert "DEVIATES: cosine 0.5" in lines[2]
    assert verdict([good, bad], NEAR).startswith("DEVIATES: 1 of 2 rows")
    assert verdict([good], NEAR).startswith("EQUALS THE REFERENCE in all 1 rows")


def asks(max_tokens: int | None = None, token_budget: int = 48, **adapter: Any) -> list[list[Ask]]:
    """The plan for a server of two adapters; `adapter` are the settings of the first."""
    args = AppArgs.model_validate(
        {
            "topology": "orthrus",
            "model": {"path": "/m"},
            "adapters": {"first": {"path": "/a", **adapter}, "second": {"path": "/b", "pooling": "mean"}},
            "generate_adapters": {"tuned": {"path": "/c"}},
            "embed_adapter": "first",
        }
    )
    words = list(range(3, 100))
    prompts = Prompts(words, lambda ids: " ".join(map(str, ids)), lambda text: [int(word) for word in text.split()], 1)
    return plan(Server(args, max_model_len=200, token_budget=token_budget, eos_id=EOS, max_tokens=max_tokens), prompts)


def embed_asks(planned: list[list[Ask]]) -> list[EmbedAsk]:
    return [ask for stage in planned for ask in stage if isinstance(ask, EmbedAsk)]


def test_every_input_ends_in_the_end_of_sequence_token_where_the_adapter_appends_it() -> None:
    for ask in embed_asks(asks()):
        assert all(one.token_ids[-1] == EOS and EOS not in one.token_ids[:-1] for one in ask.inputs)
    without = [ask for ask in embed_asks(asks(append_eos=False)) if ask.adapter == "first"]
    assert all(EOS not in one.token_ids for ask in without for one in ask.inputs)


def test_no_input_is_longer_than_the_server_takes_and_one_is_exactly_as_long() -> None:
    lengths = [len(one.token_ids) for ask in embed_asks(asks()) for one in ask.inputs]
    assert max(lengths) == 199
    refused = [ask for stage in asks() for ask in stage if isinstance(ask, RefusedAsk)]
    assert {len(ask.token_ids) for ask in refused} == {199}  # one more with the end-of-sequence token
    prompts = [ask for stage in asks() for ask in stage if isinstance(ask, GenerateAsk)]
    assert max(len(ask.prompt.token_ids) + ask.num_tokens for ask in prompts) == 200


@pytest.mark.parametrize("token_budget", [48, 90, 150, 190, 400])
def test_no_prompt_leaves_less_room_than_its_answer_needs(token_budget: int) -> None:
    prompts = [ask for stage in asks(token_budget=token_budget) for ask in stage if isinstance(ask, GenerateAsk)]
    assert all(len(ask.prompt.token_ids) + ask.num_tokens <= 200 for ask in prompts)


def test_a_truncated_input_keeps_its_first_tokens_and_counts_its_end_of_sequence_token() -> None:
    cut = [ask for ask in embed_asks(asks()) if ask.case == "truncated"]
    for ask in cut:
        (one,) = ask.inputs
        asked = ask.options["truncate_prompt_tokens"]
        assert len(one.token_ids) == (199 if asked == -1 else asked)
        if not isinstance(one.sent, str):
            assert one.sent[: len(one.token_ids) - 1] == one.token_ids[:-1]
    assert {ask.options["truncate_prompt_tokens"] for ask in cut} >= {-1, 2}


def test_every_name_is_asked_alone_in_chunks_repeated_and_beside_all_others() -> None:
    planned = asks()
    for name in ("first", "second", "orthrus", "tuned"):
        cases = {ask.case for stage in planned for ask in stage if ask.model == name}
        assert cases >= {"alone", "in chunks", "repeated, shared prefix", "mixed", "mixed, repeated"}
    together = [stage for stage in planned if len(stage) > 1]
    assert [{ask.model for ask in stage} for stage in together] == [{"first", "second", "orthrus", "tuned"}] * 2


def test_a_bound_on_lengths_is_kept_and_nothing_then_claims_to_be_the_longest() -> None:
    planned = asks(max_tokens=60)
    assert max(len(one.token_ids) for ask in embed_asks(planned) for one in ask.inputs) == 60
    cases = {ask.case for stage in planned for ask in stage}
    assert not cases & {"exactly the longest", "one token too long"}


def test_a_head_bounds_the_inputs_of_its_adapter_only() -> None:
    planned = embed_asks(asks(pooling="all", head={"path": "/h", "max_input_tokens": 30}))
    longest = {
        name: max(len(one.token_ids) for ask in planned if ask.adapter == name for one in ask.inputs)
        for name in ("first", "second")
    }
    assert longest == {"first": 30, "second": 199}


def test_a_model_of_its_own_that_embeds_is_asked_in_its_own_words_up_to_its_own_limit() -> None:
    args = AppArgs.model_validate(
        {"topology": "separate_models", "model": {"path": "/m"}, "embedder": {"path": "/e", "dimensions": [16]}}
    )
    ours = Prompts(range(3, 100), lambda ids: " ".join(map(str, ids)), lambda text: [int(w) for w in text.split()], 1)
    first, last = 901, 902  # what its tokenizer puts around every text
    theirs = Prompts(
        range(500, 600), lambda ids: " ".join(map(str, ids)), lambda text: [first, *map(int, text.split()), last], 1
    )
    spec = AdapterSpec(path="/e", pooling="mean", append_eos=False, dimensions=(16,))
    embedder = Embeds("orthrus-embed", spec, Server(args, 129, 128, None), theirs, (last,))
    planned = plan(Server(args, max_model_len=200, token_budget=48, eos_id=EOS), ours, [embedder])
    asked = embed_asks(planned)
    assert {ask.model for ask in asked} == {"orthrus-embed", "orthrus"}
    assert {ask.dimensions for ask in asked} == {None, 16}
    assert max(len(one.token_ids) for ask in asked for one in ask.inputs) == 128
    assert {token for ask in asked for one in ask.inputs for token in one.token_ids} <= {*range(500, 600), first, last}
    assert not any(ask.case == "in chunks" for ask in asked)
    (cut,) = [one for ask in asked if ask.case == "truncated" for one in ask.inputs if isinstance(one.sent, str)]
    assert (cut.token_ids[0], cut.token_ids[-1]) == (first, last)
    assert {ask.limit for stage in planned for ask in stage if isinstance(ask, RefusedAsk)} == {128}


def turned(lack: float) -> Any:
    """A vector whose cosine to (1, 0) lacks that of 1."""
    return np.array([1 - lack, (1 - (1 - lack) ** 2) ** 0.5], dtype=np.float32)


@pytest.mark.parametrize(
    ("lack", "by_rounding", "is_near"),
    [
        (0.004, None, True),
        (0.02, None, False),
        (0.02, 0.001, False),  # rounding does less to it
        (0.02, 0.01, True),
        (0.3, 0.3, False),  # whatever rounding does: such a vector is another one
    ],
)
def test_a_vector_may_be_as_far_off_as_rounding_takes_the_reference_itself(
    lack: float, by_rounding: float | None, is_near: bool
) -> None:
    rounded = None if by_rounding is None else lambda: turned(by_rounding)
    found = compare_vector(turned(lack), turned(0.0), TOLERANCES["bfloat16"], rounded)
    assert (found.problem is None) == is_near
    assert found.is_rounded == (is_near and lack > TOLERANCES["bfloat16"].cosine)
    assert ("by its rounding" in make_row("alone", "m", [found]).compared) == found.is_rounded
