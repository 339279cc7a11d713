"""What the optimisers minimise: pure functions of tensors.

Three rules hold for every loss here:

* A token counts by its weight; weight 0 means that the token is not there. Whatever its inputs hold (NaN, inf, the
  log-prob of a forced token), they change nothing and get a gradient of exactly zero. Inputs are replaced *before* the
  nonlinearities, because ``0 * nan`` is ``nan``, in the backward pass too.
* The weighted sum is divided by ``denominator``, the count of the *global* batch that the caller made once per
  optimiser step (over all micro-batches and ranks). So padding, packing and micro-batch splits leave the gradient as it
  is, and the gradients of micro-batches are added, never averaged.
* Metrics are sums over tokens, so that micro-batches can be added before anyone divides: see ``LossTerms``.

Everything is computed in fp32 at least. Tensors are ``[batch, time]`` at the token's own position (the logits that
predict token ``t`` are those of position ``t - 1``, and the caller shifts them) or, where the caller has picked the
trained tokens, ``[n]``: a token is a token, wherever it lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A loss and what is to be logged about it.

    Attributes:
        loss: scalar; the only part with a gradient.
        tokens: scalar, how many tokens had a weight other than 0.
        sums: scalars that add over micro-batches and ranks; divided by ``tokens`` they are means over tokens.
        maxima: scalars of which to take the largest; 0 where no token counted.

    Example::

        LossTerms(loss=tensor(0.7), tokens=tensor(3.0), sums={"ratio": tensor(3.3)}, maxima={"ratio": tensor(1.4)})
    """

    loss: Tensor
    tokens: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]

    def means(self) -> dict[str, Tensor]:
        """``sums`` per token; zeros where no token counted."""
        return {name: total / self.tokens.clamp(min=1) for name, total in self.sums.items()}


def merge(terms: Iterable[LossTerms]) -> LossTerms:
    """Terms of one loss from several micro-batches, as if they had been one batch; for logs, so without gradient.

    Raises:
        ValueError: there are none, or they are not terms of the same loss.
    """
    parts = list(terms)
    if not parts:
        raise ValueError("merge needs the terms of at least one micro-batch")
    sums, maxima = parts[0].sums.keys(), parts[0].maxima.keys()
    if any(part.sums.keys() != sums or part.maxima.keys() != maxima for part in parts):
        raise ValueError(f"merge got terms of different losses: {[sorted(part.sums) for part in parts]}")
    return LossTerms(
        loss=torch.stack([part.loss.detach() for part in parts]).sum(),
        tokens=torch.stack([part.tokens for part in parts]).sum(),
        sums={name: torch.stack([part.sums[name] for part in parts]).sum() for name in sums},
        maxima={name: torch.stack([part.maxima[name] for part in parts]).amax() for name in maxima},
    )


