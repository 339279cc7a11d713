"""Learning from episodes of an earlier policy: off-policy, with the log-probs that it recorded."""

from __future__ import annotations

from torch import Tensor

from imagination.learning.losses.ppo import ppo_clip_loss
from imagination.learning.losses.terms import LossTerms


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
