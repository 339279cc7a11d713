"""Messages as other programs write them, in the terms that ``messages`` reads: role, content of parts, ``tool_calls``.

Read are messages of LangChain, Gemini, the AI SDK, OpenTelemetry, Cohere, ShareGPT, AutoGen and Claude's export, items
of OpenAI's Responses with hosted tools, events of OpenHands, steps of smolagents and ATIF, lines of Claude Code, Qwen
Code, Codex and Gemini's CLI, parts of LlamaIndex and Haystack, and what ``events`` reads. One that holds calls and
answers is several messages; what is no message is counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from real_envs.importers.events import (
    NO_TOOLS,
    Message,
    Reader,
    event_reader,
    harmony,
    microsoft,
    no_message,
    note,
    objects,
    shown,
)
from real_envs.importers.messages import AGENT, ITEMS, SPEAKERS, decoded

_ASSISTANT, _TOOL, _USER = "assistant", "tool", "user"
_EMPTY = {"type": "text", "text": ""}  # in place of parts that are in another message, so that indices stay
_MORE = {"parts", "is_demo", "additional_kwargs"}  # fields of a plain message by which it is none
_SOURCES = (_USER, "agent", "environment", "system")
# of an event's arguments, what is no part of the action
_ABOUT = (
    "thought blocking hidden confirmation_state is_confirmed action_risk security_risk wait_for_response keep_prompt"
)
_ABOUT += " image_urls kernel_init_code include_extra action source id timestamp message timeout cause"
_NO_EVENTS = ("null", "agent_state_changed", "change_agent_state", "recall", "condensation", "condensation_request")
_AUTOGEN = (
    *("TextMessage", "MultiModalMessage", "StopMessage", "HandoffMessage", "StructuredMessage", "ToolCallRequestEvent"),
    *("ToolCallExecutionEvent", "ThoughtEvent", "UserMessage", "AssistantMessage", "SystemMessage"),
    "FunctionExecutionResultMessage",
)
_SMOLAGENTS = ({"step_number", "model_output"}, {"task", "task_images"}, {"plan", "model_output_message"})
_NO_MESSAGES = ("mcp_list_tools", "item_reference", "ghost_snapshot", "compaction", "mcp_approval_request", "summary")
_STREAM = ("system", "user", "assistant", "result", "stream_event", "rate_limit_event")  # of `claude -p`
_NOTES = ("queue-operation", "system")  # lines of a session that have a content
# parts that are no text of anybody; the first two say nothing at all
_NO_PARTS = (
    *("step-start", "step-finish", "reference", "container_upload", "compaction", "non_standard", "snapshot", "patch"),
    *("agent", "retry", "subtask", "tool-approval-request", "redactedThinking", "systemNotification"),
    *("contextLengthExceeded", "summarizationRequested"),
)
_CONTENTS = (  # where the content of a message is, if not there
    *("value", "text", "system_prompt", "message", "blocks", "contents", "items", "_content"),
    *("result", "output", "response", "tool_output"),
)
_CALLED = ("tool_use", "function_call", "tool_call")


def is_session(value: Any) -> bool:
    """A line of a session of Claude Code, or of its stream."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str) or "role" in value:
        return False
    if "content" in value:
        return value["type"] in _NOTES and "sessionId" in value
    if value["type"] in _STREAM and "session_id" in value and "stats" not in value:
        return True
    return "sessionId" in value or "leafUuid" in value or value["type"] == "file-history-snapshot"


def is_message(value: Any) -> bool:
    """Or an item, an event, or a line of a session."""
    if not isinstance(value, dict):
        return False
    roles = {"role", "_role"} & value.keys() or {"from", "value"} <= value.keys()
    named = bool(roles) or value.get("type") in tuple(ITEMS)
    return named or ("sender" in value and ("text" in value or "content" in value)) or _reader(value) is not None


