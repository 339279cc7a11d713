"""If these fail, an algorithm's parts are each right and yet do not learn together.

`make learn` runs all of the registry on three seeds; here are a few, one of each kind, in seconds.
"""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from imagination.learning.algorithms import ALGORITHMS
from imagination.learning.q_learning import best_actions, fit_q
from imagination.settings import DigiQSettings
from tests.learn import race
from tests.learn.learner import Learner, Tables
from tests.learn.world import (
    ACTIONS,
    GIVE_UP,
    OBJECTS,
    OPTIMUM,
    ROOMS,
    SLIP,
    STARTS,
    STATES,
    TIME,
    TURNS,
    VERBS,
    effect,
    play,
    value,
    value_of,
)  # fmt: skip
from worldmodel.extras.synther.transitions import Transitions


def expected(state: int, turn: int, policy) -> float:
    """What a policy earns from here, by recursion into the future: the definition, not the dynamic programme."""
    if turn == TURNS:
        return 0.0
    total = SLIP * expected(state, turn + 1, policy)
    for p, action in zip(policy[state], ACTIONS, strict=True):
        if p:
            after, reward, end = effect(state, *action)
            total += p * (1 - SLIP) * (reward + (0.0 if end else expected(after, turn + 1, policy)))
    return total


def route(actions: dict[int, tuple[int, int]]) -> list[list[float]]:
    return [[float(action == actions[state]) for action in ACTIONS] for state in range(STATES)]


# back to room 0, the key, to room 2, open
SHORTEST = {0: (1, 0), 1: (0, 0), 2: (0, 1), 0 + ROOMS: (0, 1), 1 + ROOMS: (0, 2), 2 + ROOMS: (2, 2)}


def test_the_value_is_that_of_the_definition():
    found = sum(expected(start, 0, route(SHORTEST)) for start in STARTS) / len(STARTS)
    assert value_of(route(SHORTEST)) == pytest.approx(found)


def test_the_optimum_is_the_shortest_way_and_giving_up_when_it_is_too_late():
    """By hand: 3, 4, 5 and 6 right actions in ten turns; who cannot make it any more gives up if a turn is left."""
    assert value_of(route(SHORTEST)) < OPTIMUM < value_of(route(SHORTEST)) + GIVE_UP * 0.01
    binomial = [
        sum(
            SLIP ** slips.count(1) * (1 - SLIP) ** slips.count(0)
            for slips in itertools.product((0, 1), repeat=TURNS)
            if slips.count(0) >= needed
        )
        for needed in (3, 4, 5, 6)
    ]
    assert value_of(route(SHORTEST)) == pytest.approx(sum(binomial) / 4)


def test_giving_up_at_once_is_a_trap():
    giving_up = value_of(route(dict.fromkeys(range(STATES), (2, 0))))
    assert giving_up == pytest.approx(GIVE_UP * (1 - SLIP**TURNS))
    random_play = value(lambda _, worths: sum(worths) / len(worths))
    assert random_play < giving_up + 0.05 < 0.2 * OPTIMUM


def test_played_episodes_earn_what_the_value_says():
    tables = Tables()
    played = play(tables.verbs.softmax(-1), tables.things.softmax(-1), 2000, torch.Generator().manual_seed(0))
    assert played.turn.shape == (8000, TIME)
    earned = played.rewards[played.valid].sum(1)
    assert float(earned.mean()) == pytest.approx(tables.value(), abs=3.5 * float(earned.std()) / 8000**0.5)
    assert (played.rewards[~played.valid].isnan()).all()
    assert torch.equal(played.token >= 0, played.turn >= 0)
    assert torch.equal(played.logprobs.isnan(), played.turn < 0)


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_it_learns(name):
    """Ninety-five percent of the optimum, from less than ten, within 250 updates."""
    student = Learner(ALGORITHMS[name], seed=0)
    assert student.tables.value() < 0.1
    for _ in range(250):
        student.update()
        if student.tables.value() >= 0.95 * OPTIMUM:
            return
    pytest.fail(f"{name} reached {student.tables.value():.2f} of {OPTIMUM:.2f}")


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_algorithm_improves_a_little(name):
    """Ten updates and a seed: not the threshold, but up, and finite."""
    chosen = ALGORITHMS[name].with_settings(**race.SETTINGS.get(name, {}))
    student = Learner(chosen, seed=0, steps=1 if chosen.surrogate.on_policy else 2)
    before = student.tables.value()
    for _ in range(10):
        student.update()
    assert all(p.isfinite().all() for p in student.tables.parameters())
    assert student.tables.value() > before


def test_digi_q_finds_the_optimum_in_a_log_of_mediocre_play():
    """One action in three is the right one, the others are drawn; the best of sixteen by Q is right in every state."""
    rng, n = torch.Generator().manual_seed(0), len(ACTIONS)
    behaviour = torch.tensor(route(SHORTEST)) / 3 + 2 / 3 / n
    both = behaviour.view(STATES, VERBS, OBJECTS)
    turns, acted = logged_turns(play(both.sum(2), both / both.sum(2, keepdim=True), 250, rng))
    heads = fit_q(turns, acted, DigiQSettings(hidden=64, td_steps=1500, lr=3e-3, polyak=0.05), 0)
    candidates = torch.multinomial(behaviour, 16, replacement=True, generator=rng)
    q = heads.q(torch.eye(STATES * n)).view(STATES, n).gather(1, candidates)
    best = best_actions(q, heads.v(torch.eye(STATES)))
    assert (best >= 0).all()
    imitated = torch.zeros_like(behaviour).scatter(1, candidates.gather(1, best[:, None]), 1.0)
    assert value_of(behaviour.tolist()) < 0.5 < 0.95 * OPTIMUM <= value_of(imitated.tolist())


def logged_turns(log):
    """What `digi-q` reads of a log: one-hot states before and after each action. Failed episodes are left out."""
    rows = []
    for r in log.valid.nonzero()[:, 0].tolist():
        states = [s for s in log.anchors[r].tolist() if s >= 0]
        actions = log.token[r][log.turn[r] >= 0].view(-1, 2).tolist()
        paid = log.rewards[r].tolist()
        for k, (state, (verb, thing)) in enumerate(zip(states, actions, strict=True)):
            done = paid[k] != 0
            after = states[k + 1] if k + 1 < len(states) else effect(state, verb, thing)[0]
            rows.append((state, state * len(ACTIONS) + verb * OBJECTS + thing, paid[k], done, after))
    state, acted, reward, done, after = (torch.tensor(column) for column in zip(*rows, strict=True))
    hot = torch.eye(STATES)
    turns = Transitions(hot[state], hot[after], reward, done, torch.zeros(len(rows)))
    return turns, torch.eye(STATES * len(ACTIONS))[acted]


def test_the_table_says_who_did_not_arrive(tmp_path, capsys):
    row = race.run("grpo", 0, budget=5)
    assert row["updates"] is None
    assert "| grpo | no (" in race.table([row])
    assert race.main(["reinforce_pp", "--seeds", "0", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "table.json").read_text())["rows"][0]["updates"] > 0
    assert (tmp_path / "table.md").read_text() in capsys.readouterr().out
