"""The other kinds of world model go through the stages: trained, loaded, dreamed in and judged as they were set."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import imagination.commands.train as train_stage
from imagination.commands.audit import run_audit
from imagination.commands.clone import clone
from imagination.commands.compare import compare
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.train import train
from imagination.runs.log import read_log
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError, WorldModelSettings
from policy.lm.engine import EngineCannotScore
from policy.lm.settings import EngineSettings
from real_envs.trajectory import StopReason, Trajectory
from tests.support.killing import summary_of
from worldmodel.ensemble import EnsembleWorldModel
from worldmodel.evaluation.transitions import judge
from worldmodel.rewards import Goal


def through(config: Config, run: Path) -> list[dict[str, Any]]:
    """The rollouts that training wrote."""
    fit_world_model(config, run)
    clone(config, run)
    config.train.updates = 2
    train(config, run)
    return [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]


def looked_at(config: Config, run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ``audit`` and ``compare`` say of the run."""
    config.compare.episodes = config.compare.logged = 2
    compare(config, run)
    return run_audit(config, run), json.loads((run / "compare.json").read_text())


def own_turns(rollouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [turn for row in rollouts for turn in row["turns"][row["prefix_turns"] :]]


@pytest.mark.parametrize("kind", ["delta", "retrieval"])
def test_a_kind_learns_is_judged_and_dreamed_in(tiny: Config, run: Path, kind: Any) -> None:
    tiny.worldmodel.kind = kind
    tiny.worldmodel.context, tiny.fit.steps = 512, 400
    rollouts = through(tiny, run)
    found = summary_of(run)
    assert found["world_model"]["exact_match"] > 0.5, found["world_model"]
    assert found["world_model"]["n"] > 0
    assert found["real_steps"]["train"] == 0
    turns = own_turns(rollouts)
    assert turns
    assert {turn["info"]["outcome_by"] for turn in turns} == {"model"}
    assert all("disagreement" not in turn["info"] for turn in turns)
    assert not any(turn["observation"].startswith("=") for turn in turns)  # an edit is applied, never shown

    audited, compared = looked_at(tiny, run)
    assert audited["sets"]["held_out"]["text"]["value"] > 0.5
    assert audited["sets"]["held_out"]["n"] == found["world_model"]["n"]
    assert audited["sets"]["held_out"]["exact"]["value"] == found["world_model"]["exact_match"], (
        "one and the same audit"
    )
    assert {pair["source"] for pair in compared["pairs"]} == {"log"}
    kinds = [turn["kind"] for pair in compared["pairs"] for turn in pair["turns"]]
    assert kinds.count("same") > len(kinds) / 4

    tiny.worldmodel.kind = "text"  # the same weights read as something else would dream nonsense
    with pytest.raises(UserError, match=f"trained as {kind}.*fit-world-model"):
        Session(tiny, RunFolder(run, 0)).world_model((), 0.0)


def test_an_ensemble_is_several_models_and_its_turns_say_how_far_they_agree(tiny: Config, run: Path) -> None:
    tiny.worldmodel.members = 2
    turns = own_turns(through(tiny, run))
    assert all(0 <= turn["info"]["disagreement"] <= 0.7 for turn in turns)
    first, second = (run / "models" / name for name in ("worldmodel", "worldmodel-1"))
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    a, b = (dict(AutoModelForCausalLM.from_pretrained(path).state_dict()) for path in (first, second))
    assert all((a[name] != b[name]).any() for name in a if "embed" in name or "proj" in name)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["stage"] for row in rows} >= {"fit_world_model", "fit_world_model-1"}
    assert set(summary_of(run)["wall_seconds"]) == {"fit_world_model", "clone", "train"}
    assert list((run / "checkpoints").glob("fit_world_model*")) == []

    folder = RunFolder(run, 0)
    model = Session(tiny, folder).world_model((), 0.0)
    assert isinstance(model, EnsembleWorldModel)
    _, held = read_log(folder, tiny.collect.validation)
    judged = asyncio.run(judge(model, held))
    assert all(j.predicted is None or j.predicted.disagreement is not None for j in judged)
    audited, compared = looked_at(tiny, run)  # members score in engines that count tokens as well
    assert audited["sets"]["held_out"]["n"] > 0
    assert compared["cost"]["generated_tokens"]["dream"] > 0
    assert compared["world_model_version"] == audited["world_model"]["version"] == model.version
    tiny.audit.world_model = "worldmodel-1"  # a member can be audited alone
    assert run_audit(tiny, run)["world_model"]["version"] not in (model.version, audited["world_model"]["version"])
    assert (run / "audit-worldmodel-1.html").exists()
    for engine in (
        EngineSettings(name="openai", url="http://127.0.0.1:1/v1", served_model="w"),
        EngineSettings(name="vllm"),
    ):
        tiny.engine = engine
        with pytest.raises(EngineCannotScore, match=r"worldmodel\.members=1"):
            Session(tiny, folder).world_model((), 0.0)
    tiny.engine, tiny.worldmodel.members = EngineSettings(), 3
    with pytest.raises(UserError, match="worldmodel-2"):
        Session(tiny, folder).world_model((), 0.0)


