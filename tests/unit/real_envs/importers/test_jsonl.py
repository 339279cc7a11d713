"""If these fail, somebody's own log is imported with other rewards, ends or actions than it states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from real_envs.importers.jsonl import import_jsonl
from real_envs.store import StoreError, TrajectoryStore
from real_envs.trajectory import Source, StopReason, Turn
from tests.support.refusal import refused

STEP = {"action": "search mug", "observation": "3 results"}
END = {"action": "buy", "observation": "Thank you!", "reward": 1, "terminated": True}
LINE = {"task_id": "shop-3", "start": "Buy a mug.", "turns": [STEP, END]}


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "shop.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_two_lines_become_two_episodes_with_what_they_state_and_no_more(tmp_path: Path) -> None:
    open_ended = {"task_id": "shop-4", "start": "Kaufe Tee. ☕", "turns": [STEP | {"reward": 0}]}
    open_ended |= {"agent": "expert", "id": "x"}
    first, second = import_jsonl(write(tmp_path, LINE, "", open_ended))
    assert first.turns == (
        Turn("search mug", "3 results", reward=None, terminated=False),
        Turn("buy", "Thank you!", reward=1.0, terminated=True),
    )
    assert (first.id, first.agent, first.source, first.stop) == ("shop/1", "log", Source.REAL, StopReason.TERMINATED)
    assert (second.id, second.source, second.stop) == ("x", Source.EXPERT, StopReason.TURN_LIMIT)
    assert second.turns[0].reward == 0.0
    assert second.start == "Kaufe Tee. ☕"
    assert second.group_id == "shop-4/expert"


def test_the_end_may_be_stated_by_stop_alone(tmp_path: Path) -> None:
    (episode,) = import_jsonl(write(tmp_path, LINE | {"turns": [STEP, STEP], "stop": "terminated"}))
    assert [turn.terminated for turn in episode.turns] == [False, True]


def test_null_stands_for_left_out(tmp_path: Path) -> None:
    turn = STEP | {"reward": None, "terminated": None}
    (episode,) = import_jsonl(write(tmp_path, LINE | {"turns": [turn], "id": None, "stop": None, "agent": None}))
    assert (episode.id, episode.agent, episode.stop) == ("shop/1", "log", StopReason.TURN_LIMIT)
    assert episode.turns[0].reward is None


def test_an_episode_that_failed_at_reset_needs_no_turns(tmp_path: Path) -> None:
    failed, _ = import_jsonl(write(tmp_path, LINE | {"turns": [], "stop": "env_timeout"}, LINE))
    assert failed.stop is StopReason.ENV_TIMEOUT
    assert failed.failure is not None
    assert "env_timeout" in failed.failure


def test_a_stated_success_is_kept_and_null_is_unknown(tmp_path: Path) -> None:
    lines = [LINE | {"success": False}, LINE | {"success": None}, LINE | {"turns": [STEP], "success": True}]
    refused_sum, unsaid, unpaid = import_jsonl(write(tmp_path, *lines))
    assert (refused_sum.success, refused_sum.solved) == (False, False)  # its rewards add up to 1
    assert (unsaid.success, unsaid.solved) == (None, True)
    assert (unpaid.success, unpaid.solved) == (True, True)


def test_what_is_imported_can_be_stored_as_it_is(tmp_path: Path) -> None:
    told = ["The mug is blue.", "It costs 5."]
    episodes = import_jsonl(write(tmp_path, LINE, LINE | {"world_facts": told}))
    assert [episode.world_facts for episode in episodes] == [(), tuple(told)]
    store = TrajectoryStore.create(tmp_path / "log", {"train": ["shop-3"]})
    store.append(episodes)
    assert list(store.read("train")) == episodes


def test_windows_line_ends_and_a_byte_order_mark_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "shop.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LINE).encode() + b"\r\n" + json.dumps(LINE).encode() + b"\r\n")
    assert [episode.id for episode in import_jsonl(path)] == ["shop/1", "shop/2"]


def turn(**changes: object) -> dict:
    return LINE | {"turns": [STEP, STEP | changes, END]}


def without(record: dict, key: str) -> dict:
    return {name: value for name, value in record.items() if name != key}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ('{"task_id": ', ("is no JSON object",)),
        ("[1, 2]", ("is no JSON object", "[1, 2]")),
        (without(LINE, "task_id"), ("'task_id'", "missing")),
        (LINE | {"start": 3}, ("'start' is 3, not text",)),
        (without(LINE, "turns"), ("'turns'", "missing", "a list")),
        (LINE | {"turns": {"action": "x"}}, ("'turns' is {", "not a list")),
        (LINE | {"turns": ["buy"]}, ("'turns[0]' is 'buy'",)),
        (LINE | {"turns": []}, ("'turns' is empty", "env_crashed")),
        (LINE | {"turns": [without(STEP, "action")]}, ("'turns[0].action'", "missing")),
        (turn(action=None), ("'turns[1].action' is null",)),
        (turn(observation=["a"]), ("'turns[1].observation' is ['a'], not text",)),
        (turn(observation="\ud800"), ("'turns[1].observation'", "surrogate")),
        (turn(reward="1"), ("'turns[1].reward' is '1'", "number")),
        (turn(reward=True), ("'turns[1].reward' is True", "number")),
        (turn(reward=float("nan")), ("'turns[1].reward' is nan", "finite")),
        (turn(reward=10**400), ("'turns[1].reward' is 1000", "64 bits")),
        (turn(terminated="yes"), ("'turns[1].terminated' is 'yes'",)),
        (turn(terminated=True), ("'turns[1].terminated' is true", "follow")),
        (turn(rewards=1), ("'turns[1].rewards'", "'reward'")),
        (LINE | {"taskid": "x"}, ("'taskid'", "'task_id'")),
        (LINE | {"stop": "done"}, ("'stop' is 'done'", "terminated")),
        (LINE | {"stop": ["done"]}, ("'stop' is ['done'], not text",)),
        (LINE | {"stop": "turn_limit"}, ("'stop' is 'turn_limit'", "'terminated'")),
        (LINE | {"stop": "terminated", "turns": [STEP | {"terminated": False}]}, ("'stop' is 'terminated'", "false")),
        (LINE | {"agent": 1}, ("'agent' is 1, not text",)),
        (LINE | {"id": "first"}, ("'id' is 'first'", "line 1")),
        (LINE | {"success": "yes"}, ("'success' is 'yes'",)),
    ],
)
def test_a_bad_line_is_named_by_file_line_and_field(tmp_path: Path, bad: object, words: tuple[str, ...]) -> None:
    path = write(tmp_path, LINE | {"id": "first"}, "", bad, LINE)
    before = path.read_bytes()
    refused(lambda: import_jsonl(path), f"{path}: line 3", *words, error=StoreError)
    assert path.read_bytes() == before


def test_bytes_that_are_no_utf8_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "shop.jsonl"
    path.write_bytes(json.dumps(LINE).encode() + b'\n{"task_id": "\xff"}\n')
    refused(lambda: import_jsonl(path), "shop.jsonl: line 2", "'utf-8'", error=StoreError)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused(lambda: import_jsonl(tmp_path / "none.jsonl"), "none.jsonl", "No such file", error=StoreError)


@pytest.mark.parametrize(
    "lines",
    [(), ("", " "), (LINE | {"turns": [STEP | {"action": " "}]},), (LINE | {"turns": [], "stop": "env_crashed"},)],
)
def test_a_file_in_which_nobody_acts_is_an_error(tmp_path: Path, lines: tuple[object, ...]) -> None:
    path = write(tmp_path, *lines)
    refused(lambda: import_jsonl(path), str(path), "no episode", error=StoreError)
