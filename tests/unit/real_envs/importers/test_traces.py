"""Traces of model calls. If these fail, a dialogue is cut, doubled, or mixed with another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from real_envs.importers.formats import find_format
from real_envs.trajectory import StopReason
from tests.support.imported import agent, items, left_out, only, only_of, steps, user, write

SYSTEM = {"role": "system", "content": "Help."}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
ASKED = [SYSTEM, user("Where is it?")]
CALLED = agent(None, tool_calls=[CALL])
SEEN = {"role": "tool", "tool_call_id": "c1", "content": "a box"}
FOUND = agent("In the box.")
STEPS = [('look({"at": 1})', "a box"), ("In the box.", "")]


def run(number: int, kind: str, inputs: Any, outputs: Any, parent: str | None = "r", **more: Any) -> dict[str, Any]:
    times = {"start_time": f"2026-01-01T00:00:{number:02}.5"}
    about = {"id": f"r{number}", "parent_run_id": parent, "trace_id": "t", "session_id": "project", "name": kind}
    return times | about | {"run_type": kind, "inputs": inputs, "outputs": outputs} | more


def langchain(kind: str, **kwargs: Any) -> dict[str, Any]:
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", kind], "kwargs": kwargs}


def langsmith() -> list[dict[str, Any]]:
    asked = [langchain("SystemMessage", content="Help."), langchain("HumanMessage", content="Where is it?")]
    called = langchain("AIMessage", content="", tool_calls=[{"name": "look", "args": {"at": 1}, "id": "c1"}])
    seen = langchain("ToolMessage", content="a box", tool_call_id="c1")
    found = langchain("AIMessage", content="In the box.")
    model = {"extra": {"metadata": {"ls_model_name": "m"}}}
    return [
        run(0, "chain", {"q": 1}, {"a": 1}, None, id="r", feedback_stats={"right": {"n": 1, "avg": 1.0}}),
        run(3, "llm", {"messages": [[*asked, called, seen]]}, {"generations": [[{"message": found}]]}, **model),
        run(1, "llm", {"messages": [asked]}, {"generations": [[{"text": "", "message": called}]]}, **model),
        run(2, "tool", {"input": "{'at': 1}"}, {"output": "a box"}, name="look"),
    ]  # fmt: skip


def langfuse() -> list[dict[str, Any]]:
    def seen(number: int, kind: str, given: Any, made: Any) -> dict[str, Any]:
        about = {"id": f"o{number}", "traceId": "t", "parentObservationId": None, "name": "look", "model": "m"}
        return about | {"type": kind, "startTime": f"2026-01-01T00:00:0{number}Z", "input": given, "output": made}

    observations = [
        seen(1, "GENERATION", {"messages": ASKED, "tools": [{"type": "function"}]}, CALLED),
        seen(2, "TOOL", {"at": 1}, "a box"),
        seen(3, "GENERATION", json.dumps([*ASKED, CALLED, SEEN]), FOUND | {"content": "In the box."}),
    ]
    scores = [{"name": "right", "value": 1.0}]
    return [{"id": "t", "sessionId": "s", "input": "x", "observations": observations, "scores": scores}]


def parts(*messages: Any) -> str:
    made = []
    for message in messages:
        content = message["content"]
        part: list[dict[str, Any]] = [{"type": "text", "content": content}]
        if message is CALLED:
            part = [
                {"type": "reasoning", "content": "hm"},
                {"type": "tool_call", "name": "look", "arguments": {"at": 1}},
            ]
        if message is SEEN:
            part = [{"type": "tool_call_response", "id": "c1", "response": content}]
        made.append({"role": message["role"], "parts": part})
    return json.dumps(made)


def otlp() -> list[dict[str, Any]]:
    def span(number: int, **attributes: Any) -> dict[str, Any]:
        listed = [{"key": key.replace("__", "."), "value": {"stringValue": value}} for key, value in attributes.items()]
        about = {"traceId": "t", "spanId": f"s{number}", "parentSpanId": "s9", "name": "execute_tool look"}
        return about | {"startTimeUnixNano": str(number), "attributes": listed}

    system = json.dumps([{"type": "text", "content": "Help."}])
    spans = [
        span(9, gen_ai__operation__name="invoke_agent") | {"parentSpanId": ""},
        span(1, gen_ai__operation__name="chat", gen_ai__system_instructions=system, gen_ai__request__model="m",
             gen_ai__input__messages=parts(ASKED[1]), gen_ai__output__messages=parts(CALLED)),
        span(2, gen_ai__operation__name="execute_tool", gen_ai__tool__name="look", gen_ai__tool__call__result="a box"),
        span(3, gen_ai__operation__name="chat", gen_ai__system_instructions=system, gen_ai__request__model="m",
             gen_ai__input__messages=parts(ASKED[1], CALLED, SEEN), gen_ai__output__messages=parts(FOUND)),
    ]  # fmt: skip
    return [{"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": spans}]}]}]


def indexed(prefix: str, message: str, call: str, messages: list[Any]) -> dict[str, Any]:
    made = {}
    for i, each in enumerate(messages):
        made[f"{prefix}.{i}.{message}role"] = each["role"]
        if each["content"] is not None:
            made[f"{prefix}.{i}.{message}content"] = each["content"]
        for j, one in enumerate(each.get("tool_calls", ())):
            function = "function." if call else ""
            for key in ("name", "arguments"):
                made[f"{prefix}.{i}.{message}tool_calls.{j}.{call}{function}{key}"] = one["function"][key]
    return made


def flat(asked: str, answered: str, message: str, call: str, model: str) -> list[dict[str, Any]]:
    def line(number: int, before: list[Any], after: list[Any]) -> dict[str, Any]:
        attributes = indexed(asked, message, call, before) | indexed(answered, message, call, after) | {model: "m"}
        context = {"trace_id": "0xt", "span_id": f"0x{number}"}
        return {"name": "chat", "context": context, "parent_id": None, "start_time": number, "attributes": attributes}

    return [line(1, ASKED, [CALLED]), line(2, [*ASKED, CALLED, SEEN], [FOUND])]


def agents_sdk() -> list[dict[str, Any]]:
    def span(number: int, **data: Any) -> dict[str, Any]:
        about = {"object": "trace.span", "id": f"s{number}", "trace_id": "t", "parent_id": "s0", "error": None}
        return about | {"started_at": f"2026-01-01T00:00:0{number}+00:00", "span_data": data}

    return [
        {"object": "trace", "id": "t", "workflow_name": "w", "group_id": "g", "metadata": None},
        span(0, type="agent", name="a") | {"parent_id": None},
        span(1, type="generation", input=ASKED, output=[CALLED], model="m"),
        span(2, type="function", name="look", input='{"at": 1}', output="a box"),
        span(3, type="generation", input=[*ASKED, CALLED, SEEN], output=[FOUND], model="m"),
    ]


def litellm() -> list[dict[str, Any]]:
    def call(number: int, before: list[Any], after: Any) -> dict[str, Any]:
        response = {"choices": [{"finish_reason": "stop", "message": after}]}
        about = {"id": f"x{number}", "call_type": "acompletion", "model": "m", "metadata": {"user_api_key": "h"}}
        return about | {"session_id": "s", "startTime": number, "messages": before, "response": response}

    return [call(2, [*ASKED, CALLED, SEEN], FOUND), call(1, ASKED, CALLED)]


def ai_sdk() -> list[dict[str, Any]]:
    def span(number: int, operation: str, **attributes: Any) -> dict[str, Any]:
        given = {f"ai.{key.replace('__', '.')}": value for key, value in attributes.items()}
        given |= {"ai.operationId": operation, "ai.model.id": "m"}
        return {"traceId": "t", "spanId": str(number), "parentSpanId": "9", "startTime": number, "attributes": given}

    inner = "ai.generateText.doGenerate"
    calls = json.dumps([{"toolCallId": "c1", "toolName": "look", "args": '{"at": 1}'}])
    called = {"role": "assistant", "content": [{"type": "tool-call", "toolName": "look", "input": {"at": 1}}]}
    result = {"type": "tool-result", "toolName": "look", "output": {"type": "text", "value": "a box"}}
    later = [*ASKED, called, {"role": "tool", "content": [result]}]
    return [
        span(9, "ai.generateText", prompt=json.dumps({"messages": ASKED}), response__text="In the box."),
        span(1, inner, prompt__messages=json.dumps(ASKED), response__toolCalls=calls),
        span(2, "ai.toolCall", toolCall__name="look", toolCall__result='"a box"'),
        span(3, inner, prompt__messages=json.dumps(later), response__text="In the box."),
    ]


def events() -> list[dict[str, Any]]:
    """As events of the spans, an older convention."""

    def span(number: int, before: list[Any], after: Any) -> dict[str, Any]:
        said = [(f"gen_ai.{message['role']}.message", message) for message in before]
        said.append(("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": after}))
        logged = [{"name": n, "attributes": {"gen_ai.event.content": json.dumps(body)}} for n, body in said]
        attributes = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
        about = {"traceId": "t", "spanId": str(number), "startTime": number, "attributes": attributes}
        return about | {"events": logged}

    return [span(1, ASKED, CALLED), span(2, [*ASKED, CALLED, SEEN], FOUND)]


LOGS: dict[str, list[dict[str, Any]]] = {
    "LangSmith": langsmith(),
    "Langfuse": langfuse(),
    "OpenTelemetry": otlp(),
    "OpenTelemetry, OpenLLMetry": flat("gen_ai.prompt", "gen_ai.completion", "", "", "gen_ai.request.model"),
    "OpenTelemetry, OpenInference": flat(
        "llm.input_messages", "llm.output_messages", "message.", "tool_call.", "llm.model_name"
    ),
    "OpenTelemetry, AI SDK": ai_sdk(),
    "OpenTelemetry, events": events(),
    "Agents SDK": agents_sdk(),
    "LiteLLM": litellm(),
}


@pytest.mark.parametrize("product", LOGS)
def test_the_calls_of_a_trace_are_one_dialogue_with_each_message_once(tmp_path: Path, product: str) -> None:
    path = write(tmp_path / "log.jsonl", "\n".join(map(json.dumps, LOGS[product])))
    format, reason = find_format("auto", path)
    assert format.name == "traces"
    assert product.partition(",")[0] in reason
    episode = only(path)
    assert (episode.start, episode.agent, episode.success) == ("Help.\n\nWhere is it?", "m", None)
    assert steps(episode) == STEPS
    assert left_out(episode) == {}
    assert all(turn.reward is None for turn in episode.turns)


@pytest.mark.parametrize("product", LOGS)
def test_an_array_of_spans_is_the_same_as_lines(tmp_path: Path, product: str) -> None:
    assert steps(only(write(tmp_path / "log.json", LOGS[product]))) == STEPS


@pytest.mark.parametrize("product", ["LangSmith", "Langfuse"])
def test_scores_are_rewards_only_where_a_mapping_says_so(tmp_path: Path, product: str) -> None:
    path = write(tmp_path / "log.json", LOGS[product])
    assert [turn.reward for turn in only(path, mapping={"reward": "score.right"}).turns] == [0.0, 1.0]
    assert only(path, mapping={"success": "score.right"}).success is True


def test_parquet_and_nested_runs_are_read_as_lines_are(tmp_path: Path) -> None:
    path = tmp_path / "runs.parquet"
    rows = [
        {k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items() if v is not None}
        for row in langfuse()[0]["observations"]
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert steps(only(path)) == STEPS
    trace = langfuse()[0]
    shown = {"trace": trace, "observations": trace.pop("observations")}
    assert steps(only(write(tmp_path / "shown.json", shown), mapping={"reward": "score.right"})) == STEPS
    root, *children = langsmith()
    assert steps(only(write(tmp_path / "tree.json", [root | {"child_runs": children}]))) == STEPS


def test_a_tool_answers_in_its_span_where_no_call_follows(tmp_path: Path) -> None:
    called = langsmith()[:1] + langsmith()[2:]
    episode = only(write(tmp_path / "log.json", called))
    assert steps(episode) == STEPS[:1]
    listed = [called[0], called[1], called[2] | {"outputs": {"output": [{"box": 1}]}}]
    assert steps(only(write(tmp_path / "log.json", listed))) == [(STEPS[0][0], '[{"box": 1}]')]
    broken = [called[0], called[1], called[2] | {"outputs": None, "error": "no box"}]
    episode = only(write(tmp_path / "log.json", broken))
    assert steps(episode) == [('look({"at": 1})', "no box")]
    assert episode.turns[0].info["log.is_error"] is True


def test_calls_of_a_subagent_are_an_episode_and_its_tool_answers_are_its_own(tmp_path: Path) -> None:
    root, *own = agents_sdk()
    inner = [{"role": "user", "content": "Sum up."}]

    def below(number: int, parent: str, **data: Any) -> dict[str, Any]:
        return own[1] | {
            "id": f"i{number}",
            "parent_id": parent,
            "span_data": data,
            "started_at": f"2026-01-01T00:00:02.{number}+00:00",
        }

    nested = [
        below(1, "s2", type="agent", name="b"),
        below(2, "i1", type="generation", input=inner, output=[agent(None, tool_calls=[CALL])], model="n"),
        below(3, "i1", type="function", name="look", output="a bag"),
        below(
            4, "i1", type="generation", input=[*inner, CALLED, SEEN | {"content": "a bag"}], output=[agent("A bag.")]
        ),
    ]
    (main, side), refusals = items(write(tmp_path / "log.jsonl", "\n".join(map(json.dumps, [root, *own, *nested]))))
    assert refusals == []
    assert (steps(main), left_out(main)) == (STEPS, {})
    assert (side.start, steps(side)) == ("Sum up.", [('look({"at": 1})', "a bag"), ("A bag.", "")])


def test_a_retry_is_counted_and_a_failed_last_call_broke_the_episode(tmp_path: Path) -> None:
    first, later = sorted(litellm(), key=lambda call: call["startTime"])
    retried = first | {"id": "x0", "startTime": 0, "response": {"choices": [{"message": agent("What?")}]}}
    failed = later | {"id": "x3", "startTime": 1.5, "response": {}, "error_str": "429"}
    episode = only(write(tmp_path / "log.json", [first, later, retried, failed]))
    assert steps(episode) == STEPS
    assert left_out(episode) == {"call beside the dialogue": 1, "call without messages or an answer": 1}
    episode = only(write(tmp_path / "log.json", [first, later, failed | {"startTime": 9}]))
    assert episode.stop is StopReason.ENV_CRASHED
    assert episode.failure is not None
    assert "429" in episode.failure


def test_the_traces_of_a_session_are_one_dialogue(tmp_path: Path) -> None:
    more = [*ASKED, CALLED, SEEN, FOUND, user("Thanks.")]
    call = litellm()[0] | {
        "id": "y",
        "startTime": 3,
        "messages": more,
        "response": {"choices": [{"message": agent("Bye.")}]},
    }
    expected = [STEPS[0], ("In the box.", "Thanks."), ("Bye.", "")]
    assert steps(only(write(tmp_path / "a.json", [*litellm(), call]))) == expected
    # without a session they go on word for word, or not at all
    unnamed = [one | {"session_id": f"u{i}"} for i, one in enumerate((*litellm(), call))]
    assert steps(only(write(tmp_path / "b.json", unnamed))) == expected
    other = unnamed[2] | {"messages": [*more[:3], SEEN | {"content": "a bag"}, *more[4:]]}
    episodes, _ = items(write(tmp_path / "c.json", [*unnamed[:2], other]))
    assert sorted(map(len, map(steps, episodes))) == [2, 3]


def test_messages_that_later_calls_cut_or_shorten_are_read_once(tmp_path: Path) -> None:
    first, later = sorted(litellm(), key=lambda call: call["startTime"])
    cut = [*ASKED, CALLED, SEEN | {"content": "[cleared]"}, FOUND, user("And now?")]
    third = later | {
        "id": "x3",
        "startTime": 3,
        "messages": cut,
        "response": {"choices": [{"message": agent("Gone.")}]},
    }
    window = [SYSTEM | {"content": "Help, at noon."}, FOUND, user("And now?"), agent("Gone."), user("OK.")]
    fourth = third | {
        "id": "x4",
        "startTime": 4,
        "messages": window,
        "response": {"choices": [{"message": agent("Bye.")}]},
    }
    episode = only(write(tmp_path / "log.json", [first, later, third, fourth]))
    assert steps(episode) == [STEPS[0], ("In the box.", "And now?"), ("Gone.", "OK."), ("Bye.", "")]
    assert left_out(episode) == {"changed system prompt": 1}


def test_calls_that_hold_only_what_is_new_go_on(tmp_path: Path) -> None:
    spans = agents_sdk()
    items_ = [{"type": "function_call", "name": "look", "arguments": '{"at": 1}', "call_id": "c1"}]
    spans[2]["span_data"] |= {"type": "response", "output": items_}
    spans[4]["span_data"] |= {"input": [{"type": "function_call_output", "call_id": "c1", "output": "a box"}]}
    assert steps(only_of(tmp_path, *spans)) == STEPS


def test_other_choices_and_unknown_forms_are_told(tmp_path: Path) -> None:
    first, later = sorted(litellm(), key=lambda call: call["startTime"])
    two = later | {"response": {"choices": [{"message": FOUND}, {"message": agent("No.")}]}}
    assert left_out(only(write(tmp_path / "a.json", [first, two]))) == {"other answer": 1}
    odd = later | {"response": {"output": {"blob": "In the box."}}}
    episodes, refusals = items(write(tmp_path / "b.json", [first, odd]))
    assert [steps(episode) for episode in episodes] == [[(STEPS[0][0], "")]]
    assert [(one.field, "blob" in one.reason) for one in refusals] == [("outputs", True)]


DEFINED = {"role": "tool", "content": {"type": "function", "function": {"name": "look", "parameters": {}}}}
NAMED = {"role": "look", "content": "a box", "additional_kwargs": {}}
BESIDE = agent("", additional_kwargs={"tool_calls": [CALL], "refusal": None})
RESPONSE = {"instructions": "Help.", "tools": [{"name": "look"}], "object": "response"}
ITEM = {"type": "function_call", "name": "look", "arguments": '{"at": 1}', "call_id": "c1"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "a box"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "In the box."}]}
FORMS: dict[str, list[tuple[Any, Any]]] = {  # (what the calls were asked, and their answers)
    "LangChain's handler": [([*ASKED, DEFINED], BESIDE), ([*ASKED, BESIDE, NAMED, DEFINED], FOUND)],
    "responses": [
        (ASKED[1:], RESPONSE | {"output": [ITEM]}),
        ([ASKED[1], ITEM, OUTPUT], RESPONSE | {"output": [SAID]}),
    ],
    "Gemini": [
        (
            {
                "config": {},
                "system_instruction": "Help.",
                "contents": [{"role": "user", "parts": [{"text": "Where is it?"}]}],
            },
            {
                "candidates": [
                    {"content": {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {"at": 1}}}]}}
                ]
            },
        )
    ],
    "calls alone": [({"system": "Help.", "prompt": "Where is it?"}, [{"toolName": "look", "input": '{"at": 1}'}])],
    "Anthropic": [
        (
            {"system": "Help.", "messages": ASKED[1:], "max_tokens": 9},
            [{"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}}],
        )
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_however_a_handler_wraps_them(tmp_path: Path, form: str) -> None:
    spans = []
    for i, (given, made) in enumerate(FORMS[form]):
        about = {"id": f"o{i}", "traceId": "t", "type": "GENERATION", "startTime": f"2026-01-01T00:00:0{2 * i}Z"}
        spans.append(about | {"input": given, "output": made})
    tool = {"id": "x", "traceId": "t", "type": "SPAN", "name": "tool.look", "input": {"at": 1}, "output": "a box"}
    spans.append(tool | {"startTime": "2026-01-01T00:00:01Z"})
    spans.append(spans[0] | {"id": "n", "output": "None"})
    episode = only(write(tmp_path / "log.json", spans))
    assert (episode.start, steps(episode)) == ("Help.\n\nWhere is it?", STEPS[: len(FORMS[form])])
    assert left_out(episode) == {"call without messages or an answer": 1}


def test_a_root_run_alone_may_hold_the_whole_dialogue(tmp_path: Path) -> None:
    messages = [langchain("HumanMessage", content="Hi"), langchain("AIMessage", content="Yo")]
    root = run(0, "chain", {"messages": messages[:1]}, {"messages": messages}, None)
    episode = only(write(tmp_path / "log.json", [root]))
    assert (episode.start, steps(episode)) == ("Hi", [("Yo", "")])


def test_single_calls_are_no_chats(tmp_path: Path) -> None:
    episodes, refusals = items(write(tmp_path / "log.json", litellm()), "openai")
    assert episodes == []
    assert ["traces" in one.reason for one in refusals] == [True, True]


def test_a_trace_without_contents_is_refused_by_its_name(tmp_path: Path) -> None:
    spans = agents_sdk()
    for span in (spans[2], spans[4]):
        span["span_data"] = {"type": "response", "response_id": "resp_1"}
    episodes, (refusal,) = items(write(tmp_path / "log.jsonl", "\n".join(map(json.dumps, spans))))
    assert (episodes, refusal.record) == ([], "trace g")


def weave(number: int, asked: list[Any], said: Any) -> dict[str, Any]:
    about = {"id": str(number), "op_name": "weave:///openai.create", "trace_id": "t", "started_at": number}
    return about | {"inputs": {"model": "m", "messages": asked}, "output": {"choices": [{"message": said}]}}


def mlflow(number: int, asked: list[Any], said: Any) -> dict[str, Any]:
    given = {
        "spanType": "CHAT_MODEL",
        "spanInputs": {"messages": asked},
        "spanOutputs": {"choices": [{"message": said}]},
    }
    about = {"span_id": str(number), "trace_id": "t", "start_time_unix_nano": number}
    return about | {"attributes": {f"mlflow.{key}": json.dumps(value) for key, value in given.items()}}


def braintrust(number: int, asked: list[Any], said: Any) -> dict[str, Any]:
    about = {"span_id": str(number), "root_span_id": "t", "span_attributes": {"type": "llm"}, "scores": {"right": 1}}
    return about | {"metrics": {"start": number}, "input": asked, "output": [{"message": said}]}


def helicone(number: int, asked: list[Any], said: Any) -> dict[str, Any]:
    answer = {"choices": [{"message": said}]}
    return {"request_id": str(number), "request_body": {"messages": asked}, "response_body": answer}


@pytest.mark.parametrize("product", [weave, mlflow, braintrust, helicone])
def test_calls_of_other_products_are_one_dialogue(tmp_path: Path, product: Any) -> None:
    calls = [product(1, ASKED, CALLED), product(2, [*ASKED, CALLED, SEEN], FOUND)]
    episode = only_of(tmp_path, *calls)
    assert (episode.start, steps(episode)) == ("Help.\n\nWhere is it?", STEPS)
    if product is mlflow:
        asked, said = (ASKED, [*ASKED, CALLED, SEEN]), (CALLED, FOUND)
        about = {"span_type": "LLM", "attributes": {}}
        flat = [calls[i] | about | {"inputs": asked[i], "outputs": said[i]} for i in range(2)]
        assert steps(only_of(tmp_path, *flat)) == STEPS
        path = write(tmp_path / "a.json", {"info": {"trace_id": "t"}, "data": {"spans": calls}})
        assert steps(only(path)) == STEPS
    if product is braintrust:
        assert episode.turns[-1].info["log.score.right"] == 1
