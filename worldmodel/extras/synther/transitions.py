"""Transitions between hidden states, as plain tensors, and how alike two sets of them are.

SynthER: Lu et al. 2023, arXiv 2303.06614.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # diffusers is optional
    from worldmodel.extras.synther.model import TransitionDenoiser

RIDGE = 1.0  # of the regressor, in whitened units


@dataclass(frozen=True, slots=True)
class Transitions:
    """What happened between one state and the next.

    Attributes:
        states, next_states: float ``[n, hidden]``. The next state of the last transition of an episode is what stands
            after all of it.

    Raises:
        ValueError: shapes disagree, or ``dones`` is not bool.
    """

    states: Tensor
    next_states: Tensor
    rewards: Tensor  # ``[n]``, earned in between
    dones: Tensor  # bool ``[n]``, the world ended there
    returns: Tensor  # ``[n]``, discounted, of all that was earned from the state on

    def __post_init__(self) -> None:
        n = len(self.states)
        if self.states.ndim != 2 or self.next_states.shape != self.states.shape:
            raise ValueError(
                f"states and next_states must be [n, hidden], got {tuple(self.states.shape)} and "
                f"{tuple(self.next_states.shape)}"
            )
        for name in ("rewards", "dones", "returns"):
            if getattr(self, name).shape != (n,):
                raise ValueError(f"{name} must be [{n}], got {tuple(getattr(self, name).shape)}")
        if self.dones.dtype != torch.bool:
            raise ValueError(f"dones must be bool, got {self.dones.dtype}")

    def __len__(self) -> int:
        return len(self.states)

    def rows(self, which: Tensor) -> Transitions:
        return Transitions(*(getattr(self, f.name)[which] for f in fields(self)))

    def columns(self) -> Tensor:
        """All of it side by side, float ``[n, 2 hidden + 3]``: state, next state, reward, done, return."""
        numbers = (self.rewards, self.dones.float(), self.returns)
        return torch.cat([self.states, self.next_states, *(x[:, None] for x in numbers)], 1)


@dataclass(frozen=True, slots=True)
class Similarity:
    """How like held-out real transitions others are (SynthER, section 4).

    Marginals and correlations are the paper's. Its dynamics error asks the simulator for the true next state, which
    nobody can compute from a hidden state of a language model. Instead a regressor that was fitted on real held-out
    transitions predicts it: on synthetic ones it errs more than on real ones where their dynamics are others.
    """

    marginal: float  # 1 less the mean Kolmogorov-Smirnov statistic of the columns
    correlation: float  # 1 less half of the mean distance of the columns' correlations
    # mean squared error, in whitened units, of a regressor from states to next states and rewards
    dynamics_error: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def similarity(denoiser: TransitionDenoiser, held: Transitions, others: Transitions) -> Similarity:
    """Compares transitions with real ones that nothing was fitted to; each of both at least two.

    The first two are over all numbers of a transition, hidden states as wide as they are: what its components lose
    counts.
    """
    return Similarity(
        marginal_similarity(held.columns(), others.columns()),
        correlation_similarity(held.columns(), others.columns()),
        dynamics_error(*_dynamics(denoiser, held), *_dynamics(denoiser, others)),
    )


def marginal_similarity(real: Tensor, other: Tensor) -> float:
    """1 - mean over columns of sup_x |F_real(x) - F_other(x)|, of the empirical distribution functions.

    Example::

        marginal_similarity(tensor([[0.], [1.]]), tensor([[1.], [2.]]))  # 0.5: at 0 it is 1/2 against 0
    """
    statistics = []
    for a, b in zip(real.T.contiguous(), other.T.contiguous(), strict=True):
        a, b, places = a.sort().values, b.sort().values, torch.cat([a, b])
        below_a, below_b = (torch.searchsorted(x, places, right=True) / len(x) for x in (a, b))
        statistics.append((below_a - below_b).abs().amax())
    return 1 - float(torch.stack(statistics).mean())


def correlation_similarity(real: Tensor, other: Tensor) -> float:
    """1 - mean over pairs of columns of |r_real - r_other| / 2, of Pearson's r; columns that vary in both count.

    Raises:
        ValueError: fewer than two columns vary in both.
    """
    varies = (real.std(0) > 1e-6) & (other.std(0) > 1e-6)
    if varies.sum() < 2:
        raise ValueError(f"correlations need two columns that vary, there is {int(varies.sum())}")
    apart = (torch.corrcoef(real[:, varies].T) - torch.corrcoef(other[:, varies].T)).abs() / 2
    pairs = torch.ones_like(apart, dtype=torch.bool).triu(1)
    return 1 - float(apart[pairs].mean())


def dynamics_error(x: Tensor, y: Tensor, other_x: Tensor, other_y: Tensor) -> float:
    """Mean squared error on the others of a ridge regression from ``x`` ``[n, a]`` to ``y`` ``[n, b]``.

    The intercept is not shrunk: both are centred by the means of ``x`` and ``y``.
    """
    x_mean, y_mean = x.mean(0), y.mean(0)
    centred = (x - x_mean).double()
    gram = centred.T @ centred + RIDGE * torch.eye(x.shape[1], dtype=torch.float64)
    slope = torch.linalg.solve(gram, centred.T @ (y - y_mean).double())
    predicted = (other_x - x_mean).double() @ slope + y_mean
    return float((predicted - other_y).square().mean())


def _dynamics(denoiser: TransitionDenoiser, transitions: Transitions) -> tuple[Tensor, Tensor]:
    """States in components, and next states with rewards, whitened."""
    columns, dims = denoiser.encode(transitions), denoiser.dims
    return columns[:, :dims], columns[:, dims : 2 * dims + 1]
