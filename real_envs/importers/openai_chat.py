"""Chats in OpenAI's format: messages of system, user, assistant (with tool calls) and tool.

The assistant acts; users and tools are its world. A tool call is written as a call, ``get_user({"id": "u1"})``, after
the message that it came with. What stands before the first message of the assistant is the start. A last message that
nobody answered ends the episode with an empty observation, unless it calls a tool, whose answer is missing then: it is
left out. A dialogue that the user hung up, or that earned a reward, ended; of others nobody knows.

A record is an object with ``messages`` (or ``traj``, ``conversation``, ``trajectory``), with the two lists ``prompt``
and ``completion`` of a rollout (TRL, verifiers), or the list of messages itself, which may be the whole file. Beside
them may stand ``task_id``, ``reward`` of the whole episode, ``success``, ``agent`` or ``model``, and ``id``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from real_envs.importers.drafts import Dialogue, EpisodeDraft, Format, Reading, outcome
from real_envs.importers.records import Record, Sample, json_records
from real_envs.store.codec import FieldError

MESSAGES = ("messages", "traj", "conversation", "trajectory")
_STOP = "###STOP###"  # how the simulated user of tau-bench hangs up
_WORLD = ("user", "tool", "function")
_ROLLOUT = ("prompt", "completion")
_KNOWN = ("task_id", "reward", "success")


class OpenaiChat(Format):
    name = "openai"
    about = "chat messages with tool calls (messages of role and content), as of tau-bench"

    def recognises(self, sample: Sample) -> str:
        if isinstance(sample.record, dict) and "role" in sample.record:
            return "it is one list of messages with 'role'"
        key, messages = messages_of(sample.record)
        good = bool(messages) and isinstance(messages[0], dict) and "role" in messages[0]
        return f"its records have messages with 'role'{f' in {key!r}' if key else ''}" if good else ""

    def records(self, path: Path) -> Iterator[Record]:
        records = json_records(path)
        first = next(records, None)
        if first is not None and isinstance(first.value, dict) and "role" in first.value:
            yield Record("the file", [first.value, *(record.value for record in records)])
        elif first is not None:
            yield first
            yield from records

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        return chat_draft(value, reading)


def messages_of(record: Any) -> tuple[str, list[Any]]:
    """The name of the field that holds the messages, and these; an empty list where there are none."""
    if isinstance(record, list):
        return "", record
    if isinstance(record, dict) and all(isinstance(record.get(key), list) for key in _ROLLOUT):
        return "+".join(_ROLLOUT), [message for key in _ROLLOUT for message in record[key]]
    lists = ((key, record.get(key)) for key in MESSAGES if isinstance(record, dict))
    return next(((key, messages) for key, messages in lists if isinstance(messages, list)), ("", []))


def chat_draft(record: Any, reading: Reading) -> EpisodeDraft:
    """Raises ``FieldError`` where there are no messages, or one has no known role or no text."""
    key, messages = messages_of(record)
    if not messages:
        raise FieldError(MESSAGES[0], "is no list of messages, or an empty one")
    fields = record if isinstance(record, dict) else {}
    dialogue = Dialogue()
    turns = dialogue.turns
    calls = False  # whether the last message of the assistant called a tool
    for i, message in enumerate(messages):
        at = f"{key}[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role == "assistant":
            calls = bool(message.get("tool_calls") or message.get("function_call"))
            action = _action(message, at)
            if dialogue.unanswered:  # two messages in a row are one action
                turns[-1]["action"] += f"\n{action}"
            else:
                dialogue.act(action)
        elif role in ("system", "developer"):
            if turns:
                raise FieldError(f"{at}.role", f"is '{role}' after the assistant has acted")
            if reading.system:
                dialogue.answer(text_of(message.get("content"), f"{at}.content"))
        elif role in _WORLD:
            dialogue.answer(text_of(message.get("content"), f"{at}.content"))
        else:
            raise FieldError(f"{at}.role", f"is {role!r:.40}, not system, user, assistant or tool")
    if dialogue.unanswered and calls:
        turns.pop()
    dialogue.end()
    if turns and (_STOP in turns[-1]["observation"] or fields.get("reward")):
        turns[-1]["terminated"] = True
    if not turns:
        raise FieldError(key, "has no message of the assistant that was answered")
    return EpisodeDraft.of_record(
        fields,
        (*key.split("+"), *_KNOWN),
        start="\n\n".join(dialogue.start),
        turns=turns,
        task_id=None if fields.get("task_id") is None else str(fields["task_id"]),
        **{"success": fields.get("success"), **outcome(fields.get("reward"))},
    )


def text_of(content: Any, at: str) -> str:
    """The text of a message; parts that are no text are named in brackets, such as ``[image_url]``."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise FieldError(at, f"is {content!r:.60}, not text")
    return "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)


def _action(message: dict[str, Any], at: str) -> str:
    parts = [text_of(message.get("content"), f"{at}.content")]
    calls: Any = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise FieldError(f"{at}.tool_calls", f"is {calls!r:.60}, not a list")
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    if message.get("function_call"):  # the format of 2023
        functions.append(message["function_call"])
    for i, function in enumerate(functions):
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise FieldError(f"{at}.tool_calls[{i}]", "names no function")
        parts.append(f"{function['name']}({_arguments(function.get('arguments'))})")
    return "\n".join(part for part in parts if part)


def _arguments(value: Any) -> str:
    """JSON in one spelling, however the model spaced it; anything else as it is."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return str(value)
    return "" if value is None else json.dumps(value, ensure_ascii=False)
