"""What is held out, and that no near-duplicate of it is trained on. If these fail, held-out numbers flatter."""

from __future__ import annotations

import random

import pytest

from real_envs.importers.splits import SimilarTasks, heldout_tasks, leaks, normalised

WORDS = [f"{a}{b}{c}" for a in "bdgklmprst" for b in "aeiou" for c in "lnrst"]  # 250


def text(draw: random.Random, words: int = 20) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def alike(**starts: str | tuple[str, ...]) -> set[frozenset[str]]:
    """The groups of two tasks and more."""
    tasks = SimilarTasks()
    for task, found in starts.items():
        for start in (found,) if isinstance(found, str) else found:
            tasks.add(task, start)
    return {group for group in tasks.groups() if len(group) > 1}


def test_what_differs_in_numbers_names_and_masks_is_one_task() -> None:
    start = "Buy a pair of red running shoes, size {}, and send them to {} in the old town before noon. Mail {}."
    found = alike(
        a=start.format(41, "Ada", "<email#0123abcd>"),
        b=start.format("9", "Grace", "<email#99999999>"),
        c="Cancel the flight of tomorrow, and book a train to the sea for two grown people and a dog instead.",
    )
    assert found == {frozenset("ab")}
    assert normalised("Room  12\n<token#00ff00ff>") == "room 0 <token>"


def test_starts_with_half_of_their_words_in_common_are_two_tasks() -> None:
    draw = random.Random(0)
    shared = text(draw, 15)
    assert alike(a=f"{shared} {text(draw, 15)}", b=f"{shared} {text(draw, 15)}") == set()  # overlap 14 of 44


def test_a_task_that_begins_in_two_ways_connects_both() -> None:
    draw = random.Random(1)
    one, other = text(draw), text(draw)
    assert alike(a=one, b=(one.upper(), other), c=other) == {frozenset("abc")}


def test_the_words_of_the_world_itself_make_no_tasks_alike() -> None:
    """A system prompt of 500 words before tasks of 20: of the whole texts nine tenths are the same."""
    draw = random.Random(2)
    prompt = text(draw, 500)
    starts = {f"t{k}": f"{prompt} {text(draw)}" for k in range(300)}  # more than those that say what is common
    starts["t300"] = starts["t7"] + " please"
    starts["t301"] = starts["t290"] + " please"
    assert alike(**starts) == {frozenset(("t7", "t300")), frozenset(("t290", "t301"))}


def test_doubles_are_found_among_thousands_and_nothing_else_is() -> None:
    draw = random.Random(3)
    starts = {f"t{k}": text(draw, 40) for k in range(3000)}
    doubles = {}
    for k in range(100):
        said = starts[f"t{k}"].split()
        said[draw.randrange(40)] = "somebody"  # 37 of 41 pairs stay
        doubles[f"d{k}"] = " ".join(said)
    found = alike(**starts, **doubles)
    assert found <= {frozenset((f"t{k}", f"d{k}")) for k in range(100)}
    assert len(found) >= 99


def test_a_share_of_the_tasks_is_held_out_whatever_their_order() -> None:
    tasks = [f"t{k}" for k in range(40)]
    held = heldout_tasks(tasks, 0.25)
    assert len(held) == 10
    assert held == heldout_tasks(tasks[::-1], 0.25)
    assert held < heldout_tasks(tasks, 0.5)


@pytest.mark.parametrize(("count", "share", "held"), [(0, 0.5, 0), (1, 0.5, 0), (2, 0.01, 1), (2, 0.99, 1), (9, 0, 0)])
def test_something_is_always_left_to_train_on(count: int, share: float, held: int) -> None:
    assert len(heldout_tasks([f"t{k}" for k in range(count)], share)) == held


def test_near_duplicates_are_on_one_side() -> None:
    tasks = [f"t{k}" for k in range(40)]
    groups = [frozenset((f"t{k}", f"t{k + 20}")) for k in range(20)]
    held = heldout_tasks(tasks, 0.25, groups)
    assert len(held) == 10
    assert leaks(held, groups) == []
    assert leaks(heldout_tasks(tasks, 0.25), groups) != []  # else this test could not fail


def test_earlier_splits_stand_and_new_tasks_follow_them() -> None:
    before = {"a": "train", "b": "heldout", "c": "train", "d": "heldout"}
    groups = [frozenset(("a", "a2")), frozenset(("b", "b2")), frozenset(("c", "d", "cd"))]
    assert heldout_tasks(["a2", "b2", "cd"], 0.5, groups, before) == {"b2"}
    assert heldout_tasks(["b2"], 0.0, groups, before) == frozenset()


def test_a_template_that_all_tasks_share_does_not_keep_them_together() -> None:
    tasks = [f"t{k}" for k in range(20)]
    assert len(heldout_tasks(tasks, 0.1, [frozenset(tasks)])) == 2
    most = frozenset(tasks[:18])  # the other two make up the share
    assert heldout_tasks(tasks, 0.1, [most]) == {"t18", "t19"}
    halves = [frozenset(tasks[:10]), frozenset(tasks[10:])]  # rather too many than a leak
    assert heldout_tasks(tasks, 0.1, halves) in halves
