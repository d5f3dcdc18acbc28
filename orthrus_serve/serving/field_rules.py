"""Rules for single fields of a request body: numbers within a range, lists of token ids, texts. Pure.

Every refusal is a 400 that names the field, what it must be and the limit. Fields that no rule names are left to vLLM.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from orthrus_serve.serving.served import Served, refuse

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 1000.0

# Field → smallest and largest value, both allowed.
NUMBER_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (math.ulp(0.0), 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (math.ulp(0.0), MAX_PENALTY),
    "length_penalty": (-MAX_PENALTY, MAX_PENALTY),
}
TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")


def is_int(value: object) -> bool:
    """A JSON integer; `true` and `false` are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_int(field: str, value: object, low: int, high: int) -> None:
    """`value` is an integer from `low` to `high`, both allowed."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise refuse(field, f"{field} must be an integer, got {brief(value)}.")
    if not low <= value <= high:
        raise refuse(field, f"{field} must be from {low} to {high}, got {brief(value)}.")


def check_number(field: str, value: object, low: float, high: float) -> None:
    """`value` is a finite number from `low` to `high`, both allowed."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise refuse(field, f"{field} must be a number, got {brief(value)}.")
    if not low <= value <= high:  # false for NaN too
        above = "above 0 and at most" if low == math.ulp(0.0) else f"from {low:g} to"
        raise refuse(field, f"{field} must be {above} {high:g}, got {brief(value)}.")


def check_token_ids(field: str, ids: Sequence[object], vocab_size: int) -> None:
    """Every entry is an integer within the vocabulary."""
    for index, token_id in enumerate(ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise refuse(f"{field}[{index}]", f"{field}[{index}] must be a token id, got {brief(token_id)}.")
        if not 0 <= token_id < vocab_size:
            raise refuse(
                f"{field}[{index}]",
                f"{field}[{index}]: token id {brief(token_id)} is outside the vocabulary (0 to {vocab_size - 1}).",
            )


def check_text(field: str, text: str) -> None:
    """`text` is text that can be encoded: JSON can spell half a surrogate pair, tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refuse(field, f"{field} holds half of a surrogate pair, which is not a character.") from None


def check_max_items(field: str, items: Sequence[object], most: int, what: str) -> None:
    """At most `most` entries."""
    if len(items) > most:
        raise refuse(field, f"{field} holds {len(items)} {what}; one request may hold at most {most}.")


def check_sampling(body: Mapping[str, Any], served: Served, *, is_chat: bool) -> None:
    """The sampling fields of a completion or a chat. null counts as absent."""
    for field, (low, high) in _int_ranges(served, is_chat=is_chat).items():
        if body.get(field) is not None:
            check_int(field, body[field], low, high)
    for field, limits in NUMBER_RANGES.items():
        if body.get(field) is not None:
            check_number(field, body[field], *limits)
    for field in TOKEN_LISTS:
        if body.get(field) is not None:
            ids = body[field]
            if not isinstance(ids, list):
                raise refuse(field, f"{field} must be a list of token ids, got {brief(ids)}.")
            check_max_items(field, ids, served.vocab_size, "token ids")
            check_token_ids(field, ids, served.vocab_size)
    formatted = body.get("structured_outputs")
    if formatted is not None and not isinstance(formatted, dict):
        raise refuse("structured_outputs", f"structured_outputs must be an object, got {brief(formatted)}.")
    if body.get("logit_bias") is not None:
        _check_logit_bias(body["logit_bias"], served.vocab_size)


def check_truncation(value: object, low: int, high: int) -> None:
    """`truncate_prompt_tokens`: -1 (as much as fits), or how many tokens to keep, from `low` to `high`."""
    field = "truncate_prompt_tokens"
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or low <= value <= high):
        raise refuse(field, f"{field} must be -1 or an integer from {low} to {high}, got {brief(value)}.")


def _int_ranges(served: Served, *, is_chat: bool) -> dict[str, tuple[int, int]]:
    ranges = {
        "n": (1, served.max_n),
        "max_tokens": (1, served.max_model_len),
        "max_completion_tokens": (1, served.max_model_len),
        "min_tokens": (0, served.max_model_len),
        "top_logprobs": (0, served.max_logprobs),
        "prompt_logprobs": (0, served.max_logprobs),
        "top_k": (-1, INT32_MAX),
        "seed": (INT64_MIN, INT64_MAX),
        "stream_interval": (1, INT32_MAX),
        "thinking_token_budget": (-1, INT32_MAX),
        "routed_experts_prompt_start": (0, served.max_model_len),
    }
    # A chat says `logprobs: true` and how many in `top_logprobs`; a completion gives the number.
    return ranges if is_chat else {**ranges, "logprobs": (0, served.max_logprobs)}


def _check_logit_bias(bias: object, vocab_size: int) -> None:
    field = "logit_bias"
    if not isinstance(bias, dict):
        raise refuse(field, f"{field} must be an object from token id to bias, got {brief(bias)}.")
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise refuse(field, f"{field}: {brief(key)} is not a token id (0 to {vocab_size - 1}).")
        check_number(f"{field}.{key}", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def brief(value: object) -> str:
    """A value as an error message shows it: its kind, and its text where that is short."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**24:
        return "an integer of more than 24 digits"  # str() of a huge integer is slow, and refused above 4,300 digits
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
