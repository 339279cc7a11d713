"""What agents' programs log, an event a line or a message in words of their own, as chat messages.

Read are the streams of Codex, OpenCode and Gemini's CLI, sessions of Copilot's CLI, pi, goose, Kimi Code, DeepSeek's
harness, OpenCode, Cursor and Continue, events of OpenHands' SDK and Google's ADK, messages of Pydantic AI and Letta.
What is no message is counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from real_envs.importers.messages import SPEAKERS

Message = dict[str, Any]
Reader = Callable[[Message, Counter[str]], list[Any]]
_AGENT, _TOOL, _USER, _SYSTEM = "assistant", "tool", "user", "system"
NO_TOOLS = (None, "all", _USER, _AGENT)  # recipients of messages that call nothing
_OF_ITEMS = ("command", "changes", "arguments", "query")  # what Codex's tools were asked
_NOTICES = ("info", "error", "warning")  # of Gemini's CLI
_OF_SESSIONS = ("model_change", "thinking_level_change", "compaction", "branch_summary", "label", "session_info")
_LETTA = {"user_message": _USER, "system_message": _SYSTEM, "assistant_message": _AGENT, "tool_return_message": _TOOL}


def event_reader(value: Mapping[str, Any]) -> Reader | None:
    """How an event is read; ``None`` where it is none."""
    kind, inner = value.get("type"), value.get("kind")
    if _within(value):
        return _wrapped
    if isinstance(value.get("tool_messages"), list):  # of tau2-bench
        return _together
    if isinstance(inner, str) and "source" in value and (inner.endswith("Event") or inner == "Condensation"):
        return _openhands
    if inner in ("request", "response") and isinstance(value.get("parts"), list):
        return _pydantic_ai
    if isinstance(value.get("Role"), dict) and {"Items", "Content"} & value.keys():
        return _semantic_kernel
    if isinstance(value.get("message_type"), str):
        return _letta
    if isinstance(value.get("message"), dict) and "content" in value["message"] and "role" in value:  # of Cursor
        return _beside
    if not isinstance(kind, str):  # how goose begins, or an event of ADK without a content
        if {"id", "timestamp", "instructions"} <= value.keys():  # how a session of Codex began in 2025
            return _codex_head
        about = ({"working_dir", "description"}, {"author", "actions"}, {"record_type"})
        return no_message if any(names <= value.keys() for names in about) and "conversation" not in value else None
    if kind == "gemini" or (kind in _NOTICES and {"content", "timestamp"} <= value.keys()):
        return _gemini_cli
    if kind in ("tool_use", "tool_result") and ("tool_id" in value or "tool_use_id" in value):
        return _gemini_stream
    if kind.startswith(("thread.", "turn.", "item.", "session.created", "session.resumed")) and "data" not in value:
        return _codex_stream
    if isinstance(value.get("part"), dict) and "sessionID" in value:
        return _opencode_stream
    if isinstance(value.get("data"), dict) and re.search(r"[./]", kind):
        return _session_event
    if "." in kind and ("time" in value or kind.startswith("config.")):
        return _kimi
    begins = (kind in ("session", "init") and {"cwd", "session_id"} & value.keys()) or "protocol_version" in value
    noted = kind in _OF_SESSIONS or "parentId" in value or isinstance(value.get("message"), dict) or "seq0" in value
    ends = (kind in ("result", "turn_ended") and "status" in value) or (kind == "error" and "sessionID" in value)
    return no_message if "role" not in value and (begins or noted or ends) else None


def no_message(value: Message, left_out: Counter[str]) -> list[Any]:
    left_out[f"line of type {value.get('type', 'session')}"] += 1
    return []


def note(message: Message, left_out: Counter[str]) -> list[Any]:
    """Of Kimi's CLI: its system prompt, or a number."""
    if message["role"] == "_system_prompt":
        return [message | {"role": _SYSTEM}]
    left_out[f"line of role {message['role']}"] += 1
    return []


