"""A dataclass as the schema of a configuration: its keys, its defaults, and plain values made into instances of it.

OmegaConf's structured configs know neither ``Literal`` nor a nearest name, so this is done here, strictly.

Example::

    build(Train, {"updates": 20})    # Train(updates=20)
    build(Train, {"updates": "abc"}) # ConfigError: updates wants an int, got 'abc'
"""

from __future__ import annotations

import difflib
import inspect
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from real_envs.errors import UserError


class ConfigError(UserError):
    """The user's configuration is wrong. The message is one sentence that names the key and the way out."""


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.4) -> list[str]:
    """The valid name most like ``name``; two, in their own order, where both are about as near; or none.

    ``nearest("gpro", ["grpo", "ppo"])`` is ``["grpo"]``; cliprange is near to both clip_low and clip_high.
    """
    ranked = [(difflib.SequenceMatcher(None, word, name).ratio(), word) for word in valid]
    best = sorted((pair for pair in ranked if pair[0] >= cutoff), key=lambda pair: -pair[0])[:2]
    return [word for score, word in ranked if (score, word) in best and score >= best[0][0] - 0.1]


def unknown(what: str, name: str, valid: Sequence[str]) -> ConfigError:
    """The error for a name that does not exist: ``unknown stage 'trian'; did you mean 'train'?``"""
    return ConfigError(f"unknown {what} '{name}'; {_hint(nearest(name, valid), valid)}")


def unknown_key(key: str, valid: Sequence[str]) -> ConfigError:
    """The same for a dotted key.

    The right name in another section wins (``train.clip_low``, ``trian.updates``), then a like name in the same section
    (``algorithm.cliprange``), then a like key anywhere (``trian.update``); failing all, the section is listed.
    """
    section, _, leaf = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in valid if name.rpartition(".")[0] == section}
    best = nearest(key, [name for name in valid if name.rpartition(".")[2] == leaf], cutoff=0)
    best = best or [siblings[name] for name in nearest(leaf, siblings)]
    best = best or ([] if section and siblings else nearest(key, valid, cutoff=0.6))
    return ConfigError(f"unknown key '{key}'; {_hint(best, list(siblings.values()) or valid)}")


def _hint(best: Sequence[str], valid: Sequence[str]) -> str:
    if best:
        return f"did you mean {' or '.join(repr(name) for name in best)}?"
    return f"valid: {', '.join(valid) or 'none'}"


def arms(annotation: Any) -> tuple[Any, ...]:
    """The types that a value may have besides None: ``int | None`` is ``(int,)``."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(arm for arm in get_args(annotation) if arm is not type(None))
    return (annotation,)


def _section(annotation: Any) -> Any:
    """The dataclass that a field holds, also when it may be None; otherwise None."""
    for candidate in arms(annotation):
        if isinstance(candidate, type) and is_dataclass(candidate):
            return candidate
    return None


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def schema_keys(schema: type, prefix: str = "") -> dict[str, Any]:
    """Every dotted key with its type, sections too: ``{"seed": int, "train": Train, "train.updates": int}``."""
    keys: dict[str, Any] = {}
    for name, annotation in _hints(schema).items():
        keys[prefix + name] = annotation
        if section := _section(annotation):
            keys |= schema_keys(section, f"{prefix}{name}.")
    return keys


def _hints(schema: type) -> dict[str, Any]:
    hints = get_type_hints(schema)
    return {field.name: hints[field.name] for field in fields(schema) if field.init}


def to_plain(value: Any) -> Any:
    """Dataclasses, enums, paths and tuples as what YAML can hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def flatten(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts by dotted key: ``{"train": {"updates": 5}}`` is ``{"train.updates": 5}``."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return flat


def schema_defaults(schema: type) -> dict[str, Any]:
    """The defaults as nested dicts. A field without a default is left out, so that ``build`` asks for it."""
    plain: dict[str, Any] = {}
    hints = _hints(schema)
    for field in fields(schema):
        if not field.init:
            continue
        default = _default(field)
        if default is not MISSING:
            plain[field.name] = to_plain(default)
        elif section := _section(hints[field.name]):
            plain[field.name] = schema_defaults(section)
    return plain


def flat_defaults(schema: type) -> dict[str, str]:
    """Every key that takes a value, with its default as one types it: ``{"seed": "0", "train.betas": "[0.9,0.99]"}``.

    A key without a default has "...".
    """
    plain, flat = schema_defaults(schema), {}
    for key, annotation in schema_keys(schema).items():
        value: Any = plain
        for name in key.split("."):
            value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
        if _section(annotation) is None or value is None:
            flat[key] = "..." if value is MISSING else typed(value)
    return flat


def typed(value: Any) -> str:
    """A value as one types it: ``[1,2]``, ``null``, ``true``."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{typed(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(typed, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def explanations(schema: type, prefix: str = "") -> dict[str, str]:
    """What the ``Attributes:`` of the dataclasses' docstrings say of each key, up to the end of the line."""
    words: dict[str, str] = {}
    for name, annotation in _hints(schema).items():
        for described in schema.__mro__:  # a section may extend another one
            if found := re.search(rf"^\s+{name}: (.+)$", described.__doc__ or "", flags=re.MULTILINE):
                words[prefix + name] = found[1].rstrip(" .;,")
                break
        if section := _section(annotation):
            words |= explanations(section, f"{prefix}{name}.")
    return words


def docstring(annotation: Any) -> str:
    """What the docstring of a section says, without the ``Attributes:`` that ``explanations`` reads."""
    return inspect.cleandoc(_section(annotation).__doc__ or "").partition("Attributes:")[0].strip()


def type_name(annotation: Any) -> str:
    """A type in words: ``int`` is "an int", ``Literal["a", "b"]`` is "a or b"."""
    words = {int: "an int", float: "a number", bool: "true or false", str: "text", Path: "a path", type(None): "null"}
    if annotation in words:
        return words[annotation]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_name, args))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(str(member.value) for member in annotation)
    if isinstance(annotation, type) and is_dataclass(annotation):
        return "a section"
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping such as {name: value}"
    if origin is not None and issubclass(origin, Sequence):
        return "a list such as [1,2]"
    return str(annotation)


