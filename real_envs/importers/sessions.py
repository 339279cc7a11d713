"""Dialogues that stand in a file an event a line: sessions of Claude Code, Codex, Gemini's CLI and others.

Of a session that was rewound, or is a tree, one path is read, and the rest is counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from real_envs.importers.records import Record
from real_envs.store.codec import FieldError

GEMINI_CLI = {"sessionId", "startTime"}


def path_to(above: Mapping[Any, Any], leaf: Any) -> list[Any]:
    """The nodes of a tree from its root to a leaf."""
    path: dict[Any, None] = {}
    while leaf in above and leaf not in path:
        path[leaf] = None
        leaf = above[leaf]
    return list(path)[::-1]


def _chunk(line: Any) -> Any:
    """A piece of a text, of Kimi Code, as Gemini's CLI writes one."""
    event = line.get("event") if isinstance(line, dict) else None
    part = event.get("part") if isinstance(event, dict) else None
    plain = isinstance(part, dict) and part.get("type") == "text"
    return {"role": "assistant", "content": part.get("text"), "delta": True} if plain and part else line


def _error(line: Any) -> Any:
    """How a line says that a stream broke off."""
    kind, status = (line.get("type"), line.get("status")) if isinstance(line, dict) else ("", "")
    broken = kind in ("turn.failed", "error") or (kind in ("result", "turn_ended") and status not in (None, "success"))
    if isinstance(line, dict) and line.get("kind") == "ConversationErrorEvent":  # of OpenHands
        return line.get("detail") or line.get("code")
    given = line if broken else event if (event := _payload(line)).get("type") == "error" else {}
    return given.get("error") or given.get("message") or (status if broken else None)


def _payload(line: Any) -> Mapping[str, Any]:
    """What a line of Codex holds."""
    return line["payload"] if isinstance(line, dict) and isinstance(line.get("payload"), dict) else {}


def _is_item(line: Any) -> bool:
    return isinstance(line, dict) and line.get("type") == "response_item"


def _taken_back(line: Any, before: list[Any]) -> int:
    """From which of the lines before it one of Codex takes all back, up to a prompt; 0 where it takes none back."""
    event = _payload(line)
    if event.get("type") != "thread_rolled_back" or not isinstance(event.get("num_turns"), int):
        return 0
    prompts = [i for i, one in enumerate(before) if _is_item(one) and _is_prompt(_payload(one))]
    return prompts[-event["num_turns"] :][0] if prompts and event["num_turns"] > 0 else 0