def spoken(value: Any) -> tuple[list[Any], Counter[str]]:
    """The messages that it stands for, and what of it is left out, by its kind."""
    left_out: Counter[str] = Counter()
    if not isinstance(value, dict):
        return [value], left_out
    role = value.get("role") if isinstance(value.get("content"), str) else None
    plain = isinstance(role, str) and role not in _CALLED and not role.startswith("_")
    plain &= "channel" not in value and "recipient" not in value
    if plain and not _MORE & value.keys():
        return [value], left_out
    if value.get("is_demo"):
        return [], Counter({"demonstration": 1})
    reader = _reader(value)
    if isinstance(value.get("message"), dict) and "finish_reason" in value:  # a choice
        value = {**value["message"], "finish_reason": value["finish_reason"]}
    made = reader(value, left_out) if reader else [value]
    return [part for message in made for part in _apart(_with_role(message), left_out)], left_out


def _reader(value: Mapping[str, Any]) -> Reader | None:
    """How a value that has no plain role is read."""
    kind, source = value.get("type"), value.get("source")
    if isinstance(value.get("message"), dict) and kind in (_USER, "human", _ASSISTANT, "tool_result"):
        return _claude_code
    if is_session(value) or kind in _NO_MESSAGES:
        return no_message
    if isinstance(value.get("payload"), dict) and isinstance(kind, str):
        return _codex
    if "role" in value:
        role = str(value["role"])
        if isinstance(value.get("message"), dict) or "tool_messages" in value:
            return event_reader(value)
        if role == _ASSISTANT and ("channel" in value or value.get("recipient") not in NO_TOOLS):
            return harmony
        return _called if role in _CALLED else note if role.startswith("_") else None
    if kind == "mcp_approval_response":
        return _approval
    if reader := event_reader(value):
        return reader
    if "step_id" in value and isinstance(source, str):
        return _atif
    if any(names <= value.keys() for names in _SMOLAGENTS) or value.keys() == {"system_prompt"}:
        return _smolagents
    from_someone = isinstance(source, str) or kind == "FunctionExecutionResultMessage"
    if from_someone and isinstance(kind, str) and ("models_usage" in value or kind in _AUTOGEN):
        return _autogen
    typed = str(kind).lower() in SPEAKERS and ("content" in value or isinstance(value.get("data"), dict))
    if typed or (value.get("lc") and isinstance(value.get("kwargs"), dict)):
        return _langchain
    act, seen = value.get("action"), value.get("observation")
    about = source in _SOURCES or "content" in value or "args" in value or "thought" in value
    if about and isinstance(act or seen, str) and (act is None or seen is None):
        return _event
    item = isinstance(kind, str) and kind not in ITEMS and kind.endswith(("_call", "_call_output"))
    return _item if item else None


def _called(message: Message, left_out: Counter[str]) -> list[Any]:
    """A call in a message of its own, as JSON; anything else as it was written."""
    given = decoded(message.get("content"))
    calls = given if isinstance(given, list) else [given]
    if not all(isinstance(call, dict) and call.get("name") for call in calls):
        return [message | {"role": _ASSISTANT}]
    return [message | {"role": _ASSISTANT, "content": None, "tool_calls": calls}]


def _approval(part: Message, left_out: Counter[str]) -> list[Any]:
    """What somebody said to a call; that he agreed is no answer to it."""
    given = {key: part[key] for key in ("approve", "approved", "reason") if part.get(key) is not None}
    if True in given.values():
        left_out["approval"] += 1
        return []
    return [{"role": _TOOL, "content": shown(given), "is_error": True}]


def _claude_code(line: Message, left_out: Counter[str]) -> list[Any]:
    if line.get("isApiErrorMessage") or line["message"].get("model") == "<synthetic>":
        left_out["message of the program"] += 1
        return []
    return [line["message"]]


def _codex(line: Message, left_out: Counter[str]) -> list[Any]:
    if line["type"] == "response_item":
        messages, more = spoken(line["payload"])
        left_out.update(more)
        return messages
    given = line["payload"].get("base_instructions") or line["payload"].get("instructions")
    text = given.get("text") if isinstance(given, dict) else given
    if line["type"] != "session_meta" or not isinstance(text, str):
        return no_message(line, left_out)
    return [{"role": "system", "content": text}]


