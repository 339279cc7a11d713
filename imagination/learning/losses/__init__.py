"""What the optimisers minimise: pure functions of tensors, by what they act on.

Three rules hold for every loss here:

* A token counts by its weight; weight 0 means that the token is not there. Whatever its inputs hold (NaN, inf, the
  log-prob of a forced token), they change nothing and get a gradient of exactly zero. Inputs are replaced *before* the
  nonlinearities, because ``0 * nan`` is ``nan``, in the backward pass too.
* The weighted sum is divided by ``denominator``, the weight of the *global* batch that the caller counted once per
  optimiser step (over all micro-batches and ranks). So padding, packing and micro-batch splits leave the gradient as it
  is, and the gradients of micro-batches are added, never averaged.
* Metrics are sums over tokens, so that micro-batches can be added before anyone divides: see ``LossTerms``.

A sequence mean or a constant length is a choice of weights: ``token_weights``. Settings are the parts of
``imagination.settings.algorithm_parts``, which check their ranges; a loss that has a coefficient is multiplied by it.

Everything is computed in fp32 at least. Tensors are of one shape: ``[batch, time]`` at the token's own position (the
logits that predict token ``t`` are those of position ``t - 1``, and the caller shifts them) or ``[n]`` for the tokens
that the caller has picked. ``logprobs`` are nats of the policy that is trained, at the temperature of sampling
(``token_logprobs``), or ratios of an unchanged policy are not 1; all other arguments are constants. Every loss raises
``ValueError`` where shapes disagree, ``denominator`` is not positive, or a number is outside its range.
"""

from imagination.learning.losses.auxiliary import (
    EntropyHistory,
    cross_entropy_loss,
    entropy_loss,
    expert_policy_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_loss,
    trajectory_preference_loss,
    value_loss,
)
from imagination.learning.losses.policy import (
    cispo_loss,
    gspo_loss,
    policy_loss,
    ppo_clip_loss,
    reinforce_loss,
    replay_loss,
    row_segments,
    segment_mean,
    turn_ratio_loss,
    turn_segments,
)
from imagination.learning.losses.terms import LossInputs, LossTerms, token_entropy, token_logprobs, token_weights

__all__ = [
    "EntropyHistory",
    "LossInputs",
    "LossTerms",
    "cispo_loss",
    "cross_entropy_loss",
    "entropy_loss",
    "expert_policy_loss",
    "gspo_loss",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_loss",
    "policy_loss",
    "ppo_clip_loss",
    "reinforce_loss",
    "replay_loss",
    "row_segments",
    "segment_mean",
    "token_entropy",
    "token_logprobs",
    "token_weights",
    "trajectory_preference_loss",
    "turn_ratio_loss",
    "turn_segments",
    "value_loss",
]
