"""verl 0.9.1, ``verl/trainer/ppo/core_algos.py``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos as verl
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.config import ActorConfig

from imagination.learning.advantages.gae import masked_gae
from imagination.learning.advantages.group import group_relative, leave_one_out
from imagination.learning.advantages.reinforce import reinforce, reinforce_pp_baseline, whiten
from imagination.learning.advantages.turns import broadcast_over_tokens
from imagination.learning.losses.auxiliary import kl_k1, kl_k2, kl_k3, value_loss
from imagination.learning.losses.policy import cispo_loss, gspo_loss, ppo_clip_loss, reinforce_loss
from imagination.learning.losses.terms import LossInputs, token_entropy, token_weights
from imagination.settings.algorithm_parts import (
    Critic,
    GroupRelative,
    PolicyGradient,
    PpoClip,
    ReturnsToGo,
    SequenceClip,
    TokenGae,
    WeightClip,
)
from tests.peers.rows import Rows, assert_agree, make_rows, with_gradient

GROUPS = [3, 3, 3, 3, 5, 5, 5, 9]  # the last is a group of one
PEERED = torch.tensor(GROUPS) != 9
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])
AVERAGES = pytest.mark.parametrize(
    ("theirs", "ours", "length"),
    [("token-mean", "token_mean", None), ("seq-mean-token-mean", "sequence_mean", None),
     ("seq-mean-token-sum-norm", "constant", 10)],
)  # fmt: skip


def actor(average: str = "token-mean", length: int | None = None, **rest: object) -> ActorConfig:
    info = {} if length is None else {"loss_scale_factor": length}
    return ActorConfig(strategy="fsdp", rollout_n=1, loss_agg_mode=average, global_batch_info=info,
                       use_dynamic_bsz=True, **rest)  # fmt: skip


def scores(rows: Rows) -> torch.Tensor:
    return rows.rewards.sum(1)


@SEEDS
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8)])
def test_gae(seed, gamma, lam):
    """verl whitens inside; its returns are unwhitened."""
    r = make_rows(seed)
    advantages, returns = masked_gae(r.rewards, r.values, r.mask, TokenGae(gamma, lam))
    theirs, targets = verl.compute_gae_advantage_return(r.rewards, r.values, r.mask.double(), gamma, lam)
    assert_agree(returns[r.mask], targets[r.mask])
    assert_agree(whiten(advantages, r.mask)[r.mask], theirs[r.mask])


def test_differs_a_reward_on_an_observation_is_lost_there_and_refused_here():
    r = make_rows(0)
    trailing = torch.zeros_like(r.rewards)
    trailing[:, 2] = 1.0  # an observation token after the first turn
    none, _ = verl.compute_gae_advantage_return(torch.zeros_like(trailing), r.values, r.mask.double(), 1.0, 0.95)
    with_reward, _ = verl.compute_gae_advantage_return(trailing, r.values, r.mask.double(), 1.0, 0.95)
    assert torch.equal(none[r.mask], with_reward[r.mask])
    with pytest.raises(ValueError, match="would be lost"):
        masked_gae(trailing, r.values, r.mask, TokenGae(1.0, 0.95))


@SEEDS
@pytest.mark.parametrize("normalise_std", [True, False])
def test_grpo(seed, normalise_std):
    """verl adds 1e-6 to the deviation, we by default 1e-4 (as DeepSeek's and TRL's)."""
    r = make_rows(seed)
    theirs, _ = verl.compute_grpo_outcome_advantage(
        r.rewards, r.mask.double(), np.array(GROUPS), norm_adv_by_std_in_grpo=normalise_std
    )
    ours, counts = group_relative(
        scores(r), torch.tensor(GROUPS), torch.ones(8).bool(), GroupRelative(normalise_std, std_eps=1e-6)
    )
    assert_agree(broadcast_over_tokens(ours, r.mask)[PEERED], theirs[PEERED])
    assert counts.tolist() == PEERED.tolist()


def test_differs_a_group_of_one_gets_its_reward_there_and_nothing_here():
    r = make_rows(0)
    rewards = r.rewards.clone()
    rewards[-1, 1] = 7.0
    theirs, _ = verl.compute_grpo_outcome_advantage(rewards, r.mask.double(), np.array(GROUPS))
    assert theirs[-1, 0] > 6
    ours, counts = group_relative(rewards.sum(1), torch.tensor(GROUPS), torch.ones(8).bool())
    assert ours[-1] == 0
    assert not counts[-1]


@SEEDS
def test_rloo(seed):
    r = make_rows(seed)
    theirs, _ = verl.compute_rloo_outcome_advantage(r.rewards, r.mask.double(), np.array(GROUPS))
    vectorised, _ = verl.compute_rloo_vectorized_outcome_advantage(r.rewards, r.mask.double(), np.array(GROUPS))
    ours, _ = leave_one_out(scores(r), torch.tensor(GROUPS), torch.ones(8).bool())
    tokens = broadcast_over_tokens(ours, r.mask)
    assert_agree(tokens[PEERED], theirs[PEERED])
    assert_agree(tokens, vectorised)  # here a group of one gets nothing either


@SEEDS
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp(seed, gamma):
    r = make_rows(seed)
    theirs, _ = verl.compute_reinforce_plus_plus_outcome_advantage(
        r.rewards, r.mask.double(), config=AlgoConfig(gamma=gamma)
    )
    assert_agree(reinforce(r.rewards, r.mask, torch.ones(8).bool(), ReturnsToGo(gamma, whiten=True)), theirs)


@SEEDS
def test_reinforce_pp_baseline(seed):
    """Without the group of one, which verl whitens together with the rest, at its full reward."""
    r = make_rows(seed)
    theirs, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
        r.rewards[PEERED], r.mask[PEERED].double(), torch.tensor(GROUPS)[PEERED].numpy()
    )
    ours, _ = reinforce_pp_baseline(scores(r), torch.tensor(GROUPS), torch.ones(8).bool(), r.mask)
    assert_agree(ours[PEERED], theirs)


@SEEDS
@AVERAGES
@pytest.mark.parametrize("eps", [(0.2, 0.2), (0.2, 0.28)])
def test_ppo_and_dapo(seed, theirs, ours, length, eps):
    """Dual clip at 3 on both sides."""
    r = make_rows(seed, spread=1.0)
    config = actor(theirs, length, clip_ratio_low=eps[0], clip_ratio_high=eps[1])
    weights, denominator = token_weights(r.mask, ours, max_tokens=length)
    expected = with_gradient(
        lambda x: verl.compute_policy_loss_vanilla(r.old, x, r.advantages, r.mask.double(), theirs, config)[0],
        r.logprobs,
    )
    got = with_gradient(
        lambda x: ppo_clip_loss(LossInputs(x, r.old, r.advantages, weights), PpoClip(*eps), denominator).loss,
        r.logprobs,
    )
    assert_agree(got, expected)


@SEEDS
def test_importance_weights_of_the_engine(seed):
    r = make_rows(seed)
    factor = torch.rand(r.mask.shape, generator=torch.Generator().manual_seed(seed)).double() * 2
    expected, _ = verl.compute_policy_loss_vanilla(
        r.old, r.logprobs, r.advantages, r.mask.double(), "token-mean", actor(), rollout_is_weights=factor
    )
    n = float(r.mask.sum())
    inputs = LossInputs(r.logprobs, r.old, r.advantages, r.mask.double(), importance=factor)
    got = ppo_clip_loss(inputs, PpoClip(), denominator=n)
    assert_agree(got.loss, expected)


@SEEDS
@pytest.mark.parametrize("eps", [(3e-4, 4e-4), (0.2, 0.3)])
def test_gspo(seed, eps):
    """verl's is the token form; with one advantage a sequence it is the sequence form, too."""
    r = make_rows(seed, spread=0.3)
    config = actor("seq-mean-token-mean", clip_ratio_low=eps[0], clip_ratio_high=eps[1])
    weights, denominator = token_weights(r.mask, "sequence_mean")
    same = r.advantages[:, :1].expand_as(r.advantages)
    for advantages, token_form in ((r.advantages, True), (same, True), (same, False)):
        expected = with_gradient(
            lambda x, a=advantages: verl.compute_policy_loss_gspo(
                r.old, x, a, r.mask.double(), "seq-mean-token-mean", config
            )[0],
            r.logprobs,
        )
        got = with_gradient(
            lambda x, a=advantages, form=token_form: (
                gspo_loss(LossInputs(x, r.old, a, weights, r.ids), SequenceClip(*eps, form), denominator).loss
            ),
            r.logprobs,
        )
        assert_agree(got, expected)


