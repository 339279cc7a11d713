"""Messages as other programs write them. If these fail, actions or answers are lost, or read where nobody said them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from real_envs.importers.drafts import ANSWER
from real_envs.trajectory import StopReason
from tests.support.imported import agent, items, left_out, only_of, steps, text, user, write

Step = tuple[str, str]


CALL = {"name": "f", "args": {"x": 1}, "id": "c", "type": "tool_call"}
OLD_CALL = {"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}, "type": "function"}
LANGCHAIN = {
    "flat": [
        {"type": "human", "content": "Hi"},
        {"type": "ai", "content": "", "tool_calls": [CALL], "response_metadata": {"finish_reason": "tool_calls"}},
        {"type": "tool", "content": "no", "tool_call_id": "c", "status": "error"},
        {"type": "ai", "content": "Bye"},
    ],
    "data": [
        {"type": "human", "data": {"content": "Hi"}},
        {"type": "ai", "data": {"content": "", "additional_kwargs": {"tool_calls": [OLD_CALL]}}},
        {"type": "tool", "data": {"content": "no", "status": "error"}},
        {"type": "ai", "data": {"content": "Bye"}},
    ],
    "constructor": [
        {"lc": 1, "id": ["langchain", "schema", "messages", kind], "kwargs": kwargs}
        for kind, kwargs in (
            ("HumanMessage", {"content": "Hi"}),
            ("AIMessage", {"content": [CALL | {"type": "tool_use"}], "tool_calls": [CALL]}),
            ("ToolMessage", {"content": "no", "status": "error"}),
            ("AIMessage", {"content": "Bye"}),
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", LANGCHAIN)
def test_langchain_in_its_three_forms_has_each_call_once(tmp_path: Path, form: str) -> None:
    episode = only_of(tmp_path, {"messages": LANGCHAIN[form]})
    assert episode.start == "Hi"
    assert steps(episode) == [('f({"x": 1})', "no"), ("Bye", "")]
    assert episode.turns[0].info["log.is_error"] is True


def test_a_call_that_langchain_could_not_parse_is_an_action_as_it_was_written(tmp_path: Path) -> None:
    wrong = {"name": "f", "args": '{"x": 1', "id": "c", "error": "bad"}
    messages = [{"type": "human", "content": "Hi"}, {"type": "ai", "content": "", "invalid_tool_calls": [wrong]}]
    assert steps(only_of(tmp_path, {"messages": messages}))[0][0] == 'f({"x": 1)'


def test_tools_of_the_server_answer_within_the_message_of_the_agent(tmp_path: Path) -> None:
    page = {"type": "web_search_result", "url": "u", "title": "News", "encrypted_content": "zz"}
    episode = only_of(
        tmp_path,
        {
            "messages": [
                user("Who won?"),
                agent([
                    text("I search."),
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "won"}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": [page]},
                    {"type": "mcp_tool_use", "id": "m", "name": "get", "input": {}},
                    {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": True, "content": [text("down")]},
                    text("Ann won.", citations=[{"url": "u"}]),
                ]),
            ]
        },
    )  # fmt: skip
    assert steps(episode) == [
        ('I search.\nweb_search({"query": "won"})', '[{"url": "u", "title": "News"}]'),
        ("get({})", "down"),
        ("Ann won.", ""),
    ]
    assert episode.turns[1].info["log.is_error"] is True
    assert left_out(episode) == {"encrypted content": 1, "citation": 1}


def test_a_wrong_part_of_such_a_message_is_named_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    use = {"type": "server_tool_use", "name": "web_search", "input": {}}
    answer = {"type": "web_search_tool_result", "content": []}
    path.write_text(json.dumps({"messages": [user("Q"), agent([use, answer, {"type": "hologram"}])]}))
    _, (refused,) = items(path)
    assert refused.field == "messages[1].content[2].type"


def test_items_of_responses_with_hosted_tools_are_actions_and_answers(tmp_path: Path) -> None:
    items = [
        user("ls"),
        {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c", "output": "a"},
        {"type": "mcp_list_tools", "tools": []},
        {"type": "mcp_call", "name": "get", "arguments": "{}", "output": "b"},
        {"type": "web_search_call", "id": "w", "action": {"query": "q"}},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
    ]
    episode = only_of(tmp_path, items, name="log.json")
    assert steps(episode) == [
        ('local_shell({"command": ["ls"]})', "a"),
        ("get({})", "b"),
        ('web_search({"query": "q"})\nok', ""),
    ]
    assert left_out(episode) == {"line of type mcp_list_tools": 1, "answer of web_search": 1}


def test_gemini_contents_are_read_in_both_spellings(tmp_path: Path) -> None:
    for call, answer in (("functionCall", "functionResponse"), ("function_call", "function_response")):
        contents = [
            {"role": "user", "parts": [{"text": "Weather?"}]},
            {"role": "model", "parts": [{"text": "hm", "thought": True}, {call: {"name": "w", "args": {"c": "B"}}}]},
            {"role": "user", "parts": [{answer: {"name": "w", "response": {"t": 21}}}, {"inlineData": {"data": "x"}}]},
            {"role": "model", "parts": [{"text": "21"}]},
        ]
        episode = only_of(tmp_path, {"contents": contents, "systemInstruction": {"parts": [{"text": "Be brief."}]}})
        assert episode.start == "Be brief.\n\nWeather?"
        assert steps(episode) == [('w({"c": "B"})', '{"t": 21}'), ("21", "")]
        assert (episode.turns[0].info["log.thought"], left_out(episode)) == ("hm", {"file": 1})


def test_calls_of_a_step_of_the_ai_sdk_are_one_action_and_steps_are_turns(tmp_path: Path) -> None:
    def tool(name: str, **more: Any) -> dict[str, Any]:
        return {"type": f"tool-{name}", "state": "output-available", "input": {}} | more

    step = {"type": "step-start"}
    failed = {"type": "dynamic-tool", "toolName": "c", "state": "output-error", "input": {}, "errorText": "bad"}
    parts = [step, tool("a", output="1"), tool("b", output="2"), step, failed, step, text("3"), {"type": "data-x"}]
    messages = [{"role": "user", "parts": [text("Hi")]}, {"role": "assistant", "parts": parts}]
    episode = only_of(tmp_path, {"messages": messages})
    assert steps(episode) == [("a({})\nb({})", "1\n2"), ("c({})", "bad"), ("3", "")]
    assert left_out(episode) == {"data-x": 1}


def test_invocations_within_parts_are_read_and_others_are_counted(tmp_path: Path) -> None:
    invocation = {"toolName": "w", "args": {"c": "B"}, "result": "rain", "state": "result"}
    parts = [{"type": "tool-invocation", "toolInvocation": invocation}, text("Rain.")]
    episode = only_of(tmp_path, {"messages": [user("Hi"), agent("Rain.", toolInvocations=[invocation], parts=parts)]})
    assert steps(episode) == [('w({"c": "B"})', "rain"), ("Rain.", "")]
    assert left_out(episode) == {}
    episode = only_of(tmp_path, {"messages": [user("Hi"), agent("Rain.", toolInvocations=[invocation])]})
    assert left_out(episode) == {"field toolInvocations": 1}


EVENTS = [
    {"source": "agent", "action": "system", "args": {"content": "Help."}},
    {"source": "user", "action": "message", "args": {"content": "Fix it."}},
    {"source": "environment", "observation": "recall", "content": "Added workspace context", "extras": {}},
    {"source": "agent", "action": "run", "args": {"command": "ls", "thought": "look", "blocking": False}},
    {"source": "agent", "observation": "run", "content": "a.py"},
    {"source": "agent", "action": "read", "args": {"path": "b"}},
    {"source": "agent", "observation": "error", "content": "no such file"},
    {"source": "agent", "action": "finish", "args": {"final_thought": "done"}},
]


@pytest.mark.parametrize("pairs", [False, True])
def test_events_of_openhands_are_turns_and_what_is_recalled_is_counted(tmp_path: Path, pairs: bool) -> None:
    history = [EVENTS[i : i + 2] for i in range(0, len(EVENTS), 2)] if pairs else EVENTS
    episode = only_of(tmp_path, {"instance_id": "i", "history": history, "error": None})
    assert episode.start == "Help.\n\nFix it."
    assert steps(episode)[:2] == [('run({"command": "ls"})', "a.py"), ('read({"path": "b"})', "no such file")]
    assert [turn.info.get("log.is_error") for turn in episode.turns] == [None, True, None]
    assert (episode.turns[0].info["log.thought"], left_out(episode)) == ("look", {"event recall": 1})
    assert episode.stop is StopReason.TERMINATED


HI, YO = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}
TAGGED = 'So:\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
SPOKEN: list[Step] = [("Yo", "")]
OTHERS: dict[str, tuple[Any, list[Step]]] = {
    "cohere": (
        {"messages": [{"role": "USER", "message": "Hi"}, {"role": "CHATBOT", "message": "", "tool_calls": [CALL]},
                      {"role": "TOOL", "tool_results": ["ok"]}, {"role": "CHATBOT", "message": "Yo"}]},
        [('f({"x": 1})', '["ok"]'), ("Yo", "")],
    ),
    "tagged call": (
        {"conversations": [HI, {"from": "function_call", "value": TAGGED}, {"from": "observation", "value": "ok"}, YO]},
        [('So:\nf({"x": 1})', "ok"), ("Yo", "")],
    ),
    "role and value": ({"conversations": [{"role": "user", "value": "Hi"}, {"role": "ai", "value": "Yo"}]}, SPOKEN),
    "from in messages": ({"messages": [HI, YO]}, SPOKEN),
    "ai and text": ({"trajectory": [{"role": "user", "text": "Hi"}, {"role": "ai", "text": "Yo"}]}, SPOKEN),
    "claude's export": (
        {"chat_messages": [{"sender": "human", "text": "Hi"},
                           {"sender": "assistant", "text": "Yo", "content": [text("Yo")]}]},
        SPOKEN,
    ),
    "mistral": (
        {"messages": [user("Hi"), agent([{"type": "thinking", "thinking": [text("hm")]}, text("Yo")])]},
        SPOKEN,
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_other_programs_say_the_same_in_their_words(tmp_path: Path, form: str) -> None:
    record, expected = OTHERS[form]
    episode = only_of(tmp_path, record, name="log.json")
    assert steps(episode) == expected
    assert left_out(episode) == {}
    assert episode.stop is StopReason.TERMINATED


def test_sharegpt_has_thoughts_and_marks_as_chats_do(tmp_path: Path) -> None:
    said = [
        {"from": "Human", "value": "Hi", "image": "a.png"},
        {"from": "GPT", "value": "Thought: hm\nAction: f", "reasoning": "so"},
        {"from": "human", "value": "ok"},
        {"from": "gpt", "value": "Thought: yes\nFinal Answer: Yo<|im_end|>"},
    ]
    episode = only_of(tmp_path, {"conversations": said, "id": 3})
    assert (episode.id, steps(episode)) == ("3", [("f", "ok"), ("Final Answer: Yo", "")])
    assert [turn.info["log.thought"] for turn in episode.turns] == ["so\n\nhm", "yes"]
    assert left_out(episode) == {"image": 1, "mark at the end of a message": 1}


def test_no_placeholder_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps({"messages": [user("redacted-by-litellm"), agent("Yo")]}))
    _, (refused,) = items(path)
    assert refused.field == "messages[0].content"


def test_fields_of_a_message_that_nobody_knows_are_counted(tmp_path: Path) -> None:
    episode = only_of(tmp_path, {"messages": [user("Hi"), agent("Yo", plan=["a", "b"], usage={"tokens": 3})]})
    assert left_out(episode) == {"field plan": 1}


def test_steps_of_smolagents_are_turns(tmp_path: Path) -> None:
    def step(number: int, output: str | None, tool: str, given: Any, seen: str | None, **more: Any) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": tool, "arguments": given}}
        about = {"step_number": number, "timing": {}, "model_input_messages": [user("x")], "tool_calls": [call]}
        return about | {"model_output": output, "observations": seen, "error": None, "action_output": None} | more

    error = {"type": "AgentExecutionError", "message": "no such name"}
    episode = only_of(
        tmp_path,
        {"system_prompt": "Write code."},
        {"task": "Add 2 and 3.", "task_images": None},
        {"plan": "First add.", "model_output_message": {}, "model_input_messages": []},
        step(1, "Thought: add\n<code>x</code>", "python_interpreter", "x", None, error=error, code_action="x"),
        step(2, "Calling it.", "add", {"a": 2}, "5", action_output=7),
        step(3, None, "final_answer", {"answer": 5}, "Final: 5", action_output=5, is_final_answer=True),
    )
    assert episode.start == "Write code.\n\nAdd 2 and 3."
    assert steps(episode) == [
        ("Thought: add\n<code>x</code>", "no such name"),
        ('Calling it.\nadd({"a": 2})', "5"),
        ('final_answer({"answer": 5})', "Final: 5"),
    ]
    assert dict(episode.turns[0].info) == {"log.thought": "First add.", "log.is_error": True}
    assert episode.stop is StopReason.TERMINATED
    assert left_out(episode) == {"action output": 1}


def test_messages_of_one_agent_of_autogen_are_a_dialogue(tmp_path: Path) -> None:
    def said(kind: str, content: Any, source: str = "helper") -> dict[str, Any]:
        return {"source": source, "models_usage": None, "metadata": {}, "content": content, "type": kind}

    call, result = {"id": "c", "name": "f", "arguments": '{"x": 1}'}, {"call_id": "c", "name": "f", "content": "no"}
    picture = {"data": "aGk="}
    messages = [
        said("MultiModalMessage", ["Hi", picture], "user"),
        said("ThoughtEvent", "hm"),
        said("ToolCallRequestEvent", [call]),
        said("ToolCallExecutionEvent", [result | {"is_error": True}]),
        said("ToolCallSummaryMessage", "no"),
        said("TextMessage", "Bye"),
    ]
    episode = only_of(tmp_path, {"messages": messages, "stop_reason": "Maximum number of messages 6 reached"})
    assert episode.start == "Hi"
    assert steps(episode) == [('f({"x": 1})', "no"), ("Bye", "")]
    assert dict(episode.turns[0].info) == {"log.thought": "hm", "log.is_error": True}
    assert episode.stop is StopReason.TURN_LIMIT
    assert left_out(episode) == {"image": 1, "line of type ToolCallSummaryMessage": 1, ANSWER: 1}


def test_completions_of_trl_are_an_action_or_messages_and_never_a_template(tmp_path: Path) -> None:
    row = {"step": 3, "prompt": "Add.", "completion": "5", "right": 1.0, "advantage": 0.5}
    episode = only_of(tmp_path, row)
    assert (episode.start, steps(episode), episode.success) == ("Add.", [("5", "")], None)
    text = "<tool_call>\n{}</tool_call>\nuser\n<tool_response>\n5</tool_response>\nassistant\nIt is 5."
    _, (refusal,) = items(write(tmp_path / "b.jsonl", json.dumps(row | {"completion": text})), "openai")
    assert refusal.field == "completion"


def test_parts_without_a_type_are_read_or_counted(tmp_path: Path) -> None:
    code = {"executableCode": {"language": "PYTHON", "code": "print(4)"}}
    contents = [
        {"role": "user", "parts": [{"text": "2+2?"}]},
        {"role": "model", "parts": [code, {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "4"}}]},
        {"role": "model", "parts": [{"text": "4."}]},
    ]
    assert steps(only_of(tmp_path, {"contents": contents})) == [
        ('code_execution({"language": "PYTHON", "code": "print(4)"})', "4"),
        ("4.", ""),
    ]
    given = [{"json": {"a": 1}}, {"text": "b"}, {"image": {"format": "png"}}]
    converse = [
        user([{"text": "Hi"}, {"image": "a.png"}, {"cachePoint": {"type": "default"}}]),
        agent([{"toolUse": {"name": "f", "input": {}}}]),
        user([{"toolResult": {"status": "error", "content": given}}]),
        agent([{"guardContent": {"text": {"text": "Yo"}}},
               {"citationsContent": {"content": [{"text": "there"}], "citations": [{}]}}]),
    ]  # fmt: skip
    episode = only_of(tmp_path, {"messages": converse})
    assert steps(episode) == [("f({})", '{"a": 1}\nb'), ("Yo\nthere", "")]
    assert left_out(episode) == {"image": 2, "citation": 1}


def test_what_was_spoken_is_read_where_it_was_written_down(tmp_path: Path) -> None:
    asked = user([{"type": "input_audio", "transcript": "Hi"}])
    episode = only_of(tmp_path, {"messages": [asked, agent(None, audio={"id": "a", "transcript": "Yo"})]})
    assert (episode.start, steps(episode), left_out(episode)) == ("Hi", SPOKEN, {"input_audio": 1, "audio": 1})
    value = {"type": "text", "text": {"value": "Yo", "annotations": [{}]}}
    episode = only_of(tmp_path, {"messages": [user("Hi"), agent([value])]})
    assert (steps(episode), left_out(episode)) == (SPOKEN, {"citation": 1})


@pytest.mark.parametrize(("agreed", "answer"), [(True, "ok"), (False, '{"approve": false, "reason": "no"}')])
def test_that_a_user_declines_a_call_is_its_answer(tmp_path: Path, agreed: bool, answer: str) -> None:
    said = {"type": "mcp_approval_response", "approve": agreed} | ({} if agreed else {"reason": "no"})
    seen = {"type": "function_call_output", "output": "ok"}
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    log = [user("Hi"), {"type": "mcp_approval_request"}, call, said, *([seen] if agreed else []), agent("Yo")]
    episode = only_of(tmp_path, log, name="log.json")
    assert steps(episode) == [("f({})", answer), ("Yo", "")]
    assert left_out(episode) == {"line of type mcp_approval_request": 1} | ({"approval": 1} if agreed else {})


def test_whatever_a_tool_returns_is_its_answer(tmp_path: Path) -> None:
    for given, answer in (({"t": 21}, '{"t": 21}'), (21, "21"), ([1, 2], "[1, 2]")):
        messages = [user("Hi"), agent(None, tool_calls=[OLD_CALL]), {"role": "tool", "content": given}, agent("Yo")]
        assert steps(only_of(tmp_path, {"id": 7, "messages": messages})) == [('f({"x": 1})', answer), ("Yo", "")]


def test_autogen_logs_a_dialogue_from_the_side_of_its_user(tmp_path: Path) -> None:
    def said(role: str, name: str, content: str, **more: Any) -> dict[str, Any]:
        return {"role": role, "name": name, "content": content} | more

    chat = [
        said("assistant", "user_proxy", "Plot."),
        said("assistant", "coder", "", tool_calls=[OLD_CALL]),
        said("tool", "user_proxy", "ok"),
        said("user", "critic", "Good."),
        said("assistant", "user_proxy", "Bye."),
    ]
    episode = only_of(tmp_path, {"chat_history": chat})
    assert (episode.start, steps(episode)) == ("Plot.", [('f({"x": 1})', "ok"), ("Good.", "Bye.")])
    assert left_out(episode) == {"name of another agent": 1}


CALLS = ("a", "b")


def chat_of(answers: list[str], ids: tuple[str, ...] = CALLS) -> list[Any]:
    calls = [{"id": one, "function": {"name": name, "arguments": "{}"}} for one, name in zip(ids, CALLS, strict=True)]
    return [
        agent(None, tool_calls=calls),
        *({"role": "tool", "tool_call_id": a, "content": f"of {a}"} for a in answers),
    ]


def blocks_of(answers: list[str]) -> list[Any]:
    results = [{"type": "tool_result", "tool_use_id": one, "content": [text("of"), text(one)]} for one in answers]
    results = [part | {"content": f"of {part['tool_use_id']}"} for part in results]
    return [agent([{"type": "tool_use", "id": one, "name": one, "input": {}} for one in CALLS]), user(results)]


def items_of(answers: list[str]) -> list[Any]:
    calls = [{"type": "function_call", "id": "i", "call_id": one, "name": one, "arguments": "{}"} for one in CALLS]
    return [*calls, *({"type": "function_call_output", "call_id": one, "output": f"of {one}"} for one in answers)]


def codex_of(answers: list[str]) -> list[Any]:
    return [{"type": "response_item", "payload": item} for item in items_of(answers)]


@pytest.mark.parametrize("form", [chat_of, blocks_of, items_of, codex_of])
@pytest.mark.parametrize(
    ("answers", "seen", "missing"), [("ab", "ab", 0), ("ba", "ab", 0), ("b", "b", 1), ("", "", 0), ("bb", "b", 1)]
)
def test_answers_stand_in_the_order_of_their_calls(
    tmp_path: Path, form: Any, answers: str, seen: str, missing: int
) -> None:
    episode = only_of(tmp_path, {"messages": [user("Q"), *form(list(answers)), user("Go on."), agent("Done.")]})
    observed = "\n".join([*(f"of {one}" for one in seen), "Go on."])
    assert steps(episode) == [("a({})\nb({})", observed), ("Done.", "")]
    repeated = {"repeated answer": 1} if answers == "bb" else {}
    assert left_out(episode) == ({"answer to a call": missing} if missing else {}) | repeated


@pytest.mark.parametrize("ids", [("a", "a"), ("a", "c"), ("a", "")])
def test_where_ids_are_unknown_answers_stay_as_they_are(tmp_path: Path, ids: tuple[str, str]) -> None:
    episode = only_of(tmp_path, {"messages": [user("Q"), *chat_of(["b", "a"], ids), agent("Done.")]})
    assert episode.turns[0].observation == "of b\nof a"
    assert left_out(episode) == {}
