"""EPO: entropy that is rewarded, and held within a band around what it has been."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from imagination.learning.losses.terms import LossTerms, weighted_sum
from imagination.learning.shapes import at_least_fp32, check_shapes


@dataclass(frozen=True, slots=True)
class EntropyHistory:
    """Mean entropy over the updates so far, in nats per token; ``None`` before the first.

    Example::

        EntropyHistory().add(2.0).add(1.0).mean  # 1.5
    """

    total: float = 0.0
    updates: int = 0

    @property
    def mean(self) -> float | None:
        return self.total / self.updates if self.updates else None

    def add(self, entropy: float) -> EntropyHistory:
        """The history after one more update of this mean entropy."""
        return EntropyHistory(self.total + entropy, self.updates + 1)


def entropy_loss(
    entropy: Tensor,
    weight: Tensor,
    *,
    denominator: float,
    coef: float,
    history: float | None = None,
    smoothing: float = 0.0,
    low: float = 0.8,
    high: float = 1.2,
) -> LossTerms:
    """``-coef (H - smoothing P)``, where ``P`` is how far each token's entropy lies outside a band.

    Entropy-regularised policy optimisation (EPO, arXiv 2509.22576). The band is ``(low, high)`` times the mean entropy
    of earlier updates. With a constant penalty outside the band, as released, the gradient of ``P`` is zero and the
    smoothing does nothing; here it is a hinge,

        ``P_t = max(low h - H_t, 0) + max(H_t - high h, 0)``,

    with slope -1 below the band and +1 above. The numbers of the band are this project's choice.

    Args:
        entropy: ``[batch, time]`` with a gradient, nats, as ``token_entropy`` gives it; anything where the weight is 0.
        weight: ``[batch, time]``, 0 on every token that RL does not train.
        denominator: weight of the global batch.
        coef: of the entropy, at least 0.
        history: mean entropy of earlier updates, a constant; ``None`` for none, then ``P`` is 0.
        smoothing: of the penalty, at least 0; 0 for the plain entropy bonus.
        low, high: the band, ``low <= 1 <= high``.

    Returns:
        sums ``entropy``, ``entropy_penalty`` and ``outside_fraction``, unweighted; no maxima.

    Raises:
        ValueError: shapes disagree, or a number is outside its range.

    Example::

        entropy_loss(tensor([0.5, 2.0]), tensor([1.0, 1.0]), denominator=2, coef=0.1, history=1.0, smoothing=1.0)
        # H = 1.25, P = (0.3 + 0.8) / 2 = 0.55: loss -0.07
    """
    check_shapes("entropy_loss", entropy=entropy, weight=weight)
    if coef < 0.0 or smoothing < 0.0:
        raise ValueError(f"coef and smoothing must be at least 0, got {coef} and {smoothing}")
    if not 0.0 <= low <= 1.0 <= high:
        raise ValueError(f"the band must be low <= 1 <= high, got {low} and {high}")
    active = weight != 0
    entropy = at_least_fp32(entropy).masked_fill(~active, 0.0)
    penalty = entropy.new_zeros(entropy.shape)
    if history is not None:
        below, above = (low * history - entropy).clamp(min=0.0), (entropy - high * history).clamp(min=0.0)
        penalty = (below + above).masked_fill(~active, 0.0)
    return LossTerms(
        loss=weighted_sum(-coef * (entropy - smoothing * penalty), weight, denominator),
        tokens=active.sum().to(entropy.dtype),
        sums={
            "entropy": entropy.detach().sum(),
            "entropy_penalty": penalty.detach().sum(),
            "outside_fraction": (penalty > 0).sum().to(entropy.dtype),
        },
        maxima={},
    )
