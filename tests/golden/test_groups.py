"""If these fail, episodes are kept, come again or branch off otherwise than the papers say.

Expected numbers are worked out by hand or by plain Python loops over lists, written apart from the code under test.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations, permutations

import pytest
import torch

from imagination.learning.advantages.group import shared_before_branches
from imagination.learning.groups import (
    FailedTasks,
    ReachedGoals,
    branch_points,
    quality_penalty,
    resample_on_correct,
    turn_surprisals,
)
from real_envs.trajectory import Owner, Source, StopReason, Trace, Trajectory, Turn

WON, LOST = 1.0, 0.0
CRASH, INVALID = StopReason.ENV_CRASHED, StopReason.PREDICTION_INVALID


def episode(reward: float, stop: StopReason = StopReason.TERMINATED, task: str = "t", prefix: int = 0) -> Trajectory:
    turns = (Turn("a", "o", reward, True),) * (prefix + 1)
    return Trajectory("e", task, f"g/{task}", Source.DREAM, "policy", 0, "S", turns, stop, prefix_turns=prefix)


# --- Resample on Correct ---


@pytest.mark.parametrize("wins", range(25))
def test_solved_and_unsolved_keep_their_proportion(wins: int) -> None:
    """Of 24 episodes 12 are kept: half of each kind, as in the paper. Of an odd number one kind gets the half more; the
    only one of its kind stays."""
    group = [episode(WON)] * wins + [episode(LOST)] * (24 - wins)
    kept = resample_on_correct(group, 12, [0.0] * 24, random.Random(wins))
    solved = sum(t.solved for t in kept)
    allowed = {wins // 2, (wins + 1) // 2}
    if wins == 1:
        allowed = {1}
    if wins == 23:
        allowed = {11}
    assert len(kept) == 12
    assert solved in allowed


def test_successes_are_drawn_one_after_the_other_by_their_weights() -> None:
    """Two of four with weights 1 / (penalty + 0.1), without replacement: chances by a loop over all orders."""
    penalties = [0.0, 0.1, 0.4, 0.9]
    weights = [1 / (penalty + 0.1) for penalty in penalties]
    chance = Counter[tuple[int, ...]]()
    for order in permutations(range(4)):
        p, left = 1.0, sum(weights)
        for k in order:
            p, left = p * weights[k] / left, left - weights[k]
        chance[tuple(sorted(order[:2]))] += p
    group = [replace(episode(WON), id=str(k)) for k in range(4)]
    draws = 4000
    found = Counter(
        tuple(int(t.id) for t in resample_on_correct(group, 2, penalties, random.Random(seed))) for seed in range(draws)
    )
    for pair in combinations(range(4), 2):
        assert found[pair] / draws == pytest.approx(chance[pair], abs=0.03)
    assert chance[(0, 1)] > 10 * chance[(2, 3)]


def test_failures_are_drawn_uniformly_whatever_their_penalty() -> None:
    group = [replace(episode(LOST), id=str(k)) for k in range(4)]
    found = Counter(
        t.id for seed in range(4000) for t in resample_on_correct(group, 2, [0, 0, 2, 2], random.Random(seed))
    )
    assert [found[str(k)] / 4000 for k in range(4)] == pytest.approx([0.5] * 4, abs=0.03)


def test_a_single_one_is_solved_as_often_as_the_episodes_are() -> None:
    """As for PPO, with one episode a start: kept for the failures' sake, nothing would ever be solved."""
    group = [episode(WON)] * 3 + [episode(LOST)]
    kept = [t for seed in range(4000) for t in resample_on_correct(group, 1, [0.0] * 4, random.Random(seed))]
    assert sum(t.solved for t in kept) / 4000 == pytest.approx(0.75, abs=0.03)


def test_what_broke_is_kept_only_where_there_is_nothing_else() -> None:
    """A malformed prediction is the action's doing and counts as unsolved; a crash is nobody's."""
    group = [episode(LOST, CRASH), episode(WON), episode(LOST, INVALID), episode(LOST, CRASH)]
    kept = [resample_on_correct(group, n, [0.0] * 4, random.Random(0)) for n in (2, 3)]
    assert [[t.stop for t in some] for some in kept] == [
        [StopReason.TERMINATED, INVALID],
        [CRASH, StopReason.TERMINATED, INVALID],
    ]


def test_a_penalty_by_hand() -> None:
    """Four own turns after a logged one: one refused, one empty, one cut before its end token 9."""
    said = ("You can't.", "You can't.", "ok", "ok", "ok")
    turns = tuple(Turn(a, o, 0.0, False) for a, o in zip(("x", "x", "", "x", "x"), said, strict=True))
    ids, index = (1, 5, 9, 9, 5, 6, 5, 9), (-1, 1, 1, 2, 3, 3, 4, 4)
    owners = tuple(Owner.ENV if k < 0 else Owner.AGENT for k in index)
    trace = Trace(ids, owners, tuple(None if k < 0 else -0.5 for k in index), index)
    played = replace(episode(LOST), turns=turns, prefix_turns=1, trace=trace)
    assert quality_penalty(played, "can't", stop=9) == pytest.approx(1 / 4 + 2 / 4)
    assert quality_penalty(played, "", stop=9) == pytest.approx(2 / 4)
    assert quality_penalty(replace(played, turns=turns[:1], trace=None), "can't", stop=9) == 0.0


