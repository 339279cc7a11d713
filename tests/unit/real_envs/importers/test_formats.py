"""Small records of each format, written by hand. If these fail, a log says something else after its import."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from real_envs.importers.drafts import Reading
from real_envs.importers.formats import FORMATS, Imported, find_format, read
from real_envs.trajectory import StopReason, Turn
from tests.support.imported import items, only, steps, write
from tests.support.refusal import refused

CALL = {"id": "c", "function": {"name": "cancel", "arguments": '{"id":"R1"}'}}
CHAT: dict[str, Any] = {
    **{"task_id": 3, "reward": 1.0, "trial": 2, "info": {"cost": 1}},
    "traj": [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "Cancel it."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "cancelled"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks ###STOP###"},
    ],
}
HISTORY = {
    "actions": ["ls", "ls | wc -l", "find | wc -l"], "observations": ["a b", "2", "3"], "rewards": [0.5, 0.25, 1.0],
    "valid_action": [True, True, False], "thoughts": ["look", "count", "all"],
}  # fmt: skip
CODE: dict[str, Any] = {"environment": "bash", "task_id": 4, "query": "Count the files.", "turn_history": HISTORY}
CODE["summary"] = {"max_reward": 1.0}
SPOKEN = [
    ("human", None, "You shop. Answer Thought and Action."), ("gpt", False, "OK."),
    ("human", None, "Buy tea. [Search]"), ("gpt", True, "Thought:\nI search.\n\nAction:\nsearch[tea]"),
    ("human", None, "Green tea $3"), ("gpt", True, "Action: click[buy]"),
]  # fmt: skip
GYM = {"item_id": "shop_1", "conversations": [{"from": who, "loss": x, "value": text} for who, x, text in SPOKEN]}
TRACE = " think: find a mug\nOK.\n> go to shelf 1\nYou see a mug.\nIt is red.\n>\n\n\n go to desk 1\nA desk.\n>\n"
PLAYED = {"problem": "You are in a room. Put a mug on the desk.", "trace": TRACE, "plans": ["a", "b"], "reward": True}
EMPTY: dict[str, Any] = {"problem": "A room.", "trace": "", "plans": [], "reward": 0}
OVERALL = {"rate": 0.5, "success": [1], "count": [2]}
GAME = {"kind": {"game/1": PLAYED, "game/2": EMPTY}, "overall": OVERALL}
SHOP = """-----------------
0
Action: reset
Observation:
Buy tea.

Action: think[look]
Observation: OK.

Action: click[Buy Now]
Observation: Your score (min 0.0, max 1.0): 0.5

1 0.5 0.0 0.0
-------------
-----------------
1
Action: reset
Observation: Buy a cup.

Action: click[x]
Observation: Invalid action!

2 0.25 0.0 0.0
-------------
-----------------
2
Action: reset
Observation: Buy a pot.

Action: click[Buy Now]
Observation: Your score (min 0.0, max 1.0): 1.0

