"""RL of the world model on logged turns: a half-trained one gets better, and a spoiled one is not promoted."""

from __future__ import annotations

import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.refine_world_model import Answers, no_worse, refine_world_model
from imagination.learning.policy_module import PolicyModule, Update
from imagination.rollout.engines import Engines
from imagination.rollout.world_models import form_of
from imagination.runs.fingerprint import state
from imagination.runs.log import read_log
from imagination.runs.models import load_model, weights_version
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError
from policy.lm.settings import EngineSettings
from real_envs.trajectory import Trajectory
from tests.support.killing import summary_of
from tests.support.tiny import tiny_settings, write_log
from worldmodel.objective import transition_weights
from worldmodel.rewards import Goal


def version(folder: Path) -> str:
    return weights_version(AutoModelForCausalLM.from_pretrained(folder))


def misheard(episode: Trajectory) -> Trajectory:
    """The same, but of three walks two show nothing: a model of this answers walks rightly now and then only."""
    rng = random.Random(episode.id)
    wrong = [turn.observation.startswith("You walk") and rng.random() < 2 / 3 for turn in episode.turns]
    turns = (replace(t, observation="Nothing new.") if w else t for t, w in zip(episode.turns, wrong, strict=True))
    return replace(episode, turns=tuple(turns))


def half_trained_settings() -> Config:
    config = tiny_settings()
    config.collect.validation, config.fit.steps = 0.3, 300
    config.refine.updates, config.refine.turns, config.refine.group_size, config.refine.lr = 15, 16, 6, 1e-3
    return config


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose world model was fitted to a log that was not heard rightly, before the right log."""
    folder = tmp_path_factory.mktemp("half-trained")
    write_log(folder, misheard)
    fit_world_model(half_trained_settings(), folder)
    shutil.rmtree(folder / "log")
    write_log(folder)
    return folder


def test_a_half_trained_world_model_gets_better(half_trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(half_trained, tmp_path / "run"))
    before = version(run / "models/worldmodel")
    RunFolder(run, 0).update({"done": {"train": "by the model before"}})
    refine_world_model(half_trained_settings(), run)
    told = summary_of(run)["refined"]
    assert isinstance(told, dict)
    assert told["promoted"]
    assert state(half_trained_settings(), run, "train") == "not done"
    assert told["after"] > told["before"] + 0.05, told
    assert version(run / "models/worldmodel-before") == before
    assert version(run / "models/worldmodel") != before
    assert (run / "models/worldmodel/calibration.json").exists()
    lines = RunFolder(run, 0).metrics("refine_world_model")
    assert [line["step"] for line in lines] == list(range(15))
    assert lines[0]["expert_loss"] > 0  # logged episodes take part


def test_refining_has_a_length_and_an_imitation_of_its_own(
    half_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate that falls over the policy's two updates would be below 0 in the third; an expert's advantage is nobody's
    here, and what is logged would teach nothing."""
    run, config = Path(shutil.copytree(half_trained, tmp_path / "run")), half_trained_settings()
    config.refine.updates, config.train.updates, config.train.lr_end, config.train.expert_form = 3, 2, 0.1, "luffy"
    rates: list[float] = []
    honest = PolicyModule._optimise

    def optimise(self: PolicyModule, batch: Any, update: Update, optimizer: Any) -> Any:
        rates.append(optimizer.param_groups[0]["lr"])
        return honest(self, batch, update, optimizer)

    monkeypatch.setattr(PolicyModule, "_optimise", optimise)
    refine_world_model(config, run)
    assert rates == pytest.approx([1e-3, 5.5e-4, 1e-4])
    assert all(line["expert_loss"] > 0 for line in RunFolder(run, 0).metrics("refine_world_model"))


def test_a_log_without_rewards_is_refined_by_the_declared_goal(half_trained: Path, tmp_path: Path) -> None:
    run, config = Path(shutil.copytree(half_trained, tmp_path / "run")), half_trained_settings()
    shutil.rmtree(run / "log")
    write_log(run, lambda t: replace(t, turns=tuple(replace(turn, reward=None) for turn in t.turns)))
    config.refine.updates, config.worldmodel.goal = 1, Goal(observation="You walk")
    refine_world_model(config, run)
    assert RunFolder(run, 0).metrics("refine_world_model")[0]["failures"] == 0


