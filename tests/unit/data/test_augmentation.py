"""If these fail, a policy imitates episodes for goals that they did not reach, or a model learns names by heart."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.data.augmentation import failed, relabelled, with_misspelt, with_renamed
from imagination.data.examples import WorldModelExamples
from imagination.rollout.world_models import form_of
from imagination.settings.models import FitSettings, HindsightSettings, WorldModelSettings
from policy.lm.tokenizer import train_tokenizer, word_pieces
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from worldmodel.formats.memory import KNOWN

# --- hindsight ---

GOALS = [[r"You open the (\w+)", r"Open the \1."], [r"You take the (\w+) from the (\w+)", r"Take the \1 from the \2."]]
HINDSIGHT = HindsightSettings(goals=GOALS)


def failure(*turns: tuple[str, str], start: str = "Eat the bear.\n-= Hall =-", **facts: object) -> Trajectory:
    told = tuple(
        Turn(action, observation, 0.0, False, {"n": k, "reasoning": "it opens"})
        for k, (action, observation) in enumerate(turns)
    )
    made = Trajectory("e", "t", "g", Source.REAL, "noisy", 3, start, told, StopReason.TURN_LIMIT)
    return replace(made, **{"world_facts": ("secret",), **facts})  # type: ignore[arg-type]


OPENED = ("open chest", "You open the chest.")
REFUSED = ("eat hall", "You can't.")
TAKEN = ("take key", "You take the key from the chest.")
WANDERED = failure(REFUSED, OPENED, REFUSED, TAKEN, OPENED, ("look", "-= Hall =-"))


def test_an_episode_is_told_up_to_the_last_goal_that_it_reached_first() -> None:
    """Opening the chest again is no new goal; what follows the key is left out, and so is what the world refused."""
    told = relabelled(WANDERED, HINDSIGHT, refusals="^You can't")
    assert told is not None
    assert told.start == "Take the key from the chest.\n-= Hall =-"
    assert [t.action for t in told.turns] == ["open chest", "take key"]
    assert [(t.reward, t.terminated) for t in told.turns] == [(0.0, False), (1.0, True)]
    assert [t.info for t in told.turns] == [{"n": 1}, {"n": 3}], "reasoning is the world model's"
    assert (told.id, told.task_id, told.agent) == ("hindsight/e", "t", "hindsight/noisy")
    assert told.solved
    assert told.stop is StopReason.TERMINATED
    assert (told.world_facts, told.trace) == ((), None)
    assert WANDERED.turns[3].reward == 0.0  # the log is what it was


def test_without_declared_refusals_only_an_observation_that_repeats_itself_is_left_out() -> None:
    told = relabelled(failure(REFUSED, REFUSED, OPENED), HINDSIGHT)
    assert told is not None
    assert [t.action for t in told.turns] == ["eat hall", "open chest"]


def test_a_goal_that_took_too_long_gives_way_to_an_earlier_one() -> None:
    """Turns are counted without those that are left out: the chest is the first, the key the second."""
    for most, action in ((1, "open chest"), (2, "take key")):
        told = relabelled(WANDERED, replace(HINDSIGHT, max_turns=most), refusals="^You can't")
        assert told is not None
        assert told.turns[-1].action == action


@pytest.mark.parametrize(
    ("trajectory", "declared"),
    [
        (failure(REFUSED), HINDSIGHT),
        (failure(OPENED, start="-= Hall =-\nYou open the chest."), HINDSIGHT),  # it was so from the start
        (failure(OPENED), replace(HINDSIGHT, place=r"Your task: .*")),
    ],
    ids=["nothing reached", "reached before", "no place for a goal"],
)
def test_what_cannot_be_relabelled_is_not(trajectory: Trajectory, declared: HindsightSettings) -> None:
    assert relabelled(trajectory, declared) is None


def test_only_what_is_known_to_have_failed_is_retold() -> None:
    """An episode whose success nobody measured may have solved its task; an outage says nothing."""
    unmeasured = tuple(replace(turn, reward=None) for turn in WANDERED.turns)
    paid = (*WANDERED.turns[:-1], replace(WANDERED.turns[-1], reward=1.0))
    assert failed(WANDERED)
    assert failed(replace(WANDERED, turns=unmeasured, success=False))
    assert not failed(replace(WANDERED, turns=unmeasured))
    assert not failed(replace(WANDERED, turns=paid))
    assert not failed(replace(WANDERED, success=True))
    assert not failed(replace(WANDERED, stop=StopReason.ENV_CRASHED))


@pytest.mark.parametrize(
    "declared",
    [{"goals": [["a"]]}, {"goals": [["(", "b"]]}, {"goals": [["a", r"\1"]]}, {"place": "("}],
)
def test_declarations_that_cannot_work_are_refused(declared: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"goals"):
        HindsightSettings(**declared)  # type: ignore[arg-type]


# --- renamed copies ---

WORD = re.compile(r"[A-Za-z]+")
SAID = ["oak", "Brick", "steel", "a1", "of", "the", "lamp25", "25lamp", "box", "'oak'", "steel_2"]


def logged(number: int, start: str, *turns: tuple[str, str]) -> Trajectory:
    told = tuple(Turn(action, seen, float(k == len(turns) - 1), False) for k, (action, seen) in enumerate(turns))
    name = f"task-{number}"
    return Trajectory(f"{name}/0", name, name, Source.EXPERT, "expert", 0, start, told, StopReason.TURN_LIMIT)


TAKE, LIST = ("take 25kg of oak", "You take the 25kg of oak."), ("inventory", "Your inventory: oak.")
LOG = [
    logged(0, "You see 25kg of oak, a box and nothing else.", TAKE, LIST, ("put oak in box", "Oak is in the box.")),
    logged(1, "You see a brick, a box and nothing else.", ("put brick in box", "The brick is in the box.")),
    logged(2, "You see a box and nothing else.", ("look", "You see a box and nothing else.")),
]


def new_names(before: str, after: str) -> dict[str, str]:
    """Word by word; the two texts have equally many."""
    return {a.lower(): b.lower() for a, b in zip(WORD.findall(before), WORD.findall(after), strict=True) if a != b}


def whole(t: Trajectory) -> str:
    return "\n".join([t.start, *(f"{u.action}\n{u.observation}" for u in t.turns)])


def test_things_have_other_names_and_the_rest_stays() -> None:
    told = with_renamed(LOG, 1, seed=3)
    assert told[: len(LOG)] == LOG
    first, second, third = told[len(LOG) :]
    new = new_names(whole(LOG[0]), whole(first))
    # the box is in every task, "inventory" is first said by an action, the unit is a part of a number
    assert new.keys() == {"oak"}
    name = new["oak"]
    assert first.start == f"You see 25kg of {name}, a box and nothing else."
    assert [u.action for u in first.turns] == [f"take 25kg of {name}", "inventory", f"put {name} in box"]
    assert first.turns[-1].observation == f"{name.capitalize()} is in the box."
    assert new_names(whole(LOG[1]), whole(second)).keys() == {"brick"}
    assert third == LOG[2]
    assert [u.reward for u in first.turns] == [u.reward for u in LOG[0].turns]
    assert with_renamed(LOG, 1, seed=3) == told
    assert with_renamed(LOG, 0, seed=3) == LOG
    assert len(with_renamed(LOG, 3, seed=3)) == 4 * len(LOG)


def test_names_are_other_ones_in_quotes_and_in_parts_of_file_names() -> None:
    call = ("cp(source='oak_2.txt', destination='brick')", '{"oak_2.txt": "isn\'t \'brick\'"}')
    log = [logged(0, "User: copy 'oak_2.txt' to brick.", call), *(logged(k, "nothing") for k in (1, 2))]
    renamed = with_renamed(log, 1, seed=0)[len(log)]
    new = new_names(whole(log[0]), whole(renamed))
    oak, brick = new["oak"], new["brick"]
    assert renamed.turns[0].action == f"cp(source='{oak}_2.txt', destination='{brick}')".replace("txt", new["txt"])
    assert renamed.turns[0].observation == f'{{"{oak}_2.{new["txt"]}": "isn\'t \'{brick}\'"}}'


def test_names_are_made_of_what_single_tokens_write() -> None:
    """So that every token is written by a model that copies; some of the names are of syllables all the same."""
    tokenizer = train_tokenizer(["noodles and oodles of noodles, 99 IN ALL"] * 9, 300)
    pieces = set(word_pieces(tokenizer))
    assert {"noodles", "oodles", "dles"} < pieces
    assert all(re.fullmatch("[a-z]{2,8}", piece) for piece in pieces)
    renamed = with_renamed(LOG, 300, 0, tokenizer)[len(LOG) :]
    names = {new_names(whole(LOG[0]), whole(t)).get("oak") for t in renamed if t.task_id == "task-0"}
    assert {"noodles", "oodles", "dles"} < names
    assert {"oodlesdles", "dlesnoodles"} & names or any(name and name.count("dles") > 1 for name in names)
    assert any(name and "dl" not in name for name in names)


def test_no_name_is_a_short_word_or_a_fact_of_the_episode() -> None:
    tokenizer = train_tokenizer(["ab cde ab cde"] * 9, 300)
    assert {"ab", "cde"} <= set(word_pieces(tokenizer))
    log = [replace(t, start=f"{t.start} ab", world_facts=("cde is here",)) for t in LOG]
    for copy in with_renamed(log, 200, 0, tokenizer)[len(log) :]:
        if copy.task_id == "task-0":
            assert copy.turns[0].action.split()[-1] not in ("ab", "cde")


def test_copies_know_what_is_true_of_their_own_names() -> None:
    """The start names no thing, so the original's facts would be found by it."""
    log = [
        replace(
            t,
            start=f"Task {t.task_id}.",
            turns=(Turn("look", t.start, 0.0, False), *t.turns),
            world_facts=(f"There is {name} in the box.",),
        )
        for t, name in zip(LOG, ("oak", "brick", "nothing"), strict=True)
    ]
    known = WorldModelSettings(facts=9, facts_share=1.0)
    examples = WorldModelExamples.of(log, form_of(known, log), known, FitSettings(renamed=1), seed=0)
    for episode, form in zip(examples.episodes, examples.forms, strict=True):
        (context, *_) = form.excluding([episode]).contexts(episode.start, [], "look")
        assert context.startswith(f"{KNOWN}{episode.world_facts[0]}\n")
    assert examples.episodes[len(log)].world_facts != log[0].world_facts