3 0.5 0.3333333333333333 0.0
-------------
0.5 0.3333333333333333 0.0
"""


def test_a_chat_acts_by_messages_and_calls_and_earns_at_its_end(tmp_path: Path) -> None:
    episode = only(write(tmp_path / "chats.json", [CHAT]))
    assert episode.start == "Help.\n\nCancel it."
    assert [(t.action, t.observation, t.reward, t.terminated) for t in episode.turns] == [
        ('cancel({"id": "R1"})', "cancelled", 0.0, False),
        ("Done.", "Thanks ###STOP###", 1.0, True),
    ]
    assert (episode.task_id, episode.success, episode.solved) == ("3", None, True)
    assert dict(episode.turns[-1].info) == {"log.trial": 2}
    assert only(tmp_path / "chats.json", system=False).start == "Cancel it."


def test_fields_without_a_place_are_named(tmp_path: Path) -> None:
    (found,) = read(write(tmp_path / "a.json", [CHAT]), FORMATS["openai"], Reading())
    assert isinstance(found, Imported)
    assert found.left_out == ("info",)


def test_a_rollout_in_two_parts_is_one_chat(tmp_path: Path) -> None:
    whole, parts = dict(CHAT), dict(CHAT)
    del parts["traj"]
    parts |= {"prompt": CHAT["traj"][:2], "completion": CHAT["traj"][2:]}
    found = [only(write(tmp_path / name, [record])) for name, record in (("a.json", whole), ("b.json", parts))]
    assert found[0].turns == found[1].turns
    assert found[0].start == found[1].start


def test_a_file_that_is_one_list_of_messages_is_one_chat(tmp_path: Path) -> None:
    chat = write(tmp_path / "a.json", CHAT["traj"])
    assert [turn.action for turn in only(chat).turns] == ['cancel({"id": "R1"})', "Done."]


def test_a_last_message_or_call_without_an_answer_is_kept(tmp_path: Path) -> None:
    """With an empty answer; where the world would have answered, that counts as left out."""
    said = CHAT["traj"][:5]
    answered = only(write(tmp_path / "a.json", [{"messages": said}]))
    assert answered.turns[-1] == Turn("Done.", "", None, True)
    assert answered.task_id.startswith("task-")
    calling = {"messages": [*said[:4], said[2]]}
    cut = only(write(tmp_path / "b.json", [calling]))
    assert [t.action for t in cut.turns] == ['cancel({"id": "R1"})'] * 2
    assert (cut.stop, cut.turns[-1].observation) == (StopReason.TURN_LIMIT, "")
    assert dict(cut.turns[-1].info) == {"log.left_out.answer to the last action": 1}
    assert cut.task_id == answered.task_id  # the same start is the same task
    # a reward says that it was played to its end, and belongs to the call
    for reward in (1.0, 0.0):
        paid = only(write(tmp_path / "c.json", [calling | {"reward": reward}]))
        assert [t.reward for t in paid.turns] == [0.0, reward]
        assert (paid.stop, dict(paid.turns[-1].info)) == (StopReason.TERMINATED, {})


def test_a_chat_that_did_not_end_for_sure_is_cut_off(tmp_path: Path) -> None:
    """A time-out looks like this: no reward, nobody hung up."""
    said = [*CHAT["traj"][:5], {"role": "user", "content": "And?"}]
    assert only(write(tmp_path / "a.json", [{"messages": said, "reward": 0.0}])).stop is StopReason.TURN_LIMIT


def test_scores_so_far_become_what_each_turn_earned(tmp_path: Path) -> None:
    episode = only(write(tmp_path / "runs.json", {"0": CODE}))
    assert [t.reward for t in episode.turns] == [0.5, -0.25, 0.75]  # 1.0 in all, not 1.75
    assert (episode.success, episode.stop, episode.task_id) == (True, StopReason.TERMINATED, "bash/4")
    assert episode.start == "Count the files."
    assert dict(episode.turns[2].info) == {"log.valid_action": False, "log.thought": "all"}


def test_arrays_of_unequal_lengths_are_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    short = CODE | {"turn_history": HISTORY | {"observations": ["a"]}}
    episodes, refusals = items(write(tmp_path / "runs.json", {"0": short, "1": CODE, "2": CODE | {"turn_history": {}}}))
    assert len(episodes) == 1
    assert [(r.record, r.field) for r in refusals] == [("record '0'", "turn_history"), ("record '2'", "turn_history")]
    assert "3 actions, 1 observations" in refusals[0].reason
    assert str(refusals[0]).startswith(f"{tmp_path / 'runs.json'}: record '0', field 'turn_history'")


def test_numbers_that_no_64_bits_hold_are_refused(tmp_path: Path) -> None:
    huge = CODE | {"turn_history": HISTORY | {"rewards": [0.5, 10**400, 1]}}
    episodes, refusals = items(write(tmp_path / "runs.json", {"0": huge, "1": CODE, "2": CODE | {"note": 10**400}}))
    assert len(episodes) == 1
    assert [refusal.record for refusal in refusals] == ["record '0'", "record '2'"]


def test_a_conversation_begins_after_the_assent_and_ends_with_its_last_action(tmp_path: Path) -> None:
    episode = only(write(tmp_path / "gym.json", [GYM]))
    assert episode.start == "You shop. Answer Thought and Action.\n\nBuy tea. [Search]"
    assert episode.turns == (
        Turn("search[tea]", "Green tea $3", None, False, {"log.thought": "I search."}),
        Turn("click[buy]", "", None, True),
    )
    assert (episode.task_id, episode.success) == ("shop_1", None)


def test_a_text_game_with_parts_is_one_episode_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    episodes, refusals = items(write(tmp_path / "games.json", GAME))
    assert [(t.action, t.observation) for t in episodes[0].turns] == [
        ("think: find a mug", "OK."),
        ("go to shelf 1", "You see a mug.\nIt is red."),
        ("go to desk 1", "A desk."),
    ]
    assert (episodes[0].task_id, episodes[0].success, episodes[0].stop) == ("game/1", True, StopReason.TERMINATED)
    assert [r.record for r in refusals] == ["record 'kind', 'game/2'", "record 'overall'"]
    assert {r.field for r in refusals} == {"trace"}


def test_a_text_game_in_a_text_file_begins_above_its_first_action(tmp_path: Path) -> None:
    episode = only(write(tmp_path / "zork.txt", "West of House.\n\n> open mailbox\nA leaflet.\n> read it\nWELCOME\n"))
    assert (episode.start, episode.task_id) == ("West of House.", "zork")
    assert [t.observation for t in episode.turns] == ["A leaflet.", "WELCOME"]


@pytest.mark.parametrize("notebook", [False, True])
def test_a_printed_run_states_scores_and_by_its_rates_who_solved(tmp_path: Path, notebook: bool) -> None:
    cut = SHOP.index("Action: think")
    stream = {"output_type": "stream", "name": "stdout"}
    outputs = [stream | {"text": [SHOP[:cut]]}, stream | {"name": "stderr", "text": ["a warning\n"]}]
    cells = {"cells": [{"outputs": [*outputs, stream | {"text": [SHOP[cut:]]}]}]}
    path = tmp_path / ("shop.ipynb" if notebook else "shop.txt")
    episodes, refusals = items(write(path, cells if notebook else SHOP))
    assert refusals == []
    assert [e.start for e in episodes] == ["Buy tea.", "Buy a cup.", "Buy a pot."]
    assert [e.success for e in episodes] == [False, False, True]
    assert [[t.reward for t in e.turns] for e in episodes] == [[0.0, 0.5], [None], [1.0]]
    assert [e.stop.value for e in episodes] == ["terminated", "turn_limit", "terminated"]
    assert episodes[1].turns[-1].observation == "Invalid action!"  # and no line of rates
    assert [e.task_id for e in episodes] == ["shop/0", "shop/1", "shop/2"]


def test_the_next_reset_begins_another_episode(tmp_path: Path) -> None:
    one = "Action: reset\nObservation: Room {}.\n\nAction: go\nObservation: Hall.\n\n"
    episodes, _ = items(write(tmp_path / "a.txt", one.format(1) + one.format(2)))
    assert [(e.start, len(e.turns), e.success) for e in episodes] == [("Room 1.", 1, None), ("Room 2.", 1, None)]


def web_run(folder: Path, pages: bool) -> Path:
    """One task: a click on the second element, then done; and one of which nothing was logged."""

    def step(number: int, actions: list[dict], said: str, done: bool = False) -> dict:
        result = [{"is_done": done, "extracted_content": said}]
        return {"model_output": {"action": actions}, "result": result, "metadata": {"step_number": number}}

    steps = [
        step(0, [{"navigate": {"url": "http://x"}}], "went"),
        step(1, [{"click": {"index": 901}}, {"input": {"index": 900, "text": "tea", "clear": None}}], "Clicked"),
        step(2, [{"done": {"text": "ok"}}], "ok", True),
    ]
    task, empty = folder / "run" / "task_1", folder / "run" / "task_2"
    for path in (task, empty):
        path.mkdir(parents=True)
        write(path / "result.json", {"task_id": path.name, "instruction": "Star it.", "passed": True, "elapsed": 2.5})
    write(task / "history.json", {"history": steps})
    shown = "<browser_state>stats\nInteractive elements:\n{}\n</browser_state>\n{{answer}}"
    texts = [shown.format("[900]<input />\n[901]<a />\n\tStar"), shown.format("*[77]<input />\n[901]<a />\n\tStarred")]
    lines = [json.dumps({"task": "task_1", "step": k + 1, "text": text}) for k, text in enumerate(texts)]
    if pages:
        (folder / "run" / "conversations.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return folder / "run"


def test_pages_are_renumbered_from_one_and_actions_with_them(tmp_path: Path) -> None:
    episodes, refusals = items(web_run(tmp_path, pages=True))
    (episode,) = episodes
    assert episode.start == "Goal: Star it.\n[1]<input />\n[2]<a />\n\tStar"
    assert [(t.action, t.observation) for t in episode.turns] == [
        ('click(index=2)\ninput(index=1, text="tea")', "[1]<input />\n[2]<a />\n\tStarred"),
        ('done(text="ok")', "ok"),
    ]
    assert (episode.success, episode.stop) == (True, StopReason.TERMINATED)
    assert episode.turns[-1].reward is None  # nothing says what a step earned
    assert [(r.record, r.field) for r in refusals] == [("task_2", "history.json")]


def test_without_kept_pages_the_results_are_the_observations(tmp_path: Path) -> None:
    (episode,), _ = items(web_run(tmp_path, pages=False))
    assert [t.observation for t in episode.turns] == ["went", "Clicked", "ok"]
    assert episode.turns[1].action.startswith("click(index=901)")


OWN = {"task_id": "t", "start": "s", "turns": [{"action": "a", "observation": "o", "reward": 1, "terminated": True}]}


def test_our_own_lines_keep_strange_keys_as_notes_but_no_misspelt_ones(tmp_path: Path) -> None:
    lines = [OWN | {"model": "m", "scores": [1]}, OWN | {"turnz": 1}, {"task_id": "t"}, 7]
    episodes, refusals = items(write(tmp_path / "own.jsonl", "\n".join(map(json.dumps, lines))))
    assert dict(episodes[0].turns[0].info) == {"log.model": "m"}
    assert [(r.record, r.field) for r in refusals] == [("line 2", "turnz"), ("line 3", "turns"), ("line 4", "")]


def test_ids_are_the_same_in_every_import_and_of_every_episode_another(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", "\n".join(map(json.dumps, [OWN, OWN | {"start": "z"}, OWN])))
    ids = [e.id for e in items(path)[0]]
    assert len(set(ids)) == 3
    assert ids[2] == f"{ids[0]}-2"  # the same episode once more
    turned = write(tmp_path / "own.jsonl", "\n".join(map(json.dumps, [OWN | {"start": "z"}, OWN, OWN])))
    assert sorted(e.id for e in items(turned)[0]) == sorted(ids)
    twice = write(tmp_path / "own.jsonl", "\n".join(map(json.dumps, [OWN | {"id": "i"}, OWN | {"id": "i"}])))
    assert [(r.record, r.field) for r in items(twice)[1]] == [("line 2", "id")]


@pytest.mark.parametrize(
    ("name", "content", "found", "why"),
    [
        ("a.json", [CHAT], "openai", "'role' in 'traj'"),
        ("a.json", {"0": CODE}, "intercode", "'turn_history'"),
        ("a.json", [GYM], "agentgym", "'from' and 'value'"),
        ("a.json", GAME, "commands", "'trace'"),
        ("a.txt", "x\n> go\ny", "commands", "'> action'"),
        ("a.txt", SHOP, "react", "'Observation: ...'"),
        ("a.jsonl", OWN, "jsonl", "'turns' with 'action'"),
        ("a.json", {"simulations": [CHAT]}, "openai", "tau2-bench"),
        ("a.traj", {"trajectory": [{"action": "a", "observation": "o"}]}, "swe-agent", "'trajectory'"),
    ],
)
def test_auto_says_which_format_it_sees_and_why(
    tmp_path: Path, name: str, content: object, found: str, why: str
) -> None:
    seen, reason = find_format("auto", write(tmp_path / name, content))
    assert seen.name == found
    assert why in reason


def test_what_no_utf_8_can_hold_is_one_character_and_counted(tmp_path: Path) -> None:
    cut = OWN | {"turns": [{"action": "\ud83d\ude00", "observation": "cut \ud83d", "reward": 1, "terminated": True}]}
    (turn,) = only(write(tmp_path / "a.jsonl", cut)).turns
    assert (turn.action, turn.observation) == ("😀", "cut \ufffd")
    assert dict(turn.info) == {"log.left_out.unreadable character": 1}
    (tmp_path / "game.txt").write_bytes(b"Hall.\n> look\nA l\xe4mp.\n")
    (turn,) = only(tmp_path / "game.txt").turns
    assert (turn.observation, turn.info["log.left_out.unreadable character"]) == ("A l\ufffdmp.", 1)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_transcripts_of_windows_begin_with_their_first_action(tmp_path: Path, encoding: str) -> None:
    game, run = tmp_path / "game.txt", tmp_path / "run.txt"
    game.write_bytes("> look\r\nA room.\x0cA hall.\r\n> take\r\nTaken.".encode(encoding))
    assert [(t.action, t.observation) for t in only(game).turns] == [("look", "A room.\x0cA hall."), ("take", "Taken.")]
    text = "Action: reset\r\nObservation: Buy tea.\r\n\r\nAction: search[tea]\r\nObservation: 3\r\n\r\nAction: buy\r\n"
    run.write_bytes(text.encode(encoding))
    episode = only(run)
    assert episode.start == "Buy tea."
    assert [(t.action, t.observation) for t in episode.turns] == [("search[tea]", "3"), ("buy", "")]
    assert episode.turns[-1].info["log.left_out.answer to the last action"] == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", OWN | {"turns": [{"action": "<think>x</think>\n\ngo", "observation": "o"}]}),
        ("a.jsonl", CODE | {"turn_history": {"actions": ["<think>x</think>go"], "observations": [""], "rewards": [0]}}),
        ("a.txt", "Hall.\n> <think>x</think> go\nAttic."),
        ("a.txt", "Action: <think>x</think>go\nObservation: Attic.\n"),
    ],
)
def test_an_action_has_no_thoughts_in_any_format(tmp_path: Path, name: str, content: object) -> None:
    (turn,) = only(write(tmp_path / name, content)).turns
    assert (turn.action, dict(turn.info)) == ("go", {"log.thought": "x"})
    quoting = OWN | {"turns": [{"action": "grep '</think>' a", "observation": "o"}]}
    assert only(write(tmp_path / "b.jsonl", quoting)).turns[0].action == "grep '</think>' a"


STEP = {"action": "ls\n", "observation": "a.py\n", "thought": "I look.\n", "response": "I look.", "state": "{}"}
TRAJ: dict[str, Any] = {
    "environment": "main",
    "trajectory": [STEP, {"action": "", "observation": "Exited", "thought": "Exit due to cost", "response": "Exit"}],
    "history": [
        {"role": "system", "content": "SHELL."},
        {"role": "user", "content": "A demonstration.", "is_demo": True},
        {"role": "user", "content": [{"type": "text", "text": "Fix a.py."}]},
        {"role": "assistant", "content": "I look."},
        {"role": "user", "content": "a.py"},
    ],
    "info": {"exit_status": "submitted (exit_cost)", "resolved": False},
}


def test_a_trajectory_of_swe_agent_is_what_the_shell_got(tmp_path: Path) -> None:
    path = write(tmp_path / "repo-1.traj", json.dumps(TRAJ, indent=1))
    episode = only(path, mapping={"success": "info.resolved"})
    assert (episode.start, episode.task_id, episode.success) == ("SHELL.\n\nFix a.py.", "repo-1", False)
    assert [(t.action, t.observation) for t in episode.turns] == [("ls", "a.py\n")]
    assert episode.stop is StopReason.TURN_LIMIT
    assert dict(episode.turns[0].info) == {
        **{"log.thought": "I look.", "log.environment": "main"},
        **{"log.left_out.demonstration": 1, "log.left_out.last step of the runner": 1},
    }
    ended = TRAJ | {"trajectory": [STEP], "info": {"exit_status": "submitted"}}
    assert only(write(tmp_path / "b.traj", ended)).stop is StopReason.TERMINATED
    (refusal,) = items(write(tmp_path / "c.traj", TRAJ | {"history": []}))[1]
    assert refusal.field == "history"


def test_a_column_can_be_the_success_or_the_reward_in_every_format(tmp_path: Path) -> None:
    mapping = {"success": "resolved", "task": "instance", "reward": "score.total", "agent": "by"}
    beside = {"resolved": 0, "instance": 7, "score": {"total": 0.25}, "by": "m"}
    chat = {key: value for key, value in CHAT.items() if key not in ("reward", "task_id")}
    own, won = OWN | {"turns": [{"action": "a", "observation": "o"}]}, beside | {"resolved": 1}
    code = {key: value for key, value in CODE.items() if key != "summary"}
    for name, record in (
        ("openai", chat),
        ("agentgym", GYM),
        ("jsonl", own),
        ("commands", PLAYED),
        ("intercode", code),
    ):
        lost, solved = items(write(tmp_path / "a.json", [record | beside, record | won]), name, mapping=mapping)[0]
        assert (lost.success, lost.task_id, lost.agent, solved.success) == (False, "7", "m", True)
        assert lost.turns[-1].reward == 0.25
        assert "log.resolved" not in lost.turns[-1].info
    pq.write_table(pa.Table.from_pylist([{"messages": CHAT["traj"]} | beside]), tmp_path / "a.parquet")
    assert only(tmp_path / "a.parquet", mapping=mapping).success is False
    assert only(write(tmp_path / "c.json", [chat | beside | {"resolved": "True"}]), mapping=mapping).success is True
    (refusal,) = items(write(tmp_path / "b.json", [chat | beside]), mapping={"success": "resolvd"})[1]
    assert (refusal.field, "'resolved'" in refusal.reason) == ("resolvd", True)


def test_what_is_in_no_known_format_is_said_with_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": "x", "response": "y"}')
    none, cut = tmp_path / "none.json", tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"turns": [{"action": "a"}]}\n' * 9)[:-20])
    refused(lambda: find_format("auto", path), str(path), "'prompt' and 'response'", "huggingface")
    near = write(tmp_path / "near.jsonl", '{"conversation": {"role": "user"}, "reward": 1}')
    refused(lambda: find_format("auto", near), "conversation, reward", "nearest is openai", "'messages'")
    spoken = write(tmp_path / "spoken.jsonl", '{"conversations": [{"speaker": "human", "value": "x"}]}')
    refused(lambda: find_format("auto", spoken), "nearest is agentgym", "conversations[0].from")
    refused(lambda: find_format("opena", path), "'opena'", "'openai'")
    refused(lambda: find_format("auto", none), str(none), "No such file")
    refused(lambda: find_format("auto", cut), str(cut), "Compressed file ended")
    refused(lambda: list(read(none, FORMATS["openai"], Reading())), str(none), "No such file")


@pytest.mark.parametrize("colour", ["", "\x1b[32;1m"])
def test_a_chain_of_langchain_is_an_episode_with_its_final_answer(tmp_path: Path, colour: str) -> None:
    text = (
        f"What are cats?\n{colour}> Entering new AgentExecutor chain...\n{colour}I look.\nAction: Search\n"
        f"Action Input: cats\nand dogs\nObservation: {colour}Animals.\nThought: I know.\nFinal Answer: animals\n"
        f"{colour}> Finished chain.\n"
    )
    (first, second), _ = items(write(tmp_path / "a.log", text * 2))
    assert (first.start, first.stop) == ("What are cats?", StopReason.TERMINATED)
    assert steps(first) == [("Search\nAction Input: cats\nand dogs", "Animals."), ("Final Answer: animals", "")]
    assert [turn.info["log.thought"] for turn in first.turns] == ["I look.", "I know."]
    assert steps(second) == steps(first)


def test_act_and_obs_are_action_and_observation(tmp_path: Path) -> None:
    episode = only(write(tmp_path / "a.txt", "Heat it.\nAct 1: take egg\nObs 1: OK.\nAct 2: heat egg\nObs 2: Hot.\n"))
    assert (episode.start, steps(episode)) == ("Heat it.", [("take egg", "OK."), ("heat egg", "Hot.")])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"\n", "is empty"),
        ("a.json", b"[]", "is empty"),
        ("a.zip", b"PK\x03\x04\0", "unzip it"),
        ("a.jsonl.gz.gz", gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "packed twice"),
        ("a.tar.gz", gzip.compress(bytes(257) + b"ustar" + bytes(250), mtime=0), "an archive"),
        ("a.db", b"SQLite format 3\0", "a database of SQLite"),
        ("a.jsonl", b'{"text": "<|im_start|>user Hi"}', "a chat template in 'text'"),
        ("a.jsonl", b'{"choices": [], "object": "chat.completion.chunk"}', "single answers of a model"),
        ("a.json", b'{\n"a": 1}\n{\n"a": 2}', "jq -c"),
    ],
)
def test_a_file_that_cannot_be_read_says_what_it_is(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    refused(lambda: find_format("auto", tmp_path / name), said)