def ppo_clip_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    weight: Tensor,
    *,
    denominator: float,
    importance: Tensor | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = 3.0,
    log_ratio_clamp: float = 20.0,
) -> LossTerms:
    """PPO's clipped surrogate, one ratio per token.

    With ``rho = exp(clamp(logprobs - behavior_logprobs))``: ``max(-A rho, -A clip(rho, 1 - eps_low, 1 + eps_high))``,
    Schulman et al. 2017 (arXiv 1707.06347, eq. 7), two-sided range from DAPO (arXiv 2503.14476, section 3.1). Where
    ``A < 0`` it is at most ``-dual_clip A`` (dual clip, arXiv 1912.09729), so that one token whose ratio
    exploded cannot dominate the step.

    ``behavior_logprobs`` were taken by the engine at its sampling temperature T. ``logprobs`` must be taken at the same
    T (``token_logprobs``), or ratios of an unchanged policy are not 1. Where engine and trainer compute differently
    they are the trainer's own, of the policy before the update, and ``importance`` corrects for the engine
    (``imagination/mismatch.py``).

    Args:
        logprobs: ``[batch, time]``, natural log, of the policy that is trained.
        behavior_logprobs: ``[batch, time]``, of the policy that acted; constants.
        advantages: ``[batch, time]``; constants.
        weight: ``[batch, time]``, 0 on every token that RL does not train.
        denominator: weight (usually the number of trained tokens) of the global batch.
        importance: ``[batch, time]``, a constant factor of each token's loss; ``None`` for 1.
        eps_low, eps_high: the range in which the ratio has a gradient, around 1.
        dual_clip: larger than 1, or ``None`` for none.
        log_ratio_clamp: bound of the log-ratio, in nats, against overflow.

    Returns:
        sums ``clip_fraction`` (the clipped branch won), ``dual_clip_fraction``, ``kl_k3`` (KL(behaviour || policy), k3,
        nats), ``ratio``; maxima ``ratio``.

    Raises:
        ValueError: shapes disagree, or a number is outside its range.

    Example::

        ppo_clip_loss(tensor([[log(1.5)]]), tensor([[0.0]]), tensor([[1.0]]), tensor([[1.0]]), denominator=1)
        # loss -1.2: the ratio 1.5 is worth no more than 1.2
    """
    _check_shapes(
        "ppo_clip_loss",
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        weight=weight,
        importance=weight if importance is None else importance,
    )
    if not (0.0 <= eps_low <= 1.0 and eps_high >= 0.0):
        raise ValueError(f"eps_low must lie in [0, 1] and eps_high be at least 0, got {eps_low} and {eps_high}")
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be larger than 1 or None, got {dual_clip}")
    if log_ratio_clamp <= 0.0:
        raise ValueError(f"log_ratio_clamp must be positive, got {log_ratio_clamp}")

    active = weight != 0
    log_ratio = _difference(logprobs, behavior_logprobs.detach(), active).clamp(-log_ratio_clamp, log_ratio_clamp)
    advantages = advantages.detach().to(log_ratio.dtype).masked_fill(~active, 0.0)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    per_token = torch.maximum(free, clipped)
    dual_clipped = torch.zeros_like(active)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (per_token > ceiling)
        per_token = torch.where(dual_clipped, ceiling, per_token)
    if importance is not None:
        per_token = per_token * importance.detach().to(per_token.dtype).masked_fill(~active, 0.0)
    ratio = ratio.detach()
    return LossTerms(
        loss=_weighted_sum(per_token, weight, denominator),
        tokens=active.sum().to(ratio.dtype),
        sums={
            "clip_fraction": (clipped > free).sum().to(ratio.dtype),
            "dual_clip_fraction": dual_clipped.sum().to(ratio.dtype),
            "kl_k3": _k3(-log_ratio.detach()).sum(),
            "ratio": ratio.masked_fill(~active, 0.0).sum(),
        },
        maxima={"ratio": _largest(ratio.masked_fill(~active, 0.0))},
    )


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    denominator: float,
    clip: float | None = 0.2,
) -> LossTerms:
    """The critic's squared error, pessimistic about steps larger than ``clip``.

    ``1/2 max((v - R)^2, (v_old + clamp(v - v_old, -clip, clip) - R)^2)`` as in OpenAI baselines ``ppo2/model.py``.

    Args:
        values, old_values, returns: ``[batch, time]``, in units of return; the last two are constants.
        mask: ``[batch, time]`` bool, agent tokens; the tokens that ``masked_gae`` read values of.
        denominator: number of such tokens in the global batch.
        clip: largest step that still pays, in units of return; ``None`` for the plain squared error.

    Returns:
        sums ``clip_fraction`` and ``squared_error`` (without the 1/2 and the clip); no maxima.

    Raises:
        ValueError: shapes disagree, ``mask`` is not bool, or a number is outside its range.

    Example::

        value_loss(tensor([[1.0]]), tensor([[0.0]]), tensor([[1.0]]), tensor([[True]]), denominator=1, clip=0.2)
        # loss 0.32 = 1/2 (0.2 - 1)^2: right, but reached in too large a step
    """
    _check_shapes("value_loss", values=values, old_values=old_values, returns=returns, mask=mask)
    if mask.dtype != torch.bool:
        raise ValueError(f"value_loss needs a bool mask, got {mask.dtype}")
    if clip is not None and clip <= 0.0:
        raise ValueError(f"clip must be positive or None, got {clip}")

    error = _difference(values, returns.detach(), mask)
    squared = error.square()
    worst, clipped = squared, torch.zeros_like(mask)
    if clip is not None:
        step = _difference(values, old_values.detach(), mask)
        # Within the clip the correction is exactly zero, so rounding makes no token look clipped.
        squared_clipped = (error + (step.clamp(-clip, clip) - step)).square()
        clipped = squared_clipped > squared
        worst = torch.maximum(squared, squared_clipped)
    return LossTerms(
        loss=_weighted_sum(0.5 * worst, mask, denominator),
        tokens=mask.sum().to(squared.dtype),
        sums={"clip_fraction": clipped.sum().to(squared.dtype), "squared_error": squared.detach().sum()},
        maxima={},
    )


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
    _check_shapes("cross_entropy_loss", logprobs=logprobs, weight=weight)
    active = weight != 0
    nll = -_at_least_fp32(logprobs).masked_fill(~active, 0.0)
    return LossTerms(
        loss=_weighted_sum(nll, weight, denominator),
        tokens=active.sum().to(nll.dtype),
        sums={"nll": nll.detach().sum()},
        maxima={},
    )


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Per-token estimate ``d`` of KL(policy || reference), ``d = logprobs - ref_logprobs``, tokens sampled from policy.

    Estimators k1, k2, k3 of Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). k1 is
    unbiased and may be negative; as a loss its gradient is zero in expectation, so it serves logs and rewards only.
    All three take tensors of one shape and give that shape in nats, exactly 0 where ``mask`` is false.

    Raises:
        ValueError: shapes disagree.

    Example::

        kl_k1(tensor([-1.0]), tensor([-1.5]))  # [0.5]; kl_k2 gives [0.125], kl_k3 gives [0.1065]
    """
    return _masked_log_ratio("kl_k1", logprobs, ref_logprobs, mask)


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """``d^2 / 2``: biased, never negative; as a loss its gradient is that of the KL. See ``kl_k1``."""
    return 0.5 * _masked_log_ratio("kl_k2", logprobs, ref_logprobs, mask).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """``exp(-d) + d - 1``: unbiased, never negative; overflows to inf where ``d < -88``. See ``kl_k1``."""
    return _k3(_masked_log_ratio("kl_k3", logprobs, ref_logprobs, mask))


def token_logprobs(
    logits: Tensor, ids: Tensor, temperature: float = 1.0, mask: Tensor | None = None, which: Tensor | None = None
) -> Tensor:
    """``log_softmax(logits / temperature)`` at ``ids``: the log-prob an engine reports when it samples at T.

    Args:
        logits: ``[batch, time, vocab]`` or ``[n, vocab]``, already shifted: ``logits[:, t]`` predicts ``ids[:, t]``.
        ids: ``[batch, time]`` integers.
        temperature: the T the tokens were sampled at.
        mask: ``[batch, time]`` bool; where false, logits and ids may be anything and the result is 0.
        which: ``[n]``, where several of the ids ``[n]`` are predicted by the same logits ``[m, vocab]``: which of the
            ``m``. Without a mask.

    Returns:
        of the shape of ``ids``, nats, fp32 or better.

    Raises:
        ValueError: shapes disagree or ``temperature`` is not positive (greedy tokens have no log-prob).

    Example::

        token_logprobs(tensor([[[0.0, log(3.0)]]]), tensor([[1]]))  # [[log(3/4)]]
        token_logprobs(tensor([[[0.0, log(3.0)]]]), tensor([[1]]), temperature=0.5)  # [[log(9/10)]]
        token_logprobs(tensor([[0.0, log(3.0)]]), tensor([1, 0]), which=tensor([0, 0]))  # [log(3/4), log(1/4)]
    """
    logits = _scaled_logits("token_logprobs", logits, temperature, mask)
    if which is not None:
        if mask is not None or logits.ndim != 2 or ids.ndim != 1 or which.shape != ids.shape:
            raise ValueError(
                "with `which`, token_logprobs needs logits [m, vocab], ids [n], which [n] and no mask, got "
                f"{tuple(logits.shape)}, {tuple(ids.shape)} and {tuple(which.shape)}"
            )
        return logits.log_softmax(dim=-1)[which, ids.long()]
    if ids.shape != logits.shape[:-1]:
        raise ValueError(f"ids must have the tokens' shape {tuple(logits.shape[:-1])}, got {tuple(ids.shape)}")
    if mask is not None:
        ids = ids.masked_fill(~mask, 0)
    picked = logits.log_softmax(dim=-1).gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)
    return picked if mask is None else picked.masked_fill(~mask, 0.0)


def token_entropy(logits: Tensor, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Entropy of the distribution each token was sampled from, ``-sum p log p``.

    Args:
        logits: ``[batch, time, vocab]`` or ``[n, vocab]``; -inf marks tokens that cannot be sampled, they add nothing.
        temperature: as in ``token_logprobs``.
        mask: ``[batch, time]`` bool; where false, logits may be anything and the result is 0.

    Returns:
        ``[batch, time]``, nats, with a gradient, fp32 or better.

    Raises:
        ValueError: shapes disagree or ``temperature`` is not positive.

    Example::

        token_entropy(tensor([[[0.0, 0.0]]]))  # [[log(2)]]
    """
    logits = _scaled_logits("token_entropy", logits, temperature, mask)
    log_p = logits.log_softmax(dim=-1)
    # A log-prob of -inf times its probability 0 would be NaN.
    entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=-1)
    return entropy if mask is None else entropy.masked_fill(~mask, 0.0)