def harmony(message: Message, left_out: Counter[str]) -> list[Any]:
    """Of gpt-oss: the channel says what is a thought, the recipient which tool is called."""
    known = {key: kept for key, kept in message.items() if key not in ("channel", "recipient", "content_type")}
    content, tool = message.get("content"), str(message.get("recipient") or "all")
    text = content if isinstance(content, str) else "\n".join(str(part.get("text")) for part in objects(content))
    if tool not in NO_TOOLS:
        return [known | {"content": None, "tool_calls": [{"name": tool.removeprefix("functions."), "arguments": text}]}]
    return [known | ({"content": None, "reasoning_content": text} if message.get("channel") == "analysis" else {})]


def microsoft(part: Message, kind: str) -> Message:
    """A part of Semantic Kernel or Microsoft.Extensions.AI, in the terms of ``messages``."""
    given = {key[:1].lower() + key[1:]: kept for key, kept in part.items()}
    kind = re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.removesuffix("Content")).lower()
    if kind == "usage":  # counts of tokens
        return {"type": "text", "text": ""}
    names = [given[key] for key in ("pluginName", "functionName") if isinstance(given.get(key), str)]
    call = given.get("callId", given.get("id"))
    return given | {"type": kind, "name": given.get("name") or "-".join(names), "call_id": call}


def _semantic_kernel(message: Message, left_out: Counter[str]) -> list[Any]:
    """Of .NET, where names begin with capitals."""
    parts = [microsoft(part, str(part.get("$type"))) for part in objects(message.get("Items"))]
    about = {"name": message.get("AuthorName"), "content": parts or message.get("Content")}
    return [{"role": str(message["Role"].get("Label")).lower()} | about]


def objects(value: Any) -> list[Message]:
    return [inner for inner in value if isinstance(inner, dict)] if isinstance(value, list) else []


def shown(value: Any, plain: tuple[type, ...] = (str,)) -> Any:
    return value if isinstance(value, plain) else json.dumps(value, ensure_ascii=False)


def _within(value: Mapping[str, Any]) -> Message:
    """The message that a value holds beside what is known of it; empty where it holds none."""
    key = "message" if value.get("type") == "message" or {"contextItems", "message_id"} & value.keys() else ""
    key = "content" if "author" in value else key
    inner = value.get(key)
    if "author" in value and isinstance(inner, dict) and inner.get("role") is None:
        inner = inner | {"role": _USER if value["author"] == _USER else _AGENT}
    if "parts" in value and isinstance(info := value.get("info"), dict):
        inner = {"role": info.get("role"), "parts": value["parts"], "error": info.get("error")}
    named = isinstance(inner, dict) and isinstance(inner.get("role"), str) and inner["role"].lower() in SPEAKERS
    return inner if named and isinstance(inner, dict) else {}


def _wrapped(value: Message, left_out: Counter[str]) -> list[Any]:
    message, beside = dict(_within(value)), objects(value.get("contextItems"))
    if value.get("author") not in (None, _USER):
        message["name"] = value["author"]
    if value.get("partial") is True:  # of ADK: the whole follows
        left_out["part of a stream"] += 1
        return []
    left_out["context item"] += len(beside)
    reason = message.pop("stopReason", None)
    return [message | ({"stop_reason": reason} if reason else {})]


def _together(message: Message, left_out: Counter[str]) -> list[Any]:
    return list(message["tool_messages"])


def _tool(name: Any, given: Any, answer: Any, failed: bool = False, call_id: Any = None) -> list[Any]:
    """A call and what it gave, ``None`` where nothing was logged."""
    call = {"role": _AGENT, "content": None, "tool_calls": [{"name": name, "arguments": given, "id": call_id}]}
    return [call, *([] if answer is None else [{"role": _TOOL, "content": shown(answer), "is_error": failed}])]


