"""Learning from what others or an earlier policy did: cross-entropy, LUFFY's off-policy form, and replays.

An expert's tokens have no behaviour log-probs, so they never get an importance ratio. Replayed tokens have those that
were recorded when they were sampled.
"""

from __future__ import annotations

from torch import Tensor

from imagination.learning.losses.policy import ppo_clip_loss
from imagination.learning.losses.terms import LossTerms, constant, weighted_sum
from imagination.learning.shapes import at_least_fp32, check_positive, check_shapes


def cross_entropy_loss(logprobs: Tensor, weight: Tensor, *, denominator: float) -> LossTerms:
    """Negative log-likelihood: clones experts, fits world models.

    Args:
        logprobs: ``[batch, time]``, natural log, at temperature 1.
        weight: ``[batch, time]``, 0 on every token that is not learned.
        denominator: weight of the global batch, its own and not that of the RL tokens.

    Returns:
        sums ``nll``, nats, unweighted; no maxima.

    Raises:
        ValueError: shapes disagree or ``denominator`` is not positive.

    Example::

        cross_entropy_loss(tensor([[-1.0, -3.0, nan]]), tensor([[1.0, 0.5, 0.0]]), denominator=1.5)
        # loss 1.6667 = (1 + 0.5 * 3) / 1.5
    """
    check_shapes("cross_entropy_loss", logprobs=logprobs, weight=weight)
    active = weight != 0
    nll = -at_least_fp32(logprobs).masked_fill(~active, 0.0)
    return LossTerms(
        loss=weighted_sum(nll, weight, denominator),
        tokens=active.sum().to(nll.dtype),
        sums={"nll": nll.detach().sum()},
        maxima={},
    )


def expert_policy_loss(
    logprobs: Tensor, advantages: Tensor, weight: Tensor, *, denominator: float, gamma: float = 0.1
) -> LossTerms:
    """Off-policy learning from expert tokens: ``-A f(pi)`` with ``f(pi) = pi / (pi + gamma)``.

    LUFFY (Yan et al. 2025, arXiv 2504.14945, section 3.3). The expert's own probability is taken as 1, and the shaping
    gives unlikely tokens more gradient than ``-A pi`` would: the slope by the log-prob is
    ``-A gamma pi / (pi + gamma)^2``, largest at ``pi = gamma``.

    Args:
        logprobs: ``[batch, time]``, nats, of the policy that is trained, at temperature 1.
        advantages: ``[batch, time]``; constants.
        weight: ``[batch, time]``, 0 on every token that is not learned.
        denominator: weight of the expert tokens of the global batch.
        gamma: positive; the probability that learns fastest.

    Returns:
        sums ``probability``, unweighted; no maxima.

    Raises:
        ValueError: shapes disagree, or a number is out of range.

    Example::

        expert_policy_loss(tensor([log(0.3)]), tensor([1.0]), tensor([1.0]), denominator=1)  # loss -0.75 = -0.3 / 0.4
    """
    check_shapes("expert_policy_loss", logprobs=logprobs, advantages=advantages, weight=weight)
    check_positive("expert_policy_loss", gamma=gamma)
    active = weight != 0
    probability = at_least_fp32(logprobs).masked_fill(~active, 0.0).exp()
    shaped = probability / (probability + gamma)
    return LossTerms(
        loss=weighted_sum(-constant(advantages, active) * shaped, weight, denominator),
        tokens=active.sum().to(shaped.dtype),
        sums={"probability": probability.detach().masked_fill(~active, 0.0).sum()},
        maxima={},
    )


def replay_loss(
    logprobs: Tensor,
    recorded_logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    *,
    denominator: float,
    clip_high: float = 0.2,
) -> LossTerms:
    """Self-imitation in its off-policy form: PPO's clip around the policy that played the episode.

    SPEAR (arXiv 2509.22601): replayed episodes did better than the running median, so advantages are positive and only
    the upper clip binds: ``-A min(rho, 1 + clip_high)`` with ``rho = exp(logprobs - recorded_logprobs)``. The ratio is
    to the log-probs that were recorded when the tokens were sampled, several updates ago, never to the policy before
    this update, under which they were not sampled.

    Args:
        logprobs: ``[batch, time]`` or ``[n]``, nats, of the policy that is trained, at the temperature of sampling.
        recorded_logprobs: as the engine gave them with the tokens; constants.
        advantages: constants, not negative where the weight is not 0.
        weight: 0 on every token that is not replayed.
        denominator: number of replayed tokens of the whole optimiser step.
        clip_high: ratios above ``1 + clip_high`` have no gradient.

    Returns:
        as ``ppo_clip_loss``.

    Raises:
        ValueError: as ``ppo_clip_loss``, or an advantage is negative: an episode to unlearn is not one to imitate.

    Example::

        replay_loss(tensor([log(0.6)]), tensor([log(0.3)]), tensor([0.5]), tensor([1.0]), denominator=1)
        # loss -0.6: the ratio 2 is worth no more than 1.2
    """
    if ((advantages < 0) & (weight != 0)).any():
        raise ValueError("replay_loss imitates: advantages must be at least 0 where the weight is not 0")
    return ppo_clip_loss(
        logprobs,
        recorded_logprobs,
        advantages,
        weight,
        denominator=denominator,
        eps_low=1.0,  # any: it never binds where advantages are positive
        eps_high=clip_high,
        dual_clip=None,
    )
