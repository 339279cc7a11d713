"""A trajectory as a row of plain values: the schema of a store's shards, and the only check of what is in a file.

``encode`` and ``decode`` are inverse. ``decode`` takes rows written by anybody, so it looks at every field and says
which one is wrong, as in ``field 'turns[3].action' is null or missing, not text``. Importers fill such rows, too.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from numbers import Integral, Real
from typing import TypeVar

import pyarrow as pa

from real_envs.trajectory import Owner, Source, StopReason, Trace, Trajectory, Turn

_INTS = pa.list_(pa.int64())
_INFO = {"key": pa.string(), "number": pa.float64(), "text": pa.string(), "flag": pa.bool_()}
_TURN = {"action": pa.string(), "observation": pa.string(), "reward": pa.float64(), "terminated": pa.bool_()}
_TURN |= {"info": pa.list_(pa.struct(_INFO))}
_TRACE = {
    "ids": _INTS,
    "owners": _INTS,
    "logprobs": pa.list_(pa.float64()),
    "turns": _INTS,
    "temperature": pa.float64(),
    "top_p": pa.float64(),
    "top_k": pa.int64(),
    "segments": _INTS,
}
SCHEMA = pa.schema(
    {name: pa.string() for name in ("id", "task_id", "group_id", "source", "agent", "start", "stop")}
    | {"seed": pa.int64(), "prefix_turns": pa.int64(), "turns": pa.list_(pa.struct(_TURN))}
    | {name: pa.string() for name in ("policy_version", "world_model_version", "failure")}
    | {"trace": pa.struct(_TRACE), "world_facts": pa.list_(pa.string()), "success": pa.bool_()}
)

LATER = frozenset({"world_facts", "success"})  # columns that shards of earlier versions, and of others, may lack

EnumT = TypeVar("EnumT", bound=StrEnum)


class FieldError(ValueError):
    """A field of a row is not what the format says; whoever knows the file and the row adds them."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"field '{field}' {reason}")
        self.field, self.reason = field, reason


def nearest(name: object, names: Iterable[str]) -> str:
    """A hint for a misspelt name, such as ``did you mean 'train'? (known: train, test)``."""
    known = sorted(names)
    match = difflib.get_close_matches(str(name), known, n=1)
    shown = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
    return (f"did you mean '{match[0]}'? " if match else "") + f"(known: {shown or 'none'})"


def encode(trajectory: Trajectory) -> dict[str, object]:
    """The row of a trajectory. Nothing is checked here: ``decode`` the row before it is kept."""
    row = _without_turns(trajectory)
    row["turns"] = [
        {
            "action": turn.action,
            "observation": turn.observation,
            "reward": turn.reward,
            "terminated": turn.terminated,
            "info": entries(turn.info) if turn.info else [],
        }
        for turn in trajectory.turns
    ]
    return row


def _without_turns(trajectory: Trajectory) -> dict[str, object]:
    row: dict[str, object] = {name: getattr(trajectory, name) for name in SCHEMA.names}
    row["source"], row["stop"] = str(trajectory.source), str(trajectory.stop)
    if trajectory.trace is not None:
        row["trace"] = {name: getattr(trajectory.trace, name) for name in _TRACE}
    return row