@pytest.mark.parametrize("metric", ["behr", "embedding"])
def test_a_frozen_model_judges_what_is_predicted(half_trained: Path, tmp_path: Path, metric: str) -> None:
    run, config = Path(shutil.copytree(half_trained, tmp_path / "run")), half_trained_settings()
    shutil.copytree(run / "models/worldmodel", run / "models/policy-clone")
    config.refine.metric, config.refine.updates = metric, 2  # type: ignore[assignment]
    config.refine.distance = 2.0  # nothing is further away
    refine_world_model(config, run)
    for line in RunFolder(run, 0).metrics("refine_world_model"):
        assert line["exact_sampled"] < line["reward"] <= 1  # what is exact pays 1, what is similar something


def test_a_spoiled_world_model_takes_nobodys_place(half_trained: Path, tmp_path: Path) -> None:
    run, config = Path(shutil.copytree(half_trained, tmp_path / "run")), half_trained_settings()
    before = version(run / "models/worldmodel")
    config.refine.lr, config.refine.updates = 0.5, 3
    refine_world_model(config, run)
    told = summary_of(run)["refined"]
    assert isinstance(told, dict)
    assert not told["promoted"]
    assert told["after"] < told["before"]
    assert version(run / "models/worldmodel") == before
    assert version(run / "models/worldmodel-refined") != before


@pytest.mark.parametrize("kind", ["text", "delta"])
def test_rows_train_what_was_sampled_and_nothing_else(tiny: Config, run: Path, kind: str) -> None:
    tiny.worldmodel.kind = kind  # type: ignore[assignment]
    tiny.fit.steps, tiny.refine.supervised_share = 60, 0.0
    fit_world_model(tiny, run)
    train, _ = read_log(RunFolder(run, 0), tiny.collect.validation)
    model, chat = load_model(run / "models/worldmodel", "fit-world-model", tiny.worldmodel)
    engine = Engines(tiny.engine).make(model, chat, 256)
    weights = transition_weights(train)
    answers = Answers(engine, chat, form_of(tiny.worldmodel, train), train, weights, tiny)
    update = answers.update(0)
    assert update.rows
    assert update.exact
    rounded = Engines(EngineSettings(dtype="bfloat16")).make(model, chat, 256)
    assert not replace(answers, engine=rounded).update(0).exact
    assert [row.ids.tolist() for row in update.rows] == [row.ids.tolist() for row in answers.update(0).rows]
    for row in update.rows:
        made = [i for i, m in enumerate(row.action_mask) if m]
        assert made == list(range(made[0], len(row.ids)))
        for i in range(len(row.ids)):
            trained = i in made
            assert (row.rl_weight[i] != 0) == trained == (not math.isnan(row.behavior_logprobs[i]))
            assert (row.turns[i] == 0) == trained
        assert len(row.rewards) == 1, "an answer is one turn"
    groups = {int(row.group) for row in update.rows}
    for group in groups:
        assert len({float(row.rewards) for row in update.rows if row.group == group}) > 1, "equal answers teach nothing"


def test_what_cannot_work_is_said_at_once(tiny: Config, run: Path) -> None:
    tiny.refine.group_size = 1
    with pytest.raises(UserError, match=r"refine\.group_size must be 2 or more"):
        refine_world_model(tiny, run)
    tiny.refine.group_size, tiny.worldmodel.members = 4, 2
    with pytest.raises(UserError, match=r"set worldmodel\.members=1"):
        refine_world_model(tiny, run)
    tiny.worldmodel.members, tiny.collect.validation = 1, 0.0
    with pytest.raises(UserError, match=r"raise collect\.validation"):
        refine_world_model(tiny, run)


@pytest.mark.parametrize(
    ("before", "after", "promoted"),
    [
        ((0.9, 0), (0.9, 0), True),
        ((0.9, 0), (0.89, 0), False),
        ((0.9, 0), (0.99, 1), False),  # it broke on a turn that the other had to answer
        ((0.9, 2), (0.91, 1), True),
        ((0.9, 0), (None, 40), False),
        ((None, 40), (0.9, 0), True),
    ],
)
def test_a_refined_model_that_breaks_more_often_is_not_promoted(
    before: tuple[float | None, int], after: tuple[float | None, int], promoted: bool
) -> None:
    one, other = ({"exact_match": exact, "failed": failed} for exact, failed in (before, after))
    assert no_worse(one, other) is promoted