def _langchain(value: Message, left_out: Counter[str]) -> list[Any]:
    inner = next((value[key] for key in ("kwargs", "data") if isinstance(value.get(key), dict)), value)
    path = value.get("id") if value.get("lc") else None
    name = path[-1] if isinstance(path, list) and path else value.get("type")
    beside = inner["additional_kwargs"] if isinstance(inner.get("additional_kwargs"), dict) else {}
    calls = [*(inner.get("tool_calls") or beside.get("tool_calls") or ()), *(inner.get("invalid_tool_calls") or ())]
    known = ("type", "additional_kwargs", "invalid_tool_calls", "tool_call_chunks")
    message = beside | {key: kept for key, kept in inner.items() if key not in known}
    if calls:
        message.pop("function_call", None)
    failed = inner.get("status") == "error"
    return [message | {"role": inner.get("role") or name, "tool_calls": calls, "error": failed}]


def _event(event: Message, left_out: Counter[str]) -> list[Any]:
    """Of OpenHands; older ones have no ``args``."""
    kind = event.get("action") or event["observation"]
    if kind in _NO_EVENTS:
        left_out[f"event {kind}"] += 1
        return []
    if "observation" in event:
        return [{"role": _TOOL, "content": event.get("content"), "error": kind == "error"}]
    args = event["args"] if isinstance(event.get("args"), dict) else event
    source = event.get("source") or ("agent" if kind != "message" else None)
    if kind in ("message", "system") or source != "agent":
        return [{"role": "system" if kind == "system" else source, "content": args.get("content")}]
    given = {key: value for key, value in args.items() if key not in _ABOUT.split() and value is not None}
    call = {"name": kind, "arguments": given}
    message = {"role": _ASSISTANT, "content": None, "tool_calls": [call], "ends": kind == "finish"}
    return [message | {"reasoning_content": args.get("thought")}]


def _atif(step: Message, left_out: Counter[str]) -> list[Any]:
    """A step of Harbor's format, with what its tools gave."""
    role = {"agent": _ASSISTANT}.get(step["source"], step["source"])
    calls = [{"name": call.get("function_name"), **call} for call in objects(step.get("tool_calls"))]
    message = {"role": role, "content": step.get("message"), "tool_calls": calls}
    message |= {"reasoning_content": step.get("reasoning_content")} if role == _ASSISTANT else {}
    given = step["observation"].get("results") if isinstance(step.get("observation"), dict) else None
    left_out["trajectory of a sub-agent"] += sum(bool(one.get("subagent_trajectory_ref")) for one in objects(given))
    if step.get("is_copied_context") and role == _ASSISTANT:  # of an earlier trajectory
        left_out["copied step"] += 1
        return []
    seen = [
        {"role": _TOOL, "content": one["content"], "tool_call_id": one.get("source_call_id")}
        for one in objects(given)
        if one.get("content") is not None
    ]
    return [*([message] if message["content"] or calls or not seen else []), *seen]


def _smolagents(step: Message, left_out: Counter[str]) -> list[Any]:
    if "step_number" not in step:
        left_out["image"] += len(objects(step.get("task_images")))
        if "plan" in step:
            return [{"role": _ASSISTANT, "content": None, "reasoning_content": step["plan"]}]
        return [{"role": _USER, "content": step["task"]} if "task" in step else {"role": "system", **step}]
    written, calls = step["model_output"], objects(step.get("tool_calls"))
    code = written and all("python_interpreter" in str(call) for call in calls)  # stands in the text, too
    message = {"role": _ASSISTANT, "content": written, "ends": step.get("is_final_answer") is True}
    message |= {} if code else {"tool_calls": calls}
    seen = {"role": _TOOL, "content": step.get("observations"), "error": step.get("error")}
    made, output = f"{written}{calls}{seen}", step.get("action_output")
    left_out["action output"] += output is not None and str(output) not in made
    left_out["image"] += len(objects(step.get("observations_images")))
    return [message, *([seen] if seen["content"] or seen["error"] else [])]