# --- failed tasks ---


def test_a_task_stays_until_it_is_solved() -> None:
    """Against a plain list. Groups from the middle of an episode, outages and dreams in doubt say nothing."""
    rng, tasks = random.Random(0), FailedTasks(seed=1)
    waiting: list[str] = []
    for update in range(40):
        played = []
        for name in rng.sample("abcdef", 3):
            outcomes = [rng.choice([WON, LOST, LOST, None]) for _ in range(2)]
            middle, nothing = rng.random() < 0.2, rng.choice([CRASH, StopReason.UNSURE])
            played += [
                episode(LOST if o is None else o, nothing if o is None else StopReason.TERMINATED, name, int(middle))
                for o in outcomes
            ]
            known = [o for o in outcomes if o is not None]
            if middle or not known:
                continue
            if WON in known:
                waiting = [task for task in waiting if task != name]
            elif name not in waiting:
                waiting.append(name)
        assert tasks.add(played) == {"failed_tasks": len(waiting)}
        assert tasks.tasks == waiting
        drawn = tasks.draw(update, 2)
        assert len(drawn) == len(set(drawn)) == min(2, len(waiting))
        assert set(drawn) <= set(waiting)
        again = FailedTasks(seed=1)
        again.load_state_dict(tasks.state_dict())
        assert again.draw(update, 2) == drawn


# --- goals that failures reached ---


def test_goals_are_drawn_by_how_seldom_the_log_shows_their_end() -> None:
    """Weights 1, 1/2 and 1/4 by hand: an end that one, two and four episodes show, however often each."""
    shown = [["rare", "x"], ["twice"], ["twice", "twice"], *([["often"]] * 4)]
    log = [replace(episode(LOST), turns=tuple(Turn("a", o, 0.0, False) for o in seen)) for seen in shown]
    reached = [
        replace(episode(WON), id=name, start=f"Goal {name}", turns=(Turn("b", "x", 0, False), Turn("a", name, 1, True)))
        for name in ("rare", "twice", "often")
    ]
    goals = ReachedGoals(reached, log)
    found = Counter(goals.draw(7000, random.Random(0)))
    assert [found[name] / 7000 for name in goals.starts] == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=0.02)
    assert goals.starts["rare"].text == "Goal rare"
    assert goals.draw(0, random.Random(0)) == []


# --- branches ---


def test_the_entropy_of_an_action_is_estimated_by_its_tokens() -> None:
    index = (-1, 2, 2, -1, 3)
    owners = tuple(Owner.ENV if k < 0 else Owner.AGENT for k in index)
    played = replace(episode(WON), trace=Trace((1,) * 5, owners, (None, -1.0, -2.0, None, -0.25), index))
    assert turn_surprisals(played) == {2: 1.5, 3: 0.25}
    assert turn_surprisals(replace(played, stop=CRASH)) == {}
    assert turn_surprisals(replace(played, trace=None)) == {}


@pytest.mark.parametrize("seed", range(8))
def test_branches_begin_where_the_entropy_rose_most(seed: int) -> None:
    """Each time the largest rise over its episode's first action, divided by how often that one was taken, plus one."""
    rng = random.Random(seed)
    group = [{turn: rng.random() for turn in range(1, rng.randint(2, 6))} for _ in range(5)]
    expected: list[tuple[int, int]] = []
    for _ in range(6):
        best, where = 0.0, None
        for k, turns in enumerate(group):
            used = 1 + sum(1 for episode, _ in expected if episode == k)
            for turn, value in turns.items():
                if (value - turns[1]) / used > best and (k, turn) not in expected:
                    best, where = (value - turns[1]) / used, (k, turn)
        if where is None:
            break
        expected.append(where)
    assert branch_points(group, 6) == expected
    assert branch_points(group, 2) == expected[:2]


def test_nothing_branches_without_a_rise() -> None:
    assert branch_points([{0: 1.0, 1: 1.0, 2: 0.5}, {}, {3: 2.0}], 4) == []


def test_shared_tokens_have_the_mean_of_all_that_share_them() -> None:
    """Plain lists: row 0 has two branches, before turns 1 and 2; row 3 has one; rows differ in length."""
    index = [[0, 0, -1, 1, -1, 2], [-1, -1, -1, 1, 2, 2], [-1, -1, -1, -1, -1, 2], [-1, 0, 1, 1, -1, -1]]
    index.append([-1, -1, 1, -1, -1, -1])
    parents, whole = [-1, 0, 0, -1, 3], [1.0, -0.5, 0.25, 2.0, -2.0]
    begins = [min(turn for turn in row if turn >= 0) for row in index]
    expected = []
    for k, row in enumerate(index):
        expected.append([])
        for turn in row:
            sharing = [k] + [c for c, parent in enumerate(parents) if parent == k and turn < begins[c]]
            expected[-1].append(sum(whole[c] for c in sharing) / len(sharing) if turn >= 0 else 0.0)
    turns = torch.tensor(index)
    given = torch.where(turns >= 0, torch.tensor(whole)[:, None], 0.0)
    found = shared_before_branches(given, turns, torch.tensor(parents))
    torch.testing.assert_close(found, torch.tensor(expected))
    assert found[0].tolist() == [0.25, 0.25, 0.0, 0.625, 0.0, 1.0]
    assert torch.equal(shared_before_branches(given, turns, torch.full((5,), -1)), given)
