"""One short dialogue as many programs log it. If these fail, calls or answers of agents are lost or doubled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from real_envs.trajectory import StopReason
from tests.support.imported import agent, items, left_out, only_of, steps, text, user, write

ASKED, THOUGHT, SEEN, SAID, GIVEN = "List.", "hm", "a.py", "One.", {"p": "."}
STEPS = [('ls({"p": "."})', SEEN), (SAID, "")]
CALL = {"id": "c", "name": "ls", "arguments": json.dumps(GIVEN)}
USE = {"type": "tool_use", "id": "c", "name": "ls", "input": GIVEN}


def linked(*lines: dict[str, Any]) -> list[dict[str, Any]]:
    return [line | {"id": str(i), "parentId": str(i - 1)} for i, line in enumerate(lines)]


def wrapped(**message: Any) -> dict[str, Any]:
    return {"type": "message", "message": message}


def block(kind: str, **more: Any) -> dict[str, Any]:
    return {"block_type": kind} | more


def part(kind: str, **more: Any) -> dict[str, Any]:
    return {"part_kind": kind} | more


def opencode(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"info": {"role": role}, "parts": list(parts)}


def loop(**event: Any) -> dict[str, Any]:
    return {"type": "context.append_loop_event", "event": event, "time": 1}


def opencode_line(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "sessionID": "s", "part": {"type": kind} | more}


def event(kind: str, source: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "source": source} | more


def adk(author: str, role: str | None, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"author": author, "content": {"role": role, "parts": list(parts)}, "actions": {}}


LINES: dict[str, list[dict[str, Any]]] = {
    "claude's stream": [
        {"type": "system", "subtype": "init", "session_id": "s"},
        {"type": "user", "session_id": "s", "message": user(ASKED)},
        {"type": "assistant", "session_id": "s", "message": agent([{"type": "thinking", "thinking": THOUGHT}, USE])},
        {"type": "user", "session_id": "s", "message": user([{"type": "tool_result", "content": SEEN}])},
        {"type": "assistant", "session_id": "s", "message": agent([text(SAID)])},
        {"type": "result", "subtype": "success", "is_error": False, "session_id": "s"},
    ],
    "qwen code": [
        line | {"sessionId": "s", "uuid": str(i), "parentUuid": str(i - 1) if i else None}
        for i, line in enumerate((
            {"type": "user", "message": {"role": "user", "parts": [{"text": ASKED}]}},
            {"type": "assistant", "message": {"role": "model", "parts": [
                {"text": THOUGHT, "thought": True}, {"functionCall": {"name": "ls", "args": GIVEN}}]}},
            {"type": "tool_result", "message": {"role": "user", "parts": [
                {"functionResponse": {"name": "ls", "response": {"output": SEEN}}}]}},
            {"type": "assistant", "message": {"role": "model", "parts": [{"text": SAID}]}},
        ))
    ],
    "codex exec": [
        {"type": "thread.started", "thread_id": "t"},
        {"type": "item.completed", "item": {"type": "agent_message", "text": ""}},
        {"type": "item.completed", "item": {"type": "reasoning", "text": THOUGHT}},
        {"type": "item.completed", "item": {"type": "mcp_tool_call", "tool": "ls", "arguments": GIVEN, "result": SEEN}},
        {"type": "item.completed", "item": {"item_type": "assistant_message", "text": SAID}},
    ],
    "gemini's stream": [
        {"type": "init", "session_id": "s"},
        {"type": "message", "role": "user", "content": ASKED},
        {"type": "tool_use", "tool_id": "1", "tool_name": "ls", "parameters": GIVEN},
        {"type": "tool_result", "tool_id": "1", "status": "success", "output": SEEN},
        {"type": "message", "role": "assistant", "content": "On", "delta": True},
        {"type": "message", "role": "assistant", "content": "e.", "delta": True},
        {"type": "result", "status": "success", "stats": {}},
    ],
    "copilot": linked(
        {"type": "session.start", "data": {}},
        {"type": "user.message", "data": {"content": ASKED}},
        {"type": "assistant.message", "data": {"content": "", "reasoningText": THOUGHT, "toolRequests": [CALL]}},
        {"type": "assistant.message", "data": {"content": "I help.", "parentToolCallId": "x"}},
        {"type": "tool.execution_complete", "data": {"success": True, "result": {"content": SEEN}}},
        {"type": "assistant.message", "data": {"content": SAID, "toolRequests": []}},
    ),
    "pi": [
        {"type": "session", "id": "s", "cwd": "/x"},
        *linked(
            {"type": "model_change", "modelId": "m"},
            wrapped(role="user", content=[text(ASKED)]),
            wrapped(role="assistant", content=[{"type": "thinking", "thinking": THOUGHT}, CALL | {"type": "toolCall"}]),
            wrapped(role="toolResult", toolName="ls", content=[text(SEEN)], isError=False),
            wrapped(role="assistant", content=[text(SAID)], stopReason="stop"),
        ),
    ],
    "goose": [
        {"working_dir": "/x", "description": "d"},
        user([text(ASKED)]),
        agent([{"type": "thinking", "thinking": THOUGHT},
               {"type": "toolRequest", "toolCall": {"status": "success", "value": CALL}}]),
        user([{"type": "toolResponse", "toolResult": {"status": "success", "value": [text(SEEN)]}}]),
        agent([text(SAID)]),
    ],
    "kimi": [
        {"role": "_system_prompt", "content": ""},
        user(ASKED),
        {"role": "_checkpoint", "id": 0},
        agent([{"type": "think", "think": THOUGHT}], tool_calls=[{"function": CALL}]),
        {"role": "_usage", "token_count": 9},
        {"role": "tool", "content": [text(SEEN)]},
        agent(SAID),
    ],
    "kimi code": [
        {"type": "metadata", "protocol_version": "1.4"},
        {"type": "config.update", "systemPrompt": ""},
        {"type": "context.append_message", "time": 1, "message": user([text(ASKED)])},
        loop(type="content.part", part={"type": "think", "think": THOUGHT}),
        loop(type="tool.call", name="ls", args=GIVEN),
        loop(type="tool.result", result={"output": SEEN}),
        loop(type="step.end"),
        loop(type="content.part", part=text("On")),
        loop(type="content.part", part=text("e.")),
    ],
    "deepseek": [
        {"type": "session", "cwd": "/x"},
        {"type": "user/message", "data": {"role": "user", "content": [text(ASKED)]}},
        {"type": "assistant/chunk", "data": {"chunk": {"type": "text-delta", "text": "On"}}},
        {"type": "assistant/message", "data": {"message": agent([{"type": "reasoning", "text": THOUGHT}])}},
        {"type": "tool/call", "data": {"name": "ls", "arguments": GIVEN}},
        {"type": "tool/result", "data": {"message": {"content": [{"type": "tool-result", "content": [text(SEEN)]}]}}},
        {"type": "assistant/message", "data": {"message": agent([text(SAID)])}},
    ],
    "opencode run": [
        opencode_line("reasoning", text=THOUGHT),
        opencode_line("tool", tool="ls", state={"status": "completed", "input": GIVEN, "output": SEEN}),
        opencode_line("step-start"),
        opencode_line("text", text=SAID),
    ],
    "cursor": [
        {"role": "user", "message": {"content": [text(ASKED)]}},
        {"role": "assistant", "message": {"content": [{"type": "thinking", "thinking": THOUGHT}, USE]}},
        {"role": "user", "message": {"content": [{"type": "tool_result", "content": SEEN}]}},
        {"role": "assistant", "message": {"content": [text(SAID)]}},
        {"type": "turn_ended", "status": "success"},
    ],
    "openhands": [
        event("MessageEvent", "user", llm_message=user([text(ASKED)])),
        event("ConversationStateUpdateEvent", "environment", key="k"),
        event("ActionEvent", "agent", thought=[text(THOUGHT)], tool_name="ls", tool_call=CALL),
        event("ObservationEvent", "environment", observation={"content": [text(SEEN)], "is_error": False}),
        event("MessageEvent", "agent", llm_message=agent([text(SAID)])),
    ],
    "strands": [
        {"message_id": i, "created_at": "t", "message": message}
        for i, message in enumerate((
            user([{"text": ASKED}]),
            agent([{"reasoningContent": {"reasoningText": {"text": THOUGHT}}},
                   {"toolUse": {"toolUseId": "c", "name": "ls", "input": GIVEN}}]),
            user([{"toolResult": {"toolUseId": "c", "status": "success", "content": [{"text": SEEN}]}}]),
            agent([{"text": SAID}]),
        ))
    ],
    "codex of 2025": [
        {"id": "s", "timestamp": "t", "instructions": None},
        {"record_type": "state"},
        user([{"type": "input_text", "text": ASKED}]) | {"type": "message"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": THOUGHT}]},
        CALL | {"type": "function_call"},
        {"type": "function_call_output", "output": SEEN},
        agent([{"type": "output_text", "text": SAID}]) | {"type": "message"},
    ],
    "letta": [
        {"message_type": "user_message", "content": ASKED},
        {"message_type": "reasoning_message", "reasoning": THOUGHT},
        {"message_type": "tool_call_message", "tool_call": CALL},
        {"message_type": "tool_return_message", "tool_return": SEEN, "status": "success"},
        {"message_type": "assistant_message", "content": SAID},
    ],
}  # fmt: skip
COUNTED = {
    "claude's stream": {"line of type system": 1, "line of type result": 1},
    "codex exec": {"line of type thread.started": 1},
    "codex of 2025": {"line of type session": 2},
    "gemini's stream": {"line of type init": 1, "line of type result": 1},
    "copilot": {"line of type session.start": 1, "line of a sub-agent": 1},
    "pi": {"line of type session": 1, "line of type model_change": 1},
    "kimi code": {"line of type metadata": 1, "line of type step.end": 1},
    "deepseek": {"line of type session": 1, "line of type assistant/chunk": 1},
    "cursor": {"line of type turn_ended": 1},
    "goose": {"line of type session": 1},
    "kimi": {"line of role _checkpoint": 1, "line of role _usage": 1},
    "openhands": {"event ConversationStateUpdateEvent": 1},
}


@pytest.mark.parametrize("program", LINES)
def test_lines_of_a_program_are_turns_and_what_is_no_message_is_counted(tmp_path: Path, program: str) -> None:
    episode = only_of(tmp_path, *LINES[program])
    assert (episode.start, steps(episode)) == ("" if program in ("codex exec", "opencode run") else ASKED, STEPS)
    assert episode.turns[0].info.get("log.thought") == (None if program == "gemini's stream" else THOUGHT)
    assert left_out(episode) == COUNTED.get(program, {})
    assert episode.stop is StopReason.TERMINATED


RECORDS: dict[str, Any] = {
    "llamaindex": {"messages": [
        {"role": "user", "blocks": [block("text", text=ASKED)]},
        {"role": "assistant", "additional_kwargs": {"tool_calls": [{"id": "c", "function": CALL}]}, "blocks": [
            block("thinking", content=THOUGHT),
            block("tool_call", tool_call_id="c", tool_name="ls", tool_kwargs=GIVEN)]},
        {"role": "tool", "blocks": [block("text", text=SEEN)]},
        {"role": "assistant", "blocks": [block("text", text=SAID)]},
    ]},
    "haystack": {"messages": [
        {"role": "user", "meta": {}, "content": [{"text": ASKED}]},
        {"role": "assistant", "content": [{"reasoning": {"reasoning_text": THOUGHT}},
                                          {"tool_call": {"tool_name": "ls", "arguments": GIVEN}}]},
        {"role": "tool", "content": [{"tool_call_result": {"result": SEEN, "error": False}}]},
        {"role": "assistant", "meta": {"usage": {}}, "content": [{"text": SAID}]},
    ]},
    "haystack through pydantic": {"messages": [
        {"_role": "user", "_content": [{"text": ASKED}], "_meta": {}},
        {"_role": "assistant", "_content": [{"reasoning": {"reasoning_text": THOUGHT}},
                                            {"tool_name": "ls", "arguments": GIVEN, "id": "c"}]},
        {"_role": "tool", "_content": [{"result": SEEN, "origin": {"tool_name": "ls"}, "error": False}]},
        {"_role": "assistant", "_content": [{"text": SAID}]},
    ]},
    "agent framework": {"messages": [
        {"role": "user", "contents": [text(ASKED)]},
        {"role": "assistant", "contents": [{"type": "text_reasoning", "text": THOUGHT},
                                           CALL | {"type": "function_call"}]},
        {"role": "tool", "contents": [{"type": "function_result", "call_id": "c", "result": SEEN}]},
        {"role": "assistant", "contents": [text(SAID)]},
    ]},
    "semantic kernel": {"messages": [
        {"role": "user", "content_type": "message", "items": [{"content_type": "text", "text": ASKED}]},
        {"role": "assistant", "items": [{"content_type": "reasoning", "text": THOUGHT},
                                        CALL | {"content_type": "function_call", "plugin_name": None}]},
        {"role": "tool", "items": [{"content_type": "function_result", "id": "c", "name": "ls", "result": SEEN}]},
        {"role": "assistant", "items": [{"content_type": "text", "text": SAID}], "finish_reason": "stop"},
    ]},
    "semantic kernel of .NET": [
        {"Role": {"Label": "user"}, "Items": [{"$type": "TextContent", "Text": ASKED}]},
        {"Role": {"Label": "Assistant"}, "Items": [
            {"$type": "ReasoningContent", "Text": THOUGHT},
            {"$type": "FunctionCallContent", "Id": "c", "FunctionName": "ls", "Arguments": GIVEN}]},
        {"Role": {"Label": "tool"}, "Items": [{"$type": "FunctionResultContent", "CallId": "c", "Result": SEEN}]},
        {"Role": {"Label": "assistant"}, "Items": [{"$type": "TextContent", "Text": SAID}]},
    ],
    "microsoft's extensions": [
        {"role": "user", "contents": [{"$type": "text", "text": ASKED}]},
        {"role": "assistant", "contents": [
            {"$type": "reasoning", "text": THOUGHT}, {"$type": "usage", "details": {"inputTokenCount": 9}},
            {"$type": "functionCall", "callId": "c", "name": "ls", "arguments": GIVEN}]},
        {"role": "tool", "contents": [{"$type": "functionResult", "callId": "c", "result": SEEN}]},
        {"role": "assistant", "contents": [{"$type": "text", "text": SAID}]},
    ],
    "a team of autogen": {"type": "TeamState", "agent_states": {
        "manager": {"type": "RoundRobinManagerState", "message_thread": []},
        "solver": {"agent_state": {"llm_context": {"messages": [
            {"type": "UserMessage", "source": "planner", "content": ASKED},
            {"type": "AssistantMessage", "source": "solver", "content": [CALL], "thought": THOUGHT},
            {"type": "FunctionExecutionResultMessage", "content": [{"call_id": "c", "content": SEEN}]},
            {"type": "AssistantMessage", "source": "solver", "content": SAID}]}}}}},
    "rllm": {"id": "t:0", "is_correct": True, "termination_reason": "unknown", "trajectories": [{"steps": [
        {"chat_completions": [user(ASKED), agent(tool_calls=[CALL], reasoning=THOUGHT)], "action": "ls"},
        {"chat_completions": [user(ASKED), agent(tool_calls=[CALL]), {"role": "env", "content": SEEN}, agent(SAID)]},
    ]}]},
    "pydantic ai": [
        {"kind": "request", "parts": [part("user-prompt", content=ASKED)]},
        {"kind": "response", "parts": [part("thinking", content=THOUGHT),
                                       part("tool-call", tool_name="ls", args=GIVEN)]},
        {"kind": "request", "parts": [part("tool-return", tool_name="ls", content=SEEN)]},
        {"kind": "response", "parts": [part("text", content=SAID)]},
    ],
    "opencode": {"info": {"id": "s"}, "messages": [
        opencode("user", text(ASKED)),
        opencode("assistant", {"type": "step-start"}, {"type": "reasoning", "text": THOUGHT},
                 {"type": "tool", "tool": "ls", "state": {"status": "completed", "input": GIVEN, "output": SEEN}},
                 {"type": "step-finish"}, {"type": "step-start"}, text(SAID)),
    ]},
    "adk": {"id": "s", "events": [
        adk("user", "user", {"text": ASKED}),
        adk("a", "model", {"text": THOUGHT, "thought": True}, {"functionCall": {"name": "ls", "args": GIVEN}}),
        adk("a", None, {"functionResponse": {"name": "ls", "response": {"result": SEEN}}}),
        adk("a", "model", {"text": SAID}),
    ]},
    "ms-swift": {"messages": [
        user(ASKED), agent(f"<think>{THOUGHT}</think>"), {"role": "tool_call", "content": json.dumps(CALL)},
        {"role": "tool_response", "content": SEEN}, agent(SAID),
    ]},
    "langchain's blocks": {"messages": [
        {"type": "human", "content": ASKED},
        {"type": "ai", "content": [{"type": "reasoning", "reasoning": THOUGHT}, CALL | {"type": "tool_call"}],
         "tool_calls": [CALL | {"type": "tool_call"}]},
        {"type": "tool", "content": SEEN},
        {"type": "ai", "content": SAID},
    ]},
    "langchain's steps": {
        "input": ASKED,
        "output": SAID,
        "intermediate_steps": [[{"tool": "ls", "tool_input": GIVEN, "log": f"Thought: {THOUGHT}\nAction: ls"}, SEEN]],
    },
    "nemo gym": {
        "responses_create_params": {"input": ASKED},
        "response": {"output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": THOUGHT}]},
            CALL | {"type": "function_call"}, {"type": "function_call_output", "output": SEEN},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": SAID}]}]},
        "reward": 0.5,
    },
    "azure": {
        "query": [user(ASKED)],
        "response": [
            agent([CALL | {"type": "tool_call"}], reasoning_content=THOUGHT),
            {"role": "tool", "content": [{"type": "tool_result", "tool_result": SEEN}]}, agent([text(SAID)])],
    },
    "choices": {"messages_and_choices": [
        user(ASKED),
        {"finish_reason": "tool_calls", "message": agent(None, tool_calls=[CALL], reasoning_content=THOUGHT)},
        {"role": "tool", "content": SEEN},
        {"finish_reason": "stop", "message": agent(SAID)},
    ]},
    "another name": {"output": {"dialogue": [
        user(ASKED), agent(None, tool_calls=CALL, reasoning=THOUGHT), {"role": "tool", "content": SEEN}, agent(SAID),
    ]}},
}  # fmt: skip


@pytest.mark.parametrize("program", RECORDS)
def test_records_of_a_program_are_turns(tmp_path: Path, program: str) -> None:
    record = RECORDS[program]
    episode = only_of(tmp_path, record, name="log.json" if isinstance(record, list) else "log.jsonl")
    assert (episode.start, steps(episode)) == (ASKED, STEPS)
    assert episode.turns[0].info["log.thought"] == THOUGHT
    assert left_out(episode) == {}
    assert episode.stop is StopReason.TERMINATED


@pytest.mark.parametrize(
    ("program", "last", "stop"),
    [
        ("claude's stream", {"type": "result", "subtype": "error_max_turns", "session_id": "s"}, StopReason.TURN_LIMIT),
        ("codex exec", {"type": "turn.failed", "error": {"message": "no quota"}}, StopReason.ENV_CRASHED),
        ("gemini's stream", {"type": "result", "status": "error", "stats": {}}, StopReason.ENV_CRASHED),
    ],
)
def test_a_stream_says_at_its_end_how_it_broke_off(
    tmp_path: Path, program: str, last: dict[str, Any], stop: StopReason
) -> None:
    lines = [line for line in LINES[program] if line["type"] != "result"]
    assert only_of(tmp_path, *lines, last).stop is stop


def test_what_pi_took_back_is_no_part_of_the_dialogue(tmp_path: Path) -> None:
    lines = LINES["pi"]
    wrong = wrapped(role="assistant", content="Wrong.") | {"id": "x", "parentId": "3"}
    episode = only_of(tmp_path, *lines[:-1], wrong, lines[-1])
    assert steps(episode) == STEPS
    assert episode.turns[-1].info["log.messages_of_other_branches"] == 1


def test_an_event_alone_is_no_episode(tmp_path: Path) -> None:
    _, (refusal,) = items(write(tmp_path / "event-00003.json", LINES["openhands"][2]))
    assert "jq" in refusal.reason


def test_errors_of_tools_are_marked(tmp_path: Path) -> None:
    calls = agent([{"type": "toolRequest", "toolCall": {"status": "success", "value": CALL}}])
    for answer in (
        user([{"type": "toolResponse", "toolResult": {"status": "error", "error": "no"}}]),
        {"role": "tool", "content": "no", "status": "error"},
        {"role": "toolResult", "content": "no", "isError": True},
        {"role": "tool", "content": [{"tool_call_result": {"result": "no", "error": True}}]},
    ):
        episode = only_of(tmp_path, {"messages": [user(ASKED), calls, answer, agent(SAID)]})
        assert (steps(episode)[0][1], episode.turns[0].info["log.is_error"]) == ("no", True)


def call_of(name: str) -> dict[str, Any]:
    return {"id": name, "name": name, "arguments": {}}


PARALLEL: dict[str, list[Any]] = {
    "atif": [{"step_id": 1, "source": "user", "message": ASKED},
             {"step_id": 2, "source": "agent", "message": "",
              "tool_calls": [{"tool_call_id": n, "function_name": n, "arguments": {}} for n in "ab"],
              "observation": {"results": [{"source_call_id": n, "content": n.upper()} for n in "ba"]}},
             {"step_id": 3, "source": "agent", "message": "Old.", "is_copied_context": True}],
    "copilot": [{"type": "user.message", "data": {"content": ASKED}},
                {"type": "assistant.message", "data": {"toolRequests": list(map(call_of, "ab"))}},
                *({"type": "tool.execution_complete", "data": {"success": True, "toolCallId": n, "result": n.upper()}}
                  for n in "ba")],
    "gemini": [{"role": "user", "parts": [{"text": ASKED}]},
               {"role": "model", "parts": [{"functionCall": {"id": n, "name": n, "args": {}}} for n in "ab"]},
               {"role": "user", "parts": [{"functionResponse": {"id": n, "response": {"output": n.upper()}}}
                                          for n in "ba"]}],
    "gemini's stream": [{"type": "message", "role": "user", "content": ASKED},
                        *({"type": "tool_use", "tool_id": n, "tool_name": n, "parameters": {}} for n in "ab"),
                        *({"type": "tool_result", "tool_id": n, "output": n.upper()} for n in "ba")],
    "goose": [user([text(ASKED)]),
              agent([{"type": "toolRequest", "id": n, "toolCall": {"value": {"name": n, "arguments": {}}}}
                     for n in "ab"]),
              user([{"type": "toolResponse", "id": n, "toolResult": {"value": [text(n.upper())]}} for n in "ba"])],
    "letta": [{"message_type": "user_message", "content": ASKED},
              *({"message_type": "tool_call_message", "tool_call": call_of(n)} for n in "ab"),
              *({"message_type": "tool_return_message", "tool_call_id": n, "tool_return": n.upper()} for n in "ba")],
    "openhands": [event("MessageEvent", "user", llm_message=user([text(ASKED)])),
                  *(event("ActionEvent", "agent", tool_call=call_of(n)) for n in "ab"),
                  *(event("ObservationEvent", "environment", tool_call_id=n, observation={"content": n.upper()})
                    for n in "ba")],
    "pydantic ai": [
        {"kind": "request", "instructions": "", "parts": [part("user-prompt", content=ASKED)]},
        {"kind": "response", "parts": [part("tool-call", tool_name=n, args={}, tool_call_id=n) for n in "ab"]},
        {"kind": "request", "parts": [part("tool-return", tool_name=n, tool_call_id=n, content=n.upper())
                                      for n in "ba"]}],
}  # fmt: skip


@pytest.mark.parametrize("program", PARALLEL)
def test_answers_to_calls_made_at_once_stand_in_the_order_of_the_calls(tmp_path: Path, program: str) -> None:
    episode = only_of(tmp_path, *PARALLEL[program])
    assert (episode.start, steps(episode)) == (ASKED, [("a({})\nb({})", "A\nB")])
    assert left_out(episode) == ({"copied step": 1} if program == "atif" else {})


def test_instructions_that_stand_in_each_request_are_read_once(tmp_path: Path) -> None:
    told = [{**message, "instructions": "Be brief."} for message in RECORDS["pydantic ai"]]
    episode = only_of(tmp_path, told, name="log.json")
    assert (episode.start, steps(episode)) == (f"Be brief.\n\n{ASKED}", STEPS)
    assert sum(left_out(episode).values()) == 3
