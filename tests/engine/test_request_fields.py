"""Every field of vLLM's request bodies was judged: a new vLLM with new fields fails here until they are."""

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest

from orthrus_serve.serving.request_check import CLOSED, NOT_OFFERED, STRIPPED

# Read by vLLM's own API and harmless: what they hold is bounded here or there, and touches no other request.
OPEN = {
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "chat_template_kwargs",
    "continue_final_message", "dimensions", "documents", "echo", "embed_dtype", "encoding_format", "endianness",
    "frequency_penalty", "ignore_eos", "include_reasoning", "include_stop_str_in_output", "input", "length_penalty",
    "logit_bias", "logprob_token_ids", "logprobs", "max_completion_tokens", "max_tokens", "messages", "min_p",
    "min_tokens", "model", "n", "padding", "parallel_tool_calls", "presence_penalty", "prompt", "prompt_logprobs",
    "reasoning_effort", "repetition_penalty", "response_format", "return_prompt_text", "return_token_ids",
    "return_token_offsets", "return_token_strs", "return_tokens_as_token_ids", "seed", "session_id",
    "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids", "stream", "stream_interval",
    "stream_options", "structured_outputs", "suffix", "temperature", "thinking_token_budget", "tokens", "tool_choice",
    "tools", "top_k", "top_logprobs", "top_p", "truncate_prompt_tokens", "truncation_side", "use_activation", "user",
}  # fmt: skip
# vLLM refuses it by itself unless it is told to trust it, which nobody tells it here (`test_real_app.py` has the case).
REFUSED_BY_VLLM = {"chat_template"}
BODIES = (
    CompletionRequest, ChatCompletionRequest, EmbeddingCompletionRequest, TokenizeCompletionRequest, TokenizeChatRequest,
    DetokenizeRequest,
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_field_was_judged(body: type) -> None:
    known = OPEN | REFUSED_BY_VLLM | set(CLOSED) | set(NOT_OFFERED) | set(STRIPPED)
    assert set(body.model_fields) <= known  # type: ignore[attr-defined]


def test_no_field_is_judged_twice_and_none_that_is_gone() -> None:
    groups = [OPEN, REFUSED_BY_VLLM, set(CLOSED), set(NOT_OFFERED), set(STRIPPED)]
    assert sum(map(len, groups)) == len(set().union(*groups))
    there = set().union(*(body.model_fields for body in BODIES))
    assert (set().union(*groups)) - there <= {"use_beam_search"}
