"""Messages in the attributes of spans. If these fail, exports of observability tools are refused or read in part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.imported import agent, left_out, only, only_of, steps, user, write

STEPS = [('look({"at": 1})', "a box"), ("In the box.", "")]


def phoenix(number: int, asked: list[Any], answered: dict[str, Any]) -> dict[str, Any]:
    about = {"context.trace_id": "t", "context.span_id": str(number), "start_time": f"2026-01-01T00:00:0{number}"}
    messages = {"attributes.llm.input_messages": asked, "attributes.llm.output_messages": [answered]}
    return about | {"span_kind": "LLM"} | messages


def test_dotted_keys_of_phoenixs_dataframes_are_messages(tmp_path: Path) -> None:
    call = {"tool_call.id": "c", "tool_call.function.name": "look", "tool_call.function.arguments": '{"at": 1}'}
    asked = {"message.role": "user", "message.content": "Where is it?"}
    called = {"message.role": "assistant", "message.tool_calls": [call]}
    seen = {"message.role": "tool", "message.content": "a box", "message.tool_call_id": "c"}
    found = {"message.role": "assistant", "message.content": "In the box."}
    episode = only_of(tmp_path, phoenix(1, [asked], called), phoenix(2, [asked, called, seen], found))
    assert (episode.start, steps(episode)) == ("Where is it?", STEPS)


def value(given: Any) -> dict[str, Any]:
    """As OTLP writes it."""
    if isinstance(given, dict):
        return {"kvlistValue": {"values": [{"key": key, "value": value(inner)} for key, inner in given.items()]}}
    if isinstance(given, list):
        return {"arrayValue": {"values": list(map(value, given))}}
    return {"intValue": str(given)} if isinstance(given, int) else {"stringValue": given}


@pytest.mark.parametrize("named", ["eventName", "event.name"])
def test_log_records_that_are_a_message_each_are_one_call_and_other_choices_are_counted(
    tmp_path: Path, named: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    bodies = [
        ("gen_ai.user.message", {"content": "Where is it?"}),
        ("gen_ai.assistant.message", {"tool_calls": [call]}),
        ("gen_ai.tool.message", {"id": "c", "content": "a box"}),
        ("gen_ai.choice", {"index": 0, "message": {"content": "In the box."}}),
        ("gen_ai.choice", {"index": 1, "message": {"content": "Nowhere."}}),
    ]
    logs: list[Any] = [{"traceId": "t", "spanId": "s", "timeUnixNano": "1", "body": value(body)} for _, body in bodies]
    for log, (name, _) in zip(logs, bodies, strict=True):
        log |= {named: name} if named == "eventName" else {"attributes": [{"key": named, "value": value(name)}]}
    episode = only(write(tmp_path / "logs.json", {"resourceLogs": [{"scopeLogs": [{"logRecords": logs}]}]}))
    assert (episode.start, steps(episode)) == ("Where is it?", STEPS)
    assert left_out(episode) == {"other answer": 1}
    batches = [{"resourceLogs": [{"scopeLogs": [{"logRecords": [log]}]}]} for log in logs[:4]]
    episode = only_of(tmp_path, *batches, name="logs.jsonl")
    assert (episode.start, steps(episode), left_out(episode)) == ("Where is it?", STEPS, {})
    again = {"earlier version of a call": 1}
    whole = {"resourceLogs": [{"scopeLogs": [{"logRecords": logs[:4]}]}]}
    episode = only_of(tmp_path, whole, whole, name="logs.jsonl")
    assert (episode.start, steps(episode), left_out(episode)) == ("Where is it?", STEPS, again)


def test_of_several_choices_of_a_call_the_first_is_read(tmp_path: Path) -> None:
    def said(role: str, text: str, **more: Any) -> dict[str, Any]:
        return {"role": role, "parts": [{"type": "text", "content": text}]} | more

    details = {
        "gen_ai.input.messages": [said("user", "Hi")],
        "gen_ai.output.messages": [said("assistant", text, finish_reason="stop") for text in ("Yo", "Hello")],
    }
    log = {"traceId": "t", "spanId": "s", "eventName": "gen_ai.client.inference.operation.details"}
    log |= {"attributes": [{"key": key, "value": value(given)} for key, given in details.items()]}
    episode = only(write(tmp_path / "logs.json", {"resourceLogs": [{"scopeLogs": [{"logRecords": [log]}]}]}))
    assert (steps(episode), left_out(episode)) == ([("Yo", "")], {"other answer": 1})


def test_events_in_an_attribute_are_the_messages_of_a_call(tmp_path: Path) -> None:
    events = [
        {"event.name": "gen_ai.user.message", "role": "user", "content": "Hi", "gen_ai.message.index": 0},
        {"event.name": "gen_ai.choice", "index": 0, "message": {"role": "assistant", "content": "Yo"}},
    ]
    attributes = {"gen_ai.operation.name": "chat", "events": json.dumps(events)}
    episode = only_of(tmp_path, {"trace_id": "t", "span_id": "s", "attributes": attributes})
    assert (episode.start, steps(episode)) == ("Hi", [("Yo", "")])


def test_a_system_prompt_beside_the_messages_of_a_request_is_read(tmp_path: Path) -> None:
    body, said = {"system": "Be brief.", "messages": [user("Hi")]}, {"role": "assistant", "content": "Yo"}
    helicone = {"request_id": "r", "request_body": body, "response_body": said}
    litellm = {"messages": [user("Hi")], "call_type": "anthropic_messages", "proxy_server_request": {"body": body}}
    for record in (helicone, litellm | {"response": {"choices": [{"message": agent("Yo")}]}}):
        episode = only_of(tmp_path, record)
        assert (episode.start, steps(episode)) == ("Be brief.\n\nHi", [("Yo", "")])


def test_answers_of_tools_stand_in_the_order_of_their_calls_whichever_ended_first(tmp_path: Path) -> None:
    def span(number: int, **attributes: Any) -> dict[str, Any]:
        about = {"trace_id": "t", "span_id": str(number), "start_time": f"2026-01-01T00:00:0{number}Z"}
        return about | {"name": "f.tool", "attributes": attributes}

    calls = [{"type": "tool_call", "id": name, "name": name, "arguments": {}} for name in ("a", "b")]
    asked, said = [{"role": "user", "parts": []}], [{"role": "assistant", "parts": calls}]
    model = span(1, **{"gen_ai.input.messages": asked, "gen_ai.output.messages": said})
    tools = [
        span(2, **{"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "b", "gen_ai.tool.call.result": "B"}),
        span(3, **{"traceloop.span.kind": "tool", "traceloop.entity.name": "a", "traceloop.entity.output": "A"}),
    ]
    assert steps(only_of(tmp_path, model, *tools)) == [("a({})\nb({})", "A\nB")]


def test_a_score_that_is_a_word_is_read(tmp_path: Path) -> None:
    call = {"id": "1", "type": "GENERATION", "traceId": "t", "startTime": "2026-01-01T00:00:01Z"}
    call |= {"input": [user("Hi")], "output": agent("Yo")}
    trace = {"id": "t", "observations": [call], "scores": [{"name": "ok", "value": None, "stringValue": "True"}]}
    assert only(write(tmp_path / "a.json", trace), mapping={"success": "score.ok"}).success is True
