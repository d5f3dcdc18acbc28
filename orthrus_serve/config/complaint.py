"""Turns what is wrong with a configuration into sentences that name the key and the way out. Pure.

Leaves out what is right or wrong: `schema.py`, `load.py` and `vllm_keys.py` decide that.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

KeyPath = tuple[str | int, ...]

_NOUNS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def join(path: Sequence[str | int]) -> str:
    """`applications[0].args.model`; the empty path is the file itself."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "the file"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'topology'?`, or nothing when no known word is near."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower().replace("-", "_"), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def unknown_key(path: Sequence[str | int], known: Iterable[str]) -> str:
    """The sentence for a key (the last part of `path`) that nobody reads."""
    names = sorted(known)
    hint = did_you_mean(str(path[-1]), names)
    if not hint and len(names) <= 12:
        hint = f"; known here: {', '.join(names)}"
    return f"{join(path)}: unknown key{hint}"


def type_of(value: Any) -> str:
    """A value as its writer would call it, short enough for a sentence."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    if isinstance(value, int | float):
        return f"the number {value}"
    return (
        "a mapping" if isinstance(value, Mapping) else "a list" if isinstance(value, Sequence) else type(value).__name__
    )


def sentences(error: ValidationError, model: type[BaseModel], prefix: KeyPath = ()) -> list[str]:
    """One sentence per problem, unknown keys first; a missing key that an unknown one misspells is not named twice."""
    details = error.errors(include_url=False)
    unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
    lines = [unknown_key((*prefix, *detail["loc"]), _keys_at(model, detail["loc"][:-1])) for detail in unknown]
    for detail in details:
        if detail["type"] == "missing" and any(f"did you mean {detail['loc'][-1]!r}?" in line for line in lines):
            continue
        if detail["type"] != "extra_forbidden":
            lines.append(_sentence(detail, prefix))
    return lines


def _sentence(detail: ErrorDetails, prefix: KeyPath) -> str:
    path = (*prefix, *detail["loc"])
    kind, given, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    if kind == "missing":
        return f"{join(path)}: missing"
    if kind == "value_error":
        # Our own sentence; one about a whole section begins with the key already.
        message = str(context.get("error", detail["msg"]))
        if not isinstance(given, Mapping):
            return f"{join(path)}: {message}"
        return f"{join(path)}.{message}" if path else message
    if kind == "literal_error":
        allowed = str(context["expected"])
        hint = (
            did_you_mean(given, allowed.replace("'", "").replace(" or ", ", ").split(", "))
            if isinstance(given, str)
            else ""
        )
        return f"{join(path)}: must be {allowed}, got {type_of(given)}{hint}"
    if kind == "string_type" and isinstance(given, bool):
        return f"{join(path)}: must be text, got {type_of(given)} (YAML takes yes, no, on and off for that: quote them)"
    if kind == "string_too_short":
        return f"{join(path)}: must not be empty"
    if kind in _NOUNS:
        return f"{join(path)}: must be {_NOUNS[kind]}, got {type_of(given)}"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"{join(path)}: must be {words} {context[key]:g}, got {type_of(given)}"
    return f"{join(path)}: {detail['msg'][:1].lower()}{detail['msg'][1:]}, got {type_of(given)}"


def _keys_at(model: type[BaseModel], loc: KeyPath) -> list[str]:
    """Keys of the section at `loc`: fields lead to sections, keys of `dict[str, Section]` are skipped."""
    section: type[BaseModel] = model
    for part in loc:
        field = section.model_fields.get(str(part))
        if field is None:
            continue
        candidates = [field.annotation, *get_args(field.annotation)]
        inner = [one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)]
        section = inner[0] if inner else section
    return [field.alias or name for name, field in section.model_fields.items()]
