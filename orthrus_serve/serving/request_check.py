"""Checks and completes a request body before vLLM's app sees it. Pure: bytes and facts in, bytes out.

Refuses with a 400 (404 for an unknown model) in OpenAI's shape what would otherwise disturb a neighbour, reach the engine as
nonsense, or be answered in another shape. Completes: the base name becomes its embedding adapter, `dimensions` is taken out
(vLLM refuses it by the base model's configuration; the engine cuts), and so is `priority` (which would need another scheduler).
Leaves to vLLM what it answers well: contents of messages, tools, response formats, stream options, lengths of texts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

from orthrus_serve.errors import RequestError
from orthrus_serve.serving import field_rules
from orthrus_serve.serving.field_rules import brief, is_int
from orthrus_serve.serving.served import Served, ServedAdapter, refuse
from orthrus_serve.types import ClosedField

CHECKED_PATHS = frozenset({"/v1/embeddings", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})

# Taken out silently: no client of ours may order other people's requests, or name them (the id comes with a header).
STRIPPED = ("priority", "request_id")
# vLLM knows these, this server does not offer them: refused, so that none is silently without effect.
NOT_OFFERED = (
    "kv_transfer_params", "ec_transfer_params", "prompt_embeds", "use_beam_search", "mm_processor_kwargs", "media_io_kwargs",
    "mm_payload", "return_mm_kwargs",
)  # fmt: skip
# The same, unless the configuration opens them: what they hold is read by code that nobody here has tested.
CLOSED: tuple[ClosedField, ...] = get_args(ClosedField)
ENCODING_FORMATS = ("float", "base64")


@dataclass(frozen=True)
class CheckedRequest:
    """A body that vLLM's app may see, and the length that its vectors are to be cut to (None: not at all)."""

    body: bytes
    dimensions: int | None = None


def check_request(path: str, body: bytes, served: Served) -> CheckedRequest:
    """Checks the body of a POST to `path`.

    Raises:
        RequestError: 400 or 404, naming the field and the limit.
    """
    if path not in CHECKED_PATHS:
        return CheckedRequest(body)
    parsed = _parse(body)
    # Clients write null for what they leave out, and vLLM refuses it in some fields; of `max_tokens` it makes "all that fits".
    given = {key: value for key, value in parsed.items() if value is not None or key == "max_tokens"}
    fields = {key: value for key, value in given.items() if key not in STRIPPED}
    for field in NOT_OFFERED:
        if fields.get(field) not in (None, False):
            raise refuse(field, f"{field} is not offered by this server.")
    _check_extras(fields.get("vllm_xargs"))
    for field in CLOSED:
        if fields.get(field) is not None and field not in served.open_fields:
            raise refuse(field, f"{field} is not offered by this server (limits.open_fields).")
    name = _model_name(fields, served)
    dimensions = None
    if path == "/v1/embeddings":
        dimensions = _check_embedding(fields, name, served)
    elif path == "/detokenize":
        _check_detokenize(fields, served.vocab_size_of(name))
    elif path == "/tokenize":
        _check_tokenize(fields)
    else:
        _check_generation(fields, name, served, is_chat=path == "/v1/chat/completions")
    # The body is written anew only where it was changed.
    return CheckedRequest(body if fields == parsed else json.dumps(fields).encode(), dimensions)


def _check_extras(extras: object) -> None:
    """vLLM puts `vllm_xargs` beside its own parameters, so a field that is refused could come in by it."""
    if isinstance(extras, dict):
        for field in NOT_OFFERED:
            if field in extras:
                raise refuse(f"vllm_xargs.{field}", f"vllm_xargs.{field} is not offered by this server.")


