"""Dataclasses as the schema of the configuration: keys, defaults, help texts, and strict conversion of YAML values.

OmegaConf's structured configs support neither ``Literal`` nor suggestions for misspelt names.

Example: ``build(Train, {"updates": "abc"})`` is a ``ConfigError``: updates wants an int, got 'abc'.
"""

from __future__ import annotations

import difflib
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache, reduce
from inspect import cleandoc
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from real_envs.errors import UserError

# Keys whose feature is gone: settings of old runs may still name them, until the next release.
_REMOVED = {f"worldmodel.diffusion.inverse_{name}" for name in ("share", "tokens", "told")}

_TYPE_NAMES = {int: "an int", float: "a number", bool: "true or false", str: "text", Path: "a path", type(None): "null"}


class ConfigError(UserError):
    """The user's configuration is wrong. The message is one sentence that names the key and the way out."""


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.4) -> list[str]:
    """The valid name most like ``name``; two, in their own order, where both are about as near; or none.

    ``nearest("gpro", ["grpo", "ppo"])`` is ``["grpo"]``; cliprange is near to both clip_low and clip_high.
    """
    ranked = [(difflib.SequenceMatcher(None, word, name).ratio(), word) for word in valid]
    best = sorted((pair for pair in ranked if pair[0] >= cutoff), key=lambda pair: -pair[0])[:2]
    return [word for score, word in ranked if (score, word) in best and score >= best[0][0] - 0.1]


@cache
def is_removed(key: str) -> bool:
    """Whether a key's feature is gone, which is said once."""
    if key in _REMOVED:
        print(f"note: {key} is ignored: what it set was removed", file=sys.stderr)
    return key in _REMOVED


def unknown(what: str, name: str, valid: Sequence[str]) -> ConfigError:
    """The error for a name that does not exist: ``unknown stage 'trian'; did you mean 'train'?``"""
    return ConfigError(f"unknown {what} '{name}'; {_hint(nearest(name, valid), valid)}")


def unknown_key(key: str, valid: Sequence[str]) -> ConfigError:
    """The same for a dotted key.

    The right name in another section wins (``train.clip_low``, ``trian.updates``), then a similar name in the same
    section (``algorithm.cliprange``), then a similar key anywhere (``trian.update``). Otherwise the section is listed.
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


BOUNDS: Mapping[str, Callable[[float], bool]] = {
    "1 or more": lambda value: value >= 1,
    "above 0": lambda value: value > 0,
    "in [0, 1]": lambda value: 0 <= value <= 1,
    "in [0, 1)": lambda value: 0 <= value < 1,
}


def require(section: object, bound: str, *names: str) -> None:
    """Raises ``ValueError``: a field of a section is not within a bound, one of ``BOUNDS``."""
    for name in names:
        if not BOUNDS[bound](value := getattr(section, name)):
            raise ValueError(f"{name} must be {bound}, got {value}")


_hints_of = cache(get_type_hints)


def field_types(schema: type) -> dict[str, Any]:
    """Name and type of the fields that can be set."""
    hints = _hints_of(schema)
    return {field.name: hints[field.name] for field in fields(schema) if field.init}


def schema_keys(schema: type, prefix: str = "") -> dict[str, Any]:
    """Every dotted key with its type, sections too: ``{"seed": int, "train": Train, "train.updates": int}``."""
    keys: dict[str, Any] = {}
    for name, annotation in field_types(schema).items():
        keys[prefix + name] = annotation
        if is_dataclass(annotation):
            keys |= schema_keys(annotation, f"{prefix}{name}.")  # type: ignore[arg-type]  # it is a class
    return keys


def union_types(annotation: Any) -> tuple[Any, ...]:
    """The types that a value may have besides None: ``int | None`` is ``(int,)``."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(arm for arm in get_args(annotation) if arm is not type(None))
    return (annotation,)