def build(annotation: Any, value: Any, key: str = "") -> Any:
    """``value``, as YAML gives it, as an instance of ``annotation``; strict: 1.5 is no int and "abc" no number.

    Args:
        annotation: a dataclass or any type that a setting may have (int, ``Literal``, ``tuple[float, ...]``, ...).
        value: nested dicts, lists and scalars.
        key: where we are, such as ``train.updates``; for the message.

    Raises:
        ConfigError: an unknown or missing key, a value of another type, or what a ``__post_init__`` refused.
    """
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _build_dataclass(annotation, value, key)
    origin, args = get_origin(annotation), get_args(annotation)
    wrong = ConfigError(f"{key} wants {type_name(annotation)}, got {value!r}")
    if origin is Literal or (isinstance(annotation, type) and issubclass(annotation, Enum)):
        choices = {arg: arg for arg in args} if origin is Literal else {member.value: member for member in annotation}
        for choice, result in choices.items():
            if choice == value and type(choice) is type(value):
                return result
        best = nearest(str(value), [str(choice) for choice in choices])
        raise ConfigError(f"{wrong}; {_hint(best, ())}") if best else wrong
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        if len(arms(annotation)) == 1:
            return build(arms(annotation)[0], value, key)
        for arm in sorted(arms(annotation), key=lambda arm: arm in (str, float)):  # 3 stays an int in `int | float`
            try:
                return build(arm, value, key)
            except ConfigError:
                continue
        raise wrong
    if origin is tuple and isinstance(value, list):
        items = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(items) != len(value):
            raise ConfigError(f"{key} wants a list of {len(items)}, got {value!r}")
        pairs = enumerate(zip(items, value, strict=True))
        return tuple(build(item, entry, f"{key}[{i}]") for i, (item, entry) in pairs)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, dict):
        return {build(args[0], k, key): build(args[1], item, f"{key}.{k}") for k, item in value.items()}
    if isinstance(origin, type) and issubclass(origin, Sequence) and isinstance(value, list):
        return [build(args[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    if annotation is Any:
        return value
    if annotation is float and type(value) in (int, float):
        return float(value)
    if annotation is Path and isinstance(value, str):
        return Path(value)
    if annotation in (int, bool, str) and type(value) is annotation:
        return value
    raise wrong


def _build_dataclass(schema: type, value: Any, key: str) -> Any:
    if not isinstance(value, dict):
        names = ", ".join(f"{key}.{name}" for name in _hints(schema))
        raise ConfigError(f"{key} is a section; set one of its keys: {names}")
    prefix = f"{key}." if key else ""
    hints = _hints(schema)
    for name in value:
        if name not in hints:
            raise unknown_key(f"{prefix}{name}", [prefix + valid for valid in hints])
    for field in fields(schema):
        if field.init and field.name not in value and _default(field) is MISSING:
            raise ConfigError(f"{prefix}{field.name} has no default; give it, such as {prefix}{field.name}=...")
    built = {name: build(hints[name], item, prefix + str(name)) for name, item in value.items()}
    try:
        return schema(**built)
    except ConfigError:
        raise
    except ValueError as error:  # what a __post_init__ says about its own values
        raise ConfigError(f"{key or schema.__name__}: {error}") from error