def _parse(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body, parse_constant=_not_a_number)
    except RecursionError:
        raise refuse(None, "The request body is nested too deeply.", code="invalid_json") from None
    except ValueError as error:  # bad JSON, bad UTF-8, an integer of thousands of digits
        raise refuse(None, f"The request body is not valid JSON: {str(error)[:200]}.", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise refuse(None, f"The request body must be a JSON object, got {brief(parsed)}.", code="invalid_json")
    return parsed


def _not_a_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _model_name(fields: Mapping[str, Any], served: Served) -> str:
    name = fields.get("model")
    if name is None:  # as in vLLM: the model that the server was started with
        return served.base_name
    if not isinstance(name, str):
        raise refuse("model", f"model must be a string, got {brief(name)}.")
    if name != served.base_name and name not in served.generators and name not in served.adapters:
        known = ", ".join([served.base_name, *sorted([*served.generators, *served.adapters])])
        message = f"The model {brief(name)} does not exist; this server has {known}."
        raise RequestError(404, message, param="model", code="model_not_found")
    return name


# --- embeddings -----------------------------------------------------------------------------------------------------


def _check_embedding(fields: dict[str, Any], name: str, served: Served) -> int | None:
    """Checks and completes the fields of an embedding request; returns the length to cut to."""
    if name == served.base_name and served.base_name_adapter is not None:
        name = fields["model"] = served.base_name_adapter
    if name not in served.adapters:
        choice = ", ".join(sorted(served.adapters))
        raise refuse("model", f"The model {name!r} generates; for embeddings put one of these into model: {choice}.")
    adapter = served.adapters[name]
    if "messages" in fields:
        raise refuse("messages", "messages is not offered for embeddings: put text or token ids into input.")
    longest = _longest_to_send(fields, served.longest_input(adapter))
    _check_inputs("input", fields.get("input"), InputLimits(served.max_inputs, longest, served.vocab_size_of(name)))
    encoding = fields.get("encoding_format")
    if encoding is not None and encoding not in ENCODING_FORMATS:
        raise refuse("encoding_format", f'encoding_format must be "float" or "base64", got {brief(encoding)}.')
    if fields.get("padding") not in (None, "do_not_pad"):
        raise refuse("padding", "padding is not offered by this server: vectors must not depend on it.")
    _complete_truncation(fields, adapter, served.longest_input(adapter))
    if not adapter.normalizes:
        fields.setdefault(
            "use_activation", False
        )  # vLLM would make it true before the engine sees that it was left out
    return _take_dimensions(fields, name, adapter)


def _complete_truncation(fields: dict[str, Any], adapter: ServedAdapter, longest: int) -> None:
    """Makes room for the end-of-sequence token that the engine appends: `n` tokens are `n` tokens with it."""
    value = fields.get("truncate_prompt_tokens")
    if value is None:
        return
    room = int(adapter.appends_eos)
    field_rules.check_truncation(value, 1 + room, longest)
    fields["truncate_prompt_tokens"] = (longest if value == -1 else value) - room
    if fields.get("truncation_side") is None and adapter.vocab_size is None:
        # Of a model that generates, vLLM keeps the end; an embedding server keeps the beginning. A model of its own that embeds
        # keeps it unasked, and also what its tokenizer puts at the end of a text, which a side that is named would cut away.
        fields["truncation_side"] = "right"


def _longest_to_send(fields: Mapping[str, Any], longest: int) -> int | None:
    """Most token ids of one input; None when it will be cut to what fits."""
    return longest if fields.get("truncate_prompt_tokens") is None else None


def _take_dimensions(fields: dict[str, Any], name: str, adapter: ServedAdapter) -> int | None:
    dimensions = fields.pop("dimensions", None)
    if dimensions is None or (is_int(dimensions) and dimensions == adapter.size):
        return None
    if is_int(dimensions) and dimensions in adapter.dimensions:
        return dimensions
    allowed = ", ".join(str(n) for n in sorted({*adapter.dimensions, adapter.size}))
    raise refuse("dimensions", f"dimensions for {name!r} must be one of {allowed}, got {brief(dimensions)}.")


@dataclass(frozen=True)
class InputLimits:
    """What a list of inputs may hold: how many, how many tokens each (None: it will be cut), ids of how many tokens."""

    max_inputs: int
    longest: int | None
    vocab_size: int


def _check_inputs(field: str, value: object, limits: InputLimits) -> int:
    """A text, a list of texts, a list of token ids, or a list of such lists; none of them empty. Returns how many inputs."""
    if value is None:
        raise refuse(field, f"{field} is required: a text, a list of texts, or token ids.")
    if isinstance(value, str):
        _check_input_text(field, value)
        return 1
    if not isinstance(value, list):
        raise refuse(field, f"{field} must be a text, a list of texts, or token ids, got {brief(value)}.")
    if not value:
        raise refuse(field, f"{field} must not be an empty list.")
    if is_int(value[0]):
        _check_input_ids(field, value, limits.vocab_size, limits.longest)
        return 1
    field_rules.check_max_items(field, value, limits.max_inputs, "inputs")
    is_text = isinstance(value[0], str)
    for index, entry in enumerate(value):
        where = f"{field}[{index}]"
        if is_text and isinstance(entry, str):
            _check_input_text(where, entry)
        elif not is_text and isinstance(entry, list):
            _check_input_ids(where, entry, limits.vocab_size, limits.longest)
        else:
            wanted = "a text" if is_text else "a text or a list of token ids"
            raise refuse(where, f"{where} must be {wanted}, got {brief(entry)}.")
    return len(value)


def _check_input_text(field: str, text: str) -> None:
    if not text:
        raise refuse(field, f"{field} must not be an empty text.")
    field_rules.check_text(field, text)


def _check_input_ids(field: str, ids: Sequence[object], vocab_size: int, longest: int | None) -> None:
    if not ids:
        raise refuse(field, f"{field} must not be an empty list of token ids.")
    if longest is not None and len(ids) > longest:
        raise refuse(
            field,
            f"{field} holds {len(ids)} token ids; the longest input is {longest} tokens.",
            code="context_length_exceeded",
        )
    field_rules.check_token_ids(field, ids, vocab_size)


# --- generation and tokens ------------------------------------------------------------------------------------------


def _check_generation(fields: Mapping[str, Any], name: str, served: Served, *, is_chat: bool) -> None:
    if name in served.adapters:
        raise refuse(
            "model", f"The model {name!r} embeds and does not generate: use {served.base_name!r}, or /v1/embeddings."
        )
    if "dimensions" in fields:
        raise refuse("dimensions", "dimensions belongs to /v1/embeddings.")
    num_prompts = 1
    if is_chat:
        _check_messages(fields.get("messages"), served.max_inputs)
    else:
        limits = InputLimits(served.max_inputs, _longest_to_send(fields, served.longest_prompt), served.vocab_size)
        num_prompts = _check_inputs("prompt", fields.get("prompt"), limits)
    field_rules.check_sampling(fields, served, is_chat=is_chat)
    num_outputs = num_prompts * (fields.get("n") or 1)
    if num_outputs > served.max_inputs:
        raise refuse(
            "n",
            f"{num_prompts} prompts with n={fields['n']} make {num_outputs} outputs; "
            f"one request may have at most {served.max_inputs}.",
        )
    if fields.get("truncate_prompt_tokens") is not None:
        field_rules.check_truncation(fields["truncate_prompt_tokens"], 1, served.longest_prompt)


def _check_messages(messages: object, max_messages: int) -> None:
    if not isinstance(messages, list):
        raise refuse("messages", f"messages must be a list of messages, got {brief(messages)}.")
    if not messages:
        raise refuse("messages", "messages must not be an empty list.")
    field_rules.check_max_items("messages", messages, max_messages, "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise refuse(where, f"{where} must be an object with role and content, got {brief(message)}.")
        if not isinstance(message.get("role"), str):
            raise refuse(f"{where}.role", f"{where}.role must be a string, got {brief(message.get('role'))}.")
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise refuse(
                f"{where}.content", f"{where}.content must be a text or a list of parts, got {brief(content)}."
            )
        if isinstance(content, str):
            field_rules.check_text(f"{where}.content", content)


def _check_tokenize(fields: Mapping[str, Any]) -> None:
    if "messages" in fields:
        return
    prompt = fields.get("prompt")
    if not isinstance(prompt, str):
        raise refuse("prompt", f"prompt must be a text, got {brief(prompt)}.")
    field_rules.check_text("prompt", prompt)


def _check_detokenize(fields: Mapping[str, Any], vocab_size: int) -> None:
    tokens = fields.get("tokens")
    if not isinstance(tokens, list):
        raise refuse("tokens", f"tokens must be a list of token ids, got {brief(tokens)}.")
    field_rules.check_token_ids("tokens", tokens, vocab_size)
