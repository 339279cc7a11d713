"""If these fail, dreams are answered by laws that the world does not have, or its laws are not found in the log."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.rooms_world import BACK, NO, ROOMS, RoomsWorld, rooms_log
from tests.support.scripted import Answering
from worldmodel.evaluation.dreams import Contradiction, contradiction_metrics, contradictions_of
from worldmodel.rules.conditions import Condition, Copy, Rule
from worldmodel.rules.invariants import OUTCOME, REFUSAL
from worldmodel.rules.mine import mine_rules
from worldmodel.rules.rule_set import FILE, RuleSet, RulesInvalid, check_rules
from worldmodel.rules.search import find_conjunctions, lower_bound
from worldmodel.rules.templates import ANY, OTHER, Templates, blank, fill, find_templates, words
from worldmodel.rules.world_model import RuledWorldModel
from worldmodel.world_model import Prediction, PredictionInvalid


@pytest.fixture(scope="module")
def rules() -> RuleSet:
    return mine_rules(rooms_log(160))


def test_actions_are_read_as_templates() -> None:
    actions = [
        "take red lamp",
        "take key",
        "put key in old box",
        "put lamp in box",
        "look",
        "click('12')",
        "click('7')",
    ]
    templates = find_templates(actions * 20)
    assert set(templates.texts) == {"take {1}", "put {1} in {2}", "look", "click ( ' {1} ' )"}
    read = templates.read("Put the key in old box")
    assert (read.template, read.fillers) == ("put {1} in {2}", ("the key", "old box"))
    read = templates.read("put key in old box")
    assert (read.template, read.fillers) == ("put {1} in {2}", ("key", "old box"))
    assert templates.read("sing").template == OTHER


def test_a_slot_with_one_value_is_no_slot() -> None:
    templates = find_templates(["open door to east", "open door to west"] * 20)
    assert templates.texts == ("open door to {1}",)


@given(st.lists(st.sampled_from(["lamp", "old key", "box"]), min_size=1, max_size=2, unique=True))
def test_blank_and_fill_are_inverse(fillers: list[str]) -> None:
    text = "You put " + " and ".join(fillers) + " down."
    assert "{1}" in blank(text, fillers)
    assert fill(blank(text, fillers), fillers) == text


def test_the_lower_bound_is_wilsons() -> None:
    """By hand, one-sided 95 %: n / (n + z²) at no error, z² = 2.7055."""
    assert lower_bound(100, 100) == pytest.approx(100 / 102.7055, abs=1e-4)
    assert lower_bound(267, 267) < 0.99 <= lower_bound(268, 268)
    assert lower_bound(0, 0) == 0.0


def test_conjunctions_are_found_by_counting_and_judged_on_the_other_half() -> None:
    """A plain loop over all pairs finds the same law: right where a and not b."""
    rng = np.random.default_rng(0)
    table = rng.random((4000, 5)) < 0.5
    right = table[:, 1] & ~table[:, 3]
    held = np.arange(4000) % 2 == 1
    found = find_conjunctions(table, right, np.ones(4000, dtype=bool), np.zeros(4000, dtype=bool), held, 30)
    assert found is not None
    assert set(found.literals) == {(1, False), (3, True)}
    assert (found.turns, found.held_turns) == ((right & ~held).sum(), (right & held).sum())
    assert found.exceptions == found.held_exceptions == 0


def test_a_condition_that_tells_something_beside_another_one_alone_is_found() -> None:
    """Right where a and b; b is frequent where the answer is wrong, too, and eighty columns look better than it."""
    rng = np.random.default_rng(0)
    a = rng.random(4000) < 0.3
    b = ~a | (rng.random(4000) < 0.5)
    right = a & b
    noise = rng.random((4000, 80)) < np.where(right, 0.8, 0.5)[:, None]
    held = rng.random(4000) < 0.5
    table = np.column_stack([a, b, noise])
    found = find_conjunctions(table, right, np.ones(4000, bool), np.zeros(4000, bool), held, 30)
    assert float(noise[right].mean() - noise[~right].mean()) > float(b[right].mean() - b[~right].mean())
    assert found is not None
    assert found.literals == ((0, False), (1, False))


def test_what_each_of_four_ways_is_too_rare_to_prove_is_found_for_all_of_them() -> None:
    """``go D`` is refused where the room names no way D, each D some 135 times in the half that judges; ``go plugh`` by
    other words."""
    rng, log = random.Random(0), []
    ways, nonsense = ["north", "south", "east", "west"], [f"plu{k}" for k in range(40)]
    for number in range(900):
        here = rng.sample(ways, 2)
        start, turns = f"You are in a room. Ways: {here[0]}, {here[1]}.", []
        for _ in range(3):
            way = rng.choice([*ways, rng.choice(nonsense)])
            no = "You can't go that way." if way in ways else "You can't see any such thing."
            turns.append(Turn(f"go {way}", start if way in here else no, 0.0, False))
        name = f"t{number}"
        log.append(Trajectory(name, name, name, Source.REAL, "random", 0, start, tuple(turns), StopReason.TURN_LIMIT))
    found = [rule for rule in mine_rules(log).rules if rule.copy.text == "You can't go that way."]
    assert len(found) == 1
    assert all(way in str(found[0]) for way in ways)
    assert found[0].exceptions == found[0].held_exceptions == 0


def test_chance_is_no_law() -> None:
    """Answers that hang on nothing that can be seen: no conjunction is kept, whichever is best on one half."""
    rng = np.random.default_rng(1)
    table, right = rng.random((3000, 40)) < 0.5, rng.random(3000) < 0.9
    held = np.arange(3000) % 2 == 1
    everything = np.ones(3000, dtype=bool)
    assert find_conjunctions(table, right, everything, ~everything, held, 30) is None


def test_the_laws_of_the_rooms_are_found(rules: RuleSet) -> None:
    """On tasks that the miner has not seen: hardly a refusal is missed, no answer is wrong."""
    found = check_rules(rules, rooms_log(60, first=1000))
    assert found["wrong"] == 0
    assert found["refused_by_rule"] >= 0.95 * found["refused"]
    assert found["answered"] >= 0.7 * found["turns"]
    assert dict(rules.language.inverses) == {f"go {way}": f"go {back}" for way, back in BACK.items()}
    said = " / ".join(map(str, rules.rules))
    assert 'go {1}: if not "{1}' in said


def test_rules_and_conditions_survive_the_disk(rules: RuleSet, tmp_path: Path) -> None:
    rules.save(tmp_path)
    again = RuleSet.load(tmp_path)
    assert again is not None
    assert (again.rules, again.invariants) == (rules.rules, rules.invariants)
    assert again.language.templates.texts == rules.language.templates.texts
    assert RuleSet.load(tmp_path / "nowhere") is None


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 99}', '{"version": 1, "templates": []}'])
def test_a_broken_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(RulesInvalid, match=FILE):
        RuleSet.load(tmp_path)


def test_a_rule_of_an_unknown_kind_is_refused(rules: RuleSet, tmp_path: Path) -> None:
    """Whoever proposes rules can propose nothing that runs."""
    rules.save(tmp_path)
    data = json.loads((tmp_path / FILE).read_text())
    data["rules"][0]["copy"]["kind"] = "python"
    del data["sha256"]
    (tmp_path / FILE).write_text(json.dumps(data))
    with pytest.raises(RulesInvalid, match="python"):
        RuleSet.load(tmp_path)


def liar(*answers: str) -> Answering:
    """Says what it is told to say, call by call."""
    texts = iter(answers)

    def answer(*_: object) -> Prediction | PredictionInvalid:
        text = next(texts)
        return PredictionInvalid("nonsense") if text == "broken" else Prediction(text, 0.0, False, 0.5, 0.9)

    return Answering(answer)


def predict(model: Answering, rules: RuleSet, world: RoomsWorld, action: str, **settings: object) -> Prediction:
    ruled = RuledWorldModel(model, rules, **settings)  # type: ignore[arg-type]
    return asyncio.run(ruled.predict(world.start, (), action, 7, "s"))


def test_what_a_rule_knows_costs_no_token(rules: RuleSet) -> None:
    world, model = RoomsWorld(3), liar()
    way = next(way for way in BACK if way not in world.exits())
    found = predict(model, rules, world, f"go {way}")
    assert (found.observation, found.reward, found.terminated, model.asked) == (NO, 0.0, False, [])
    assert found.outcome_by == "rule"
    assert found.rule is not None
    assert 0.99 < found.confidence < 1
    assert predict(model, rules, world, "look").observation == world.text()


def test_refuse_asks_the_model_for_all_that_is_no_refusal(rules: RuleSet) -> None:
    world, model = RoomsWorld(3), liar("as it likes")
    assert predict(model, rules, world, "look", mode="refuse").observation == "as it likes"


def test_an_answer_that_breaks_an_invariant_is_mended(rules: RuleSet) -> None:
    """The text of a new room has the name that the way promised, and the way back leads back."""
    world, true = RoomsWorld(3), RoomsWorld(3)
    way = world.exits()[0]
    right, _, _ = true.step(f"go {way}")
    here, there = world.rooms[world.here], true.rooms[true.here]
    other = next(name for name in ROOMS if name not in right)
    for wrong in (right.replace(f"in the {there}", f"in the {other}"), right.replace(f"the {here}", f"the {other}")):
        assert wrong != right
        model = liar(wrong)
        found = predict(model, rules, world, f"go {way}")
        assert (found.observation, found.mended, found.broken, len(model.asked)) == (right, True, (), 1)
    untouched = predict(liar(right), rules, world, f"go {way}")
    assert (untouched.observation, untouched.mended, untouched.resampled) == (right, False, 0)


def shelves_log(tasks: int) -> list[Trajectory]:
    """A thing lies on each shelf; lamps on the first two alone, cups seldom on the others: chance, and no law."""
    log = []
    for task in range(tasks):
        rng = random.Random(task)
        turns = []
        for shelf in rng.sample(range(1, 6), 5):
            things, weights = (
                ("cup", "fork", "pen", "key", "lamp"),
                (4 if shelf < 3 else 0.03, 1, 4, 4, 4 * (shelf < 3)),
            )
            turns.append(
                Turn(
                    f"go to shelf {shelf}",
                    f"On the shelf {shelf}, you see a {rng.choices(things, weights)[0]}.",
                    0.0,
                    False,
                )
            )
        id_ = f"s{task}"
        log.append(Trajectory(id_, id_, id_, Source.REAL, "a", 0, "Five shelves.", tuple(turns), StopReason.TURN_LIMIT))
    return log


def test_what_is_rare_is_not_forbidden_and_no_answer_is_emptied() -> None:
    """Where a model says what the log seldom has there, it is mostly true: it has read the facts of the task."""
    rules = mine_rules(shelves_log(900))
    forbidden = [i.phrase for i in rules.invariants if not (i.required or i.once or i.phrase in (REFUSAL, OUTCOME))]
    assert {phrase.split()[-1] for phrase in forbidden} == {"lamp"}
    assert check_rules(rules, shelves_log(950)[900:])["rejected"] == 0
    lamp, cup = (f"On the shelf 4, you see a {thing}." for thing in ("lamp", "cup"))
    (found, broken), cups = (
        rules.mended("Five shelves.", (), Turn("go to shelf 4", text, 0.0, False)) for text in (lamp, cup)
    )
    assert found == lamp, "no words break nothing, and are no answer"
    assert broken
    assert cups == (cup, [])


def test_what_cannot_be_mended_is_sampled_again(rules: RuleSet) -> None:
    """There is a way, so no is no answer; what is malformed counts as a try."""
    world, true = RoomsWorld(3), RoomsWorld(3)
    way = world.exits()[0]
    right, _, _ = true.step(f"go {way}")
    model = liar(NO, "broken", right, NO)
    found = predict(model, rules, world, f"go {way}")
    assert (found.observation, found.resampled, len(model.asked)) == (right, 2, 3)
    stubborn = liar(*[NO] * 3)
    found = predict(stubborn, rules, world, f"go {way}", resamples=2)
    assert (found.observation, found.resampled, len(stubborn.asked)) == (NO, 2, 3)
    assert "is not refused" in " ".join(found.broken)


def test_the_known_first_words_are_given_to_a_model_that_can_go_on_from_them(rules: RuleSet) -> None:
    world, true = RoomsWorld(3), RoomsWorld(3)
    way = world.exits()[0]
    right, _, _ = true.step(f"go {way}")
    opening = rules.opening(world.start, (), f"go {way}")
    assert opening == f"You stand in the {true.rooms[true.here]}."
    assert right.startswith(opening)

    class Continues(Answering):
        continues = True
        opening = ""

        async def predict(self, *args: object, opening: str = "") -> Prediction:  # type: ignore[override]
            self.opening = opening
            return await super().predict(*args)  # type: ignore[arg-type]

    model = Continues(lambda *_: Prediction(right, 0.0, False, 0.5, 0.9))
    predict(model, rules, world, f"go {way}")
    assert model.opening == opening


def dreamed(turns: list[tuple[str, str, float]], start: str) -> Trajectory:
    played = tuple(Turn(action, text, reward, False) for action, text, reward in turns)
    return replace(rooms_log(1, 1)[0], start=start, turns=played, stop=StopReason.TURN_LIMIT)


def test_contradictions_are_told_by_kind(rules: RuleSet) -> None:
    """Each turn by hand: through a wall, a room that changed, a thing taken twice, a refusal where there is a way."""
    world = RoomsWorld(3)
    room, (way, *_) = world.text(), world.exits()
    wall = next(w for w in BACK if w not in world.exits())
    changed = room.replace("You stand in the", "You stand in the old")
    found = contradictions_of(dreamed([("look", room, 0), (f"go {wall}", room, 0)], world.start), rules)
    assert found == [None, Contradiction.ACCEPTED]
    assert contradictions_of(dreamed([("look", changed, 0)], world.start), rules) == [Contradiction.CHANGED]
    assert contradictions_of(dreamed([("look", NO, 0)], world.start), rules) == [Contradiction.REFUSED]
    assert contradictions_of(dreamed([("look", room, 1.0)], world.start), rules) == [Contradiction.OUTCOME]
    assert contradictions_of(dreamed([(f"go {way}", NO, 0)], world.start), rules) == [Contradiction.INVARIANT]
    no_rules = RuleSet(rules.language, ())
    tried = dreamed([(f"go {wall}", NO, 0), ("sing", NO, 0), (f"go {wall}", room, 0)], world.start)
    assert contradictions_of(tried, no_rules) == [None, None, Contradiction.RETRIED]


def test_the_real_world_does_not_contradict_itself(rules: RuleSet) -> None:
    """On unseen tasks; and a world that forgets does."""
    real = rooms_log(20, first=2000)
    found = contradiction_metrics(real, rules)
    assert found["rate"]["value"] == 0
    assert found["turns"] == sum(len(t.turns) for t in real)
    rng = random.Random(0)
    forgetful = [
        replace(t, turns=tuple(replace(u, observation=rng.choice(t.turns).observation) for u in t.turns)) for t in real
    ]
    assert contradiction_metrics(forgetful, rules)["rate"]["value"] > 0.3


def test_a_rule_says_in_words_what_it_does() -> None:
    rule = Rule(
        "take {1}",
        (Condition("text", 1, "a _", "you stand in", negated=True), Condition("last_deed", 1, "drop {1}", other=1)),
        Copy("say", "No {1}."),
        0.0,
        False,
        True,
        10,
        0,
        300,
        1,
    )
    assert str(rule) == (
        'take {1}: if not "a {1}" stands in the last text that begins "you stand in" and "drop {1}" is the last thing '
        "done with {1} -> 'No {1}.' (309 of 310)"
    )
    assert rule.precision == 310 / 312
    assert words("It's 7 o'clock!") == ("it's", "7", "o'clock", "!")


def test_what_is_never_refused_is_known(rules: RuleSet) -> None:
    assert {i.template for i in rules.invariants if i.phrase == REFUSAL} >= {"go {1}", "look"}


def test_what_holds_for_all_actions_is_found_where_each_is_rare(tmp_path: Path) -> None:
    """Six verbs, each too rare for a rule of its own: none of them does anything to what is not in sight."""
    things, verbs = [f"{c} {t}" for c in ("red", "blue") for t in ("ball", "key", "box")], "poke kick lift rub hit pull"
    log = []
    for seed in range(260):
        rng = random.Random(seed)
        here = rng.sample(things, 2)
        turns = []
        for _ in range(6):
            verb, thing = rng.choice(verbs.split()), rng.choice(things)
            told = f"You {verb} the {thing}." if thing in here else "There is no such thing."
            turns.append(Turn(f"{verb} {thing}", told, 0.0, False))
        start = f"A cell. You see a {here[0]} and a {here[1]}."
        log.append(replace(rooms_log(1, 1)[0], id=f"e{seed}", task_id=f"t{seed}", start=start, turns=tuple(turns)))
    found = mine_rules(log)
    assert {rule.template for rule in found.rules if rule.copy.text == "There is no such thing."} == {ANY}
    assert any(str(rule).startswith("any action: if not all that it names stands in") for rule in found.rules)
    found.save(tmp_path)
    again = RuleSet.load(tmp_path)
    assert again is not None
    assert again.rules == found.rules
    start = "A cell. You see a red ball and a blue key."
    answer = again.answer(start, (), "kick red box")
    assert answer is not None
    assert answer.observation == "There is no such thing."
    assert again.answer(start, (), "look") is None


def test_a_rule_of_any_action_answers_none_with_fewer_names_than_its_words_have(rules: RuleSet) -> None:
    """Else the dream would say ``{2}``."""
    said = Copy("say", "You see no {1} and no {2}.")
    templates = Templates(["put {1} in {2}", "take {1}"])
    found = RuleSet(replace(rules.language, templates=templates), [Rule(ANY, (), said, 0.0, False, False)])
    both, one = (found.answer("A room.", (), action) for action in ("put cat in hat", "take cat"))
    assert both is not None
    assert (both.observation, one) == ("You see no cat and no hat.", None)