def test_a_declared_goal_decides_in_dreams(tiny: Config, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "You walk" pays and ends here, whatever the world model has learned to pay for."""
    watched: list[Sequence[Trajectory]] = []
    watch = train_stage._watch

    def listen(*given: Any) -> Any:
        watched.append(given[2].log)
        return watch(*given)

    monkeypatch.setattr(train_stage, "_watch", listen)
    tiny.worldmodel.goal.observation = "You walk"
    tiny.worldmodel.goal.reward = 0.25
    tiny.clone.steps, tiny.clone.lr = 240, 1e-2  # a policy that says commands
    tiny.fit.steps = 400  # and a world model that does not let it walk by taking books
    tiny.tripwires.enabled = True
    rollouts = through(tiny, run)
    turns = own_turns(rollouts)
    assert {turn["info"]["outcome_by"] for turn in turns} == {"predicate"}
    before = [turn for row in rollouts for turn in row["turns"][: row["prefix_turns"]]]
    assert not any("You walk" in turn["observation"] for turn in before), "it began where it was over"
    walked = [turn for turn in turns if "You walk" in turn["observation"]]
    assert walked
    assert {(turn["reward"], turn["terminated"]) for turn in walked} == {(0.25, True)}
    # the tripwires read the log as the goal pays it, not as it was paid
    logged = [turn for t in watched[0] for turn in t.turns]
    assert {(u.reward, u.terminated) for u in logged if "You walk" in u.observation} == {(0.25, True)}
    assert {u.reward for u in logged if "You walk" not in u.observation} == {0.0}
    assert {(t["reward"], t["terminated"]) for t in turns if t not in walked} <= {(0.0, False)}
    assert {row["stop"] for row in rollouts} <= {StopReason.TERMINATED, StopReason.TURN_LIMIT, "prediction_invalid"}

    walks = sum(
        "You walk" in turn.observation
        for t in read_log(RunFolder(run, 0), tiny.collect.validation)[1]
        for turn in t.turns
    )
    card = summary_of(run)["world_model"]
    assert walks > 0
    assert card["reward_precision"] > 0.5  # judged by what the goal pays, walking: taking things is 0 of it
    folder = RunFolder(run, tiny.seed)
    tiny.dream.min_probability = 0.5
    assert Session(tiny, folder).guard().calibration is not None
    tiny.dream.temperature = 0.25
    with pytest.raises(UserError, match=r"dream\.temperature=1"):
        Session(tiny, folder).guard()
    tiny.dream.temperature, tiny.worldmodel.goal = 1.0, Goal()
    with pytest.raises(UserError, match=r"worldmodel\.goal\.observation='You walk'"):
        Session(tiny, folder).guard()
    (run / "models/worldmodel/calibration.json").unlink()
    with pytest.raises(UserError, match="run `imagine fit-world-model`"):
        Session(tiny, folder).guard()


def test_the_balance_is_set_and_reported(tiny: Config, run: Path) -> None:
    tiny.fit.steps = 2
    fit_world_model(tiny, run)
    found = summary_of(run)["world_model"]["unchanged_share"]
    tiny.worldmodel.refusals, tiny.worldmodel.unchanged_share = "^Nothing new", 0.125
    fit_world_model(tiny, run)
    assert found != 0.125
    assert summary_of(run)["world_model"]["unchanged_share"] == pytest.approx(0.125)
    tiny.worldmodel.refusals = "^no such text"
    tiny.worldmodel.unchanged_share = 0.5
    log, _ = read_log(RunFolder(run, 0), tiny.collect.validation)
    again = any(b.observation == a.observation for t in log for a, b in zip(t.turns, t.turns[1:], strict=False))
    assert again  # "Nothing new." twice in a row
    fit_world_model(tiny, run)
    assert summary_of(run)["world_model"]["unchanged_share"] == pytest.approx(0.5)


def test_a_stage_that_was_cut_off_leaves_no_model_that_looks_whole(
    tiny: Config, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.fit.steps = 2
    fit_world_model(tiny, run)
    tiny.worldmodel.kind = "delta"
    with monkeypatch.context() as patch:
        patch.setattr(
            "imagination.commands.fit_world_model.SupervisedTrainer",
            lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        with pytest.raises(KeyboardInterrupt):
            fit_world_model(tiny, run)
    for kind in ("text", "delta"):
        tiny.worldmodel.kind = kind  # type: ignore[assignment]
        with pytest.raises(UserError, match="to its end"):
            Session(tiny, RunFolder(run, 0)).world_model((), 0.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"members": 0}, "members"),
        ({"neighbours": 0}, "neighbours"),
        ({"unchanged_share": 1.0}, "unchanged_share"),
        ({"refusals": "("}, "regular expression"),
        ({"members": 2, "model": "some/checkpoint"}, r"lora\.rank"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorldModelSettings(**wrong)
