"""Which records are chats, and which only a part of one. If these fail, one dialogue counts as many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from real_envs.errors import UserError
from real_envs.importers.formats import find_format
from real_envs.importers.openai_chat import latest_states
from real_envs.importers.records import Record
from tests.support.imported import agent, items, left_out, only, steps, user, write

SEEN = {"role": "tool", "content": "a.py"}
WHOLE = [user("List."), agent("ls"), SEEN, agent("One.")]
STATES = [WHOLE[:n] for n in (1, 2, 4)]


def lines(*records: object) -> str:
    return "\n".join(map(json.dumps, records))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("form", [lambda m: {"values": {"messages": m}, "next": []}, lambda m: {"messages": m}, list])
def test_states_of_one_dialogue_as_it_grew_are_one_episode(tmp_path: Path, form: Any, order: int) -> None:
    other = form([user("Stop."), agent("OK.")])
    path = write(tmp_path / "a.jsonl", lines(*[form(state) for state in STATES[::order]], other))
    (episode, second), refusals = items(path)
    assert refusals == []
    assert (steps(episode), steps(second)) == ([("ls", "a.py"), ("One.", "")], [("OK.", "")])
    assert (left_out(episode), left_out(second)) == ({"earlier state of the dialogue": 2}, {})


def test_rows_of_a_table_may_be_states_of_one_dialogue(tmp_path: Path) -> None:
    pq.write_table(pa.table({"messages": [[user("List."), agent("ls")], [user("List."), agent("ls"), agent("One.")]]}),
                   tmp_path / "a.parquet")  # fmt: skip
    assert left_out(only(tmp_path / "a.parquet")) == {"earlier state of the dialogue": 1}


@pytest.mark.parametrize(
    "own", [{"reward": 1.0}, {"success": False}, {"id": "a"}, {"instance_id": "i"}, {"resolved": 0}]
)
def test_an_episode_with_an_outcome_or_a_name_is_no_state_of_another(tmp_path: Path, own: dict[str, Any]) -> None:
    short, long = {"messages": WHOLE[:2]} | own, {"messages": WHOLE}
    for pair in ((short, long), (long, short), ({"messages": WHOLE[:2]}, {"messages": WHOLE[:2]})):
        episodes, _ = items(write(tmp_path / "a.jsonl", lines(*pair)))
        assert [left_out(episode) for episode in episodes] == [{}, {}]


def test_what_was_read_before_a_file_breaks_off_is_kept() -> None:
    def breaking() -> Iterator[Record]:
        yield Record("line 1", {"messages": WHOLE[:2]})
        yield Record("line 2", {"messages": WHOLE})
        raise EOFError

    read: list[Record] = []
    with pytest.raises(EOFError):
        read.extend(latest_states(breaking()))
    assert [record.where for record in read] == ["line 2"]


@pytest.mark.parametrize(
    ("more", "read"),
    [
        ({"completion": "a <search>b</search>\n<information>c</information> d"}, False),
        ({"completion": "abc", "completion_mask": [1, 0, 1, 0]}, False),
        ({"completion": "abc", "completion_mask": [0, 1, 1, 0, 0]}, True),
        ({"completion": "an <information> tag"}, True),
        ({"response": "abc", "loss_mask": [1, 0, 1]}, False),
    ],
)
def test_a_text_that_holds_answers_of_tools_is_no_action(tmp_path: Path, more: dict[str, Any], read: bool) -> None:
    path = write(tmp_path / "a.jsonl", lines({"prompt": [user("Find b.")]} | more))
    episodes, refusals = items(path)
    assert (len(episodes), len(refusals)) == (read, not read)
    with pytest.raises(UserError, match="nobody can tell who wrote what"):
        find_format(
            "auto", write(path, lines({"input_prompt": "x", "output_response": "<observation>y</observation>"}))
        )


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "tool", "output": "42"}, "42"),
        ({"role": "tool", "result": {"a": 1}}, '{"a": 1}'),
        ({"role": "tool", "stdout": "42"}, None),
        ({"role": "tool", "id": "c", "finished_at": "today"}, ""),
    ],
)
def test_an_answer_under_another_name_is_read_or_refused(tmp_path: Path, message: Any, read: str | None) -> None:
    path = write(tmp_path / "a.jsonl", lines({"messages": [user("Add."), agent("add"), message, agent("42.")]}))
    episodes, refusals = items(path)
    assert [episode.turns[0].observation for episode in episodes] == ([] if read is None else [read])
    assert [refusal.field for refusal in refusals] == ["messages[2].content"] * (read is None)


@pytest.mark.parametrize("field", [{"action": "go"}, {"content": None, "tool_call": {"name": "f"}}])
def test_a_message_whose_action_nobody_knows_is_refused(tmp_path: Path, field: dict[str, Any]) -> None:
    _, (refusal,) = items(write(tmp_path / "a.jsonl", lines({"messages": [user("?"), {"role": "assistant"} | field]})))
    assert refusal.field == "messages[1].content"


def test_answers_of_tau2_that_stand_in_one_message_are_read(tmp_path: Path) -> None:
    both = [{"role": "tool", "id": name, "content": name, "requestor": "assistant"} for name in "ab"]
    calls = agent(tool_calls=[{"id": name, "name": name, "arguments": {}} for name in "ba"])
    record = {"messages": [user("Hi"), calls, {"role": "tool", "tool_messages": both}, agent("Done.")]}
    assert steps(only(write(tmp_path / "a.jsonl", lines(record)))) == [("b({})\na({})", "b\na"), ("Done.", "")]


def test_what_a_program_wrote_below_an_action_is_its_answer(tmp_path: Path) -> None:
    acted, said = "Thought: t\nAction: s\nAction Input: 1", agent("Final Answer: 3")
    path = write(tmp_path / "a.jsonl", lines({"messages": [user("?"), agent(f"{acted}\nObservation: r"), said]}))
    assert steps(only(path)) == [(acted, "r"), ("Final Answer: 3", "")]
    made_up = f"{acted}\nObservation: r"  # as the answer shows
    write(path, lines({"messages": [user("?"), agent(f"{made_up}\nObservation: x"), said]}))
    assert steps(only(path))[0] == (made_up, "x")
    write(path, lines({"messages": [user("?"), agent(made_up), user("Observation: x"), said]}))
    assert steps(only(path))[0] == (made_up, "Observation: x")
    write(path, lines({"messages": [user("?"), agent(f"{made_up}\nThought: k\nFinal Answer: 3")]}))
    _, (refusal,) = items(path)
    assert refusal.field == "messages[1]"


def test_updates_of_a_graph_are_one_dialogue_where_its_tools_are_among_them(tmp_path: Path) -> None:
    call = {"type": "ai", "content": "", "tool_calls": [{"name": "f", "args": {}, "id": "c"}]}
    updates = [{"agent": {"messages": [call]}}, {"tools": {"messages": [{"type": "tool", "content": "r"}]}}]
    updates.append({"agent": {"messages": [{"type": "ai", "content": "Done."}]}})
    path = write(tmp_path / "a.jsonl", lines(*updates))
    assert steps(only(path)) == [("f({})", "r"), ("Done.", "")]
    episodes, _ = items(write(path, lines(updates[0], updates[2])))
    assert len(episodes) == 2


def test_events_of_a_folder_are_joined_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    _, (refusal,) = items(write(tmp_path / "10.json", {"source": "agent", "action": "run", "args": {"command": "ls"}}))
    assert "sort -V" in refusal.reason


def test_a_step_of_rllm_that_is_another_dialogue_is_refused_by_its_field(tmp_path: Path) -> None:
    chats = [[user("Solve."), agent("4")], [user("Judge 4."), agent("right")], [user("Solve."), agent("5")]]
    for first, second in pairwise(chats):
        trajectory = {"name": "a", "steps": [{"chat_completions": first}, {"chat_completions": second}]}
        _, (refusal,) = items(write(tmp_path / "a.jsonl", lines({"id": "t:1", "trajectories": [trajectory]})))
        assert refusal.field == "steps[1].chat_completions"


def test_rewards_of_rllm_are_of_the_trajectory_or_of_its_steps(tmp_path: Path) -> None:
    made = [{"chat_completions": WHOLE[:2], "reward": 0.25}, {"chat_completions": WHOLE, "reward": 0.5}]
    episode = {"id": "t:1", "is_correct": True, "termination_reason": "max_turns_exceeded"}
    first = {"name": "solver", "reward": 1.0, "steps": made}
    record = episode | {"trajectories": [first, first | {"name": "judge", "reward": None}]}
    (solver, judge), _ = items(write(tmp_path / "a.jsonl", lines(record)))
    assert [(one.id, one.task_id, one.agent) for one in (solver, judge)] == [
        ("t:1/0", "t", "solver"),
        ("t:1/1", "t", "judge"),
    ]
    assert [turn.reward for turn in (*solver.turns, *judge.turns)] == [0.0, 1.0, 0.25, 0.5]
    assert (solver.success, solver.stop.value) == (True, "turn_limit")


def test_an_exported_session_of_goose_is_an_episode_and_its_notices_are_counted(tmp_path: Path) -> None:
    called = agent([{"type": "frontendToolRequest", "id": "c", "toolCall": {"value": {"name": "f", "arguments": {}}}}])
    noted = agent([{"type": "systemNotification", "msg": "compacted"}, {"type": "text", "text": "Done."}])
    session = {"id": "1", "working_dir": "/x", "description": "d", "conversation": [user("Hi"), called, SEEN, noted]}
    episode = only(write(tmp_path / "a.json", session))
    assert steps(episode) == [("f({})", "a.py"), ("Done.", "")]
    assert left_out(episode) == {"systemNotification": 1}


def test_a_call_of_the_ai_sdk_without_an_answer_is_counted(tmp_path: Path) -> None:
    part = {"type": "tool-f", "state": "output-available", "input": {}, "output": "ok", "toolCallId": "a"}
    asked = {"type": "tool-g", "state": "input-available", "input": {}, "toolCallId": "b"}
    parts = [{"type": "step-start"}, part, asked, {"type": "step-start"}, {"type": "text", "text": "Done."}]
    message = {"id": "2", "role": "assistant", "parts": parts}
    episode = only(write(tmp_path / "a.json", [user("Hi"), message]))
    assert steps(episode) == [("f({})\ng({})", "ok"), ("Done.", "")]
    assert left_out(episode) == {"answer to a call": 1}


def test_attempts_of_swe_agent_of_which_none_was_chosen_are_episodes(tmp_path: Path) -> None:
    step = {"action": "ls", "observation": "a.py", "query": [user("Fix it.")]}
    attempts = [{"trajectory": [step], "info": {"exit_status": "submitted"}}, {"trajectory": [step, step]}]
    episodes, _ = items(write(tmp_path / "a.traj", {"attempts": attempts}))
    assert [(one.task_id, len(one.turns)) for one in episodes] == [("a", 1), ("a", 2)]


def call(name: str) -> dict[str, Any]:
    return {"id": name, "function": {"name": name, "arguments": "{}"}}


def gave(name: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": content}


PICTURE = {"type": "image_url", "image_url": {"url": "u"}}


def test_an_answer_before_its_call_is_refused_but_not_one_whose_call_was_cut_off(tmp_path: Path) -> None:
    made = agent(tool_calls=[call("f")])
    _, (refusal,) = items(write(tmp_path / "a.jsonl", lines({"messages": [user("Go."), gave("f", "r"), made]})))
    assert (refusal.field, "'f'" in refusal.reason) == ("messages[1]", True)
    cut = [gave("f", "r"), made, gave("f", "s"), agent("Done.")]
    assert steps(only(write(tmp_path / "a.jsonl", lines({"messages": cut})))) == [("f({})", "s"), ("Done.", "")]


def test_an_answer_that_is_there_twice_is_counted(tmp_path: Path) -> None:
    twice = [gave("f", "r"), gave("f", "r"), gave("g", "r"), gave("g", "s")]
    chat = [user("Go."), agent(tool_calls=[call("f"), call("g")]), *twice, agent("Done.")]
    episode = only(write(tmp_path / "a.jsonl", lines({"messages": chat})))
    assert steps(episode) == [("f({})\ng({})", "r\nr\ns"), ("Done.", "")]
    assert left_out(episode) == {"repeated answer": 1}
    same = [user("Go."), agent(tool_calls=[call("f"), call("f")]), gave("f", "r"), gave("f", "r"), agent("Done.")]
    assert steps(only(write(tmp_path / "a.jsonl", lines({"messages": same}))))[0][1] == "r\nr"


def test_a_picture_in_a_message_of_its_own_is_counted_where_its_turn_has_text(tmp_path: Path) -> None:
    chat = [user("Go."), user([PICTURE]), agent("click"), gave("f", "Taken."), user([PICTURE]), agent("Done.")]
    episode = only(write(tmp_path / "a.jsonl", lines({"messages": chat})))
    assert steps(episode) == [("click", "Taken."), ("Done.", "")]
    assert left_out(episode) == {"image_url": 2}
    for at in (1, 4):
        alone = [message for i, message in enumerate(chat) if i not in (at - 1,)]
        _, (refusal,) = items(write(tmp_path / "a.jsonl", lines({"messages": alone})))
        assert refusal.field == f"messages[{at - 1}].content"


@pytest.mark.parametrize(
    ("last", "beside", "mapping", "stop"),
    [
        (agent(tool_calls=[call("f")]), {"resolved": 1}, {"success": "resolved"}, "terminated"),
        (agent(tool_calls=[call("f")]), {"resolved": 1}, {}, "turn_limit"),
        (agent('<tool_call>{"name": "f"}</tool_call>'), {}, {}, "turn_limit"),
        (agent("Write it between <tool_call> tags."), {}, {}, "terminated"),
    ],
)
def test_a_last_call_without_an_answer_ends_what_was_judged(
    tmp_path: Path, last: Any, beside: dict[str, Any], mapping: dict[str, str], stop: str
) -> None:
    episode = only(write(tmp_path / "a.jsonl", lines({"messages": [user("Go."), last]} | beside)), mapping=mapping)
    assert episode.stop.value == stop


def test_words_for_success_and_a_reward_that_is_none(tmp_path: Path) -> None:
    chat = {"messages": WHOLE}
    assert only(write(tmp_path / "a.jsonl", lines(chat | {"success": "False"}))).success is False
    _, (refusal,) = items(write(tmp_path / "a.jsonl", lines(chat | {"reward": {"f": 1.0}})))
    assert refusal.field == "reward"


def test_a_thought_may_go_on_in_the_next_part_and_a_part_may_be_null(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "<think>So"}, None, {"type": "text", "text": "on</think>ls"}]
    episode = only(write(tmp_path / "a.jsonl", lines({"messages": [user("Go."), agent(parts)]})))
    assert (steps(episode), episode.stop.value) == ([("ls", "")], "terminated")


@pytest.mark.parametrize("said", ["<|im_start|>assistant\nls<|im_end|>\n", "ls<|endoftext|><|im_end|>"])
def test_marks_around_a_message_are_counted_once(tmp_path: Path, said: str) -> None:
    episode = only(write(tmp_path / "a.jsonl", lines({"messages": [user("Go."), agent(said)]})))
    assert (steps(episode), left_out(episode)) == ([("ls", "")], {"mark at the end of a message": 1})


def test_an_answer_beside_the_messages_is_the_last_one(tmp_path: Path) -> None:
    call = {"messages": WHOLE[:3], "response": WHOLE[3] | {"stop_reason": "max_tokens"}, "reward": 1.0}
    episode = only(write(tmp_path / "a.jsonl", lines(call)))
    assert (steps(episode), episode.stop.value) == ([("ls", "a.py"), ("One.", "")], "context_limit")
    grown = [{"messages": WHOLE[:1], "response": WHOLE[1]}, {"messages": WHOLE[:3], "response": WHOLE[3]}]
    assert steps(only(write(tmp_path / "a.jsonl", lines(*grown)))) == steps(episode)


def test_a_file_whose_first_rollout_broke_is_read(tmp_path: Path) -> None:
    broken = {"prompt": WHOLE[:1], "completion": None, "trajectory": [], "error": {"error": "E"}}
    (episode,), (refusal,) = items(write(tmp_path / "a.jsonl", lines(broken, {"messages": WHOLE})))
    assert (len(episode.turns), refusal.record) == (2, "line 1")
    assert find_format("auto", write(tmp_path / "b.jsonl", lines({"meta": 1}, {"messages": WHOLE})))[0].name == "openai"


def test_a_step_of_swe_agent_without_anything_is_counted(tmp_path: Path) -> None:
    nothing, step = {"action": "", "observation": ""}, {"action": "ls", "observation": "a.py"}
    trajectory = [step | {"query": [user("Fix it.")]}, nothing, step]
    episode = only(write(tmp_path / "a.traj", {"trajectory": trajectory}))
    assert (len(episode.turns), left_out(episode)) == (2, {"empty step": 1})


def test_of_inputs_and_the_same_with_outputs_the_whole_is_the_dialogue(tmp_path: Path) -> None:
    example = {"inputs": {"messages": WHOLE[:1]}, "outputs": {"messages": WHOLE}}
    assert steps(only(write(tmp_path / "a.jsonl", lines(example)))) == [("ls", "a.py"), ("One.", "")]


def test_a_file_of_nothing_is_in_no_format(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no format"):
        find_format("auto", write(tmp_path / "a.jsonl", "null\n"))


def test_an_answer_within_a_call_is_its_answer_and_a_call_in_two_forms_is_one(tmp_path: Path) -> None:
    made = call("f")
    both = agent(tool_calls=[made], function_call=made["function"])
    for chat in (
        [user("Go."), agent(tool_calls=[made | {"result": {"x": 1}}]), agent("Done.")],
        [user("Go."), both, gave("f", '{"x": 1}'), agent("Done.")],
        [user("Go."), agent(tool_calls=[made | {"result": {"x": 1}}]), gave("f", '{"x": 1}'), agent("Done.")],
    ):
        episode = only(write(tmp_path / "a.jsonl", lines({"messages": chat})))
        assert steps(episode) == [("f({})", '{"x": 1}'), ("Done.", "")]


def test_a_thought_that_is_there_twice_is_one(tmp_path: Path) -> None:
    said = agent("<think>So.</think>ls", reasoning_content="So.")
    episode = only(write(tmp_path / "a.jsonl", lines({"messages": [user("Go."), said]})))
    assert episode.turns[0].info["log.thought"] == "So."


@pytest.mark.parametrize(("told", "field"), [("0", ""), ("yes", "info.won"), (None, ""), (2, "info.won")])
def test_a_mapped_success_is_a_truth_or_refused_by_its_column(tmp_path: Path, told: Any, field: str) -> None:
    path = write(tmp_path / "a.jsonl", lines({"messages": WHOLE, "info": {"won": told, "pts": "0.5"}}))
    episodes, refusals = items(path, mapping={"success": "info.won", "reward": "info.pts"})
    assert [refusal.field for refusal in refusals] == [field] * bool(field)
    assert [(one.success, one.turns[-1].reward) for one in episodes] == (
        [] if field else [(None if told is None else False, 0.5)]
    )
    _, (refusal,) = items(path, mapping={"success": "info.lost"})
    assert refusal.field == "info.lost"


def test_an_answer_within_a_call_is_not_read_beside_the_message_that_answers_it(tmp_path: Path) -> None:
    noted = {"role": "assistant", "tool_calls": [call("f") | {"output": None, "result": {"x": 1}}]}
    for more, seen in (
        ([gave("f", '{"x":1}')], '{"x":1}'),
        ([{"role": "tool", "content": "x = 1"}], "x = 1"),
        ([user("Go on.")], '{"x": 1}\nGo on.'),
        ([], '{"x": 1}'),
    ):
        episode = only(write(tmp_path / "a.jsonl", lines({"messages": [user("Go."), noted, *more, agent("Done.")]})))
        assert steps(episode) == [("f({})", seen), ("Done.", "")]


@pytest.mark.parametrize("error", [False, {}, "429"])
def test_a_call_that_failed_is_a_state_of_its_dialogue(tmp_path: Path, error: Any) -> None:
    calls = {"messages": WHOLE[:2]}, {"messages": WHOLE[:3], "error": error}, {"messages": WHOLE}
    assert left_out(only(write(tmp_path / "a.jsonl", lines(*calls)))) == {"earlier state of the dialogue": 2}


@pytest.mark.parametrize("content", [WHOLE[3]["content"], [{"type": "text", "text": WHOLE[3]["content"]}]])
def test_a_response_that_the_messages_hold_already_is_no_second_one(tmp_path: Path, content: Any) -> None:
    record = {"messages": WHOLE, "response": {"role": "assistant", "content": content, "refusal": None}}
    assert steps(only(write(tmp_path / "a.jsonl", lines(record)))) == [("ls", "a.py"), ("One.", "")]


def test_a_chosen_dialogue_with_which_the_rejected_one_begins_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="several dialogues"):
        find_format("auto", write(tmp_path / "a.jsonl", lines({"chosen": WHOLE[:2], "rejected": WHOLE})))


def test_a_mark_within_a_message_is_text(tmp_path: Path) -> None:
    said = "ls\n<|im_start|>assistant\nls<|im_end|>"
    episode = only(write(tmp_path / "a.jsonl", lines({"messages": [user("Go."), agent(said)]})))
    assert steps(episode) == [(said.removesuffix("<|im_end|>"), "")]


def test_an_empty_cell_judges_nothing(tmp_path: Path) -> None:
    record = {"messages": [user("Go."), agent(tool_calls=[call("f")])], "won": ""}
    assert only(write(tmp_path / "a.jsonl", lines(record)), mapping={"success": "won"}).stop.value == "turn_limit"


def test_messages_after_a_line_of_another_kind_are_no_records(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no format"):
        find_format("auto", write(tmp_path / "a.jsonl", lines({"meta": 1}, *WHOLE)))


def test_a_picture_alone_is_refused_by_agentgym_and_swe_agent(tmp_path: Path) -> None:
    said = [("human", "Go."), ("gpt", "Look."), ("human", ""), ("gpt", "Done.")]
    chat = [{"from": speaker, "value": value} | ({} if value else {"image": "a.png"}) for speaker, value in said]
    step = {"action": "ls", "observation": "a.py", "query": [user([PICTURE])]}
    for name, record in (("a.json", {"conversations": chat}), ("a.traj", {"trajectory": [step]})):
        _, (refusal,) = items(write(tmp_path / name, record))
        assert "no text" in refusal.reason
