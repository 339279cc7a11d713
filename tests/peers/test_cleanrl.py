"""cleanrl's ``ppo.py`` (github.com/vwxyzjn/cleanrl, Huang et al. 2022, JMLR 23).

It is a script and not a library, so its formulas are restated here in plain loops: classic PPO, which is ours where
there are no observation tokens.
"""

from __future__ import annotations

import math

import pytest
import torch

from imagination.learning.advantages.gae import masked_gae
from imagination.learning.advantages.reinforce import whiten
from imagination.learning.losses.auxiliary import kl_k3, value_loss
from imagination.learning.losses.policy import ppo_clip_loss
from imagination.learning.losses.terms import LossInputs
from imagination.settings.algorithm_parts import Critic, PpoClip, TokenGae
from tests.peers.rows import assert_agree

SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@SEEDS
@pytest.mark.parametrize("done", [True, False])
def test_gae(seed, done):
    """An environment whose rollout ends done, or is cut and bootstraps."""
    rewards, values, following = normal(seed, 10), normal(seed + 10, 10), float(normal(seed + 20, 1))
    advantages, last = [0.0] * 10, 0.0
    for t in reversed(range(10)):
        alive = 0.0 if done and t == 9 else 1.0
        after = following if t == 9 else float(values[t + 1])
        delta = float(rewards[t]) + 0.99 * after * alive - float(values[t])
        last = advantages[t] = delta + 0.99 * 0.95 * alive * last
    bootstrap = torch.tensor([0.0 if done else following], dtype=torch.float64)
    ours, returns = masked_gae(rewards[None], values[None], torch.ones(1, 10).bool(), TokenGae(0.99, 0.95), bootstrap)
    assert_agree(ours[0], torch.tensor(advantages))
    assert_agree(returns[0], torch.tensor(advantages) + values)


@SEEDS
def test_advantages_are_normalised_alike(seed):
    """Per minibatch there, over the whole update here: the same numbers where the update is one minibatch."""
    x = normal(seed, 32)
    mean = sum(x.tolist()) / 32
    std = math.sqrt(sum((v - mean) ** 2 for v in x.tolist()) / 31)
    assert_agree(whiten(x, torch.ones(32).bool()), torch.tensor([(v - mean) / (std + 1e-8) for v in x.tolist()]))


@SEEDS
def test_losses(seed):
    logprobs, drift, advantages = normal(seed, 24) - 2, 0.4 * normal(seed + 1, 24), normal(seed + 2, 24)
    values, old, returns = (normal(seed + k, 24) for k in (3, 4, 5))
    policy = critic = k3 = 0.0
    for lp, d, a, v, o, target in zip(
        *(x.tolist() for x in (logprobs, drift, advantages, values, old, returns)), strict=True
    ):
        ratio = math.exp(lp - (lp - d))
        policy += max(-a * ratio, -a * min(max(ratio, 0.8), 1.2)) / 24
        clipped = o + min(max(v - o, -0.2), 0.2)
        critic += 0.5 * max((v - target) ** 2, (clipped - target) ** 2) / 24
        k3 += ((ratio - 1) - math.log(ratio)) / 24
    ones = torch.ones(24)
    ours = ppo_clip_loss(LossInputs(logprobs, logprobs - drift, advantages, ones), PpoClip(dual_clip=None), 24)
    assert_agree(ours.loss, torch.tensor(policy))
    assert_agree(ours.means()["kl_k3"], torch.tensor(k3))
    assert_agree(kl_k3(logprobs - drift, logprobs).mean(), torch.tensor(k3))
    ours = value_loss(values, old, returns, ones.bool(), Critic(value_coef=1.0), denominator=24)
    assert_agree(ours.loss, torch.tensor(critic))


def test_differs_negative_advantages_are_bounded_here():
    """A ratio of 9 with A = -1 costs 9 in classic PPO and, by default, 3 with the dual clip."""
    inputs = LossInputs(*(torch.tensor([x]) for x in (math.log(9.0), 0.0, -1.0, 1.0)))
    assert_agree(ppo_clip_loss(inputs, PpoClip(dual_clip=None), denominator=1).loss, torch.tensor(9.0))
    assert_agree(ppo_clip_loss(inputs, PpoClip(), denominator=1).loss, torch.tensor(3.0))