def _k3(d: Tensor) -> Tensor:
    return torch.expm1(-d) + d  # expm1 keeps the digits that exp(-d) - 1 loses where d is small


def _difference(a: Tensor, b: Tensor, active: Tensor) -> Tensor:
    """``a - b`` where active, else 0. Subtraction is linear: a junk operand cannot turn a zero gradient into NaN."""
    return (_at_least_fp32(a) - _at_least_fp32(b)).masked_fill(~active, 0.0)


def _weighted_sum(per_token: Tensor, weight: Tensor, denominator: float) -> Tensor:
    """``per_token`` must already be finite where the weight is 0."""
    if not (denominator > 0 and math.isfinite(denominator)):
        raise ValueError(
            f"denominator is the global number of tokens and must be positive, got {denominator}; "
            "leave a loss out of a step in which nothing has weight"
        )
    return (per_token * weight.to(per_token.dtype)).sum() / denominator


def _largest(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.new_zeros(())


def _masked_log_ratio(where: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    active = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    _check_shapes(where, logprobs=logprobs, ref_logprobs=ref_logprobs, mask=active)
    return _difference(logprobs, ref_logprobs, active)


def _scaled_logits(where: str, logits: Tensor, temperature: float, mask: Tensor | None) -> Tensor:
    if logits.ndim < 2:
        raise ValueError(f"{where} needs logits [batch, time, vocab] or [n, vocab], got {tuple(logits.shape)}")
    if not temperature > 0.0:
        raise ValueError(f"{where} needs a positive temperature, got {temperature}")
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != logits.shape[:-1]:
            raise ValueError(
                f"{where} needs a bool mask of the tokens' shape {tuple(logits.shape[:-1])}, "
                f"got {mask.dtype} {tuple(mask.shape)}"
            )
        logits = logits.masked_fill(~mask.unsqueeze(-1), 0.0)
    logits = _at_least_fp32(logits)
    return logits if temperature == 1.0 else logits / temperature  # the largest tensor of a step: no needless copy


def _check_shapes(where: str, **tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{where} needs tensors of one shape, [batch, time] or [n], got {got}")


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
