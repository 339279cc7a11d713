"""If these fail, a dream pays for what nobody declared, or the record does not say who decided that it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagination.settings import Config
from imagination.settings.compose import load_config
from imagination.settings.schema import ConfigError
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.dreamed import steps
from tests.support.scripted import Answering
from worldmodel.rewards import Goal, GoalWorldModel
from worldmodel.world_model import Prediction

WON = Goal(observation=r"You have won", action="^take", earlier=["opened"], reward=0.5)


def turn(action: str, observation: str) -> Turn:
    return Turn(action, observation, None, False)


@pytest.mark.parametrize(
    ("start", "turns", "met"),
    [
        ("opened", [turn("take it", "You have won")], True),
        ("shut", [turn("open", "now opened"), turn("take it", "So: You have won!")], True),
        ("shut", [turn("take it", "You have won, opened")], False),  # not before it
        ("opened", [turn("I take it", "You have won")], False),
        ("opened", [turn("take it", "You have lost")], False),
        ("opened", [turn("take it", "You have won"), turn("take it", "You have won")], False),  # once an episode
        ("opened", [turn("look", "You have won"), turn("take it", "You have won")], True),
    ],
)
def test_a_goal_is_met_by_the_transcript(start: str, turns: list[Turn], met: bool) -> None:
    assert WON.met(start, turns) is met


def scripted(*answers: Prediction) -> Answering:
    return Answering(lambda seen, action: answers[len(seen)])


def test_the_predicate_replaces_reward_and_end_and_the_record_says_so() -> None:
    """The model pays and ends where nothing is met: the policy would learn to go there. It is as sure of the words as
    before: 0.4 = p(words) * 0.5."""
    lies = Prediction("a door", 1.0, True, confidence=0.4, outcome_confidence=0.5, disagreement=0.2)
    misses = Prediction("You have won", 0.0, False, confidence=0.3, outcome_confidence=0.9)
    told = steps(GoalWorldModel(scripted(lies, misses), WON), ["look", "take it"], "opened")  # type: ignore[arg-type]
    assert [(r.reward, r.terminated) for r in told] == [(0.0, False), (0.5, True)]
    assert told[0].info == {
        "confidence": pytest.approx(0.8),
        "outcome_confidence": 1.0,
        "outcome_by": "predicate",
        "disagreement": 0.2,
    }
    assert told[1].info["confidence"] == pytest.approx(1 / 3)
    (plain,) = steps(scripted(replace(lies, disagreement=None)), ["look"], "opened")
    assert (plain.reward, plain.terminated) == (1.0, True)
    assert plain.info == {"confidence": 0.4, "outcome_confidence": 0.5, "outcome_by": "model"}  # no members: no key


def test_a_rule_is_no_surer_of_its_words_where_a_goal_decides() -> None:
    """Both numbers of its answer are its precision, of words and outcome together."""
    rule = Prediction("You cannot.", 0.0, False, confidence=0.99, outcome_confidence=0.99, outcome_by="rule")
    (told,) = steps(GoalWorldModel(scripted(rule), WON), ["look"], "opened")
    assert (told.info["confidence"], told.info["outcome_confidence"]) == (0.99, 1.0)


def test_a_goal_may_pay_without_ending() -> None:
    goal = Goal(observation="ring", reward=-0.25, ends=False)
    answer = Prediction("a ring", 0.0, True, 0.0, 0.0)  # so unlikely that its probability is 0.0
    told = steps(GoalWorldModel(scripted(answer, answer), goal), ["a", "b"], "opened")  # type: ignore[arg-type]
    assert [(r.reward, r.terminated) for r in told] == [(-0.25, False), (0.0, False)]
    assert told[0].info["confidence"] == 0.0


def test_a_logged_episode_as_the_goal_pays_it() -> None:
    """Its own rewards and ends are forgotten, also where they came before or after those of the goal."""
    said = [("open", "now opened", 0.25, False), ("take it", "You have won", 0.0, False), ("look", "A hall", 1.0, True)]
    turns = tuple(Turn(action, observation, reward, end) for action, observation, reward, end in said)
    logged = Trajectory("e", "t", "g", Source.REAL, "a", 0, "shut", turns, StopReason.TERMINATED)
    paid = WON.relabel(logged)
    assert [(turn.action, turn.reward, turn.terminated) for turn in paid.turns] == [
        ("open", 0.0, False),
        ("take it", 0.5, True),
    ]
    assert paid.stop is StopReason.TERMINATED
    assert WON.relabel(replace(logged, success=False)).solved  # the goal decides, which pays 0.5, and not the log
    assert not WON.relabel(replace(logged, turns=turns[::2], success=True)).solved
    goes_on = replace(WON, ends=False).relabel(logged)
    assert [(turn.reward, turn.terminated) for turn in goes_on.turns] == [(0.0, False), (0.5, False), (0.0, False)]
    assert goes_on.stop is StopReason.TURN_LIMIT


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["worldmodel.goal.observation='('"], "no regular expression"),
        (["worldmodel.goal.action=take"], "goal.observation"),
        (["worldmodel.goal.earlier=[a]"], "goal.observation"),
        (["worldmodel.goal.pattern=a"], "unknown key"),
    ],
)
def test_a_wrong_goal_is_told_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides, Config)


def test_no_goal_is_declared_by_default() -> None:
    assert not Config().worldmodel.goal.declared
    with pytest.raises(ValueError, match="declares nothing"):
        GoalWorldModel(scripted(), Goal())  # type: ignore[arg-type]
    config = load_config(["worldmodel.goal.observation='The End'", "worldmodel.goal.earlier=[a,b]"], Config)
    assert config.worldmodel.goal == Goal(observation="The End", earlier=["a", "b"])
