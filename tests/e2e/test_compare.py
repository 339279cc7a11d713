"""Dreams beside reality in a world of our own behind the protocols, and where there is only a log."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagination.cli import main
from imagination.commands.compare import _policy, compare
from imagination.runs.fingerprint import fingerprint
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError
from imagination.settings.compose import load_config
from imagination.settings.schema import ConfigError
from real_envs.env import StepResult, Task
from real_envs.store import TrajectoryStore, is_validation
from real_envs.trajectory import Observation, Trajectory, Turn
from tests.support.oracle import OracleWorldModel
from tests.support.tiny import TASKS, start, tiny_settings
from worldmodel.world_model import Prediction, PredictionInvalid


def corridor(task: str, actions: Sequence[str]) -> list[tuple[str, float, bool]]:
    """What the corridor answers, as plainly as it can be said."""
    way, thing = TASKS[task]
    answers, inside = [], False
    for action in actions:
        if action == f"go {way}" and not inside:
            inside = True
            answers.append((f"You walk {way}. Here is a {thing}.", 0.0, False))
        elif action == f"take {thing}" and inside:
            answers.append((f"You take the {thing}.", 1.0, True))
        else:
            answers.append(("Nothing new.", 0.0, False))
    return answers


class Corridor:
    """The corridor as an ``Env``; ``steps`` counts those of all corridors."""

    steps = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        self._task, self._done = task.id, list[str]()
        return Observation(start(task.id))

    async def step(self, action: str) -> StepResult:
        Corridor.steps += 1
        self._done.append(action)
        text, reward, end = corridor(self._task, self._done)[-1]
        return StepResult(Observation(text), reward, end, False)

    async def close(self) -> None:
        pass


class Corridors:
    """The corridors as a ``TaskSet``."""

    def tasks(self, split: str) -> Sequence[Task]:
        return {"train": [Task(name) for name in TASKS]}[split]

    def make_env(self) -> Corridor:
        return Corridor()


@pytest.fixture(scope="module")
def trained(cloned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a world model and a clone, and no world."""
    return Path(shutil.copytree(cloned, tmp_path_factory.mktemp("runs") / "corridors"))


@pytest.fixture
def config() -> Config:
    settings = tiny_settings()
    settings.compare.policy, settings.compare.episodes, settings.collect.validation = "policy-clone", 6, 0.2
    return settings


def result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "compare.json").read_text()))


def test_without_a_world_logged_episodes_are_dreamed_again(trained: Path, config: Config) -> None:
    compare(config, trained)
    made = result(trained)
    assert [(row["source"], row["split"]) for row in made["aligned"]] == [("log", "train")]
    assert made["free"][0]["real"] is None
    assert made["free"][0]["dream"]["n"] == 2 * 6
    assert made["cost"]["real_steps"] == {"dream": 0, "log": 0}
    assert "cannot be played" in made["notes"][0]
    logged = {e.id: e for e in TrajectoryStore.open(trained / "log").read("train")}
    assert made["pairs"]
    for pair in made["pairs"]:
        episode = logged[pair["id"].removeprefix("log/")]
        assert is_validation(episode.id, 0.2), "the world model was trained on the others"
        real = [(t["action"], t["real"]["observation"]) for t in pair["turns"]]
        assert real == [(turn.action, turn.observation) for turn in episode.turns]
        for turn in pair["turns"]:
            assert turn["kind"] == "alone" or turn["kind"] == "invalid" or turn["dream"] is not None
    assert (trained / "compare.html").stat().st_size > 10_000


def test_in_a_world_behind_the_protocols_dreamed_actions_are_replayed(trained: Path, config: Config) -> None:
    Corridor.steps = 0
    config.compare.logged = 0
    compare(config, trained, Corridors())
    made = result(trained)
    assert [(row["source"], row["pairs"]) for row in made["aligned"]] == [("dream", 12)]
    for pair in made["pairs"]:
        answers = corridor(pair["task_id"], [turn["action"] for turn in pair["turns"]])
        for turn, (text, reward, end) in zip(pair["turns"], answers, strict=True):
            if turn["real"] is None:
                break  # the corridor had ended
            assert (turn["real"]["observation"], turn["real"]["reward"], turn["real"]["terminated"]) == (
                text,
                reward,
                end,
            )
            right = turn["dream"] and turn["dream"]["observation"].split() == text.split()
            assert (turn["kind"] in ("same", "reward", "end")) == bool(right)
    free = made["free"][0]
    assert free["real"]["n"] == free["replayed"]["n"] == 12
    assert sum(made["cost"]["real_steps"].values()) == Corridor.steps > 0
    tokens = made["cost"]["generated_tokens"]
    assert tokens["replay"] == 0 < tokens["real"]
    assert tokens["dream"] > tokens["real"] / 2, "the dream's own words count, too"
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["real_steps"]["compare"] == Corridor.steps


