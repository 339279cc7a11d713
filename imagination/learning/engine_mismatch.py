"""The engine that samples and the trainer that learns compute one policy in two ways: how far apart, and what to do.

Other kernels and precisions give other log-probs, so tokens come from a slightly different distribution than the one
whose gradient is taken. Pure functions of tensors, with the rules of ``imagination.learning.losses``: tokens
of weight 0 are not there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from imagination.learning.losses.auxiliary import kl_k1, kl_k3
from imagination.learning.losses.policy import MAX_LOG_RATIO


@torch.no_grad()
def truncated_importance(old_logprobs: Tensor, engine_logprobs: Tensor, weight: Tensor, cap: float) -> Tensor:
    """How much likelier the trainer finds each sampled token than the engine did: ``min(exp(old - engine), cap)``.

    Truncated importance sampling at the token, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training": PPO's ratio stays within the trainer (new / old) and each token's loss is multiplied by
    this factor. The truncation bounds the variance.

    Args:
        old_logprobs: the trainer's, of the policy that acted, before any step.
        cap: largest factor; at least 1, 2.0 in the paper.

    Returns:
        constants in ``[0, cap]``, exactly 1 where the weight is 0.

    Example::

        truncated_importance(tensor([log(0.2), log(0.9)]), tensor([log(0.4), log(0.3)]), tensor([1.0, 1.0]), cap=2.0)
        # [0.5, 2.0]: the second would be 3
    """
    if not cap >= 1.0:
        raise ValueError(f"cap must be at least 1, got {cap}")
    return kl_k1(old_logprobs, engine_logprobs, weight != 0).exp().clamp(max=cap)


@torch.no_grad()
def engine_mismatch(logprobs: Tensor, engine_logprobs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """How far trainer and engine disagree about one unchanged policy.

    Returns:
        scalars: the sum over tokens of k3, whose mean estimates KL(engine || trainer) (see ``kl_k1``), and the largest
        ``exp(|difference|)``, 1 where no token counts. Differences are cut at 20 nats.

    Example::

        engine_mismatch(tensor([log(0.5)]), tensor([log(0.4)]), tensor([1.0]))  # 1.25 - 1 - log(1.25), and 1.25
    """
    difference = kl_k1(engine_logprobs, logprobs, weight != 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    largest = difference.abs().amax() if difference.numel() else difference.new_zeros(())
    return kl_k3(difference, torch.zeros_like(difference)).sum(), largest.exp()
