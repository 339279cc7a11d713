"""If these fail, PPO learns from another critic than the one that was there before the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from imagination.settings import AlgorithmSettings
from policy.lm.batch import Row
from tests.support.plain import (
    DEFAULTS,
    EXPERTS,
    assert_same,
    gradients_of,
    make_model,
    plain_imitation,
    plain_rl,
    rl_row,
    update,
)

# --- PPO ---


def plain_critic(
    model: PreTrainedModel, value: Tensor, rows: Sequence[Row], gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Whitened advantages and returns per row and token: values one token earlier, GAE over the agent's tokens as a
    sum over the future, mean and unbiased deviation over all of them."""
    advantages, returns, flat = [], [], []
    for row in rows:
        with torch.no_grad():
            hidden = model.model(torch.tensor([list(row.ids)])).last_hidden_state[0]
        after = (hidden @ value[:-1] + value[-1]).tolist()
        own = [t for t, m in enumerate(row.action_mask) if m]
        v = [after[t - 1] for t in own] + [after[-1] if row.truncated else 0.0]
        last = {int(row.turns[t]): t for t in own}  # of each turn
        earned = [float(row.rewards[row.turns[t]]) if last[int(row.turns[t])] == t else 0.0 for t in own]
        delta = [earned[i] + gamma * v[i + 1] - v[i] for i in range(len(own))]
        a = [sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:])) for i in range(len(own))]
        advantages.append(dict(zip(own, a, strict=True)))
        returns.append({t: a[i] + v[i] for i, t in enumerate(own)})
        flat += a
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((x - mean) ** 2 for x in flat) / (len(flat) - 1))
    whitened = [{t: (x - mean) / (std + 1e-8) for t, x in row.items()} for row in advantages]
    n = [range(len(row.ids)) for row in rows]
    return (
        [[row.get(t, 0.0) for t in ts] for row, ts in zip(whitened, n, strict=True)],
        [[row.get(t, 0.0) for t in ts] for row, ts in zip(returns, n, strict=True)],
    )


def plain_value_loss(
    model: PreTrainedModel, value: Tensor, old: Tensor, rows: Sequence[Row], returns: Sequence[Sequence[float]]
) -> Tensor:
    """Mean over the agent's tokens of half the squared error, pessimistic about steps of more than 0.2."""
    losses = []
    for row, row_returns in zip(rows, returns, strict=True):
        hidden = model.model(torch.tensor([list(row.ids)])).last_hidden_state[0]
        for t, mine in enumerate(row.action_mask):
            if mine:
                now = hidden[t - 1] @ value[:-1] + value[-1]
                before = (hidden[t - 1] @ old[:-1] + old[-1]).detach()
                bounded = before + (now - before).clamp(-0.2, 0.2)
                losses.append(0.5 * torch.maximum((now - row_returns[t]) ** 2, (bounded - row_returns[t]) ** 2))
    return torch.stack(losses).mean()


def ppo_rows(model: PreTrainedModel) -> list[Row]:
    """Two that ended, two that were cut (and bootstrap from the state after their last token); the advantages in the
    rows are nonsense, because the critic's are to be used."""
    return [
        rl_row(model, ".AA..AAA", 99.0, 1, reward=1.0),
        rl_row(model, "..A.A....AAAA.A...", 99.0, 2, reward=0.5, truncated=True),
        rl_row(model, ".A..", 99.0, 3, truncated=True),
        rl_row(model, ".......AAAAA", 99.0, 4, reward=-0.25),
    ]


