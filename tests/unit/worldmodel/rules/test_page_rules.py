"""If these fail, pages change behind one's back in dreams, or an element is edited that nobody touched."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

import tests
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.scripted import Answering
from worldmodel.rules.invariants import OUTCOME, Invariant
from worldmodel.rules.mine import mine_rules
from worldmodel.rules.pages import Change, apply, describe, find_notices, page_of, read_element
from worldmodel.rules.rule_set import RuleSet, check_rules
from worldmodel.rules.templates import Action
from worldmodel.rules.world_model import RuledWorldModel
from worldmodel.world_model import Prediction

PAGE = """[1] checkbox 'Figs' checked
[2] radio 'It\\'s' checked
[3] radio 'Tea'
[4] textbox '' value='a b'
Or
[5] button 'Go'
[6] checkbox 'Plums'"""


def random_word(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghKLMNO") for _ in range(rng.randint(3, 6)))


def played(task: int, episode: int) -> Trajectory:
    """A random agent on a page of two boxes, two radio buttons, a field and a button that pays if the goal is met."""
    names = [random_word(random.Random(100 * task + k)) for k in range(4)]
    rng = random.Random(1000 * task + episode)
    state = {"1": rng.choice(("", " checked")), "2": rng.choice(("", " checked")), "3": "", "4": "", "5": ""}

    def page() -> str:
        kinds = ("checkbox", "checkbox", "radio", "radio")
        lines = [f"[{k}] {kind} '{names[k - 1]}'{state[str(k)]}" for k, kind in enumerate(kinds, start=1)]
        return "\n".join([*lines, f"[5] textbox ''{state['5']}", "[6] button 'Submit'"])

    start, turns = f"Goal: check {names[0]}.\n{page()}", list[Turn]()
    for _ in range(10):
        n, word, fills = str(rng.randint(1, 6)), random_word(rng), rng.random() < 0.4
        n = "5" if fills and rng.random() < 0.5 else n
        action = f"fill('{n}', '{word}')" if fills else f"click('{n}')"
        notice, reward, end = "", 0.0, False
        if action[0] == "f" and n != "5":
            notice = "Error: this is no field\n"
        elif action[0] == "f":
            state["5"] = f" value='{word}'"
        elif n in "12":
            state[n] = "" if state[n] else " checked"
        elif n in "34":
            state["3"] = state["4"] = ""
            state[n] = " checked"
        elif n == "6":
            reward, end = float(state["1"] != ""), True
        turns.append(Turn(action, notice + page(), reward, end))
        if end:
            break
    stop = StopReason.TERMINATED if turns[-1].terminated else StopReason.TURN_LIMIT
    return Trajectory(f"p{task}/{episode}", f"p{task}", f"p{task}", Source.REAL, "random", 0, start, tuple(turns), stop)


@pytest.fixture(scope="module")
def rules() -> RuleSet:
    return mine_rules([played(task, k) for task in range(250) for k in range(4)])


def test_what_actions_do_to_pages_is_found_and_holds_on_new_ones(rules: RuleSet) -> None:
    assert rules.language.notices == ("error :", "goal :")
    said = "\n".join(map(str, rules.rules))
    for change in (
        "the last page with [{1}] checked",
        "the last page with [{1}] no longer checked",
        "the last page with [{1}] checked, no other checked",
        "the last page with [{1}] value='{2}'",
        "the last page behind 'Error: this is no field'",
    ):
        assert change in said
    found = check_rules(rules, [played(task, 9) for task in range(1000, 1060)])
    assert found["wrong"] == found["misworded"] == 0
    assert found["answered"] + found["worded"] > 0.95 * found["turns"]
    assert found["worded"] > 0, "the button leaves the page as it is, whatever it pays"


def test_a_filler_is_written_as_it_was_said(rules: RuleSet) -> None:
    answer = rules.answer(played(2000, 0).start, (), "fill('5', 'QaZ')")
    assert answer is not None
    assert "[5] textbox '' value='QaZ'" in answer.observation
    assert answer.observation.startswith("[1]"), "the goal is no part of the page"
    assert rules.answer(played(2000, 0).start, (), "fill('5', ' QaZ')") is None
    assert Action("fill ( ' {1} ' , ' {2} ' )", ("5", "qaz"), "fill( '5','QaZ  ' )").written == ("5", "QaZ  ")


CONFUSED = Answering(lambda *_: Prediction("[1] link 'Elsewhere'", 1.0, True, 0.5, 0.5))  # another page, and it pays


def test_where_a_rule_knows_the_words_alone_the_model_says_what_they_pay(rules: RuleSet) -> None:
    world, episode = RuledWorldModel(CONFUSED, rules), played(2000, 0)
    page = page_of(episode.start, rules.language.notices or ())[1]
    told = asyncio.run(world.predict(episode.start, (), "click('6')", 0))
    assert told.observation == page
    assert (told.reward, told.terminated, told.mended) == (1.0, True, True)
    assert told.rule is not None


def test_rules_of_pages_survive_the_disk(rules: RuleSet, tmp_path: Path) -> None:
    rules.save(tmp_path)
    again = RuleSet.load(tmp_path)
    assert again is not None
    assert again.rules == rules.rules
    assert again.language.notices == rules.language.notices


@pytest.mark.parametrize(
    ("change", "fillers", "line"),
    [
        (Change(1, "checked"), ("6",), "[6] checkbox 'Plums' checked"),
        (Change(1, "value='{2}'"), ("4", "New"), "[4] textbox '' value='New'"),
        (Change(1, "", "value"), ("4",), "[4] textbox ''"),
        (Change(1, "checked", others="checked"), ("3",), "[3] radio 'Tea' checked"),
        (Change(1, "value='{2}'", named="{2} picked"), ("4", "Tea"), "[3] radio 'Tea' picked"),
    ],
)
def test_a_change_touches_what_it_says_and_is_read_back(change: Change, fillers: tuple[str, ...], line: str) -> None:
    after = apply(change, PAGE, fillers)
    assert after is not None
    assert line in after.split("\n")
    assert describe(PAGE, "", after, fillers) == change
    touched = {k for k, (a, b) in enumerate(zip(PAGE.split("\n"), after.split("\n"), strict=True)) if a != b}
    assert len(touched) == 1 + bool(change.others) + bool(change.named)


@pytest.mark.parametrize(
    ("change", "fillers"),
    [
        (Change(1, "checked"), ("1",)),  # it is checked
        (Change(1, "", "checked"), ("6",)),  # it is not
        (Change(1, "checked"), ("9",)),  # it is not there
        (Change(1, "value='{2}'", named="{2} picked"), ("4", "Rum")),  # nothing has that name
        (Change(1, "value='{2}'"), ("4", r"O\'Brien")),  # a page may write it in other quotes
        (Change(1, "value='{2}'"), ("4", " x")),  # or without the blank
    ],
)
def test_a_change_that_cannot_be_made_is_none(change: Change, fillers: tuple[str, ...]) -> None:
    assert apply(change, PAGE, fillers) is None


def test_every_element_of_recorded_pages_is_read_and_written_as_it_was() -> None:
    log = list(TrajectoryStore.open(Path(tests.__file__).parent / "recorded" / "miniwob").read())
    notices = find_notices(log)
    assert notices == ("error :", "goal :")
    lines = [line for t in log for turn in t.turns for line in turn.observation.split("\n") if line.startswith("[")]
    read = [read_element(line) for line in lines]
    assert sum(element is None for element in read) < 0.01 * len(lines)
    assert [e.line() for e in read if e is not None] == [
        line for line, e in zip(lines, read, strict=True) if e is not None
    ]


def test_other_texts_are_no_pages() -> None:
    rooms = [Turn("go", "You are in the hall [1].", 0.0, False)] * 40
    log = [Trajectory("a", "a", "a", Source.REAL, "x", 0, "A hall.", tuple(rooms), StopReason.TURN_LIMIT)]
    assert find_notices(log) is None


def test_known_words_do_not_excuse_an_outcome_that_the_log_never_has(rules: RuleSet) -> None:
    """What pays nothing by an invariant is asked again, also where the words are known, and put right in the end."""
    nothing = Invariant("click ( ' {1} ' )", "", (), OUTCOME, False)
    world, episode = RuledWorldModel(CONFUSED, RuleSet(rules.language, rules.rules, [nothing])), played(2000, 0)
    told = asyncio.run(world.predict(episode.start, (), "click('6')", 0))
    assert told.resampled == world.resamples
    assert (told.reward, told.terminated, told.outcome_by, told.broken) == (0.0, False, "rule", ())