def _autogen(message: Message, left_out: Counter[str]) -> list[Any]:
    kind, content = message["type"], message.get("content")
    role = _USER if kind == "UserMessage" or "user" in str(message.get("source")).lower() else _ASSISTANT
    if kind in ("ToolCallExecutionEvent", "FunctionExecutionResultMessage"):
        return [{"role": _TOOL, **result} for result in objects(content)]
    if kind == "ThoughtEvent":
        return [{"role": _ASSISTANT, "content": None, "reasoning_content": content}]
    if kind == "ToolCallRequestEvent" or (kind == "AssistantMessage" and isinstance(content, list)):
        return [{"role": _ASSISTANT, "content": None, "tool_calls": content, "reasoning": message.get("thought")}]
    if kind not in _AUTOGEN:
        left_out[f"line of type {kind}"] += 1
        return []
    if kind == "MultiModalMessage" and isinstance(content, list):
        content = [part if isinstance(part, str) else {"type": "image"} for part in content]
    return [{"role": "system" if kind == "SystemMessage" else role, "content": shown(content, (str, list))}]


def _item(item: Message, left_out: Counter[str]) -> list[Any]:
    """A hosted tool, or the shell, with what it gave where that was logged."""
    kind, output = item["type"], item.get("output")
    if kind.endswith("_output"):
        picture = isinstance(output, dict) and output.get("type") == "computer_screenshot"
        return [{"role": _TOOL, "content": [output] if picture else shown(output), "call_id": item.get("call_id")}]
    keys = ("arguments", "action", "code", "queries", "operation", "input")
    given = next((item[key] for key in keys if item.get(key) is not None), None)
    about = {"call_id": item.get("call_id")}
    call = {"name": item.get("name") or kind.removesuffix("_call"), "arguments": given} | about
    answer = next((item[key] for key in ("output", "outputs", "results", "error") if item.get(key) is not None), None)
    left_out[f"answer of {call['name']}"] += answer is None and "call_id" not in item
    seen = {"role": _TOOL, "content": shown(answer), "error": bool(item.get("error"))} | about
    return [{"role": _ASSISTANT, "content": None, "tool_calls": [call]}, *([seen] if answer is not None else [])]


def _with_role(message: Any) -> Any:
    """The message with a role, content and calls under the names that ``messages`` knows."""
    given = message if isinstance(message, dict) else {}
    role = next((given[key] for key in ("role", "sender", "from", "_role") if isinstance(given.get(key), str)), None)
    if role is None:
        return message
    made = {key: value for key, value in given.items() if key not in ("sender", "from", "parts")} | {"role": role}
    if isinstance(beside := made.pop("additional_kwargs", None), dict):  # of LangChain
        made = beside | {key: kept for key, kept in made.items() if key not in beside or kept}
    if isinstance(given.get("parts"), list) and given["parts"]:
        made["content"] = given["parts"]
        made.pop("toolInvocations", None)
    if made.get("content") in (None, []):
        if key := next((key for key in _CONTENTS if made.get(key) is not None), ""):
            made["content"] = made.pop(key)
    elif isinstance(made["content"], list):
        made.pop("text", None)  # of Claude's export: the texts of its content once more
    if (results := made.pop("tool_results", None)) is not None:
        made["content"] = shown(results)
    return made | ({"reasoning_content": made.pop("tool_plan")} if "tool_plan" in made else {})


