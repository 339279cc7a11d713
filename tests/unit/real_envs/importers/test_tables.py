"""Tables whose columns are named, a row a step or an episode. If these fail, what a table does not show is guessed."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from real_envs.errors import UserError
from real_envs.trajectory import StopReason, Turn
from tests.support.imported import items, only, write

STEPS = [
    {"ep": "a", "cmd": "look", "out": "dark", "pts": 1, "over": False, "goal": "Find it."},
    {"ep": "a", "cmd": "light", "out": "bright", "pts": 3, "over": True, "goal": "Find it."},
    {"ep": "b", "cmd": "wait", "out": "dark", "pts": 0, "over": True, "goal": "Find it."},
]
COLUMNS = {"episode": "ep", "action": "cmd", "observation": "out", "reward": "pts", "done": "over", "start": "goal"}


def test_rows_that_are_steps_are_put_together(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(STEPS), tmp_path / "steps.parquet")
    episodes, _ = items(tmp_path / "steps.parquet", mapping=COLUMNS, observation="after")
    assert [[t.action for t in e.turns] for e in episodes] == [["look", "light"], ["wait"]]
    assert [[t.reward for t in e.turns] for e in episodes] == [[1.0, 3.0], [0.0]]
    assert [e.stop.value for e in episodes] == ["terminated", "terminated"]
    assert episodes[0].start == "Find it."


def test_the_traps_of_tables_are_said_and_not_guessed(tmp_path: Path) -> None:
    path = write(tmp_path / "steps.jsonl", "\n".join(map(json.dumps, STEPS)))
    _, refusals = items(path, "huggingface", mapping=COLUMNS)
    assert {(r.field, "imports.observation" in r.reason) for r in refusals} == {("out", True)}
    (first, _), _ = items(path, "huggingface", mapping=COLUMNS, observation="after", reward="cumulative")
    assert [t.reward for t in first.turns] == [1.0, 2.0]  # 3 in all
    (first, _), _ = items(path, "huggingface", mapping=COLUMNS, observation="after", done="ended")
    assert first.stop is StopReason.TURN_LIMIT
    # seen before: the answer to the last action was not logged, but what it earned was
    (first, second), _ = items(path, "huggingface", mapping=COLUMNS, observation="before")
    assert (first.start, [t.observation for t in first.turns]) == ("Find it.\ndark", ["bright", ""])
    assert ([t.reward for t in first.turns], first.stop) == ([1.0, 3.0], StopReason.TERMINATED)
    assert [t.action for t in second.turns] == ["wait"]
    open_end = {key: column for key, column in COLUMNS.items() if key != "done"}
    (first, _), _ = items(path, "huggingface", mapping=open_end, observation="before")
    assert dict(first.turns[-1].info) == {"log.left_out.answer to the last action": 1}


def test_rows_of_an_episode_that_comes_back_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "steps.jsonl", "\n".join(map(json.dumps, [*STEPS, STEPS[0]])))
    episodes, refusals = items(path, "huggingface", mapping=COLUMNS, observation="after")
    assert (len(episodes), [(r.record, r.field) for r in refusals]) == (2, [("episode 'a'", "ep")])


def test_rows_that_are_episodes_hold_lists(tmp_path: Path) -> None:
    row = {"acts": ["x", "y"], "obs": ["0", "1", "2"], "won": 1, "note": "n"}
    path = write(tmp_path / "rows.jsonl", json.dumps(row))
    mapping = {"action": "acts", "observation": "obs", "success": "won"}
    episode = only(path, "huggingface", mapping=mapping)  # one observation more: nothing has to be said
    assert (episode.start, [t.observation for t in episode.turns]) == ("0", ["1", "2"])
    assert (episode.success, dict(episode.turns[-1].info)) == (True, {"log.note": "n"})


def test_a_row_without_any_action_is_refused_and_ends_no_import(tmp_path: Path) -> None:
    rows = [{"acts": acts, "obs": acts, "goal": "Find it."} for acts in ([], ["look", "light"])]
    path = write(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    mapping = {"action": "acts", "observation": "obs", "start": "goal"}
    episodes, refusals = items(path, "huggingface", mapping=mapping, observation="before")
    assert ([e.start for e in episodes], len(refusals)) == (["Find it.\nlook"], 1)
    _, refusals = items(path, "huggingface", mapping=mapping | {"action": "actz"})
    assert refusals[0].field == "actz"
    assert "'acts'" in refusals[0].reason


def test_parquet_of_chats_is_read_as_chats(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages, "id": "m1"}]), tmp_path / "chats.parquet")
    episode = only(tmp_path / "chats.parquet")
    assert (episode.id, episode.turns) == ("m1", (Turn("Hello", "", None, True),))


@pytest.mark.parametrize(("suffix", "between"), [(".csv", ","), (".tsv", "\t")])
def test_cells_of_csv_are_texts_but_for_rewards_and_truths(tmp_path: Path, suffix: str, between: str) -> None:
    table = [
        ("run", "goal", "act", "seen", "pay", "over", "good"),
        ("a", "Go.", '"1\n2"', "", "0", "False", ""),
        ("a", "Go.", "7", "ok", "1.5", "True", "true"),
        ("b", "Go.", "7", "ok", "", "False"),
    ]
    path = write(tmp_path / f"a{suffix}", "\n".join(map(between.join, table)))
    mapping = {"episode": "run", "start": "goal", "action": "act", "observation": "seen"}
    mapping |= {"reward": "pay", "done": "over", "success": "good"}
    (episode,), (refusal,) = items(path, mapping=mapping, observation="after")
    turns = [(turn.action, turn.observation, turn.reward) for turn in episode.turns]
    assert turns == [("1\n2", "", 0.0), ("7", "ok", 1.5)]
    assert (episode.success, episode.turns[-1].terminated) == (True, True)
    assert refusal.record == "row 3"


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_is_read_as_parquet_is(tmp_path: Path, stream: bool) -> None:
    table = pa.table({"prompt": ["Hi"], "completion": ["Yo"]})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file:
        writer = (pa.ipc.new_stream if stream else pa.ipc.new_file)(file, table.schema)
        writer.write_table(table)
        writer.close()
    assert only(tmp_path / "a.arrow").turns == (Turn("Yo", "", None, True),)
    (tmp_path / "b.arrow").write_bytes(b"ARROW1 and no more")
    with pytest.raises(UserError, match="is no readable Arrow"):
        only(tmp_path / "b.arrow")


@pytest.mark.parametrize(
    ("broken", "kept", "refused"),
    [(0, "b", "0a"), (1, "b", "1a"), (2, "", "2ab"), (3, "a", "3b"), (4, "a", "4b")],
)
@pytest.mark.parametrize("row", ["no json", '{"ep": null}', '{"ep": ""}', '{"ep": NaN}', '{"cmd": "look"}'])
def test_an_episode_that_may_lack_a_row_is_refused(
    tmp_path: Path, broken: int, kept: str, refused: str, row: str
) -> None:
    lines = [json.dumps({"ep": ep, "cmd": "look", "out": "dark", "goal": ep}) for ep in "aabb"]
    path = write(tmp_path / "steps.jsonl", "\n".join([*lines[:broken], row, *lines[broken:]]))
    mapping = {"episode": "ep", "action": "cmd", "observation": "out", "start": "goal"}
    episodes, refusals = items(path, "huggingface", mapping=mapping, observation="after")
    assert "".join(episode.start for episode in episodes) == kept
    records = [f"line {broken + 1}", *(f"episode '{name}'" for name in refused[1:])]
    assert [refusal.record for refusal in refusals] == records
    assert all(f"line {broken + 1}" in refusal.reason for refusal in refusals[1:])


@pytest.mark.parametrize(
    ("column", "cells", "stop"),
    [
        ("done", ["f", "t"], "terminated"),
        ("done", ["False", "0"], "turn_limit"),
        ("done", True, "terminated"),
        ("done", "False", "turn_limit"),
        ("done", [None, ""], "turn_limit"),
        ("done", [True, True], "is true in step 1, but steps follow"),
        ("done", ["no", "t"], "is 'no' in step 1, not true or false"),
        ("score", [0, 0, 1], "has 3 entries, but there are 2 actions"),
        ("score", [1], "has 1 entries, but there are 2 actions"),
        ("score", [0, 1], "turn_limit"),
    ],
)
def test_ends_and_rewards_are_those_of_the_steps(tmp_path: Path, column: str, cells: Any, stop: str) -> None:
    row = {"acts": ["x", "y"], "obs": ["1", "2"], "goal": "Go.", column: cells}
    mapping = {"action": "acts", "observation": "obs", "start": "goal", {"score": "reward"}.get(column, column): column}
    path = write(tmp_path / "rows.jsonl", json.dumps(row))
    episodes, refusals = items(path, "huggingface", mapping=mapping, observation="after")
    assert [e.stop.value for e in episodes] + [r.reason for r in refusals] == [stop]


def test_a_table_with_two_columns_of_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names two columns 'out'"):
        only(write(tmp_path / "a.csv", "cmd,out,out\na,x,y"))


def test_an_empty_id_is_none(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    rows = [{"messages": messages, "id": "", "task_id": ""}, {"messages": messages[:1] + messages, "id": ""}]
    episodes, refusals = items(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert ([len(episode.id) > 1 for episode in episodes], refusals) == ([True, True], [])
    assert episodes[0].task_id.startswith("task-")


def test_values_of_arrow_are_read_as_json_has_them(tmp_path: Path) -> None:
    paid = {"when": datetime(2026, 1, 2, tzinfo=UTC), "sum": Decimal("1.50"), "raw": b"\xff", "text": b"a"}
    call = {"name": "pay", "arguments": paid}
    chat = [{"role": "user", "content": "Pay."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rows = [{"messages": chat, "reward": Decimal("1.00")}, {"messages": None, "reward": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (episode,), (refusal,) = items(tmp_path / "a.parquet")
    when = '"when": "2026-01-02T00:00:00+00:00"'
    assert episode.turns[0].action == f'pay({{{when}, "sum": 1.5, "raw": "/w==", "text": "a"}})'
    assert (episode.turns[0].reward, refusal.field, refusal.record) == (1, "messages", "row 2")
    assert "no list of messages" in refusal.reason


def test_a_cell_that_is_no_text_is_refused_by_its_column(tmp_path: Path) -> None:
    rows = [{"run": 1, "cmd": "a", "out": "b", "goal": "g"}, {"run": 1, "cmd": {"x": 1}, "out": "b", "goal": "g"}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    mapping = {"episode": "run", "action": "cmd", "observation": "out", "start": "goal"}
    _, (refusal,) = items(path, "huggingface", mapping=mapping, observation="after")
    assert (refusal.field, "step 2" in refusal.reason) == ("cmd", True)