def flatten(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts by dotted key: ``{"train": {"updates": 5}}`` is ``{"train.updates": 5}``."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return flat


def flat_defaults(schema: type) -> dict[str, str]:
    """Every key that takes a value, with its default as typed: ``{"seed": "0", "train.betas": "[0.9,0.99]"}``."""
    config = schema()
    keys = [key for key, annotation in schema_keys(schema).items() if not is_dataclass(annotation)]
    return {key: typed(reduce(getattr, key.split("."), config)) for key in keys}


def typed(value: Any) -> str:
    """A value as typed on the command line: ``[1,2]``, ``null``, ``true``."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{typed(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(typed, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def summary(schema: type) -> str:
    """The docstring of a section, without ``Attributes:``."""
    return cleandoc(schema.__doc__ or "").partition("Attributes:")[0].strip()


def explanations(schema: type, prefix: str = "") -> dict[str, str]:
    """A line about each key: the ``#:`` comments above and behind it, or ``Attributes:`` of its section's docstring."""
    texts: dict[str, str] = {}
    for base in reversed(schema.__mro__):  # a section may extend another one
        _, _, attributes = cleandoc(base.__doc__ or "").partition("Attributes:")
        described = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, flags=re.MULTILINE)
        commented = _comments(base.__module__).get(base.__name__, {}) if is_dataclass(base) else {}
        for name, text in {**dict(described), **commented}.items():
            texts[prefix + name] = " ".join(text.split()).rstrip(".")
    for name, annotation in field_types(schema).items():
        if is_dataclass(annotation):
            texts |= explanations(annotation, f"{prefix}{name}.")  # type: ignore[arg-type]  # it is a class
    return texts


@cache
def _comments(module: str) -> dict[str, dict[str, str]]:
    """The ``#:`` comments on the fields of a module's classes: ``{"Train": {"updates": "number of updates"}}``."""
    texts: dict[str, dict[str, str]] = {}
    name, above = "", list[str]()
    path = getattr(sys.modules[module], "__file__", None)
    for line in Path(path).read_text(encoding="utf-8").splitlines() if path else ():
        if is_class := re.match(r"class (\w+)", line):
            name = is_class[1]
        elif comment := re.match(r" {4}#: (.*)", line):
            above.append(comment[1])
        elif field := re.match(r" {4}(\w+): .*?(?:#: (.*))?$", line):
            texts.setdefault(name, {})[field[1]] = " ".join([*above, field[2] or ""])
            above = []
    return {owner: {key: text for key, text in keys.items() if text.strip()} for owner, keys in texts.items()}


def type_name(annotation: Any) -> str:
    """A type in words: ``int`` is "an int", ``Literal["a", "b"]`` is "a or b"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_name, args))
    if origin is dict:
        return "a mapping such as {name: value}"
    if origin is list:
        return "a list such as [1,2]"
    return _TYPE_NAMES.get(annotation) or str(annotation)


def build(annotation: Any, value: Any, key: str = "") -> Any:
    """Converts ``value``, as YAML gives it, to ``annotation``. Strict: 1.5 is no int and "abc" no number.

    ``key`` is that of the value, such as ``train.updates``, for the message.

    Raises:
        ConfigError: an unknown or missing key, a value of another type, or a value that a ``__post_init__`` refused.
    """
    if is_dataclass(annotation):
        return _build_dataclass(annotation, value, key)
    origin, args = get_origin(annotation), get_args(annotation)
    wrong = ConfigError(f"{key} wants {type_name(annotation)}, got {value!r}")
    if origin is Literal:
        if any(choice == value and type(choice) is type(value) for choice in args):
            return value
        best = nearest(str(value), list(map(str, args)))
        raise ConfigError(f"{wrong}; {_hint(best, ())}") if best else wrong
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        arms = union_types(annotation)
        if len(arms) == 1:
            return build(arms[0], value, key)
        for arm in sorted(arms, key=lambda arm: arm in (str, float)):  # 3 stays an int in `int | float`
            try:
                return build(arm, value, key)
            except ConfigError:
                continue
        raise wrong
    if origin is dict and isinstance(value, dict):
        return {build(args[0], name, key): build(args[1], item, f"{key}.{name}") for name, item in value.items()}
    if origin is list and isinstance(value, list):
        return [build(args[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    if annotation is float and type(value) in (int, float):
        return float(value)
    if annotation is Path and isinstance(value, str):
        return Path(value)
    if annotation in (int, bool, str) and type(value) is annotation:
        return value
    raise wrong


def _build_dataclass(schema: Any, value: Any, key: str) -> Any:
    prefix, known = f"{key}." if key else "", field_types(schema)
    if not isinstance(value, dict):
        raise ConfigError(f"{key} is a section; set one of its keys: {', '.join(prefix + name for name in known)}")
    value = {name: item for name, item in value.items() if name in known or not is_removed(f"{prefix}{name}")}
    for name in value:
        if name not in known:
            raise unknown_key(f"{prefix}{name}", [prefix + valid for valid in known])
    for field in fields(schema):
        if field.init and field.name not in value and field.default is field.default_factory is MISSING:
            raise ConfigError(f"{prefix}{field.name} has no default; give it, such as {prefix}{field.name}=...")
    built = {name: build(known[name], item, prefix + name) for name, item in value.items()}
    try:
        return schema(**built)
    except ConfigError:
        raise
    except ValueError as error:  # of a __post_init__
        raise ConfigError(f"{key or schema.__name__}: {error}") from error
