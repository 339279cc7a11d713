"""Digi-Q's offline Q-learning: heads on frozen hidden states of logged turns, and the best of several actions by them.

Bai et al. 2025, arXiv 2502.15760. The hidden states are the cloned policy's, as they are: the paper tunes its model
first, to tell which actions change the screen.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from imagination.settings import DigiQSettings
from real_envs.seeding import derive_seed
from worldmodel.extras.synther.transitions import Transitions


class QHeads(nn.Module):
    """Perceptrons of one hidden layer, from hidden states ``[n, size]`` to returns ``[n]``, fp32.

    ``q`` reads the state after an action's last token, ``v`` the state before its first. States are whitened by the
    mean and deviation of ``acted`` and ``states``.
    """

    def __init__(self, acted: Tensor, states: Tensor, hidden: int) -> None:
        super().__init__()
        self.q, self.v = _head(acted, hidden), _head(states, hidden)


def _head(states: Tensor, hidden: int) -> nn.Sequential:
    size = states.shape[1]
    scale = nn.BatchNorm1d(size, affine=False).eval()  # of the whole log, never of a batch
    assert scale.running_mean is not None
    assert scale.running_var is not None
    scale.running_mean.copy_(states.mean(0))
    scale.running_var.copy_(states.var(0, correction=0))
    return nn.Sequential(scale, nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, 1), nn.Flatten(0))


@torch.no_grad()
def td_targets(rewards: Tensor, dones: Tensor, next_values: Tensor, gamma: float) -> Tensor:
    """``r + gamma V(s')``, the targets of Q; ``r`` alone where the world ended the episode.

    Args:
        dones: bool. An episode that a limit cut is not done: the world would have gone on.
        next_values: of the target network, in units of return; may be anything where ``dones``.

    Example::

        td_targets(tensor([1.0, 0.0]), tensor([True, False]), tensor([9.0, 0.5]), 0.9)  # [1.0, 0.45]
    """
    return rewards + gamma * next_values.masked_fill(dones, 0.0)


def fit_q(data: Transitions, acted: Tensor, settings: DigiQSettings, seed: int) -> QHeads:
    """TD learning of ``Q(s, a)`` towards ``td_targets`` and of ``V(s)`` towards ``Q(s, a)``, by squared errors.

    Both targets are of slowly moving averages (Polyak). ``V`` is the value of who made the log, as its actions are
    those logged; the paper samples them from its clone. No maximum over actions is bootstrapped from.

    Args:
        data: turns, of which ``returns`` are not read.
        acted: ``[n, hidden]``, the hidden state after the action of each.
    """
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed("q heads", seed))
        heads = QHeads(acted, data.states, settings.hidden)
    target = copy.deepcopy(heads).requires_grad_(False)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    rng = torch.Generator().manual_seed(derive_seed("q batches", seed))
    for _ in range(settings.td_steps):
        chosen = torch.randint(len(data), (settings.batch,), generator=rng)
        turns, after = data.rows(chosen), acted[chosen]
        goal = td_targets(turns.rewards, turns.dones, target.v(turns.next_states), settings.gamma)
        loss: Tensor = (heads.q(after) - goal).square().mean()
        loss = loss + (heads.v(turns.states) - target.q(after)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), heads.parameters(), strict=True):
                slow.lerp_(fast, settings.polyak)
    return heads.requires_grad_(False)


@torch.no_grad()
def best_actions(q: Tensor, values: Tensor) -> Tensor:
    """Best-of-N extraction: which of each state's actions is imitated, the one of the highest Q if that is above V.

    Args:
        q: ``[n, actions]``; NaN where a state has no such action.
        values: ``[n]``.

    Returns:
        ``[n]`` integers; -1 where no action is better than the value of the state.

    Example::

        best_actions(tensor([[0.2, 0.6, nan], [0.1, nan, nan]]), tensor([0.5, 0.1]))  # [1, -1]
    """
    highest, best = q.masked_fill(q.isnan(), -torch.inf).max(1)
    return best.masked_fill(~(highest > values), -1)