def to_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    """The table of their rows. Turns, which are most of it, go column by column, without a dict for each.
    Raises ``pa.ArrowException``: more than 2 GiB of text.
    """
    rows = [_without_turns(trajectory) for trajectory in trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    infos = [entries(turn.info) if turn.info else [] for turn in turns]
    kind = SCHEMA.field("turns").type
    columns = [
        pa.array([getattr(turn, name) for turn in turns], type_) for name, type_ in _TURN.items() if name != "info"
    ]
    columns.append(pa.array(infos, _TURN["info"]))
    if any(isinstance(column, pa.ChunkedArray) for column in columns):
        raise pa.ArrowCapacityError("more than 2 GiB of text")
    ends = pa.array(accumulate((len(trajectory.turns) for trajectory in trajectories), initial=0), pa.int32())
    struct = pa.StructArray.from_arrays(columns, fields=list(kind.value_type))
    of_turns = pa.ListArray.from_arrays(ends, struct, type=kind)
    names = [name for name in SCHEMA.names if name != "turns"]
    arrays = {name: pa.array([row[name] for row in rows], SCHEMA.field(name).type) for name in names}
    return pa.table([of_turns if name == "turns" else arrays[name] for name in SCHEMA.names], schema=SCHEMA)


def entries(info: Mapping[str, float | str | bool]) -> list[dict[str, object]]:
    """``Turn.info`` as a row has it: a list of keys, each with one of its three values."""

    def kind(value: object) -> str:
        return "flag" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"

    return [{"key": key, "number": None, "text": None, "flag": None} | {kind(v): v} for key, v in info.items()]


def decode(row: Mapping[str, object]) -> Trajectory:
    """The trajectory of a row.

    Raises:
        FieldError: a field is missing or not what the format says.
    """
    turns = tuple(_turn(value, f"turns[{i}]") for i, value in enumerate(_list(row.get("turns"), "turns")))
    prefix_turns = _int(row.get("prefix_turns"), "prefix_turns")
    if not 0 <= prefix_turns <= len(turns):
        raise FieldError("prefix_turns", f"is {prefix_turns}, but the episode has {len(turns)} turns")
    return Trajectory(
        id=_text(row.get("id"), "id"),
        task_id=_text(row.get("task_id"), "task_id"),
        group_id=_text(row.get("group_id"), "group_id"),
        source=_enum(Source, row.get("source"), "source"),
        agent=_text(row.get("agent"), "agent"),
        seed=_int(row.get("seed"), "seed"),
        start=_text(row.get("start"), "start"),
        turns=turns,
        stop=_enum(StopReason, row.get("stop"), "stop"),
        prefix_turns=prefix_turns,
        policy_version=_text_or_none(row.get("policy_version"), "policy_version"),
        world_model_version=_text_or_none(row.get("world_model_version"), "world_model_version"),
        trace=_trace(row.get("trace")),
        failure=_text_or_none(row.get("failure"), "failure"),
        world_facts=_facts(row.get("world_facts")),
        success=None if row.get("success") is None else _bool(row["success"], "success"),
    )


def _facts(value: object) -> tuple[str, ...]:
    """None where the column is missing: shards of earlier versions have none."""
    facts = [] if value is None else _list(value, "world_facts")
    return tuple(_text(line, f"world_facts[{i}]") for i, line in enumerate(facts))


def _turn(value: object, at: str) -> Turn:
    if type(value) is dict and (plain := _plain_turn(value)) is not None:
        return plain
    turn = _struct(value, at)
    reward = None if turn.get("reward") is None else _number(turn["reward"], f"{at}.reward")
    if reward is not None and not math.isfinite(reward):
        raise FieldError(f"{at}.reward", f"is {reward}, not a finite number (null where nobody measured it)")
    info: dict[str, float | str | bool] = {}
    given = [] if turn.get("info") is None else _list(turn["info"], f"{at}.info")
    for i, item in enumerate(given):
        entry = _struct(item, f"{at}.info[{i}]")
        key = _text(entry.get("key"), f"{at}.info[{i}].key")
        kinds = [kind for kind in ("number", "text", "flag") if entry.get(kind) is not None]
        if len(kinds) != 1 or key in info:
            reason = "is there twice" if key in info else f"has {len(kinds)} values, not one of number, text and flag"
            raise FieldError(f"{at}.info['{key}']", reason)
        checks: dict[str, Callable[[object, str], float | str | bool]]
        checks = {"number": _number, "text": _text, "flag": _bool}
        info[key] = checks[kinds[0]](entry[kinds[0]], f"{at}.info['{key}']")
    return Turn(
        action=_text(turn.get("action"), f"{at}.action"),
        observation=_text(turn.get("observation"), f"{at}.observation"),
        reward=reward,
        terminated=_bool(turn.get("terminated"), f"{at}.terminated"),
        info=info,
    )


def _plain_turn(turn: dict[str, object]) -> Turn | None:
    """The usual turn, at a third of the cost: ASCII texts, nothing to convert, no info. ``None`` is any other."""
    action, seen, reward, ended = map(turn.get, ("action", "observation", "reward", "terminated"))
    if type(action) is not str or type(seen) is not str or type(ended) is not bool or turn.get("info"):
        return None
    if reward is not None and (type(reward) is not float or not math.isfinite(reward)):
        return None
    return Turn(action, seen, reward, ended) if action.isascii() and seen.isascii() else None


def _trace(value: object) -> Trace | None:
    if value is None:
        return None
    trace = _struct(value, "trace")

    def ints(name: str) -> Iterable[int]:
        return (_int(v, f"trace.{name}[{i}]") for i, v in enumerate(_list(trace.get(name), f"trace.{name}")))

    logprobs = enumerate(_list(trace.get("logprobs"), "trace.logprobs"))
    try:
        return Trace(
            ids=tuple(ints("ids")),
            owners=tuple(Owner(owner) for owner in ints("owners")),
            logprobs=tuple(None if v is None else _number(v, f"trace.logprobs[{i}]") for i, v in logprobs),
            turns=tuple(ints("turns")),
            temperature=_number(trace.get("temperature"), "trace.temperature"),
            top_p=1.0 if trace.get("top_p") is None else _number(trace["top_p"], "trace.top_p"),
            top_k=0 if trace.get("top_k") is None else _int(trace["top_k"], "trace.top_k"),
            segments=() if trace.get("segments") is None else tuple(ints("segments")),
        )
    except FieldError:
        raise
    except ValueError as error:  # an unknown owner, or what Trace itself refuses
        raise FieldError("trace", f"is no trace: {error}") from None


def _wrong(value: object, at: str, wanted: str) -> FieldError:
    return FieldError(at, f"is {'null or missing' if value is None else repr(value)[:60]}, not {wanted}")


def _struct(value: object, at: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise _wrong(value, at, "a struct")
    return value


def _list(value: object, at: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise _wrong(value, at, "a list")
    return value


def _text(value: object, at: str) -> str:
    if not isinstance(value, str):
        raise _wrong(value, at, "text")
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        raise FieldError(
            at, "holds half a surrogate pair, which UTF-8 cannot; use text.encode(errors='replace')"
        ) from None
    return value


def _text_or_none(value: object, at: str) -> str | None:
    return None if value is None else _text(value, at)


def _int(value: object, at: str) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or not -(2**63) <= int(value) < 2**63:
        raise _wrong(value, at, "a whole number of 64 bits")
    return int(value)


def _number(value: object, at: str) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise _wrong(value, at, "a number")
    try:
        return float(value)
    except OverflowError:
        raise _wrong(value, at, "a number of 64 bits") from None


def _bool(value: object, at: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(value, at, "true or false")
    return value


def _enum(kind: type[EnumT], value: object, at: str) -> EnumT:
    try:
        return kind(_text(value, at))
    except FieldError:
        raise
    except ValueError:
        raise FieldError(at, f"is '{value}'; {nearest(value, [member.value for member in kind])}") from None