def _is_prompt(item: Mapping[str, Any]) -> bool:
    """Whether a user wrote a message, and not the program in a mark of its own, such as <environment_context>."""
    content = item.get("content")
    texts = [str(part.get("text")) for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return item.get("role") == "user" and not re.match(r"<\w+>|# AGENTS.md", "".join(texts).lstrip())


def stream(lines: list[Any]) -> dict[str, Any]:
    """Lines of one dialogue, an event each: the path to the last one where they are a tree, and how they broke off."""
    linked = [one for one in lines if isinstance(one, dict) and {"id", "parentId"} <= one.keys()]
    above = {str(one["id"]): str(one["parentId"]) for one in linked}
    left = list[Any]()
    if above and isinstance(lines[0], dict) and lines[0].get("type") == "session":  # of pi
        path = set(path_to(above, next(reversed(above))))
        left = [one for one in linked if str(one["id"]) not in path]
        others = set(map(id, left))
        lines = [one for one in lines if id(one) not in others]
    joined: list[Any] = []
    rewound = 0
    for line in map(_chunk, lines):
        before = joined[-1] if joined else None
        if back := _taken_back(line, joined):
            rewound += sum(map(_is_item, joined[back:]))
            del joined[back:]
        if isinstance(line, dict) and line.get("delta") is True and isinstance(before, dict) and before.get("delta"):
            joined[-1] = before | {"content": f"{before.get('content')}{line.get('content')}"}
        else:
            joined.append(line)
    error = next(filter(None, map(_error, lines[:-4:-1])), None)
    cut = any(_payload(line).get("type") == "turn_aborted" for line in lines[:-4:-1])
    about = {"messages_of_other_branches": len(left) or None, "rewound_messages": rewound or None}
    return {"messages": joined, "error": error, "stop_condition": "interrupted" if cut else None} | about


def gemini_session(records: Iterable[Record]) -> Iterator[Record]:
    """Of the lines of Gemini's CLI: later ones replace those of the same id, set all, or take some back."""
    messages: dict[str, Any] = {}
    rewound, name = 0, ""
    for record in records:
        line = record.value
        if not isinstance(line, dict):
            yield record if isinstance(line, FieldError) else Record(record.where, FieldError("", "is no object"))
            continue
        name = str(line.get("sessionId") or name)
        update = line["$set"] if isinstance(line.get("$set"), dict) else {}
        if "$rewindTo" in line:
            ids, to = list(messages), str(line["$rewindTo"])
            kept = ids[: ids.index(to) if to in ids else 0]
            rewound += len(ids) - len(kept)
            messages = {key: messages[key] for key in kept}
        elif isinstance(update.get("messages"), list):
            messages = {
                str(one.get("id") if isinstance(one, dict) else i): one for i, one in enumerate(update["messages"])
            }
        elif "type" in line:
            messages[str(line.get("id"))] = line
    value = {"messages": list(messages.values()), "session": name, "rewound_messages": rewound or None}
    yield Record(f"session {name}", value)


def sessions(records: Iterable[Record]) -> Iterator[Record]:
    """The sessions of Claude Code in a file, and their side chains apart, without what a rewind took back."""
    chains: dict[tuple[str, str], dict[object, Any]] = {}
    rewound: Counter[tuple[str, str]] = Counter()
    roots: dict[object, str] = {}
    session = ""
    for record in records:
        line = record.value
        if not isinstance(line, dict):
            yield record if isinstance(line, FieldError) else Record(record.where, FieldError("", "is no object"))
            continue
        uuid, parent = (line[key] if isinstance(line.get(key), str) else None for key in ("uuid", "parentUuid"))
        session, side = str(line.get("sessionId") or line.get("session_id") or session), ""
        if line.get("parent_tool_use_id"):  # of the stream
            side = str(line["parent_tool_use_id"])
        if line.get("isSidechain") is True:
            side = roots[uuid] = str(line.get("agentId") or roots.get(parent, uuid))
        chain = chains.setdefault((session, side), {})
        if uuid is not None and uuid in chain:  # copied when a session was resumed
            continue
        linked = parent in chain or (parent is None and any(each.get("parentUuid") for each in chain.values()))
        since = list(chain).index(parent) + 1 if parent in chain else 0
        for key in list(chain)[since:] if linked and _prompt(line) else ():
            rewound[session, side] += isinstance(chain.pop(key).get("message"), dict)
        chain[uuid or len(chain)] = _prompted(line)
    loose = chains.pop(("", ""), {}) if len(chains) > 1 else {}  # titles, of no session
    for (name, side), chain in chains.items():
        messages = [line["message"] for line in chain.values() if isinstance(line.get("message"), dict)]
        model = next(
            (message["model"] for message in messages if message.get("model") not in (None, "<synthetic>")), None
        )
        value = {"messages": [*loose.values(), *chain.values()], "agent": model, "session": name}
        if result := next((line for line in chain.values() if line.get("type") == "result"), None):
            wrong = result.get("is_error") is True and result.get("subtype") == "success"
            value |= {"stop_condition": result.get("subtype"), "error": result.get("result") if wrong else None}
        yield Record(f"session {name} {side}".strip(), value | {"rewound_messages": rewound[name, side] or None})
        loose = {}


def _prompted(line: dict[str, Any]) -> dict[str, Any]:
    """The line; what a user wrote while the agent was at work stands in its place as any prompt does."""
    given = line.get("attachment")
    queued = isinstance(given, dict) and given.get("type") == "queued_command" and given.get("prompt")
    return line | {"type": "user", "message": {"role": "user", "content": queued}} if queued else line


def _prompt(line: Mapping[str, Any]) -> bool:
    """Whether a user wrote it: no answer of a tool, and no note of the program."""
    content = line["message"].get("content") if isinstance(line.get("message"), dict) else None
    notes = line.get("type") != "user" or line.get("isMeta") or line.get("isCompactSummary")
    answers = isinstance(content, list) and any(isinstance(p, dict) and p.get("type") == "tool_result" for p in content)
    return bool(content) and not notes and not answers