@SEEDS
def test_cispo(seed):
    """verl's bounds are 1 - eps and 1 + eps; the paper's, and our default, have no lower one."""
    r = make_rows(seed, spread=1.0)
    config = actor(clip_ratio_low=0.2, clip_ratio_high=0.28)
    expected = with_gradient(
        lambda x: verl.compute_policy_loss_cispo(r.old, x, r.advantages, r.mask.double(), "token-mean", config)[0],
        r.logprobs,
    )
    n = float(r.mask.sum())
    got = with_gradient(
        lambda x: cispo_loss(LossInputs(x, r.old, r.advantages, r.mask.double()), WeightClip(0.8, 1.28), n).loss,
        r.logprobs,
    )
    assert_agree(got, expected)


@SEEDS
def test_reinforce(seed):
    r = make_rows(seed)
    expected = with_gradient(
        lambda x: verl.compute_policy_loss_reinforce(r.old, x, r.advantages, r.mask.double(), "token-mean", actor())[0],
        r.logprobs,
    )
    n = float(r.mask.sum())
    got = with_gradient(
        lambda x: reinforce_loss(LossInputs(x, r.old, r.advantages, r.mask.double()), PolicyGradient(), n).loss,
        r.logprobs,
    )
    assert_agree(got, expected)


@SEEDS
def test_value(seed):
    r = make_rows(seed)
    expected, fraction = verl.compute_value_loss(r.values, r.returns, r.old_values, r.mask.double(), 0.2)
    critic = Critic(value_coef=1.0, value_clip=0.2)
    got = value_loss(r.values, r.old_values, r.returns, r.mask, critic, denominator=float(r.mask.sum()))
    assert_agree(got.loss, expected)
    assert_agree(got.means()["clip_fraction"], fraction)


@SEEDS
def test_kl_and_entropy(seed):
    r = make_rows(seed)
    for name, ours in (("k1", kl_k1), ("k2", kl_k2), ("k3", kl_k3)):
        assert_agree(ours(r.logprobs, r.reference), verl.kl_penalty(r.logprobs, r.reference, name))
    logits = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(seed))
    assert_agree(token_entropy(logits), entropy_from_logits(logits))


def test_differs_k3_is_cut_at_ten_there():
    far = torch.tensor([-6.0]), torch.tensor([-1.0])
    assert verl.kl_penalty(*far, "k3") == 10
    assert kl_k3(*far) > 100
