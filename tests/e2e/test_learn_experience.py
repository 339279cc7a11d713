"""If these fail, what a policy reads of earlier attempts is not what was learned from them, or is trained on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagination.commands import learn_experience as stage
from imagination.commands.learn_experience import learn_experience
from imagination.commands.train import train
from imagination.data.experiences import changed, contrast, question
from imagination.learning import collector
from imagination.learning.experience import policy_rows
from imagination.runs.fingerprint import fingerprint
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError
from policy.lm.batch import Row
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.judging import Answer, judge, says
from tests.support.loops import play_in_corridors
from tests.support.tiny import tiny_settings
from tests.support.worlds import Lottery, plant

LUCK = "Act twice and hope."


def attempt(reward: float, *actions: str) -> Trajectory:
    turns = tuple(Turn(action, f"You {action}.", reward * (k == 1), False) for k, action in enumerate(actions, start=1))
    return Trajectory("e", "t", "g", Source.DREAM, "policy", 0, "ATTIC\nGo.", turns, StopReason.TERMINATED)


def change(operation: str, **rest: Any) -> dict[str, Any]:
    return {"operation": operation, **rest}


@pytest.mark.parametrize(
    ("changes", "after", "invalid"),
    [
        ([], ["a", "b"], 0),
        ([change("add", text=" c \n d ")], ["a", "b", "c d"], 0),
        # numbers are those of the list that was shown, whatever was deleted before
        ([change("delete", number=1), change("modify", number=2, text="B"), change("add", text="c")], ["B", "c"], 0),
        ([change("add", text="a"), change("modify", number=2, text="a")], ["a"], 0),
        ([change("add", text=x) for x in "cdef"], ["a", "b", "c", "d"], 0),
        (
            [change("delete", number=3), change("modify", number=0, text="x"), change("delete", number=True)],
            ["a", "b"],
            3,
        ),
        (
            [change("add"), change("add", text=3), change("modify", number=1), change("rename", text="x"), 7],
            ["a", "b"],
            5,
        ),
    ],
)
def test_a_list_is_changed_as_the_answer_says(changes: list[Any], after: list[str], invalid: int) -> None:
    assert changed(["a", "b"], f"Here: {json.dumps(changes)} That is all.", most=4) == (after, invalid)


@pytest.mark.parametrize("answer", ["", "none", "][", "[{]", '{"operation": "add"}'])
def test_an_answer_that_is_no_list_changes_nothing(answer: str) -> None:
    assert changed(["a", "b"], answer, most=4) == (["a", "b"], 1)


def test_the_action_that_sets_the_best_apart_is_found_by_counting() -> None:
    """look: 2 of 2 and 2 of 2; take: 1 of 2 and 0 of 2; go: 2 of 2 and 1 of 2; run: 1 of 2 and 0 of 2, later."""
    group = [attempt(1, "look", "take", "go"), attempt(1, "look", "run", "go"), attempt(0.5, "fly")]
    group += [attempt(0, "look", "go"), attempt(0, "look")]
    told, invalid = changed([], contrast(group), 9)
    assert told == ['Where it says "ATTIC Go.": the best attempts did "take", the worst did not.']
    assert not invalid
    assert changed([], contrast([attempt(1, "go"), attempt(0, "go", "take")]), 9) == ([], 0)
    shown = question(group, ["Do not fly."])
    assert "1. Do not fly." in shown
    earned = [line.split()[-1] for line in shown.splitlines() if line.startswith("ATTEMPT")]
    assert earned == ["1", "1", "0.5", "0", "0"]


@pytest.fixture
def config(cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of a run in ``tmp_path`` that is cloned, in a world in which some episodes of each group win by luck."""
    shutil.copytree(cloned, tmp_path, dirs_exist_ok=True)
    plant(monkeypatch, Lottery, stage)
    plant(monkeypatch, Lottery)
    config = tiny_settings()
    config.learn_experience = replace(config.learn_experience, rounds=2, group_size=8, model="m", retries=0)
    return config


def written(folder: Path) -> list[str]:
    found: list[str] = json.loads((folder / "models/experience.json").read_text())["experiences"]
    return found


def test_a_server_writes_the_list_and_a_training_reads_it(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees each group with what its attempts earned, and from its first change on the list so far; only tokens that
    the policy samples are trained."""

    def answer(asked: str) -> Answer:
        if "none yet" in asked:
            return says(json.dumps([change("add", text="Look."), change("add", text=LUCK)]))
        return says(f"I see. {json.dumps([change('delete', number=1)] * ('1. Look.' in asked))}")

    with judge(answer) as server:
        config.learn_experience.url = server.url
        learn_experience(config, tmp_path)
    assert written(tmp_path) == [LUCK]
    assert len(server.asked) == 4  # two rounds of two tasks
    assert all(asked.count("ATTEMPT, earned ") == 8 for asked in server.asked)
    assert all("ATTEMPT, earned 1\n" in asked and "ATTEMPT, earned 0\n" in asked for asked in server.asked)
    assert f"1. Look.\n2. {LUCK}" in server.asked[1]
    assert f"1. {LUCK}\n\n" in server.asked[2]
    lines = RunFolder(tmp_path, 0).metrics("learn_experience")
    assert [(line["groups"], line["failed"], line["invalid"]) for line in lines] == [(2, 0, 0), (4, 0, 0)]

    rows: list[Row] = []
    monkeypatch.setattr(collector, "policy_rows", lambda *args: rows.extend(policy_rows(*args)) or rows[:])
    config.experience, config.train.updates = "experience.json", 1
    train(config, tmp_path)
    chat = Session(config, RunFolder(tmp_path, 0)).policy().chat
    for row in rows:
        assert LUCK in chat.decode(row.ids[: int(row.action_mask.nonzero()[0])].tolist())
        assert LUCK not in chat.decode(row.ids[row.action_mask].tolist())
    without = Session(replace(config, experience=""), RunFolder(tmp_path, 0)).policy().chat
    assert chat.opening[: len(without.opening)] == without.opening != chat.opening

    trained = fingerprint(config, "train")
    assert RunFolder(tmp_path, 0).summary["done"]["train"] == trained
    config.learn_experience = replace(config.learn_experience, url="", rounds=1)
    learn_experience(config, tmp_path)
    assert RunFolder(tmp_path, 0).summary["done"]["train"] != trained, "it has read another list"


def test_without_a_server_the_list_is_learned_by_contrast(config: Config, tmp_path: Path) -> None:
    learn_experience(config, tmp_path)
    assert written(tmp_path)
    assert all(text.startswith('Where it says "You stand in a corridor.') for text in written(tmp_path))
    assert RunFolder(tmp_path, 0).summary["real_steps"]["learn_experience"] == 0


def test_real_steps_are_counted(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_in_corridors(patch=monkeypatch.setattr)
    config.learn_experience = replace(config.learn_experience, world="real", tasks=1, group_size=2)
    learn_experience(config, tmp_path)
    assert 4 <= RunFolder(tmp_path, 0).summary["real_steps"]["learn_experience"] <= 20


def test_what_is_missing_is_told(config: Config, tmp_path: Path) -> None:
    config.learn_experience.url = "http://127.0.0.1:9/v1"
    with pytest.raises(UserError, match=r"learn_experience\.url: no question was answered"):
        learn_experience(config, tmp_path)
    config.experience = "experience.json"
    with pytest.raises(UserError, match="imagine learn-experience"):
        train(config, tmp_path)
    (tmp_path / "models/experience.json").write_text('{"experiences": [3]}')
    with pytest.raises(UserError, match="no list"):
        train(config, tmp_path)