def _openhands(event: Message, left_out: Counter[str]) -> list[Any]:
    """Of OpenHands' SDK, with a ``kind``."""
    if isinstance(message := event.get("llm_message"), dict):
        return [message]
    if isinstance(prompt := event.get("system_prompt"), dict):
        return [{"role": _SYSTEM, "content": prompt.get("text")}]
    if isinstance(call := event.get("tool_call"), dict):
        texts = [event.get("reasoning_content"), *(part.get("text") for part in objects(event.get("thought")))]
        message = {"role": _AGENT, "content": None, "tool_calls": [call], "ends": event.get("tool_name") == "finish"}
        return [message | {"reasoning_content": "\n\n".join(filter(None, texts))}]
    seen = event["observation"] if isinstance(event.get("observation"), dict) else {}
    if "content" in seen or "output" in seen:
        content = seen["content"] if "content" in seen else shown(seen["output"])
        about = {"is_error": seen.get("is_error") is True, "tool_call_id": event.get("tool_call_id")}
        return [{"role": _TOOL, "content": content} | about]
    if error := event.get("error") or event.get("rejection_reason"):
        return [{"role": _TOOL, "content": error, "is_error": True, "tool_call_id": event.get("tool_call_id")}]
    left_out[f"event {event['kind']}"] += 1
    return []


def _pydantic_ai(message: Message, left_out: Counter[str]) -> list[Any]:
    made: list[Any] = []
    if isinstance(text := message.get("instructions"), str):
        made.append({"role": _SYSTEM, "content": text})
    for part in objects(message["parts"]):
        kind, content = part.get("part_kind"), part.get("content")
        if kind in ("tool-call", "builtin-tool-call"):
            made += _tool(part.get("tool_name"), part.get("args"), None, call_id=part.get("tool_call_id"))
        elif kind in ("tool-return", "builtin-tool-return", "retry-prompt") and part.get("tool_name"):
            seen = {"role": _TOOL, "content": shown(content), "is_error": kind == "retry-prompt"}
            made.append(seen | {"tool_call_id": part.get("tool_call_id")})
        elif kind in ("text", "thinking"):
            key = "content" if kind == "text" else "reasoning_content"
            made.append({"role": _AGENT, "content": None, key: content})
        elif kind in ("system-prompt", "user-prompt", "retry-prompt"):
            texts = [one if isinstance(one, str) else {"type": "file"} for one in content or ()]
            content = content if isinstance(content, str) or kind == "retry-prompt" else texts
            made.append({"role": _SYSTEM if kind == "system-prompt" else _USER, "content": shown(content, (str, list))})
        else:
            made.append({"role": _AGENT, "content": [{"type": kind}]})  # unknown, and refused
    return made


def _letta(message: Message, left_out: Counter[str]) -> list[Any]:
    kind = message["message_type"]
    if kind == "reasoning_message":
        return [{"role": _AGENT, "content": None, "reasoning_content": message.get("reasoning")}]
    if calls := objects(message.get("tool_calls")) or objects([message.get("tool_call")]):
        return [{"role": _AGENT, "content": None, "tool_calls": calls}]
    if kind not in _LETTA:
        left_out[f"line of type {kind}"] += 1
        return []
    content = message.get("content", message.get("tool_return"))
    about = {"is_error": message.get("status") == "error", "tool_call_id": message.get("tool_call_id")}
    return [{"role": _LETTA[kind], "content": content} | about]


def _gemini_cli(line: Message, left_out: Counter[str]) -> list[Any]:
    if line["type"] != "gemini":
        return no_message(line, left_out)
    calls = objects(line.get("toolCalls"))
    thoughts = [f"{one.get('subject')}: {one.get('description')}" for one in objects(line.get("thoughts"))]
    made = [{key: kept for key, kept in call.items() if key != "result"} for call in calls]
    message = {"role": _AGENT, "content": line.get("content"), "tool_calls": made}
    seen = [
        {
            "role": _TOOL,
            "content": call.get("result") or call["resultDisplay"],
            "is_error": call.get("status") == "error",
        }
        for call in calls
        if call.get("result") or isinstance(call.get("resultDisplay"), str)
    ]
    return [message | {"reasoning_content": "\n\n".join(thoughts)}, *seen]


def _gemini_stream(line: Message, left_out: Counter[str]) -> list[Any]:
    if line["type"] == "tool_use":
        return _tool(line.get("tool_name"), line.get("parameters"), None, call_id=line.get("tool_id"))
    failed = line.get("status") == "error"
    failed |= line.get("is_error") is True
    given = line.get("error") if failed and line.get("error") else line.get("output", line.get("content", ""))
    about = {"is_error": failed, "tool_call_id": line.get("tool_id")}
    return [{"role": _TOOL, "content": shown(given, (str, list))} | about]


