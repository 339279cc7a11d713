"""Why a logged episode ended, in the words of the programs that write rollouts.

Read are ``error``, flags (``is_truncated``, ``done``, ...) and reasons (``stop_condition``, ``finish_reason``, ...), of
the record, its ``info``, or the agent's last message. A full context and a limit of turns, cost or time cut an episode;
an error broke it, and nobody learns from it. Any other named condition of an episode is its real end; that a model
finished its message (``stop``, ``end_turn``) says nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from real_envs.trajectory import StopReason

_OF_EPISODES = ("stop_condition", "termination_reason", "exit_status", "exit_reason", "end_reason")
_OF_MESSAGES = ("finish_reason", "stop_reason", "done_reason")
_ERRORS = ("error", "error_message", "exception", "exception_info", "has_error")
_CUT_FLAGS = ("is_truncated", "truncated", "truncation", "TimeLimit.truncated")
_END_FLAGS = ("is_completed", "is_done", "done", "terminated")
_FINISHED = frozenset("stop tool_calls tool_use function_call end_turn stop_sequence eos end null none unknown".split())  # noqa: SIM905

_BROKEN = re.compile(
    r"rate_limit|content_filter|^(safety|prohibited_content|recitation|blocklist|killed|oom)$|exit_api|(?<!too_many)(^|_)(error|exception|crash(ed)?|abort(ed)?)(_|$)"
)
_CONTEXT = re.compile(
    r"^length$|(max|context|prompt|sequence|response|model|output)\w*_(length|len)\b|length_(limit|exceeded|reached)|compaction_failed"
    r"|context_(window|limit|size|full|exceeded|overflow)|exit_context|too_long|overlong|max\w*_tokens|tokens?_(limit|budget)"
)
_LIMIT = re.compile(
    r"max(imum)?_(number_of_|num_)?(turn|step|iter|round|action|message|call|time|cost|interaction|tool|retr|attempt|consecutive)"
    r"|(turn|step|time|iteration|call|message|cost|action|round|operator|custom)s?_limit|limits?_(exceeded|reached|hit)|budget|stuck|loop_detected"
    r"|too_many_(error|turn|step|call|retr)|exit_(cost|format|total_execution_time)|early_exit|time_?d?_?out|truncat"
    r"|exhausted|incomplete|interrupted|pause_turn|cancell?ed|^(running|in_progress|queued|pending|requires_action|expired)$"
)
# an error may be a whole traceback: only what is surely no breakdown
_SURELY_CONTEXT = re.compile(r"context_(length|window|size|limit)|prompt_too_long|overlong|max\w*_tokens")
_SURELY_LIMIT = re.compile(
    r"max(imum)?_(number_of_)?(turn|step|iteration|round)|(turn|step)s?_limit|too_many_errors|stuck_in_(a_)?loop|loop_detected"
)


class Ending(NamedTuple):
    """``stop`` is ``None`` where nothing says it; ``failure`` is what broke."""

    stop: StopReason | None = None
    failure: str | None = None


def ending_of(record: Mapping[str, Any], last: Mapping[str, Any] | None = None) -> Ending:
    """``last``: the agent's last message."""
    for key in _ERRORS:
        error = record.get(key)
        if error is True or (isinstance(error, str | dict | list) and not _says_nothing(error)):
            return _of_error(key if error is True else error)
    named = {key: value for key, value in _reasons(record, last) if isinstance(value, str) and value.strip()}
    kinds = {key: _kind(value) for key, value in named.items()}
    if broken := next((named[key] for key, kind in kinds.items() if kind is StopReason.ENV_CRASHED), None):
        return _of_error(broken)
    for cut in (StopReason.CONTEXT_LIMIT, StopReason.TURN_LIMIT):
        if cut in kinds.values():
            return Ending(cut)
    info = record["info"] if isinstance(record.get("info"), Mapping) else {}
    if any(flag(one.get(name)) is True for name in _CUT_FLAGS for one in (record, info)) or any(
        flag(record.get(name)) is False for name in _END_FLAGS
    ):
        return Ending(StopReason.TURN_LIMIT)
    ended = any(flag(record.get(name)) is True for name in _END_FLAGS[1:])
    ended |= any(kind is StopReason.TERMINATED and key.split(".")[-1] in _OF_EPISODES for key, kind in kinds.items())
    return Ending(StopReason.TERMINATED if ended else None)


def _says_nothing(error: str | dict[str, Any] | list[Any]) -> bool:
    if isinstance(error, str):
        return error.strip().lower() in ("", "none", "null", "nan", "false")
    return not error or (isinstance(error, dict) and all(value is None for value in error.values()))


def _reasons(record: Mapping[str, Any], last: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    yield from ((key, record.get(key)) for key in (*_OF_EPISODES, *_OF_MESSAGES, "status"))
    for inner, keys in (
        ("info", _OF_EPISODES),
        ("metadata", (*_OF_EPISODES, *_OF_MESSAGES)),
        ("incomplete_details", ("reason",)),
    ):
        if isinstance(record.get(inner), Mapping):
            yield from ((f"{inner}.{key}", record[inner].get(key)) for key in keys)
    for message in (last, (last or {}).get("response_metadata")):
        if isinstance(message, Mapping):
            yield from ((f"message.{key}", message.get(key)) for key in _OF_MESSAGES)


def _kind(value: str) -> StopReason | None:
    words = _words(value)
    if words in _FINISHED:
        return None
    for pattern, stop in (
        (_BROKEN, StopReason.ENV_CRASHED),
        (_CONTEXT, StopReason.CONTEXT_LIMIT),
        (_LIMIT, StopReason.TURN_LIMIT),
    ):
        if pattern.search(words):
            return stop
    return StopReason.TERMINATED


def _of_error(error: Any) -> Ending:
    text = error if isinstance(error, str) else json.dumps(error, default=str, ensure_ascii=False)
    words = _words(text)
    if _SURELY_CONTEXT.search(words):
        return Ending(StopReason.CONTEXT_LIMIT)
    if _SURELY_LIMIT.search(words):
        return Ending(StopReason.TURN_LIMIT)
    late = re.search(r"time_?(d_)?out", words)
    return Ending(StopReason.ENV_TIMEOUT if late else StopReason.ENV_CRASHED, f"logged: {text:.200}")


def flag(value: Any) -> bool | None:
    """Tables and JSON of other languages write 0 and 1, or texts."""
    known = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False, "t": True, "f": False}
    return known.get(str(value).lower()) if isinstance(value, bool | int | float | str) else None


def _words(text: str) -> str:
    """``LimitsExceeded`` and ``limits exceeded`` alike."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text)
    return re.sub(r"[^a-z0-9]+", "_", split.lower()).strip("_")
