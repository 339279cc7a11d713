"""What a reward needs is found in the log. If this fails, dreams pay for what the world does not, or pay nothing."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.scripted import Answering
from worldmodel.rules.conditions import Condition
from worldmodel.rules.episode import EpisodeText, Language
from worldmodel.rules.invariants import OUTCOME, Invariant
from worldmodel.rules.mine import mine_rules
from worldmodel.rules.rule_set import RuleSet
from worldmodel.rules.templates import Templates
from worldmodel.rules.world_model import RuledWorldModel
from worldmodel.world_model import Prediction

NO = "Unknown action."
THINGS = [f"{colour} {thing}" for colour in ("red", "blue", "grey") for thing in ("ball", "key", "box")]
ACTIONS = {"walk on": 10, "walk back": 2, "wait": 2, "dance": 1, "sing": 1, "jump": 1}


def walk(seed: int) -> Trajectory:
    """A corridor with two things ahead; who stands before the one that the task names is paid, and the walk is over."""
    rng = random.Random(seed)
    goal, other = rng.sample(THINGS, 2)
    ahead = {goal: rng.randint(2, 5), other: rng.randint(2, 5)}

    def view() -> str:
        return "\n".join([*(f"a {thing}: {n} ahead" for thing, n in ahead.items() if n > 0), "You carry nothing."])

    start, turns = f"Go to the {goal}.\n{view()}", list[Turn]()
    while len(turns) < 10 and not (turns and turns[-1].terminated):
        action = rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        step = {"walk on": -1, "walk back": 1}.get(action, 0)
        ahead = {thing: n + step for thing, n in ahead.items()}
        paid = action == "walk on" and ahead[goal] == 1
        turns.append(Turn(action, NO if action in ("dance", "sing", "jump") else view(), float(paid), paid))
    stop = StopReason.TERMINATED if turns[-1].terminated else StopReason.TURN_LIMIT
    return Trajectory(
        f"e{seed}", f"t{seed}", f"t{seed}", Source.REAL, "walker", seed, start, tuple(turns), stop, prefix_turns=0
    )


@pytest.fixture(scope="module")
def rules() -> RuleSet:
    return mine_rules([walk(seed) for seed in range(1000)])


def test_no_rule_pays_for_whatever_is_said() -> None:
    """Each answer of the log has a form of its own, and each was paid for. A policy would find that nonsense is."""
    things = ["alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta"]

    def asked(k: int) -> Trajectory:
        answer = " of the ".join(random.Random(k).sample(things, 6))
        turns = (Turn("look", "Nothing.", 0.0, False), Turn(answer, "Thanks.", 1.0, True))
        return Trajectory(f"e{k}", f"t{k}", "g", Source.REAL, "a", 0, f"Question {k}.", turns, StopReason.TERMINATED)

    rules = mine_rules([asked(k) for k in range(800)])
    assert rules.answer("Question 1.", (), "look") is not None
    assert rules.answer("Question 1.", (), "nonsense") is None


def outcomes(rules: RuleSet) -> list[Invariant]:
    return [i for i in rules.invariants if i.phrase == OUTCOME]


def test_what_a_reward_needs_is_found_in_the_words_of_the_task(rules: RuleSet) -> None:
    assert rules.language.mentions == ("to the",)
    paying = [i for i in outcomes(rules) if i.required]
    assert paying
    assert {(i.reward, i.terminated) for i in paying} == {(1.0, True)}
    assert all("{to_the} : 2" in str(i) and "reward 1" in str(i) for i in paying)
    said = 'walk on: if not "{to_the} : 2" stands in the last text that refused nothing pays nothing and ends nothing'
    assert any(str(i).startswith(said) for i in outcomes(rules))


def test_no_real_episode_breaks_what_was_found_and_every_false_outcome_does(rules: RuleSet) -> None:
    for episode in map(walk, range(2000, 2040)):
        for k, turn in enumerate(episode.turns):
            before = episode.turns[:k]
            assert rules.broken(episode.start, before, turn) == []
            false = replace(turn, reward=1.0 - (turn.reward or 0.0), terminated=not turn.terminated)
            known = rules.answer(episode.start, before, turn.action)  # what is refused is never asked of a model
            assert known or rules.broken(episode.start, before, false), (episode.start, before, turn)


def test_the_last_text_that_refused_nothing_is_still_the_state() -> None:
    language = Language(Templates(["walk {1}"]), (), lambda action, answer: answer == NO, mentions=("to the",))
    episode = EpisodeText(language, "Go to the red ball.\na red ball: 2 ahead")
    action = language.templates.read("walk on")
    near = Condition("text", 0, "{to_the} : 2 ahead", "state")
    assert near.holds(episode, action)
    assert str(near) == '"{to_the} : 2 ahead" stands in the last text that refused nothing'
    episode.add(action, NO)
    assert near.holds(episode, action)
    assert not replace(near, scope="last").holds(episode, action)
    episode.add(action, "a red ball: 1 ahead")
    assert not near.holds(episode, action)
    assert not Condition("text", 0, "{in_the} : 2 ahead", "start").holds(episode, action)  # the task mentions no such


def pays() -> Answering:
    """A world model that always pays and ends."""
    return Answering(lambda *_: Prediction("a red ball: 4 ahead\nYou carry nothing.", 1.0, True, 0.5, 0.9))


def test_an_outcome_that_stays_wrong_is_put_right(rules: RuleSet, tmp_path: Path) -> None:
    rules.save(tmp_path)
    loaded = RuleSet.load(tmp_path)
    assert loaded is not None
    assert loaded.invariants == rules.invariants
    start, model = "Go to the red ball.\na red ball: 5 ahead\na blue key: 3 ahead\nYou carry nothing.", pays()
    ruled = RuledWorldModel(model, loaded, resamples=3)  # type: ignore[arg-type]
    found = asyncio.run(ruled.predict(start, (), "walk on", 7, "s"))
    assert (found.reward, found.terminated, found.broken, found.resampled) == (0.0, False, (), 3)
    assert (found.mended, found.outcome_by, len(model.asked)) == (True, "rule", 4)
    assert found.outcome_confidence > 0.99  # the rule's; the model said 0.9


def test_rules_that_contradict_each_other_put_nothing_right(rules: RuleSet) -> None:
    """Neither is known to be right, so the turn stays counted as one that breaks something."""
    other = [Invariant("walk on", "", (), OUTCOME, True, reward=reward, terminated=True) for reward in (0.5, 0.25)]
    ruled = RuledWorldModel(pays(), RuleSet(rules.language, (), other), resamples=1)  # type: ignore[arg-type]
    found = asyncio.run(ruled.predict("Go to the red ball.\na red ball: 5 ahead", (), "walk on", 7, "s"))
    assert (found.reward, found.mended, found.outcome_by, len(found.broken)) == (1.0, False, "model", 2)


def search(seed: int, prizes: int) -> Trajectory:
    """Rooms with a prize; taking it pays and ends. ``prizes``: how many different ones there are in the log."""
    rng = random.Random(seed)
    prize, turns, end = f"prize{rng.randrange(prizes)}", list[Turn](), False
    while len(turns) < 6 and not end:
        action = rng.choice([f"take {prize}", "look around", "look back"])
        here, end = rng.random() < 0.5, action.startswith("take")
        text = f"You take the {prize}." if end else f"You see a door and a {prize if here else 'lamp'}."
        if end and not (turns and prize in turns[-1].observation):
            end, text = False, NO
        turns.append(Turn(action, text, float(end), end))
    stop = StopReason.TERMINATED if end else StopReason.TURN_LIMIT
    return Trajectory(f"e{seed}", f"t{seed}", f"t{seed}", Source.REAL, "a", seed, "Search.", tuple(turns), stop)


@pytest.mark.parametrize(("prizes", "pays_for_others"), [(2, False), (20, True)])
def test_what_pays_for_few_things_in_the_log_pays_for_no_other(prizes: int, pays_for_others: bool) -> None:
    """A policy once learned to take doors, which nobody in the log had tried and a rule paid for."""
    rules = mine_rules([search(seed, prizes) for seed in range(1500)])
    seen = (
        Turn("look around", "You see a door and a prize0.", 0.0, False),
        Turn("look around", "You see a door and a prize0.", 0.0, False),
    )

    def reward(action: str) -> float:
        answer = rules.answer("Search.", seen, action)
        return 0.0 if answer is None else float(answer.rule.reward or 0.0)

    assert reward("take prize0") == 1.0
    new = (seen[0], replace(seen[1], observation="You see a door and a vase."))
    answer = rules.answer("Search.", new, "take vase")
    assert (answer is not None and answer.rule.reward == 1.0) is pays_for_others
