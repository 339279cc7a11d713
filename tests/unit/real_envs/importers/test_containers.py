"""Files that hold chats in another form: sessions and samples. If these fail, dialogues are cut or doubled."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from real_envs.errors import UserError
from real_envs.importers.formats import find_format
from real_envs.trajectory import StopReason
from tests.support.imported import agent, items, left_out, only, only_of, steps, text, user, write


def line(uuid: str, parent: str | None, kind: str, content: Any, **more: Any) -> dict[str, Any]:
    message = {"role": kind, "content": content} | ({"model": "m"} if kind == "assistant" else {})
    about = {"uuid": uuid, "parentUuid": parent, "sessionId": "s", "isSidechain": False, "type": kind}
    return about | {"message": message} | more


def test_sessions_of_claude_code_and_their_side_chains_are_episodes(tmp_path: Path) -> None:
    use = [{"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "ls"}}]
    path = tmp_path / "s.jsonl"
    lines = [
        {"type": "summary", "summary": "Files", "leafUuid": "u6"},
        line("u1", None, "user", "List it."),
        line("u2", "u1", "assistant", [{"type": "thinking", "thinking": "ls", "signature": "x"}]),
        line("u3", "u2", "assistant", [text("Looking.")]),
        line("u4", "u3", "assistant", use),
        line("x1", None, "user", "Search.", isSidechain=True),
        line("x2", "x1", "assistant", [text("Found.")], isSidechain=True),
        line("u5", "u4", "user", [{"type": "tool_result", "tool_use_id": "t", "content": "a.py"}]),
        line("u6", "u5", "assistant", [text("One file.")]),
        line("u6", "u5", "assistant", [text("One file.")]),
        line("u7", "u6", "assistant", [text("API Error: 529")], isApiErrorMessage=True),
        {"type": "summary", "summary": "One file"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    (main, side), _ = items(path)
    assert (main.start, main.agent, side.start) == ("List it.", "m", "Search.")
    assert steps(main) == [('Looking.\nBash({"command": "ls"})', "a.py"), ("One file.", "")]
    assert main.turns[0].info["log.thought"] == "ls"
    assert left_out(main) == {"line of type summary": 2, "message of the program": 1}
    assert steps(side) == [("Found.", "")]


def test_what_came_before_a_rewind_was_taken_back(tmp_path: Path) -> None:
    episode = only_of(
        tmp_path,
        line("u1", None, "user", "A"),
        line("u2", "u1", "assistant", [text("wrong")]),
        line("u3", None, "user", "B"),
        line("u4", "u3", "assistant", [text("right")]),
        line("u5", "u4", "user", "C"),
        line("u6", "u5", "assistant", [text("bad")]),
        line("u7", "u4", "user", "D"),
        line("u8", "u7", "assistant", [text("good")]),
    )
    assert episode.start == "B"
    assert steps(episode) == [("right", "D"), ("good", "")]
    assert episode.turns[-1].info["log.rewound_messages"] == 4


def test_a_rollout_of_codex_has_each_item_once(tmp_path: Path) -> None:
    payloads = [
        ("session_meta", {"base_instructions": {"text": "You are Codex."}}),
        ("response_item", {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ls"}]}),
        ("event_msg", {"type": "user_message", "message": "ls"}),
        ("response_item", {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}'}),
        ("response_item", {"type": "function_call_output", "output": "a"}),
        ("response_item", {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}),
    ]
    episode = only_of(tmp_path, *({"timestamp": "t", "type": kind, "payload": payload} for kind, payload in payloads))
    assert episode.start == "You are Codex.\n\nls"
    assert steps(episode) == [('shell({"command": ["ls"]})', "a"), ("a", "")]
    assert left_out(episode) == {"line of type event_msg": 1}


def inspect_log() -> dict[str, Any]:
    call = {"id": "c", "function": "bash", "arguments": {"cmd": "ls"}}
    answer = {"role": "tool", "content": "attachment://k", "error": {"type": "timeout", "message": "late"}}
    thought = {"type": "reasoning", "reasoning": "hm"}
    first = {
        "id": 1,
        "messages": [user("Find."), agent([thought, text("So:")], tool_calls=[call]), answer, agent("x")],
        "attachments": {"k": "a flag"},
        "scores": {"includes": {"value": "C"}},
    }
    hosted = {"type": "tool_use", "tool_type": "web_search", "name": "search", "arguments": '{"q": 1}', "result": "hit"}
    limit = {"type": "message", "limit": 2}
    second = {
        "id": 2,
        "messages": [user("Q"), agent([hosted, text("A")])],
        "scores": {"a": {"value": "I"}},
        "limit": limit,
    }
    return {"version": 2, "eval": {"task": "ctf", "model": "m"}, "samples": [first, second]}


@pytest.mark.parametrize("name", ["log.json", "log.eval"])
def test_samples_of_inspect_are_episodes_with_their_scores(tmp_path: Path, name: str) -> None:
    log, path = inspect_log(), tmp_path / name
    if name == "log.eval":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("header.json", json.dumps({"eval": log["eval"]}))
            for sample in log["samples"]:
                file.writestr(f"samples/{sample['id']}_epoch_1.json", json.dumps(sample))
    else:
        path.write_text(json.dumps(log))
    (first, second), _ = items(path)
    assert (first.task_id, first.agent, first.success, second.success) == ("ctf/1", "m", True, False)
    assert steps(first) == [('So:\nbash({"cmd": "ls"})', "a flag\nlate"), ("x", "")]
    assert dict(first.turns[0].info) == {"log.thought": "hm", "log.is_error": True}
    assert steps(second) == [('search({"q": 1})', "hit"), ("A", "")]
    assert second.stop is StopReason.TURN_LIMIT


def test_a_sample_of_inspect_may_be_cut_by_its_model_or_by_who_runs_it(tmp_path: Path) -> None:
    cut = {"output": {"choices": [{"stop_reason": "max_tokens"}]}}, {"limit": {"type": "operator", "limit": 1}}
    samples = [{"id": 1, "messages": [user("Q"), agent("A")]} | one for one in cut]
    episodes, _ = items(write(tmp_path / "log.json", inspect_log() | {"samples": samples}))
    assert [one.stop for one in episodes] == [StopReason.CONTEXT_LIMIT, StopReason.TURN_LIMIT]


def test_trajectories_of_atif_have_their_answers_and_those_of_subagents(tmp_path: Path) -> None:
    call = {"tool_call_id": "c", "function_name": "bash", "arguments": {"cmd": "ls"}}
    results = [{"source_call_id": "c", "content": "a.py"}, {"content": None, "subagent_trajectory_ref": [{"id": "x"}]}]
    steps_ = [
        {"step_id": 1, "source": "system", "message": "Help."},
        {"step_id": 2, "source": "user", "message": "List it."},
        {"step_id": 3, "source": "agent", "message": "Looking.", "reasoning_content": "ls", "tool_calls": [call]}
        | {"observation": {"results": results}},
        {"step_id": 4, "source": "agent", "message": "One file."},
    ]
    inner = {"schema_version": "ATIF-v1.7", "agent": {"name": "n"}, "steps": [steps_[1], steps_[3]]}
    log = {"schema_version": "ATIF-v1.7", "session_id": "s", "agent": {"name": "a", "model_name": "m"}, "steps": steps_}
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(log | {"subagent_trajectories": [inner]}))
    (main, side), refusals = items(path)
    assert refusals == []
    assert (main.start, main.agent, side.agent) == ("Help.\n\nList it.", "m", "n")
    assert steps(main) == [('Looking.\nbash({"cmd": "ls"})', "a.py"), ("One file.", "")]
    assert main.turns[0].info["log.thought"] == "ls"
    assert left_out(main) == {"trajectory of a sub-agent": 1}
    assert steps(side) == [("One file.", "")]


def chatgpt(key: str, parent: str | None, role: str, content: dict[str, Any], to: str = "all") -> dict[str, Any]:
    message = {"author": {"role": role}, "content": content, "recipient": to, "metadata": {"model_slug": "m"}}
    return {key: {"id": key, "parent": parent, "children": [], "message": message}}


def test_the_path_that_the_user_left_in_chatgpts_export_is_the_dialogue(tmp_path: Path) -> None:
    mapping: dict[str, Any] = {"r": {"id": "r", "parent": None, "message": None}}
    mapping |= chatgpt("u", "r", "user", {"content_type": "multimodal_text", "parts": [{"content_type": "i"}, "Sum?"]})
    mapping |= chatgpt("x", "u", "assistant", {"content_type": "text", "parts": ["Guess: 4"]})
    mapping |= chatgpt("t", "u", "assistant", {"content_type": "thoughts", "thoughts": [{"content": "add"}]})
    mapping |= chatgpt("c", "t", "assistant", {"content_type": "code", "text": "print(5)"}, to="python")
    mapping |= chatgpt("o", "c", "tool", {"content_type": "execution_output", "text": "5"})
    mapping |= chatgpt("a", "o", "assistant", {"content_type": "text", "parts": ["It is 5."]})
    export = {"title": "Sums", "mapping": mapping, "current_node": "a", "conversation_id": "k"}
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([export, export | {"current_node": "u"}]))
    (episode,), (refusal,) = items(path)
    assert (episode.start, episode.agent) == ("Sum?", "m")
    assert steps(episode) == [("python(print(5))", "5"), ("It is 5.", "")]
    assert episode.turns[0].info["log.thought"] == "add"
    assert left_out(episode) == {"image": 1}
    assert episode.turns[-1].info["log.messages_of_other_branches"] == 1
    assert refusal.record == "record 2"
    path.write_text(json.dumps([{"id": "k", "mapping": mapping}]))  # nothing says where the user was
    assert steps(only(path)) == steps(episode)
    mapping |= chatgpt("a", "o", "assistant", {"content_type": "hologram", "parts": ["?"]})
    path.write_text(json.dumps([export]))
    assert ["hologram" in one.reason for one in items(path)[1]] == [True]


def test_the_longest_path_of_a_graph_of_verifiers_is_the_rollout(tmp_path: Path) -> None:
    call = {"id": "c", "name": "look", "arguments": '{"at": 1}'}
    listed = [
        (None, user("Where?")),
        (0, agent("", tool_calls=[call])),
        (1, {"role": "tool", "tool_call_id": "c", "content": "a box"}),
        (0, agent("Nowhere.")),
        (2, agent("In it.")),
    ]
    nodes = [{"parent": parent, "message": message, "sampled": True} for parent, message in listed]
    rewards = {"right": {"score": 1.0, "weight": 0.5}, "short": {"score": 0.5, "weight": 1.0}, "none": None}
    trace = {"id": "i", "task": {"type": "T", "key": "k", "data": {}}, "agent": {"name": "solver", "config": {}}}
    episode = only_of(tmp_path, trace | {"nodes": nodes, "rewards": rewards, "stop_condition": "max_turns_reached"})
    assert (episode.task_id, episode.agent, episode.total_reward) == ("k", "solver", 1.0)
    assert steps(episode) == [('look({"at": 1})', "a box"), ("In it.", "")]
    assert episode.stop is StopReason.TURN_LIMIT
    assert episode.turns[-1].info["log.messages_of_other_branches"] == 1


@pytest.mark.parametrize(
    ("beside", "reward", "stop"),
    [
        ({"rewards": {"right": 1.0, "short": 0.5}}, 1.5, StopReason.TERMINATED),
        ({"rewards": {"right": None}}, None, StopReason.TERMINATED),
        ({"rewards": {"right": {"score": 1.0}, "short": {"score": None}}}, 1.0, StopReason.TERMINATED),
        ({"errors": [{"type": "E"}], "ok": True}, None, StopReason.TERMINATED),  # of an earlier attempt
        ({"errors": [{"type": "E"}], "ok": False}, None, StopReason.ENV_CRASHED),
        ({"calls": [{"finish_reason": "length"}, {"error": {"type": "E"}}]}, None, StopReason.CONTEXT_LIMIT),
    ],
)
def test_rewards_and_ends_of_a_graph_of_verifiers(tmp_path: Path, beside: Any, reward: Any, stop: StopReason) -> None:
    nodes = [{"parent": None, "message": user("Look.")}, {"parent": 0, "message": agent("In it.")}]
    episode = only_of(tmp_path, {"task": {"key": "k"}, "nodes": nodes, "stop_condition": "agent_completed"} | beside)
    assert (episode.turns[-1].reward, episode.stop) == (reward, stop)


def gemini(key: str, kind: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"id": key, "timestamp": "t", "type": kind, "content": content} | more


def gemini_lines() -> list[dict[str, Any]]:
    response = {"functionResponse": {"id": "c", "name": "ls", "response": {"output": "a.py"}}}
    call = {"id": "c", "name": "ls", "args": {"path": "."}, "status": "success", "result": [response]}
    failed = {"id": "d", "name": "rm", "args": {}, "status": "error", "resultDisplay": "denied"}
    thoughts = [{"subject": "Plan", "description": "look"}]
    return [
        gemini("1", "user", [{"text": "List it."}]),
        gemini("2", "gemini", "Looking.", toolCalls=[call], thoughts=thoughts, model="m", tokens={"input": 1}),
        gemini("3", "info", "Update available"),
        gemini("4", "gemini", "", toolCalls=[failed]),
        gemini("5", "gemini", "One file."),
    ]


@pytest.mark.parametrize("name", ["session.json", "session.jsonl"])
def test_a_session_of_geminis_cli_has_answers_within_its_messages(tmp_path: Path, name: str) -> None:
    about: dict[str, Any] = {"sessionId": "s", "projectHash": "p", "startTime": "t"}
    lines = gemini_lines()
    rewound = [
        gemini("6", "user", "No."),
        gemini("7", "gemini", "Sorry."),
        {"$rewindTo": "6"},
        {"$set": {"summary": "x"}},
    ]
    early = lines[1] | {"toolCalls": []}
    path = tmp_path / name
    whole = [about, lines[0], early, *lines[1:], *rewound]
    path.write_text("\n".join(map(json.dumps, whole)) if "jsonl" in name else json.dumps(about | {"messages": lines}))
    (episode,), refusals = items(path)
    assert refusals == []
    assert episode.start == "List it."
    assert steps(episode) == [('Looking.\nls({"path": "."})', "a.py"), ("rm({})", "denied"), ("One file.", "")]
    assert episode.turns[0].info["log.thought"] == "Plan: look"
    assert episode.turns[1].info["log.is_error"] is True
    assert left_out(episode) == {"line of type info": 1}
    assert episode.turns[-1].info.get("log.rewound_messages") == (2 if "jsonl" in name else None)


def test_a_broken_log_of_inspect_is_refused_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    path.write_bytes(b"no zip")
    with pytest.raises(UserError, match=r"log\.eval"):
        find_format("auto", path)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"cum_reward": 1.0, "n_steps": 3, "terminated": True}, "AgentLab"),
        ({"input": "system\nx", "output": "y", "gts": "1", "score": 1.0}, "verl"),
        ([{"task_name": "t", "agent": "a", "status": "started", "task": "x"}], "CrewAI"),
        (
            {
                "messages": [
                    {"source": name, "type": "TextMessage", "content": "x", "models_usage": None} for name in "ab"
                ]
            },
            "AutoGen",
        ),
        ({"object": "list", "data": [{"role": "assistant", "thread_id": "t", "content": []}]}, "Assistants"),
    ],
)
def test_a_log_that_is_known_and_not_read_is_named(tmp_path: Path, record: Any, words: str) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=words) as error:
        find_format("auto", path)
    assert "\n" not in str(error.value)
    episodes, refusals = items(path, "openai")
    assert episodes == []
    assert refusals


def test_pickles_and_pages_of_webarena_are_named_and_never_read(tmp_path: Path) -> None:
    step, page = tmp_path / "step_0.pkl.gz", tmp_path / "render_1.html"
    step.write_bytes(gzip.compress(b"\x80\x04."))
    page.write_bytes(b"<p class='state_obv'>")
    for path, words in ((step, "is a pickle"), (page, "page of WebArena")):
        with pytest.raises(UserError, match=words):
            find_format("auto", path)


def test_questions_in_a_row_are_episodes_and_thoughts_are_no_observation(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(
        "Question: Who?\nThought 1: I search.\nAction 1: Search[x]\nObservation 1: A man.\nThought 2: Him.\n"
        "Action 2: Finish[him]\nObservation 2: CORRECT\n\nQuestion: What?\nThought: Easy.\n"
        "Action: Finish[it]\nObservation: WRONG\n"
    )
    (first, second), _ = items(path)
    assert (first.start, second.start) == ("Question: Who?", "Question: What?")
    assert steps(first) == [("Search[x]", "A man."), ("Finish[him]", "CORRECT")]
    assert [turn.info["log.thought"] for turn in first.turns] == ["I search.", "Him."]
    assert steps(second) == [("Finish[it]", "WRONG")]


def test_an_action_that_the_server_blocked_is_nobodys(tmp_path: Path) -> None:
    history = {"actions": ["ls", "blocked"], "observations": ["a"], "rewards": [0.5, 0], "valid_action": [True]}
    episode = only_of(
        tmp_path,
        {"0": {"environment": "bash", "task_id": 0, "query": "Count.", "turn_history": history}},
        name="a.json",
    )
    assert steps(episode) == [("ls", "a")]
    assert episode.stop is StopReason.TURN_LIMIT
    assert left_out(episode) == {"action that was blocked": 1}


def test_several_rollouts_in_a_record_are_episodes(tmp_path: Path) -> None:
    group = {"messages": [[user("2+2?"), agent("4")], [user("2+2?"), agent("5")]], "scores": [1.0, -1.0], "id": "g"}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(group))
    (right, wrong), _ = items(path, mapping={"reward": "scores"})
    assert [(steps(one), one.turns[0].reward) for one in (right, wrong)] == [([("4", "")], 1.0), ([("5", "")], -1.0)]


@pytest.mark.parametrize("name", ["episodes", "results", "data"])
def test_a_list_of_chats_within_an_object_is_read_one_by_one(tmp_path: Path, name: str) -> None:
    chats = [{"messages": [user("Hi"), agent("Yo")], "reward": reward} for reward in (1.0, 0.0)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"model": "m", name: [*chats, {"messages": []}]}))
    episodes, (refusal,) = items(path)
    assert [(one.agent, one.turns[0].reward) for one in episodes] == [("m", 1.0), ("m", 0.0)]
    assert refusal.record.endswith(f"{name}[2]")


def test_of_several_dialogues_nobody_knows_which_was_played(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"chosen": [user("Hi"), agent("Yo")], "rejected": [user("Hi"), agent("No")]}))
    with pytest.raises(UserError, match="'chosen, rejected' are several dialogues"):
        find_format("auto", path)
    path.write_text(json.dumps({"prompt": [user("Hi"), agent("Yo"), user("2+2?")], "answer": "4"}))
    with pytest.raises(UserError, match="in no format"):  # examples in a prompt are no episode
        find_format("auto", path)


def test_what_an_executor_says_of_a_limit_is_no_action(tmp_path: Path) -> None:
    steps_made = [[{"kwargs": {"tool": "add", "tool_input": "2", "log": "Invoking: `add`"}}, 4]]
    record = {"input": "2+2?", "output": "Agent stopped due to max iterations.", "intermediate_steps": steps_made}
    episode = only_of(tmp_path, record)
    assert (steps(episode), episode.stop) == ([("add(2)", "4")], StopReason.TURN_LIMIT)


def test_numbered_steps_of_dspy_are_turns_and_nothing_is_without_a_task(tmp_path: Path) -> None:
    numbered = {"thought_0": "hm", "tool_name_0": "f", "tool_args_0": {"x": 1}, "observation_0": "ok"}
    numbered |= {"thought_1": "so", "tool_name_1": "finish", "tool_args_1": {}, "observation_1": "Completed."}
    episode = only_of(tmp_path, {"question": "Q?", "trajectory": numbered})
    assert (episode.start, steps(episode)) == ("Q?", [('f({"x": 1})', "ok"), ("finish({})", "Completed.")])
    assert (episode.stop, episode.turns[0].info["log.thought"]) == (StopReason.TERMINATED, "hm")
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"trajectory": numbered}))
    _, (refusal,) = items(path, "openai")
    assert refusal.field == "question"


@pytest.mark.parametrize("first", ["queue-operation", "system"])
def test_notes_of_a_session_are_no_messages_and_a_prompt_that_waited_is_one(tmp_path: Path, first: str) -> None:
    waited = {"type": "queued_command", "prompt": "Tests, too."}
    use = [{"type": "tool_use", "id": "t", "name": "Bash", "input": {}}]
    episode = only_of(
        tmp_path,
        {"type": first, "content": "Fix it.", "sessionId": "s"},
        line("u1", None, "user", "Fix it."),
        line("u2", "u1", "assistant", use),
        {"type": "system", "uuid": "h", "parentUuid": "u2", "sessionId": "s", "content": "a hook ran"},
        line("u3", "h", "user", [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]),
        {"type": "attachment", "uuid": "q", "parentUuid": "u3", "sessionId": "s", "attachment": waited},
        line("u4", "q", "assistant", [text("Done.")]),
    )
    assert (episode.start, steps(episode)) == ("Fix it.", [("Bash({})", "ok\nTests, too."), ("Done.", "")])
    assert sum(left_out(episode).values()) == 2


@pytest.mark.parametrize(("broken", "read"), [(-1, True), (2, False)])
def test_a_stream_whose_last_line_is_broken_is_read_up_to_there(tmp_path: Path, broken: int, read: bool) -> None:
    call = {"type": "function_call", "name": "sh", "arguments": "{}", "call_id": "c"}
    payloads = [user("Fix."), call, {"type": "function_call_output", "call_id": "c", "output": "a"}, agent("Done.")]
    lines = [json.dumps({"timestamp": "t", "type": "response_item", "payload": payload}) for payload in payloads]
    path = tmp_path / "rollout.jsonl"
    path.write_text("\n".join([*lines, lines[0][:9]] if read else [*lines[:broken], lines[0][:9], *lines[broken:]]))
    episodes, (refusal,) = items(path)
    assert [steps(episode) for episode in episodes] == [[("sh({})", "a"), ("Done.", "")]] * read
    assert f"{refusal.record} {refusal.reason}".count(f"line {5 if read else 3}") == 1


def test_lists_of_completions_are_rollouts_each_with_its_reward(tmp_path: Path) -> None:
    record = {"prompt": [[user("A?")], [user("B?")]], "completion": [[agent("a")], [agent("b")]], "reward": [1.0, 0.0]}
    episodes, _ = items(write(tmp_path / "a.json", record))
    assert [(one.start, steps(one), one.turns[0].reward) for one in episodes] == [
        ("A?", [("a", "")], 1.0),
        ("B?", [("b", "")], 0.0),
    ]


def test_a_prompt_of_as_many_messages_as_there_are_rollouts_is_that_of_each(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "S"}, user("Q")]
    record = {"prompt": prompt, "completion": [[agent("a")], [agent("b")]], "reward": [1.0, 0.0]}
    episodes, _ = items(write(tmp_path / "a.json", record))
    assert [(one.start, one.turns[0].reward) for one in episodes] == [("S\n\nQ", 1.0), ("S\n\nQ", 0.0)]


def test_a_trial_of_harbor_has_its_reward_in_the_result_beside_it(tmp_path: Path) -> None:
    acted = [{"step_id": 1, "source": "user", "message": "Go."}, {"step_id": 2, "source": "agent", "message": "Done."}]
    (tmp_path / "agent").mkdir()
    path = write(tmp_path / "agent" / "trajectory.json", {"schema_version": "ATIF-v1.5", "steps": acted})
    result = {"task_name": "t", "verifier_result": {"rewards": {"reward": 1.0}}, "exception_info": None}
    file = write(tmp_path / "result.json", result)
    episode = only(path)
    assert (episode.task_id, episode.turns[-1].reward, episode.stop) == ("t", 1.0, StopReason.TERMINATED)
    with pytest.raises(UserError, match="beside them"):
        find_format("auto", file)
    write(file, result | {"exception_info": {"exception_type": "AgentTimeoutError"}})
    assert only(path).stop is StopReason.ENV_TIMEOUT