def _apart(message: Any, left_out: Counter[str]) -> Iterator[Any]:
    """The message, or several where the agent's content holds answers."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not objects(content):
        yield message
        return
    message = dict(message)
    # LangChain and others note the calls of the content once more
    typed = ((part.get("type", part.get("block_type")), part) for part in objects(content))
    ids = [part.get("id", part.get("tool_call_id")) for kind, part in typed if kind in _CALLED]
    ids = [one for one in ids if one]
    if ids and isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [call for call in calls if not isinstance(call, dict) or call.get("id") not in ids]
    if SPEAKERS.get(str(message.get("role")).lower()) != AGENT:
        yield message | {"content": [plain for part in content for _, plain in _parts(part, left_out)]}
        return
    made: list[Message] = [{"role": _ASSISTANT, "content": []}]
    later: list[Any] = []  # answers to the calls of a step of the AI SDK, which were made at once

    def add(role: str, at: int, parts: list[Any]) -> None:
        if parts and made[-1]["role"] != role:
            made.append({"role": role, "content": []})
        made[-1]["content"] += [_EMPTY] * (at - len(made[-1]["content"])) * bool(parts) + parts

    for at, part in enumerate([*content, {"type": "step-start"}]):
        if not isinstance(part, dict) or part.get("type") in ("step-start", "text", "reasoning"):
            add(_TOOL, at, later)
            later = []
        for role, plain in _parts(part, left_out):
            if role == _TOOL and ("state" in part or "toolInvocation" in part):
                later.append(plain)
            elif plain is not _EMPTY:
                add(role, at, [plain])
    agents = [each for each in made if each["role"] == _ASSISTANT]
    agents[-1] |= {key: value for key, value in message.items() if key not in ("role", "content")}
    if len(agents) > 1 and "reasoning_content" in agents[-1]:
        agents[0]["reasoning_content"] = agents[-1].pop("reasoning_content")
    yield from made


def _parts(part: Any, left_out: Counter[str]) -> Iterator[tuple[str, Any]]:
    """(who speaks, the part in the terms of ``messages``); a part may hold a call and its answer."""
    kind = part.get("type") if isinstance(part, dict) else ""
    if kind == "":
        yield _ASSISTANT, part
    elif kind is None and isinstance(part.get("block_type"), str):  # of LlamaIndex
        thought = {"thinking": part["content"]} if part["block_type"] == "thinking" else {}
        yield from _parts({**part, "type": part["block_type"]} | thought, left_out)
    elif not isinstance(kind, str):
        yield _untyped(part)
    elif kind == "text" and isinstance(part.get("content"), str):  # of OpenTelemetry
        yield _ASSISTANT, {"type": "text", "text": part["content"]}
    elif kind == "tool_call_response":
        yield _result(part.get("response", part.get("result")))
    elif kind in ("blob", "uri"):
        yield _ASSISTANT, {"type": "file"}
    elif kind in ("server_tool_use", "mcp_tool_use", "server_tool_call", "toolCall"):
        yield _ASSISTANT, {**part, "type": "tool_use"}
    elif kind.endswith("_tool_result") or kind == "server_tool_result":
        failed = part.get("is_error") is True or part.get("status") == "error"
        yield _result(_of_server(part.get("content", part.get("output")), left_out), failed)
    elif kind in ("toolRequest", "frontendToolRequest", "toolResponse"):  # of goose
        yield _of_goose(part)
    elif kind == "think":  # of Kimi's CLI
        yield _ASSISTANT, {"type": "thinking", "thinking": part.get("think")}
    elif kind == "tool" and isinstance(state := part.get("state"), dict):  # of OpenCode
        yield _ASSISTANT, {"type": "tool_use", "name": part.get("tool"), "input": state.get("input")}
        if state.get("status") in ("completed", "error"):
            yield _result(state.get("output", state.get("error")), state["status"] == "error")
    elif kind == "tool-approval-response":
        yield from ((_TOOL, answer) for answer in _approval(part, left_out))
    elif kind == "tool_use" and "tool_type" in part:  # of Inspect, with its result
        yield _ASSISTANT, part
        if part.get("error") or part.get("result") is not None:
            yield _result(part.get("error") or part["result"], bool(part.get("error")))
    elif kind in ("tool-invocation", "dynamic-tool") or (kind.startswith("tool-") and "state" in part):
        inner = part["toolInvocation"] if isinstance(part.get("toolInvocation"), dict) else part
        name, given = inner.get("toolName") or kind.removeprefix("tool-"), inner.get("input", inner.get("args"))
        yield _ASSISTANT, {"type": "tool_use", "name": name, "input": given, "id": inner.get("toolCallId")}
        if inner.get("state") in ("output-available", "result", "output-error"):
            failed = inner["state"] == "output-error"
            answer = inner.get("errorText") if failed else inner.get("output", inner.get("result"))
            yield _result(answer, failed, inner.get("toolCallId"))
    elif kind.startswith(("data", "source")) or kind in _NO_PARTS:
        left_out[kind] += kind not in _NO_PARTS[:2]
        yield _ASSISTANT, _EMPTY
    else:
        yield _TOOL if kind in ("tool_result", "tool-result") else _ASSISTANT, part


def _result(content: Any, failed: bool = False, call_id: Any = None) -> tuple[str, Message]:
    return _TOOL, {"type": "tool_result", "content": content, "is_error": failed, "tool_call_id": call_id}


def _of_goose(part: Message) -> tuple[str, Any]:
    held = part.get("toolCall", part.get("toolResult"))
    inner: Message = held if isinstance(held, dict) else {}
    given, failed = inner.get("value", inner), inner.get("status") == "error"
    asks = part["type"] != "toolResponse"
    if asks and failed:  # a call that could not be read is its error
        return _ASSISTANT, {"type": "text", "text": shown(inner.get("error"))}
    if asks:
        return _ASSISTANT, {**(given if isinstance(given, dict) else {}), "type": "tool_use", "id": part.get("id")}
    whole = isinstance(given, dict) and isinstance(given.get("content"), list)
    return _result(inner.get("error") if failed else given["content"] if whole else given, failed, part.get("id"))


def _untyped(part: Message) -> tuple[str, Any]:
    """Of Gemini, Haystack and Microsoft's kits."""
    if isinstance(kind := part.get("content_type", part.get("$type")), str):
        return _ASSISTANT, microsoft(part, kind)
    for key in ("executableCode", "executable_code", "tool_call"):
        if isinstance(inner := part.get(key), dict):
            code = {"name": "code_execution", "input": inner} if key != "tool_call" else inner
            return _ASSISTANT, {**code, "type": "tool_use"}
    if isinstance(ran := part.get("codeExecutionResult", part.get("code_execution_result")), dict):
        return _result(ran.get("output", ""), ran.get("outcome") != "OUTCOME_OK")
    if "tool_name" in part and "arguments" in part:  # as pydantic writes it
        return _ASSISTANT, {**part, "type": "tool_use"}
    if isinstance(result := part if "origin" in part else part.get("tool_call_result"), dict):
        return _result(result.get("result"), result.get("error") is True)
    if isinstance(thought := part.get("reasoning"), dict):
        return _ASSISTANT, {"type": "thinking", "thinking": thought.get("reasoning_text")}
    if isinstance(call := part.get("functionCall", part.get("function_call")), dict):
        return _ASSISTANT, {**call, "type": "tool_use"}
    if isinstance(answer := part.get("functionResponse", part.get("function_response")), dict):
        given = answer.get("response")
        keys = given.keys() if isinstance(given, dict) else set()
        alone = keys in ({"output"}, {"result"}, {"error"})
        return _result(next(iter(given.values())) if given and alone else given, keys == {"error"}, answer.get("id"))
    if {"inlineData", "inline_data", "fileData", "file_data"} & part.keys():
        return _ASSISTANT, {"type": "file"}
    thought = part.get("thought") is True and isinstance(part.get("text"), str)
    return _ASSISTANT, {"type": "thinking", "thinking": part["text"]} if thought else part


def _of_server(content: Any, left_out: Counter[str]) -> Any:
    """What a tool of Anthropic's server gave; what is encrypted in it cannot be read."""

    def plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        left_out["encrypted content"] += sum(key.startswith("encrypted") for key, _ in pairs)
        return {key: value for key, value in pairs if key != "type" and not key.startswith("encrypted")}

    if content is None or (all(part.get("type") == "text" for part in objects(content)) and isinstance(content, list)):
        return content
    return shown(json.loads(json.dumps(content), object_pairs_hook=plain))