def _codex_head(line: Message, left_out: Counter[str]) -> list[Any]:
    given = line["instructions"]
    return [{"role": _SYSTEM, "content": given}] if isinstance(given, str) else no_message(line, left_out)


def _codex_stream(line: Message, left_out: Counter[str]) -> list[Any]:
    """Of ``codex exec --json``: an item counts when it is completed."""
    item = line["item"] if isinstance(line.get("item"), dict) else {}
    kind, failed = item.get("type", item.get("item_type")), item.get("status") == "failed"
    if line["type"] != "item.completed" or kind in ("todo_list", "error"):
        left_out[f"item {kind}" if line["type"] == "item.completed" else f"line of type {line['type']}"] += 1
        return []
    if kind in ("agent_message", "reasoning", "assistant_message"):
        text = {"reasoning_content" if kind == "reasoning" else "content": item.get("text")}
        return [{"role": _AGENT, "content": None} | text]
    given = {key: item[key] for key in _OF_ITEMS if key in item}
    if set(given) == {"arguments"}:
        given = given["arguments"]
    keys = ("aggregated_output", "error", "result") if not failed else ("error", "aggregated_output", "result")
    answer = next((item[key] for key in keys if item.get(key) is not None), item.get("status") if given else None)
    left_out[f"answer of {kind}"] += answer is None
    return _tool(item.get("tool", kind), given, answer, failed)


def _beside(line: Message, left_out: Counter[str]) -> list[Any]:
    return [line["message"] | {"role": line["role"]}]


def _opencode_stream(line: Message, left_out: Counter[str]) -> list[Any]:
    return [{"role": _AGENT, "content": [line["part"]]}]


def _kimi(line: Message, left_out: Counter[str]) -> list[Any]:
    if isinstance(message := line.get("message"), dict) and line["type"] == "context.append_message":
        return [{**message, "tool_calls": message.get("toolCalls"), "toolCalls": None}]
    if isinstance(prompt := line.get("systemPrompt"), str):
        return [{"role": _SYSTEM, "content": prompt}]
    event = line["event"] if isinstance(line.get("event"), dict) else {}
    if isinstance(part := event.get("part"), dict):
        return [{"role": _AGENT, "content": [part]}]
    if event.get("type") == "tool.call":
        return _tool(event.get("name"), event.get("args"), None)
    if event.get("type") == "tool.result":
        result = event["result"] if isinstance(event.get("result"), dict) else event
        failed = result.get("isError") is True or result.get("is_error") is True
        return [{"role": _TOOL, "content": shown(result.get("output", ""), (str, list)), "is_error": failed}]
    left_out[f"line of type {event.get('type', line['type'])}"] += 1
    return []


def _session_event(line: Message, left_out: Counter[str]) -> list[Any]:
    """Of Copilot's CLI, and of DeepSeek's harness."""
    kind, data = line["type"].replace("/", "."), line["data"]
    if kind == "tool.call":
        return _tool(data.get("name"), data.get("arguments"), None)
    if kind in ("assistant.message", "tool.result") and isinstance(data.get("message"), dict):
        return [data["message"] | {"role": kind.partition(".")[0]}]
    if data.get("parentToolCallId") or data.get("agentId"):
        left_out["line of a sub-agent"] += 1
        return []
    if kind == "assistant.message":
        message = {"role": _AGENT, "content": data.get("content"), "tool_calls": objects(data.get("toolRequests"))}
        return [message | {"reasoning_content": data.get("reasoningText")}]
    if kind in ("user.message", "system.message"):
        left_out["attachment"] += len(objects(data.get("attachments")))
        return [{"role": kind.partition(".")[0], "content": data.get("content")}]
    if kind != "tool.execution_complete":
        return no_message(line, left_out)
    given: Any = data.get("result") if data.get("success") else data.get("error", data.get("result"))
    if isinstance(given, dict):
        given = next((given[key] for key in ("content", "message") if isinstance(given.get(key), str)), given)
    about = {"is_error": data.get("success") is False, "tool_call_id": data.get("toolCallId")}
    return [{"role": _TOOL, "content": shown(given or "")} | about]