def oracle(**more: Any) -> OracleWorldModel:
    return OracleWorldModel(Corridor, {start(name): Task(name) for name in TASKS}, **more)


def test_a_perfect_world_model_never_parts(trained: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "world_model", lambda *arguments: oracle())
    compare(config, trained, Corridors())
    made = result(trained)
    assert {pair["source"] for pair in made["pairs"]} == {"dream", "log"}
    assert [row["first"] for row in made["aligned"]] == [{"never": row["pairs"]} for row in made["aligned"]]
    free = made["free"][0]
    assert free["dream"]["success"] == free["replayed"]["success"] == free["real"]["success"]
    assert free["optimism_gap"]["value"] == 0.0
    if free["real"]["success"]:
        assert free["ratio"] == free["pairwise"] == 1.0
    # the same seeds and the same answers: the policy does the same, token by token
    assert free["tokens"]["observations"]["jsd_bits"] == pytest.approx(0.0, abs=1e-9)


class Mumbling:
    """An oracle whose second answer can never be read."""

    version = "mumbling"

    def __init__(self) -> None:
        self._oracle = oracle()

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        if history:
            raise PredictionInvalid("no status line")
        return replace(await self._oracle.predict(start, history, action, seed, session), confidence=0.5)

    def excluding(self, episodes: Sequence[Trajectory]) -> Mumbling:
        return self

    def release(self, session: object) -> None:
        self._oracle.release(session)


def test_an_unreadable_answer_is_shown_beside_what_the_world_said(
    trained: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "world_model", lambda *arguments: Mumbling())
    compare(config, trained, Corridors())
    pairs = result(trained)["pairs"]
    assert {pair["source"] for pair in pairs} == {"dream", "log"}
    for pair in pairs:
        assert [turn["kind"] for turn in pair["turns"][:2]] == ["same", "invalid"]
        assert (pair["dream"]["outcome"], pair["comparable"], pair["first"]) == ("invalid", True, 1)
        last = pair["turns"][1]
        actions = [turn["action"] for turn in pair["turns"][:2]]
        assert last["real"]["observation"] == corridor(pair["task_id"], actions)[1][0]
    config.dream.min_confidence = 0.9
    compare(config, trained, Corridors())
    assert {pair["dream"]["outcome"] for pair in result(trained)["pairs"]} == {"unsure"}
    config.compare.guard = False
    compare(config, trained, Corridors())
    assert {pair["dream"]["outcome"] for pair in result(trained)["pairs"]} == {"invalid"}


def test_only_the_log_without_a_policy(trained: Path, config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    config.compare.policy = ""
    compare(config, trained)
    made = result(trained)
    assert made["free"] == []
    assert {pair["source"] for pair in made["pairs"]} == {"log"}
    assert "logged episodes" in capsys.readouterr().out


def test_one_pair_in_the_terminal(trained: Path, config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    compare(config, trained)
    before = (trained / "compare.json").stat().st_mtime_ns
    pair = result(trained)["pairs"][0]
    capsys.readouterr()
    words = [f"run={trained.name}", f"output={trained.parent}", "preset=tiny"]
    assert main(["compare", *words, f"compare.show={pair['id']}"]) == 0
    printed = capsys.readouterr().out
    assert pair["id"] in printed
    assert pair["turns"][0]["action"] in printed
    assert (trained / "compare.json").stat().st_mtime_ns == before, "nothing is played to show a pair"
    assert main(["compare", *words, f"compare.show={pair['id']}x"]) == 2
    assert f"did you mean '{pair['id']}'?" in capsys.readouterr().err


def test_mistakes_are_told_with_what_to_do(trained: Path, config: Config, tmp_path: Path) -> None:
    config.compare.show = "x"
    with pytest.raises(UserError, match="run `imagine compare`"):
        compare(config, tmp_path)
    config.compare.show = ""
    with pytest.raises(UserError, match="collect episodes first"):
        compare(config, tmp_path)
    config.compare.splits = ["trian"]
    with pytest.raises(UserError, match="did you mean 'train'"):
        compare(config, trained)
    config.compare.splits, config.compare.policy = [], "polixy"
    with pytest.raises(UserError, match="polixy"):
        compare(config, trained)
    with pytest.raises(ConfigError, match=r"compare\.episodes"):
        load_config(["compare.episodes=-1"], Config)


def test_looking_at_a_run_does_not_change_what_it_is() -> None:
    one, other, third = Config(), Config(), Config(seed=1)
    other.compare.episodes, other.compare.policy = 3, "policy-clone"
    assert fingerprint(one) == fingerprint(other) != fingerprint(third)


def test_a_folder_of_the_same_name_in_the_working_directory_is_no_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").mkdir()  # such as that of the sources, where `imagine` is called
    with pytest.raises(UserError, match=r"models/policy"):
        _policy(Session(Config(), RunFolder(tmp_path / "run", 0)))
