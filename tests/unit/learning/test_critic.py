"""The critic that PPO begins with. If these fail, it begins with values of something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from imagination.learning.algorithms import ALGORITHMS
from imagination.learning.critic import fit_value_head, load_critic, made_for, save_critic, squared_errors
from imagination.settings import CriticSettings, TrainSettings, UserError
from policy.lm.forward import ValueHead
from worldmodel.extras.synther.settings import SyntherSettings
from worldmodel.extras.synther.transitions import Transitions
from worldmodel.rewards import Goal

PLAIN = CriticSettings(steps=300, batch=64, lr=0.05, weight_decay=0.0, synther=SyntherSettings(ratio=0.5))


def transitions(slope: float, n: int = 100) -> Transitions:
    """Returns are ``slope`` times the first number of a state, and 2; the second number is large and says nothing."""
    rng = torch.Generator().manual_seed(0)
    states = torch.randn(n, 2, generator=rng) * torch.tensor([0.1, 50.0]) + torch.tensor([1.0, -300.0])
    return Transitions(states, states, torch.zeros(n), torch.zeros(n).bool(), slope * states[:, 0] + 2)


def test_the_head_finds_a_linear_value_whatever_the_scale_of_states() -> None:
    real = transitions(10.0)
    head = fit_value_head(real, PLAIN, 0)
    assert float(squared_errors(head, real).max()) < 1e-3
    assert head.linear.weight[0].tolist() == pytest.approx([10.0, 0.0], abs=0.1)
    assert torch.equal(head.linear.weight, fit_value_head(real, PLAIN, 0).linear.weight)
    assert head.linear.weight.requires_grad, "PPO goes on with it"


def test_it_begins_at_the_mean_return() -> None:
    real = transitions(10.0)
    head = fit_value_head(real, CriticSettings(steps=1, lr=1e-9), 0)
    with torch.no_grad():
        values = head(real.states)
    torch.testing.assert_close(values, real.returns.mean().expand(100), atol=1e-3, rtol=1e-3)


def test_synthetic_transitions_are_the_share_of_each_batch_that_was_asked_for() -> None:
    """The same states with slopes of 10 and 30: least squares weighs the two as the batch does."""
    for ratio, slope in ((0.5, 20.0), (0.25, 15.0)):
        settings = CriticSettings(steps=250, batch=64, lr=0.05, weight_decay=0.0, synther=SyntherSettings(ratio=ratio))
        head = fit_value_head(transitions(10.0), settings, 0, transitions(30.0))
        assert head.linear.weight[0, 0].item() == pytest.approx(slope, abs=1.0)
    alone = fit_value_head(transitions(10.0), PLAIN, 0)
    assert alone.linear.weight[0, 0].item() == pytest.approx(10.0, abs=0.1), "without any, all of it is logged"


def test_a_head_is_only_used_for_what_it_was_fitted_for(tmp_path: Path) -> None:
    no_goal, train = Goal(), TrainSettings()
    purpose = made_for("abc", ALGORITHMS["ppo"], train, no_goal)
    head = fit_value_head(transitions(10.0), CriticSettings(steps=3), 0)
    save_critic(head, tmp_path / "critic", purpose)
    loaded = load_critic(tmp_path / "critic", purpose)
    assert torch.equal(loaded.linear.weight, head.linear.weight)
    assert torch.equal(loaded.linear.bias, head.linear.bias)
    others = [
        (made_for("abd", ALGORITHMS["ppo"], train, no_goal), "policy was abc and is abd"),
        (made_for("abc", ALGORITHMS["ppo"].with_settings(gamma=0.9), train, no_goal), "gamma was 1.0 and is 0.9"),
        (made_for("abc", ALGORITHMS["turn_ppo"], train, no_goal), "per was token and is turn"),
        (made_for("abc", ALGORITHMS["ppo"], TrainSettings(reward_tiers=[[1.0, 2.0]]), no_goal), "reward_tiers was"),
        (made_for("abc", ALGORITHMS["ppo"], train, Goal("the sea")), "goal was"),
    ]
    for other, told in others:
        with pytest.raises(UserError, match=told):
            load_critic(tmp_path / "critic", other)
    load_critic(tmp_path / "critic", made_for("abc", ALGORITHMS["st_ppo"], train, no_goal))  # the same values

    (tmp_path / "critic" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="holds no value head"):
        load_critic(tmp_path / "critic", purpose)


def test_an_untrained_head_says_nothing() -> None:
    """What `fit-critic` is compared with: values of 0, so that the error is the mean square of returns."""
    real = transitions(0.0)
    assert squared_errors(ValueHead(2), real).tolist() == [4.0] * 100
