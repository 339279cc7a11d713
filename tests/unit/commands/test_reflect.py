"""If these fail, a policy learns to think what nobody is sure of, or a dream that speaks against the expert.

The world model is a table of predictions, so that each reason for leaving an action out can be planted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from imagination.commands import reflect as stage
from imagination.commands.reflect import Alternatives
from imagination.data.augmentation import with_reflections
from imagination.rollout.dream_env import Guard
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.session import Log, Policy, Session
from imagination.settings import Config, UserError
from imagination.settings.compose import load_config
from policy.lm.engine import ContextFull
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.scripted import CHAT, Answering, Says, Table, says
from worldmodel.rewards import GoalWorldModel
from worldmodel.world_model import Prediction, PredictionInvalid

EXPERT = Trajectory(
    "e", "t", "g", Source.EXPERT, "expert", 0, "HALL",
    (Turn("open box", "The box is open now.", 0.0, False), Turn("take key", "Taken.", 1.0, True, {"score": 1.0})),
    StopReason.TERMINATED, world_facts=("the key is in the box",),
)  # fmt: skip


def ask(world: Table, proposals: Sequence[Sequence[str]]) -> tuple[list[list[tuple[str, str]]], dict[str, int]]:
    async def propose(episode: Trajectory, k: int) -> Sequence[str]:
        return proposals[k]

    asked = Alternatives(world, Guard(0.5, 0.9), propose, 0, Bar("reflect", 1))
    return asyncio.run(asked.others(EXPERT)), dict(asked.counts)


def test_only_outcomes_that_are_sure_and_speak_for_the_expert_are_told() -> None:
    answers: dict[str, Prediction | Exception] = {
        "look": says("HALL"),
        "doubt": says("Perhaps.", confidence=0.49),
        "doubt end": says("The End", reward=-1.0, sure=0.8),
        "broken": PredictionInvalid("no status"),
        "full": ContextFull("full"),
        "same": says("The box is open now."),
        "better": says("A treasure!", reward=0.5),
    }
    world = Table({**answers, "wait": says("You wait.", reward=1.0)})
    found, counts = ask(world, [list(answers), ["wait"]])
    assert found == [[("look", "HALL")], [("wait", "You wait.")]]  # where one earns 1, another that does is no better
    assert counts == {"told": 2, "unsure": 2, "invalid": 1, "context_full": 1, "no_contrast": 2}
    assert world.asked[0] == (0, "look")
    assert world.asked[-1] == (1, "wait")  # in the state after the expert's first action
    assert world.released == ["e"]


def test_an_outcome_that_the_declared_goal_pays_speaks_for_no_expert(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The log pays the expert as much for what is no goal."""
    config = load_config(["run=r", "worldmodel.goal.observation=treasure"], Config)
    other = replace(EXPERT, id="o", agent="noisy", source=Source.REAL, turns=(Turn("dig", "A treasure!", 0.0, False),))
    world = GoalWorldModel(Answering(lambda seen, action: says("A treasure!")), config.worldmodel.goal)
    session = Mock(log=Log([EXPERT, other], []))
    session.world_model.return_value, session.guard.return_value = world, Guard(0.5, 0.9)
    monkeypatch.setattr(stage, "Session", lambda *_: session)
    with pytest.raises(UserError, match="no_contrast"):
        stage.reflect(config, tmp_path)


def test_a_reflection_tells_the_others_then_what_really_happened() -> None:
    told = with_reflections(EXPERT, [[("look", "HALL")], []], words=3)
    assert told is not None
    assert told.turns[0].info == {"reasoning": "look: HALL\nopen box: The box is\nSo open box."}
    assert told.turns[1].info == {}
    assert [(t.action, t.observation, t.reward) for t in told.turns] == [
        (t.action, t.observation, t.reward) for t in EXPERT.turns
    ]
    assert (told.id, told.agent, told.world_facts) == ("reflections/e", "reflections/expert", ())
    assert with_reflections(EXPERT, [[], []], words=3) is None


def test_a_policy_proposes_what_it_would_do_and_never_the_experts_action(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Told twice it is one proposal; of a thought only the action counts; what does not end is none."""
    engine = Says("open box", "wait", "Hm.\n[action]\ndance", "wait", "no end" * 40)
    config = Config(max_action_tokens=60)
    config.reflect.proposer, config.reflect.alternatives = "policy-clone", 5
    session = Session(config, RunFolder(tmp_path, 0))
    monkeypatch.setattr(session, "policy", lambda *_: Policy(Mock(), CHAT))
    monkeypatch.setattr(session, "agent", lambda *_: Mock(engine=engine))
    propose = stage.asked_policy(session)
    assert asyncio.run(propose(EXPERT, 0)) == ["wait", "dance"]  # type: ignore[arg-type]  # it is a coroutine