def random_value(seed: int = 9) -> Tensor:
    return 0.3 * torch.randn(17, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("micro_tokens", [1, 10**6])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_ppo_is_that_of_the_plain_loop(gamma: float, micro_tokens: int) -> None:
    """Values before each token, GAE across observations, bootstrap only where we cut, advantages whitened over the
    update, the critic's squared error on the agent's tokens alone, experts without a critic."""
    model, value = make_model(), random_value()
    rows = ppo_rows(model)
    advantages, returns = plain_critic(model, value, rows, gamma, 0.8)
    weight = value.clone().requires_grad_()
    critic = plain_value_loss(model, weight, value, rows, returns)
    loss = plain_rl(model, rows, 1.0, advantages) + 0.7 * critic + 0.3 * plain_imitation(model, EXPERTS)
    of_weight = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    expected = gradients_of(loss, model) | {
        "value.linear.weight": of_weight[None, :-1],
        "value.linear.bias": of_weight[-1:],
    }

    algorithm = AlgorithmSettings(name="ppo", gamma=gamma, lam=0.8, value_coef=0.7)
    train = replace(DEFAULTS, micro_tokens=micro_tokens)
    (got,), metrics = update(model, [EXPERTS[0], *rows, EXPERTS[1]], algorithm, train, value=value)
    assert_same(got, expected)
    assert metrics["value_loss"] == pytest.approx(critic.item(), rel=1e-4)


def test_the_critic_starts_at_zero() -> None:
    """Then the first advantages are whitened returns, and a cut episode bootstraps nothing."""
    model = make_model()
    rows = ppo_rows(model)
    advantages, _ = plain_critic(model, torch.zeros(17), rows, 1.0, 1.0)
    algorithm = AlgorithmSettings(name="ppo", gamma=1.0, lam=1.0, value_coef=1e-9)
    (got,), _ = update(model, rows, algorithm)
    assert advantages[0][1] == advantages[0][7]  # undiscounted: one return for all tokens of an episode
    del got["value.linear.weight"], got["value.linear.bias"]
    assert_same(got, gradients_of(plain_rl(model, rows, 1.0, advantages), model))


def test_the_critic_of_an_update_is_the_one_from_before_it() -> None:
    """Advantages and returns belong to the policy that acted: with several optimiser steps they are computed once."""
    model, value = make_model(), random_value()
    rows = ppo_rows(model)
    algorithm = AlgorithmSettings(name="ppo", lam=0.8)
    steps, _ = update(model, rows, algorithm, replace(DEFAULTS, epochs=3), value=value)
    assert len(steps) == 3
    for later in steps[1:]:  # the weights were left alone, so nothing may have changed
        assert_same(later, steps[0])


def test_the_critic_is_held_to_its_values_from_before_the_update() -> None:
    """Between the two steps its bias jumps by half: tokens on which that was a step too far stop pulling."""
    model, value = make_model(), random_value()
    rows = ppo_rows(model)
    _, returns = plain_critic(model, value, rows, 1.0, 0.8)
    moved = torch.cat([value[:-1], value[-1:] + 0.5]).requires_grad_()
    critic = plain_value_loss(model, moved, value, rows, returns)
    expected = torch.autograd.grad(critic, moved)[0]
    algorithm = AlgorithmSettings(name="ppo", lam=0.8, value_coef=1.0)
    (_, second), _ = update(model, rows, algorithm, replace(DEFAULTS, epochs=2), value=value, nudge=0.5)
    got = {name: second[name] for name in ("value.linear.weight", "value.linear.bias")}
    assert_same(got, {"value.linear.weight": expected[None, :-1], "value.linear.bias": expected[-1:]})
    # the clip does bite: without it the gradient would be another one
    unclipped = torch.autograd.grad(plain_value_loss(model, moved, moved.detach(), rows, returns), moved)[0]
    assert float((unclipped - expected).abs().max()) > 1e-2


def test_one_trained_token_is_no_reason_for_nan() -> None:
    """A deviation of one number does not exist; whitened by it, the weights of the run would be NaN from then on."""
    model = make_model()
    (got,), metrics = update(model, [rl_row(model, "..A.", 0.0, 1, reward=1.0)], AlgorithmSettings(name="ppo"))
    assert all(g.isfinite().all() for g in got.values())
    assert metrics["value_loss"] == pytest.approx(0.5)  # the critic says 0 and still learns; there is no advantage
    assert metrics["policy_loss"] == 0.0


def test_equal_returns_are_no_advantage() -> None:
    """Every episode earned a tenth, and the critic still says 0: nobody did better than anybody. In fp32 the mean of
    many tenths is not a tenth, and whitening made most of an advantage out of the difference."""
    model = make_model()
    rows = [rl_row(model, "." + "A" * n, 0.0, n, reward=0.1) for n in (3, 7, 20, 70)]
    (got,), _ = update(model, rows, AlgorithmSettings(name="ppo", gamma=1.0, lam=1.0, value_coef=1e-9))
    assert max(float(g.abs().max()) for g in got.values()) < 1e-6