def test_misspelt_names_are_refused_where_unknown_ones_always_were_and_nothing_else_changes() -> None:
    """``open`` refuses what nobody knows; ``make`` makes it; ``drop`` has refused too seldom to tell."""

    def episode(k: int) -> Trajectory:
        thing = ("lamp", "chest", "barrel")[k % 3]
        turns = [
            Turn(f"open {thing}", f"The {thing} is open.", 0.0, False),
            Turn(f"open gro{k}t", f"Nobody has a gro{k}t.", 0.0, False),
            Turn(f"make pla{k}x", "Made." if k % 4 else f"Nobody has a pla{k}x.", 0.0, False),
            Turn(f"drop {thing}", f"Nobody has a {thing}." if k < 3 else "Dropped.", 1.0, False),
        ]
        return replace(LOG[0], id=f"e{k}", start=f"A lamp, a chest, a barrel. {k}", turns=tuple(turns), world_facts=())

    log = [episode(k) for k in range(24)]
    assert with_misspelt(log, 0.0, "Nobody", 0) == log
    changed = with_misspelt(log, 0.9, "Nobody", 0)
    assert changed == with_misspelt(log, 0.9, "Nobody", 0) != with_misspelt(log, 0.9, "Nobody", 1)
    inserted = [
        turn for before, after in zip(log, changed, strict=True) for turn in after.turns if turn not in before.turns
    ]
    assert len(inserted) > 12
    for turn in inserted:
        verb, name = turn.action.split(" ", 1)
        assert verb == "open"
        assert turn == Turn(f"open {name}", f"Nobody has a {name}.", 0.0, False)
    for before, after in zip(log, changed, strict=True):
        assert [turn for turn in after.turns if turn in before.turns] == [*before.turns]
        for k, turn in enumerate(after.turns):
            if turn in inserted:
                known = " ".join([after.start, *(u.action + u.observation for u in after.turns[:k])]).lower()
                assert turn.action.split(" ", 1)[1].lower() not in known
    declared = WorldModelSettings(misspelt=0.9, refusals="Nobody")
    examples = WorldModelExamples.of(log, form_of(declared, log), declared, FitSettings(renamed=1), seed=0)
    assert [len(weights) for weights in examples.weights] == [len(episode.turns) for episode in examples.episodes]
    assert examples.episodes[: len(log)] == changed


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.lists(st.sampled_from(SAID), min_size=1), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
def test_a_copy_is_the_episode_under_one_renaming(texts: list[tuple[list[str], bool]], seed: int) -> None:
    log = [
        logged(k, " ".join(words), (f"take {words[0]}", " ".join(reversed(words))) if acts else ("look", "nothing"))
        for k, (words, acts) in enumerate(texts)
    ]
    for before, after in zip(log, with_renamed(log, 1, seed)[len(log) :], strict=True):
        old, told = whole(before), whole(after)
        assert re.sub(r"[A-Za-z]+", "", old) == re.sub(r"[A-Za-z]+", "", told)  # numbers and layout
        pairs = {(a.lower(), b.lower()) for a, b in zip(WORD.findall(old), WORD.findall(told), strict=True)}
        assert len({a for a, _ in pairs}) == len(pairs) == len({b for _, b in pairs})  # one to one
        assert all(a == b or a in ("oak", "brick", "steel", "the", "box") for a, b in pairs)
