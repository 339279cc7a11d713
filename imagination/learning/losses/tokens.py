"""From logits to the numbers that losses are made of: log-probs and entropies of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from imagination.learning.shapes import at_least_fp32


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
    logits = at_least_fp32(logits)
    return logits if temperature == 1.0 else logits / temperature  # the largest tensor of a step: no needless copy
