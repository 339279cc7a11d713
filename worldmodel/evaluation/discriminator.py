"""A small head on a world model that tells its own answers from logged ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from policy.lm.batch import padded
from policy.lm.forward import encode, evaluating, micro_batches
from policy.lm.render import ChatFormat
from real_envs.trajectory import Owner, Trajectory
from worldmodel.evaluation.signals import DreamedTurn, answered, upto
from worldmodel.evaluation.transitions import Judged
from worldmodel.formats.full import TransitionFormat, episode_tokens

_PENALTY = 0.01  # weight of the squared weights
_STEPS = 200  # of LBFGS at most


class AnswerStates:
    """What a language model makes of an answer: its hidden state after it, and the mean over the answer's tokens.

    Args:
        max_tokens: that a forward pass computes.
    """

    def __init__(self, model: Any, chat: ChatFormat, form: TransitionFormat, max_tokens: int = 4096) -> None:
        self._model, self._chat, self._form, self._max_tokens = model, chat, form, max_tokens

    @torch.no_grad()
    def __call__(self, episodes: Sequence[Trajectory]) -> Tensor:
        """``[episodes, 2 hidden]``, of the last turn of each, given those before it."""
        told = [episode_tokens(self._chat, episode, self._form) for episode in episodes]
        device = next(self._model.parameters()).device
        found: dict[int, Tensor] = {}
        with evaluating(self._model):
            for micro in micro_batches(self._model, [t.ids for t in told], self._max_tokens):
                ids = padded([told[i].ids for i in micro], 0, torch.long).to(device)
                mask = padded([[1.0] * len(told[i].ids) for i in micro], 0, torch.long).to(device)
                encoded = encode(self._model, ids, mask)
                for row, i in enumerate(micro):
                    last = len(episodes[i].turns) - 1
                    owners = zip(told[i].owners, told[i].turns, strict=True)
                    own = [at for at, (owner, turn) in enumerate(owners) if owner == Owner.ENV and turn == last]
                    states = encoded.states[encoded.index[row, own]].float().cpu()
                    found[i] = torch.cat([states[-1], states.mean(0)])
        return torch.stack([found[i] for i in range(len(told))])


class Discriminator:
    """A ``Signal``: the log-odds, by logistic regression on ``AnswerStates``, that the world model made an answer up.

    It learns from answers that the model sampled to actions of the log, given the logged history, beside what the
    log says. An answer that is the logged one teaches nothing. Made by ``fit``.
    """

    name = "discriminator head"

    def __init__(self, states: AnswerStates, centre: Tensor, spread: Tensor, weight: Tensor) -> None:
        self._states, self._centre, self._spread, self._weight = states, centre, spread, weight

    @classmethod
    def fit(cls, states: AnswerStates, log: Sequence[Trajectory], judged: Sequence[Judged]) -> Discriminator | None:
        """
        Args:
            log: episodes that the world model was not trained on, for of those it knows the answers.
            judged: its own answers to their actions, sampled without rules (``transitions.judge``).

        Returns:
            ``None`` where the model answers everything as the log does.
        """
        by_id = {t.id: t for t in log}
        wrong = [
            (upto(by_id[j.trajectory_id], j.index, j.turn), answered(by_id[j.trajectory_id], j))
            for j in judged
            if j.predicted is not None and not j.exact
        ]
        if not wrong:
            return None
        read = states([episode for pair in wrong for episode in pair])
        labels = torch.tensor([0.0, 1.0]).repeat(len(wrong))
        centre, spread = read.mean(0), read.std(0).clamp(min=1e-6)
        return cls(states, centre, spread, _logistic((read - centre) / spread, labels))

    def scores(self, turns: Sequence[DreamedTurn]) -> list[float | None]:
        if not turns:
            return []
        read = self._states([upto(t.dream, t.index, t.turn) for t in turns])
        return list(_with_bias((read - self._centre) / self._spread).matmul(self._weight).tolist())


def _with_bias(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(len(x), 1)], 1)


def _logistic(x: Tensor, labels: Tensor) -> Tensor:
    """Weights, the bias last, of a logistic regression with a squared penalty."""
    x = _with_bias(x)
    weight = torch.zeros(x.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(x @ weight, labels) + _PENALTY * weight[:-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach()
