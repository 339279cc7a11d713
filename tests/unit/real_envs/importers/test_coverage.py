"""What a log covers, counted by hand. If these fail, people dream on logs that cannot carry it, and are not told."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real_envs.importers.coverage import Coverage, RepeatedPairs, TurnHashes, quantile
from real_envs.trajectory import Source, StopReason, Trajectory, Turn

GO = Turn("go", "a hall", 0.0, False)
WIN = Turn("win", "You won", 1.0, True)
BAD = Turn("fly", "Invalid action!", 0.0, False)


def episode(name: str, *turns: Turn, task: str = "t", start: str = "a room", success: bool | None = None) -> Trajectory:
    stop = StopReason.TERMINATED if turns and turns[-1].terminated else StopReason.TURN_LIMIT
    return Trajectory(name, task, "g", Source.REAL, "gpt", 0, start, turns, stop, success=success)


def counted(*episodes: Trajectory, heldout: tuple[Trajectory, ...] = ()) -> Coverage:
    coverage = Coverage()
    for found in (*episodes, *heldout):
        coverage.starts.add(found.task_id, found.start)
        coverage.count(found)
    coverage.split_of = {found.task_id: "heldout" for found in heldout}
    return coverage


def test_a_small_log_by_hand() -> None:
    crash = replace(episode("x", task="u"), stop=StopReason.ENV_CRASHED)
    found = counted(episode("a", GO, WIN), episode("b", GO, BAD, GO), crash).to_json()
    assert (found["episodes"], found["turns"], found["tasks"]) == (3, 5, {"train": 2})
    assert (found["distinct_actions"], found["distinct_observations"]) == (3, 3)
    assert found["turns_per_episode"] == {"least": 0, "median": 2, "most": 3}
    assert found["rewards"]["turns"] == 5
    assert (found["rewards"]["turns_not_zero"], found["rewards"]["of_these_at_the_end"]) == (1, 1)
    assert found["rewards"]["mean_total"] == 0.5
    assert found["success"] == {"known": 2, "stated": 0, "solved": 1}
    assert (found["terminated"], found["failed"], found["invalid_answers"]) == (1, 1, 1)
    assert found["duplicate_turns"] == 1  # go in a room, twice
    assert found["agents"] == {"gpt": 3}


def test_determinism_is_the_share_of_repeated_pairs_with_the_usual_answer() -> None:
    answers = ["a hall", "a hall", "a cellar", "a hall"]
    episodes = [episode(f"{k}", Turn("go", answer, None, False)) for k, answer in enumerate(answers)]
    found = counted(*episodes, episode("once", WIN)).to_json()["determinism"]
    assert found == {"repeated_pairs": 1, "same_answer": 0.75}
    assert counted(episode("once", WIN)).to_json()["determinism"]["same_answer"] is None


def test_held_out_tasks_that_are_nearly_training_tasks_are_named() -> None:
    near = episode("h", GO, task="h", start="A   room")
    far = episode("i", Turn("look", "dark", None, False), task="i", start="a cellar")
    found = counted(episode("a", GO, WIN), heldout=(near, far)).to_json()
    assert found["heldout_tasks_like_train"] == ["h"]
    assert found["heldout_turns_in_train"] == 0  # the state is written differently
    assert any("1 held-out tasks" in line for line in found["missing"])


def test_doubles_are_counted_with_those_that_a_split_by_task_would_tear_apart() -> None:
    """Ten tasks, all in pairs of doubles, one pair held out: of a fifth of single tasks, two are held out."""
    pairs = [
        episode(f"{name}{k}", GO, task=f"{name}{k}", start=f"{room} number {k}")
        for room, name in zip(("attic", "cellar", "hall", "kitchen", "yard"), "abcde", strict=True)
        for k in range(2)
    ]
    held = [e for e in pairs if e.task_id[0] == "c"]
    found = counted(*(e for e in pairs if e not in held), heldout=tuple(held)).to_json()
    assert found["heldout_tasks_like_train"] == []
    alone = sorted(f"{n}{k}" for n in "abcde" for k in range(2))
    alone.sort(key=lambda task: hashlib.sha256(f"heldout/{task}".encode()).digest())
    leaking = 2 if alone[0][0] != alone[1][0] else 0
    assert found["near_duplicates"] == {"tasks": 10, "groups": 5, "leaks_if_split_by_task": leaking}
    assert leaking == 2


def said(*episodes: Trajectory) -> str:
    return "\n".join(counted(*episodes).to_json()["missing"])


def test_unknown_success_is_said_and_known_success_is_not() -> None:
    points = [episode("a", replace(WIN, reward=0.5)), episode("b", GO)]
    assert "unknown in 2 of 2" in said(*points)
    assert "imports.solved_at" in said(*points)
    assert "unknown" not in said(*points, episode("c", WIN))  # a terminal reward of 1 says what success is
    failed = [replace(e, success=False) for e in points]
    assert "unknown in 1 of 3" in said(*failed, episode("c", replace(GO, reward=None)))


def test_a_field_that_may_be_the_success_is_named() -> None:
    noted = replace(GO, info={"log.resolved": 1.0, "log.is_error": True})
    assert "imports.mapping.success=resolved" in said(episode("a", noted))
    assert "mapping" not in said(episode("a", replace(GO, info={"log.resolved": 0.5})))


SCORES = [Turn(f"s{k}", "o", reward, False) for k, reward in enumerate((0.1, 0.4, 0.9))]


@pytest.mark.parametrize(
    ("found", "token"),
    [
        (episode("a"), "no turn"),
        (episode("a", WIN), "every episode"),
        (episode("a", GO, success=False), "no episode is"),
        (episode("a", replace(WIN, reward=None), success=True), "has a reward"),
        (episode("a", GO), "ended"),
        (episode("a", GO), "only 1 episodes"),
        (episode("a", GO), "only 0 pairs"),
        (episode("a", GO, success=True), "reward of 1 disagree"),
        (episode("a", *SCORES), "scores so far"),
        (replace(episode("a", GO), start=" "), "1 episodes begin with no text"),
    ],
)
def test_what_else_is_missing(found: Trajectory, token: str) -> None:
    assert token in said(found)
    assert "scores so far" not in said(episode("a", GO, GO, WIN))


def test_success_is_held_against_the_threshold_of_the_log() -> None:
    ten = Coverage(solved_at=10.0)
    ten.count(episode("a", replace(GO, reward=10.0), success=True))
    assert ten.contradictions == 0
    ten.count(episode("b", WIN, success=True))
    assert "reward of 10 disagree" in "\n".join(ten.to_json()["missing"])


def test_a_log_that_carries_dreams_lacks_nothing() -> None:
    episodes = [episode(f"{k}", GO, WIN if k % 2 else BAD, task=f"t{k % 6}", start=f"room {k % 30}") for k in range(60)]
    assert said(*episodes) == ""


def test_quantiles_by_hand() -> None:
    assert quantile({1: 99, 500: 1}) == 1
    assert quantile({1: 98, 500: 2}) == 500
    assert quantile({}) == 0


texts = st.sampled_from(["a", "b", "\ud800"])  # half a pair, too, which UTF-8 cannot write
turns_of_tasks = st.lists(st.tuples(st.integers(0, 3), texts, texts, texts), max_size=30)


def hashed(rows: list[tuple[int, str, str, str]]) -> TurnHashes:
    turns = TurnHashes()
    for owner, state, action, answer in rows:
        turns.add(owner, state, action, answer)
    return turns


@settings(max_examples=60)
@given(turns_of_tasks, st.sets(st.integers(0, 3)))
def test_counts_are_those_of_a_plain_loop(rows: list[tuple[int, str, str, str]], held: set[int]) -> None:
    turns = hashed(rows)
    assert turns.distinct_actions == len({action for _, _, action, _ in rows})
    assert turns.distinct_answers == len({answer for *_, answer in rows})
    answers: dict[tuple[str, str], Counter[str]] = {}
    for _, state, action, answer in rows:
        answers.setdefault((state, action), Counter())[answer] += 1
    more = [found for found in answers.values() if found.total() > 1]
    usual = sum(max(found.values()) for found in more)
    assert turns.repeated() == RepeatedPairs(len(more), sum(found.total() for found in more), usual)
    among = turns.of_tasks(held)
    ours, others = ([row[1:] for row in rows if (row[0] in held) is side] for side in (True, False))
    assert turns.duplicates(among) == len(ours) - len(set(ours))
    assert turns.duplicates(~among) == len(others) - len(set(others))
    assert turns.shared(among, ~among) == sum(row in others for row in ours)


def test_texts_are_not_run_together() -> None:
    turns = hashed([(0, "a", "bc", "d"), (0, "ab", "c", "d")])
    assert turns.repeated().pairs == 0
    assert turns.duplicates(turns.of_tasks([0])) == 0


def test_parts_that_were_left_out_are_added_up_by_kind() -> None:
    last = replace(WIN, info={"log.left_out.image": 2.0, "log.trial": 1.0})
    found = counted(episode("a", GO, last), episode("b", replace(WIN, info={"log.left_out.image": 1.0}))).to_json()
    assert found["left_out"] == {"image": 3}
    assert counted(episode("a", GO, WIN)).to_json()["left_out"] == {}
