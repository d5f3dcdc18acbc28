"""Reads settings from a YAML file and from `key=value` texts, and says what is wrong with them, one line per problem."""

import difflib
import secrets
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError
from typing_extensions import override

from loadgen.errors import SettingsError
from loadgen.settings import Model, Settings

MAX_SEED = 1_000_000


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice: PyYAML would keep the last one."""

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise SettingsError(f"line {node.start_mark.line + 1}: the key {key!r} is given twice")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        SettingsError: the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        data: object = yaml.load(path.expanduser().read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise SettingsError(f"{path}: must be a mapping")
    return cast(dict[str, Any], data)


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, mapping by mapping. A mapping with another `kind` replaces the old one whole."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        if both and ("kind" not in value or value["kind"] == cast(dict[str, Any], old).get("kind")):
            merged[key] = overlay(cast(dict[str, Any], old), cast(dict[str, Any], value))
        else:
            merged[key] = value
    return merged


def parse_assignment(text: str) -> dict[str, Any]:
    """`a.b=1` as `{"a": {"b": 1}}`; the value is read as YAML.

    Raises:
        SettingsError: there is no `=`, or the value is not YAML.
    """
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise SettingsError(f"--set {text}: must be key=value, with dots between the parts of the key")
    try:
        parsed: object = yaml.load(value, Loader=_Loader)
    except yaml.YAMLError as error:
        raise SettingsError(f"--set {text}: not valid YAML: {' '.join(str(error).split())}") from error
    for part in reversed(path.split(".")):
        parsed = {part: parsed}
    return cast(dict[str, Any], parsed)


def parse_settings(data: Mapping[str, Any]) -> Settings:
    """Checked settings, with a seed drawn if none was given.

    Raises:
        SettingsError: one line per problem, each naming the key.
    """
    try:
        settings = Settings.model_validate(data)
    except ValidationError as error:
        lines = [_sentence(item["loc"], item["type"], item["msg"]) for item in error.errors()]
        raise SettingsError("\n".join(dict.fromkeys(lines))) from error
    return settings if settings.seed is not None else settings.model_copy(update={"seed": secrets.randbelow(MAX_SEED)})


def _sentence(place: tuple[int | str, ...], kind: str, message: str) -> str:
    key = ".".join(str(part) for part in place)
    if kind != "extra_forbidden":
        return f"{key}: {message}"
    near = difflib.get_close_matches(str(place[-1]), _all_keys(), n=1)
    return f"{key}: unknown key" + (f"; did you mean {near[0]!r}?" if near else "")


def _all_keys() -> list[str]:
    """Every key of every settings class: a place says too little to know which class was meant."""
    return sorted({key for model in Model.__subclasses__() for key in model.model_fields})
