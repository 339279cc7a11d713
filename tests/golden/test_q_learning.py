"""If these fail, Q-values look beyond the end of an episode, or another action than the best is imitated.

Expected numbers come from plain loops over lists.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.learning.algorithms import ALGORITHMS
from imagination.learning.critic import logged_transitions, with_returns
from imagination.learning.q_learning import best_actions, fit_q, td_targets
from imagination.settings import DigiQSettings
from policy.lm.batch import Row
from real_envs.trajectory import Source
from tests.support.plain import make_model, random_ids
from worldmodel.extras.synther.transitions import Transitions

JUNK = st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
GAMMA = 0.9


@settings(max_examples=40)
@given(st.integers(0, 10**6), JUNK)
def test_targets_are_those_of_a_loop_and_nothing_follows_an_end(seed, junk):
    rng = random.Random(seed)
    turns = [(rng.gauss(0, 1), rng.random() < 0.4, rng.gauss(0, 1)) for _ in range(9)]
    rewards, dones, values = map(torch.tensor, zip(*turns, strict=True))
    found = td_targets(rewards, dones, values.masked_fill(dones, junk), GAMMA)
    expected = [r if done else r + GAMMA * value for r, done, value in turns]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_the_best_action_is_imitated_if_it_is_better_than_the_state(seed):
    """Actions that were not sampled, NaN, are never chosen, wherever they stand."""
    rng = random.Random(seed)
    q = [[rng.choice([None, rng.gauss(0, 1)]) for _ in range(4)] for _ in range(9)]
    values = [rng.choice([0.0, rng.gauss(0, 1)]) for _ in q]
    expected = []
    for row, value in zip(q, values, strict=True):
        best = -1
        for k, x in enumerate(row):
            if x is not None and x > value and (best < 0 or x > row[best]):
                best = k
        expected.append(best)
    as_tensor = torch.tensor([[math.nan if x is None else x for x in row] for row in q])
    assert best_actions(as_tensor, torch.tensor(values)).tolist() == expected
    assert best_actions(torch.tensor([[0.5, 0.5]]), torch.tensor([0.5])).tolist() == [-1]


def corridor():
    """Three states in a row, the third pays and ends. Right or stay, logged equally often; one hot, an action one more.

    An episode that a limit cut in the last state is logged, too: nothing was earned, and the state goes on to be worth
    what it is.
    """
    turns = []  # state, action, reward, done, next state
    for state in range(3):
        turns += [(state, 0, 0.0, False, state), (state, 1, float(state == 2), state == 2, min(state + 1, 2))]
    return turns


def test_the_heads_learn_the_values_of_who_made_the_log():
    turns = corridor()
    values = [0.0] * 3
    for _ in range(500):  # V of equal chances, by value iteration
        q = {(s, a): r + (0 if done else GAMMA * values[n]) for s, a, r, done, n in turns}
        values = [(q[s, 0] + q[s, 1]) / 2 for s in range(3)]
    hot = torch.eye(6)
    data = Transitions(
        states=torch.stack([hot[s] for s, *_ in turns]),
        next_states=torch.stack([hot[n] for *_, n in turns]),
        rewards=torch.tensor([r for _, _, r, _, _ in turns]),
        dones=torch.tensor([done for *_, done, _ in turns]),
        returns=torch.full((6,), math.nan),
    )
    acted = torch.stack([hot[2 * s + a] for s, a, *_ in turns])
    learned = DigiQSettings(gamma=GAMMA, hidden=32, td_steps=1500, batch=64, lr=3e-3, weight_decay=0.0, polyak=0.05)
    heads = fit_q(data, acted, learned, 0)
    assert heads.q(acted).tolist() == pytest.approx([q[s, a] for s, a, *_ in turns], abs=0.05)
    assert heads.v(hot[:3]).tolist() == pytest.approx(values, abs=0.05)
    assert best_actions(heads.q(acted).view(3, 2), heads.v(hot[:3])).tolist() == [1, 1, 1]
    again = fit_q(data, acted, learned, 0)
    assert torch.equal(again.q(acted), heads.q(acted)), "the same log and seed give the same heads"


def test_the_target_network_follows_by_the_share_that_was_asked_for(monkeypatch):
    """With none to follow by, V moves to what Q said at first; Q's own steps do not reach it."""
    turns = corridor()
    hot = torch.eye(6)
    states, acted = torch.stack([hot[s] for s, *_ in turns]), torch.stack([hot[2 * s + a] for s, a, *_ in turns])
    ended = torch.ones(6, dtype=torch.bool)
    data = Transitions(states, states, torch.full((6,), 5.0), ended, torch.zeros(6))
    for polyak, low, high in ((1e-9, -1.0, 1.0), (1.0, 4.5, 5.5)):
        learned = DigiQSettings(hidden=16, td_steps=800, batch=32, lr=1e-2, weight_decay=0.0, polyak=polyak)
        heads = fit_q(data, acted, learned, 0)
        assert heads.q(acted).mean().item() == pytest.approx(5.0, abs=0.2)
        assert low < heads.v(hot[:3]).mean() < high


def test_a_cut_episode_is_bootstrapped_from_the_state_it_was_cut_in_and_an_ended_one_is_not():
    model = make_model()
    ids = random_ids(9, 3)

    def row(truncated):
        turns = [-1, -1, 0, 0, -1, 1, 1, -1, -1]
        mine = torch.tensor([turn >= 0 for turn in turns])
        return Row(
            ids, mine, Source.REAL, rl_weight=mine.float(), turns=turns, rewards=[0.0, 0.5],
            group=int(truncated), truncated=truncated,
        )  # fmt: skip

    batch = with_returns([row(False), row(True)], ALGORITHMS["turn_ppo"])
    found, of_row = logged_transitions(batch, model, 10**6)
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
    assert of_row.tolist() == [0, 0, 1, 1]
    assert found.dones.tolist() == [False, True, False, False]
    assert found.rewards.tolist() == [0.0, 0.5, 0.0, 0.5]
    torch.testing.assert_close(found.states[2:], hidden[[1, 4]])
    torch.testing.assert_close(found.next_states[2:], hidden[[4, 8]])
