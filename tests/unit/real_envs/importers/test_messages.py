"""What messages hold, in the dialects of chat APIs. If these fail, actions and answers lose parts in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from real_envs.importers.drafts import Reading
from real_envs.importers.formats import Imported, RejectedRecord, find_format, read
from real_envs.importers.messages import apart, written_call
from real_envs.importers.openai_chat import chat_draft
from real_envs.store.codec import FieldError
from real_envs.trajectory import StopReason, Trajectory


def imported(path: Path, *records: object, **reading: Any) -> list[Trajectory | RejectedRecord]:
    path.write_text("\n".join(map(json.dumps, records)))
    found = read(path, find_format("auto", path)[0], Reading(**reading))
    return [item.episode if isinstance(item, Imported) else item for item in found]


def one(tmp_path: Path, *messages: object, **beside: Any) -> Trajectory:
    (episode,) = imported(tmp_path / "chats.jsonl", {"messages": messages} | beside)
    assert isinstance(episode, Trajectory), str(episode)
    return episode


def user(content: object, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content} | more


def agent(content: object = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


def steps(episode: Trajectory) -> list[tuple[str, str]]:
    return [(turn.action, turn.observation) for turn in episode.turns]


def use(name: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "u", "name": name, "input": given}


def result(content: object, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "u", "content": content} | more


def test_anthropic_blocks_are_calls_answers_and_thoughts(tmp_path: Path) -> None:
    episode = one(
        tmp_path,
        user([{"type": "text", "text": "Make b."}]),
        agent([{"type": "thinking", "thinking": "Easy.", "signature": "s"}, {"type": "text", "text": "So:"},
               use("make", path="b")]),
        user([result([{"type": "text", "text": "no room"}], is_error=True), {"type": "text", "text": "(1 left)"}]),
        agent([{"type": "redacted_thinking", "data": "x"}, use("make", path="c"), use("look")]),
        user([result("made"), result(None)]),
        agent([{"type": "text", "text": "Done."}]),
        system=[{"type": "text", "text": "You have a shell."}],
    )  # fmt: skip
    assert episode.start == "You have a shell.\n\nMake b."
    assert steps(episode) == [
        ('So:\nmake({"path": "b"})', "no room\n(1 left)"),
        ('make({"path": "c"})\nlook({})', "made"),
        ("Done.", ""),
    ]
    assert dict(episode.turns[0].info) == {"log.thought": "Easy.", "log.is_error": True}
    assert dict(episode.turns[-1].info) == {"log.left_out.redacted_thinking": 1}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([user("x"), agent([{"type": "hologram"}])], "messages[1].content[0].type"),
        ([user("x"), agent("y"), user([result([{"type": "new"}])])], "messages[2].content[0].content[0].type"),
        ([user([use("look")]), agent("y")], "messages[0].content[0].type"),
        ([user("x"), agent([{"type": "text", "text": None}])], "messages[1].content[0].text"),
        ([user("x"), agent("y"), user([{"type": "image_url", "image_url": {"url": "u"}}])], "messages[2].content"),
        ([user("x"), {"type": "hologram", "id": "w"}], "messages[1].type"),
        ([user("x"), agent(tool_calls=[{"function": [1]}])], "messages[1].tool_calls[0]"),
        ([user("x"), {"role": "model", "parts": [{"new": "y"}]}], "messages[1].content[0].type"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_refuses_the_episode_by_its_field(tmp_path: Path, messages: list[Any], field: str) -> None:
    (bad, good) = imported(tmp_path / "a.jsonl", {"messages": messages}, {"messages": [user("z"), agent("y")]})
    assert isinstance(bad, RejectedRecord)
    assert (bad.file, bad.record, bad.field) == (tmp_path / "a.jsonl", "line 1", field)
    assert "\n" not in str(bad)
    assert isinstance(good, Trajectory)


def test_pictures_beside_text_are_counted_and_empty_parts_are_nothing(tmp_path: Path) -> None:
    picture = {"type": "image", "source": {"type": "base64", "data": "x"}}
    episode = one(
        tmp_path,
        user([{"type": "text", "text": "Click."}, picture]),
        agent("click"),
        user([{"type": "text", "text": ""}]),
        agent("wait"),
        user([result([picture, {"type": "text", "text": "A page."}])], images=["a.png"]),
    )
    assert steps(episode) == [("click", ""), ("wait", "A page.")]
    assert dict(episode.turns[-1].info) == {"log.left_out.image": 2, "log.left_out.images": 1}


def test_thoughts_in_the_text_or_beside_it_are_no_part_of_the_action(tmp_path: Path) -> None:
    said = [
        agent("<think>\nEast.\n</think>\n\ngo east"),
        agent("go east", reasoning_content="East."),
        agent("go east", reasoning="East."),
        agent("East.\n</think>\n\ngo east"),  # the template wrote the first mark
        agent("go <think>East.</think>"),
        agent("[THINK]East.[/THINK]go east"),
    ]
    messages = [message for spoken in said for message in (user("A hall."), spoken)]
    episode = one(tmp_path, *messages, user("Ok."))
    assert [turn.action for turn in episode.turns] == ["go east"] * 4 + ["go", "go east"]
    assert {turn.info["log.thought"] for turn in episode.turns} == {"East."}


def test_arguments_of_a_call_are_no_thoughts(tmp_path: Path) -> None:
    call = use("write", text="<think>a</think>b")
    episode = one(tmp_path, user("x"), agent([{"type": "text", "text": "<think>c</think>"}, call]), user("ok"))
    assert steps(episode) == [('write({"text": "<think>a</think>b"})', "ok")]
    assert dict(episode.turns[0].info) == {"log.thought": "c"}


def test_a_thought_that_breaks_off_is_no_action(tmp_path: Path) -> None:
    episode = one(tmp_path, user("A hall."), agent("go"), user("An attic."), agent("<think>Where am"))
    assert steps(episode) == [("go", "An attic.")]
    assert episode.stop is StopReason.CONTEXT_LIMIT
    assert episode.turns[-1].info["log.left_out.last message without an action"] == 1


@given(
    st.text(), st.text().filter(lambda text: "<think" not in text and "</think" not in text and "THINK]" not in text)
)
def test_a_text_without_marks_is_an_action_as_it_is(thought: str, action: str) -> None:
    assert apart(action) == ([], action, False)
    inside = thought.replace("<", "").replace("[", "")
    thoughts, rest, unfinished = apart(f"<think>{inside}</think>{action}")
    assert (thoughts, rest, unfinished) == ([inside.strip()] if inside.strip() else [], action.strip(), False)


NESTED = {"type": "function", "function": {"name": "get", "arguments": '{"id":  1}'}}


@pytest.mark.parametrize(
    "call",
    [
        NESTED,
        {"name": "get", "arguments": {"id": 1}},
        {"name": "get", "args": {"id": 1}},
        {"function": "get", "arguments": {"id": 1}},
        {"name": "get", "arguments": json.dumps('{"id": 1}')},  # written twice
        json.dumps(NESTED),
        json.dumps({"name": "get", "arguments": '{"id": 1}'}),
        {"function": json.dumps({"name": "get", "arguments": {"id": 1}})},
        {"toolName": "get", "input": {"id": 1}},
    ],
)
def test_a_call_has_one_spelling(call: object) -> None:
    assert written_call(call, "at") == 'get({"id": 1})'


def test_a_call_whose_arguments_are_no_json_is_written_as_they_are() -> None:
    assert written_call({"name": "sh", "arguments": "{ls"}, "at") == "sh({ls)"
    assert written_call({"custom": {"name": "sh", "input": "ls -l"}}, "at") == "sh(ls -l)"
    assert written_call({"name": "sh", "arguments": None}, "at") == "sh()"
    assert written_call({"name": "sh", "arguments": {"x": None}}, "at") == 'sh({"x": null})'  # JSON means it


def test_items_of_the_responses_api(tmp_path: Path) -> None:
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Ask."}], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city":"Oslo"}'},
        {"type": "custom_tool_call", "call_id": "d", "name": "sh", "input": "date"},
        {"type": "function_call_output", "call_id": "c", "output": "5 C"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "May"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "5 C."}]},
    ]
    asked = user([{"type": "input_text", "text": "Weather?"}])
    for record in ({"messages": [asked, *items]}, {"input": "Weather?", "output": items}, [asked, *items]):
        (episode,) = imported(tmp_path / "a.jsonl", record)
        assert isinstance(episode, Trajectory), str(episode)
        assert episode.start == "Weather?"
        assert steps(episode) == [('weather({"city": "Oslo"})\nsh(date)', "5 C\nMay"), ("5 C.", "")]
        assert [turn.info.get("log.thought") for turn in episode.turns] == ["Ask.", None]
        assert episode.turns[-1].info["log.left_out.reasoning"] == 1


def test_a_last_message_that_says_nothing_is_no_action(tmp_path: Path) -> None:
    for last, stop in ((agent(""), StopReason.TERMINATED), (agent("<think>So.</think>"), StopReason.TURN_LIMIT)):
        episode = one(tmp_path, user("x"), agent("look"), user("A lamp."), last)
        assert (steps(episode), episode.stop) == ([("look", "A lamp.")], stop)
        assert dict(episode.turns[-1].info) == {"log.left_out.last message without an action": 1}


def test_reminders_of_the_system_are_answers_and_not_the_start(tmp_path: Path) -> None:
    for role in ("system", "developer"):
        reminder = {"role": role, "content": "2 turns left."}
        said = [user("A hall."), agent("look"), user("A lamp."), reminder, agent("take"), user("Taken.")]
        (episode,) = imported(tmp_path / "a.jsonl", {"messages": said}, system=False)
        assert isinstance(episode, Trajectory)
        assert steps(episode) == [("look", "A lamp.\n2 turns left."), ("take", "Taken.")]


def test_what_a_simulated_user_asks_its_own_tools_is_in_no_observation(tmp_path: Path) -> None:
    own = {"id": "c", "name": "check_bar", "arguments": {}, "requestor": "user"}
    said = [
        user("No service."),
        agent("Look at the bar."),
        user(None, tool_calls=[own]),
        {"role": "tool", "content": "Airplane mode", "id": "c", "requestor": "user"},
        user("It shows a plane."),
        agent(tool_calls=[{"id": "c", "name": "line", "arguments": {}, "requestor": "assistant"}]),
        {"role": "tool", "content": "active", "id": "c", "requestor": "assistant"},
    ]
    simulation = {"task_id": "7", "messages": said, "reward_info": {"reward": 1.0}, "termination_reason": "max_steps"}
    simulation |= {"id": "s0"}
    task = {"id": "7", "user_scenario": {"persona": None, "instructions": {"task": "Roaming fails. Ask twice."}}}
    info = {"environment_info": {"policy": "Be kind."}, "agent_info": {"llm": "m"}}
    results = {
        "info": info,
        "tasks": [{"id": "6", "user_scenario": "No."}, task],
        "simulations": [simulation, simulation | {"id": "s1"}],
    }
    whole = imported(tmp_path / "results.json", results)
    (line,) = imported(tmp_path / "simulations.jsonl", simulation)
    del said[2]["tool_calls"][0]["requestor"], said[3]["requestor"]  # then it follows from their order
    (bare,) = imported(tmp_path / "bare.jsonl", simulation)
    for episode in (*whole, line, bare):
        assert isinstance(episode, Trajectory), str(episode)
        assert steps(episode) == [("Look at the bar.", "It shows a plane."), ("line({})", "active")]
        assert (episode.task_id, episode.total_reward, episode.stop) == ("7", 1.0, StopReason.TURN_LIMIT)
        assert episode.turns[-1].info["log.left_out.answer to the user's own tool"] == 1
    told = ("Roaming fails.", "Ask twice.")  # what the user wants is the world's alone
    assert [(e.start, e.agent, e.id, e.world_facts) for e in whole if isinstance(e, Trajectory)] == [
        ("Be kind.\n\nNo service.", "m", "s0", told),
        ("Be kind.\n\nNo service.", "m", "s1", told),
    ]


def table(path: Path, *rows: dict[str, Any]) -> list[Trajectory | RejectedRecord]:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    found = read(path, find_format("auto", path)[0], Reading())
    return [item.episode if isinstance(item, Imported) else item for item in found]


def test_nulls_of_arrow_are_no_arguments_and_json_text_is_read(tmp_path: Path) -> None:
    calls = [[{"name": "get", "arguments": {"id": 1}}], [{"name": "send", "arguments": {"to": {"cc": None, "a": [1]}}}]]
    said = [user("Hi"), agent(tool_calls=calls[0]), user("one"), agent(tool_calls=calls[1]), user("two")]
    (wide,) = table(tmp_path / "wide.parquet", {"messages": said})
    (text,) = table(tmp_path / "text.parquet", {"messages": json.dumps(said)})
    (parts,) = table(tmp_path / "parts.parquet", {"prompt": json.dumps(said[:1]), "completion": json.dumps(said[1:])})
    (lines,) = imported(tmp_path / "text.jsonl", {"messages": json.dumps(said)})
    for episode in (wide, text, parts, lines):
        assert isinstance(episode, Trajectory), str(episode)
        assert episode.turns[0].action == 'get({"id": 1})'
    assert isinstance(wide, Trajectory)
    assert wide.turns[1].action == 'send({"to": {"a": [1]}})'
    assert isinstance(text, Trajectory)
    assert text.turns[1].action == 'send({"to": {"cc": null, "a": [1]}})'  # this null was written


def test_a_completion_of_plain_text_is_one_turn(tmp_path: Path) -> None:
    (episode,) = table(tmp_path / "completions.parquet", {"step": 3, "prompt": "1+1?", "completion": "2", "score": 1.0})
    assert isinstance(episode, Trajectory)
    assert (episode.start, steps(episode), episode.stop) == ("1+1?", [("2", "")], StopReason.TERMINATED)


def test_messages_stand_before_texts_made_of_them(tmp_path: Path) -> None:
    said = [user("x"), agent("look"), user("y")]
    (whole,) = imported(tmp_path / "a.jsonl", {"prompt": "x", "completion": "look y", "messages": said})
    (parts,) = imported(tmp_path / "b.jsonl", {"prompt": said[:1], "completion": "look", "messages": said})
    assert isinstance(whole, Trajectory)
    assert steps(whole) == [("look", "y")]
    assert isinstance(parts, Trajectory)
    assert steps(parts) == [("look", "")]


def test_function_calls_of_sharegpt(tmp_path: Path) -> None:
    call = json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})
    said = [("human", "Weather?"), ("gpt", "<think>Ask.</think>I ask."), ("function_call", call),
            ("observation", "5 C"), ("function_call", f"[{call}, {call}]"), ("tool", "5 C, 5 C"),
            ("function_call", f"<think>Ask.</think>\n{call}\n{call}"), ("tool", "5 C, 5 C"),
            ("gpt", "It is 5 C.")]  # fmt: skip
    spoken = [{"from": who, "value": value} for who, value in said]
    for conversations in (spoken, json.dumps(spoken)):
        (episode,) = imported(tmp_path / "a.jsonl", {"conversations": conversations, "system": "Be short."})
        assert isinstance(episode, Trajectory), str(episode)
        written = 'weather({"city": "Oslo"})'
        assert episode.start == "Be short.\n\nWeather?"
        assert steps(episode) == [
            (f"I ask.\n{written}", "5 C"),
            *[(f"{written}\n{written}", "5 C, 5 C")] * 2,
            ("It is 5 C.", ""),
        ]
        assert [turn.info.get("log.thought") for turn in episode.turns] == ["Ask.", None, "Ask.", None]


TEXTS = st.text(st.characters(categories=["L", "N"]), min_size=4, max_size=9)
SPOKEN = st.lists(
    st.tuples(st.sampled_from(["user", "tool", "system"]), st.lists(TEXTS, max_size=2), TEXTS), max_size=4
)


@given(SPOKEN, st.booleans())
def test_every_text_and_argument_is_somewhere(said: list[tuple[str, list[str], str]], blocks: bool) -> None:
    messages: list[dict[str, Any]] = [user("start")]
    for role, texts, argument in said:
        called = [use("act", given=argument)] if blocks else []
        calls = [] if blocks else [{"name": "act", "arguments": {"given": argument}}]
        messages.append(agent([{"type": "text", "text": text} for text in texts] + called, tool_calls=calls))
        answers: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
        messages.append({"role": role, "content": [result(answers)] if blocks else answers})
    if not said:
        with pytest.raises(FieldError):
            chat_draft(messages, Reading())
        return
    turns: Any = chat_draft(messages, Reading()).turns
    assert len(turns) == len(said)
    for turn, (_, texts, argument) in zip(turns, said, strict=True):
        assert turn["action"].split("\n") == [*texts, f'act({{"given": {json.dumps(argument, ensure_ascii=False)}}})']
        assert turn["observation"] == "\n".join(texts)


@pytest.mark.parametrize(
    "said",
    [
        {"content": "◁think▷hm◁/think▷go"},
        {"content": "<seed:think>hm</seed:think>go"},
        {"content": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>go"},
        {"content": "<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>go<|return|>"},
        {"content": "go", "thought": "hm"},
        {"content": "<think>hm</think>go<|im_end|>\n"},
    ],
)
def test_marks_of_a_template_are_no_part_of_an_action(tmp_path: Path, said: dict[str, str]) -> None:
    messages = [{"role": "user", "content": "A hall."}, {"role": "assistant"} | said]
    (episode,) = imported(tmp_path / "a.jsonl", {"messages": messages})
    assert isinstance(episode, Trajectory)
    assert [(turn.action, turn.info["log.thought"]) for turn in episode.turns] == [("go", "hm")]


def test_a_call_in_the_text_of_gpt_oss_is_written_as_calls_are() -> None:
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x":1}<|call|>'
    assert apart(thought + call) == (["hm"], 'f({"x": 1})', False)


def test_channels_and_recipients_say_what_is_a_thought_and_what_a_call(tmp_path: Path) -> None:
    said = {"role": "assistant", "channel": "commentary", "recipient": "functions.f", "content": '{"x": 1}'}
    messages = [
        {"role": "user", "content": "A hall."},
        {"role": "assistant", "channel": "analysis", "content": "hm"},
        said,
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "channel": "final", "content": "Yo", "plan": "to say no more"},
    ]
    (episode,) = imported(tmp_path / "a.jsonl", {"messages": messages})
    assert isinstance(episode, Trajectory)
    assert [(turn.action, turn.observation) for turn in episode.turns] == [('f({"x": 1})', "ok"), ("Yo", "")]
    assert dict(episode.turns[0].info) == {"log.thought": "hm"}
    assert dict(episode.turns[1].info) == {"log.left_out.field plan": 1}


def test_rewards_of_messages_are_those_of_their_turns(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "A hall.", "reward": 9},
        {"role": "assistant", "content": "go", "reward": 0.5},
        {"role": "user", "content": "An attic."},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "take"},
        {"role": "user", "content": "A lamp.", "reward": 1},
    ]
    path = tmp_path / "a.jsonl"
    own, whole = imported(path, {"messages": messages, "id": 1}, {"messages": messages, "id": 2, "reward": 3.0})
    assert isinstance(own, Trajectory)
    assert isinstance(whole, Trajectory)
    assert [(turn.action, turn.observation, turn.reward) for turn in own.turns] == [
        ("go", "An attic.\nSo?", 0.5),
        ("take", "A lamp.", 1),
    ]
    assert dict(own.turns[-1].info) == {"log.left_out.message without an action": 1}
    assert (own.id, [turn.reward for turn in whole.turns]) == ("1", [0.0, 3.0])
    assert whole.turns[-1].info["log.left_out.reward of a message"] == 2


@pytest.mark.parametrize(
    ("text", "thoughts", "action"),
    [
        ("East.\nYes.\n</think>\nwait\ngo", ["East.\nYes."], "wait\ngo"),
        ("East.</think>\n\ngo", ["East."], "go"),
        ("East.</think>go", ["East."], "go"),
        ("go\n<think>\nEast", ["East"], "go"),
        ("  <think>East", ["East"], ""),
        ("I dropped the </think> of line 3. Next: ls", [], None),
        ("It never ends its <think> tag.\nls", [], None),
        ("Fix it:\n<think> is the mark\nls", [], None),
        ("grep '</think>' a", [], None),
    ],
)
def test_a_text_may_speak_of_marks(text: str, thoughts: list[str], action: str | None) -> None:
    assert apart(text)[:2] == (thoughts, text if action is None else action)


def test_names_of_tools_are_no_agents(tmp_path: Path) -> None:
    calls = [{"type": "function_call", "name": name, "arguments": "{}"} for name in ("look", "take")]
    episode = one(tmp_path, user("x"), *calls, user("ok"), agent("a", name="Ann"), user("y"), agent("b", name="Bob"))
    assert dict(episode.turns[-1].info) == {"log.left_out.name of another agent": 1}


def test_one_assent_is_skipped_and_a_system_message_may_be(tmp_path: Path) -> None:
    messages = [("system", "Be nice.", None), ("human", "Task.", None), ("gpt", "OK.", False), ("human", "Go.", None)]
    kept = [*messages, ("gpt", "look", True)]
    twice = [*messages, ("gpt", "look", False), *kept[-2:]]
    records = [{"conversations": [{"from": w, "value": v, "loss": x} for w, v, x in one]} for one in (kept, twice)]
    first, second = imported(tmp_path / "a.jsonl", *records, system=False)
    assert isinstance(first, Trajectory)
    assert (first.start, steps(first)) == ("Task.\n\nGo.", [("look", "")])
    assert isinstance(second, RejectedRecord)
    assert second.field == "conversations[4].loss"
