"""Flow matching with shortcut forcing: pure functions of tensors.

A picture ``x1`` is reached from noise ``x0`` on a straight line, ``x_t = (1 - t) x0 + t x1``, whose velocity is
``x1 - x0`` (rectified flow; Liu et al., arXiv 2209.03003, eq. 1). A network that also knows how long a step ``d`` it
takes can learn that one step of ``2d`` ends where two of ``d`` do, so that a few steps are enough (shortcut models;
Frans et al., arXiv 2410.12557, eq. 5). As in Dreamer 4 (Hafner et al., arXiv 2509.24527, eq. 7) the network predicts
``x1`` in place of the velocity, and errors are those of ``x1``.

Dreamer 4 draws ``t`` evenly (eq. 4) and weighs a row by ``0.9 t + 0.1`` (eq. 8), since near the noise there is little
to learn of a film. Of a page there is most to learn there: the last screen and the action decide what comes, and where
``x_t`` already shows it, that is read off. So here ``t`` is drawn more often near the noise, and all rows weigh the
same.

Shapes: pictures are ``[batch, channels, height, width]``; ``t`` and ``d`` are ``[batch]`` and lie in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

# (which rows of the batch, x_t, t, d) -> x1
Predict = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# (x_t, t, d) -> velocity
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]


def _wide(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def interpolate(x0: Tensor, x1: Tensor, t: Tensor) -> Tensor:
    """``x_t = (1 - t) x0 + t x1``."""
    return (1 - _wide(t)) * x0 + _wide(t) * x1


def velocity_to(x1: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """The velocity that leads straight from ``x_t`` to ``x1``: ``(x1 - x_t) / (1 - t)``, for ``t`` below 1."""
    return (x1 - x_t) / (1 - _wide(t))


def shortcut_target(velocity: Velocity, x_t: Tensor, t: Tensor, d: Tensor) -> Tensor:
    """What the velocity of a step of ``2d`` should be (arXiv 2410.12557, eq. 5)::

    s(x_t, t, d) / 2  +  s(x', t + d, d) / 2,      x' = x_t + d s(x_t, t, d)
    """
    first = velocity(x_t, t, d)
    second = velocity(x_t + _wide(d) * first, t + d, d)
    return (first + second) / 2


@dataclass(frozen=True, slots=True)
class Noise:
    """What is random about a batch."""

    x0: Tensor  # of the pictures' shape, standard normal
    t: Tensor  # where on the line, a multiple of ``d`` below 1
    d: Tensor  # how long a step is learned
    # bool, ``[batch]``; rows that learn from two steps of half the length. The others have the finest ``d`` and learn
    # from the data.
    bootstrap: Tensor

    def to(self, device: torch.device) -> Noise:
        return Noise(*(getattr(self, f.name).to(device) for f in fields(self)))


def draw_noise(like: Tensor, finest: int, share: float, generator: torch.Generator) -> Noise:
    """Noise for pictures like these.

    Each of the steps 1, 1/2, ... down to twice the finest is ``d`` of as many bootstrapped rows, whose ``t`` is uniform
    over the multiples of ``d`` below 1 (Dreamer 4, eq. 4). That of the others is the square of a uniform number,
    rounded down to such a multiple.

    Args:
        finest: number of the shortest steps, a power of two.
        share: of the rows that are bootstrapped; the first ones.
    """
    count = like.shape[0]
    x0 = torch.randn(like.shape, generator=generator)
    bootstrap = torch.arange(count) < (round(share * count) if finest > 1 else 0)
    levels = finest.bit_length() - 1  # 1, 1/2, ..., 2/finest
    level = torch.randint(0, max(1, levels), (count,), generator=generator)
    steps = torch.where(bootstrap, 2**level, torch.full_like(level, finest))
    chance = torch.rand(count, generator=generator)
    place = (torch.where(bootstrap, chance, chance.square()) * steps).long().clamp(max=finest - 1)
    return Noise(x0, place / steps, 1 / steps, bootstrap)


def shortcut_forcing_loss(predict: Predict, x1: Tensor, noise: Noise) -> tuple[Tensor, dict[str, float]]:
    """Dreamer 4's loss of a batch without its weights (arXiv 2509.24527, eq. 7), a mean over rows and pixels::

        |x̂1 - x1|²                                        rows that learn from the data
        (1 - t)² |(x̂1 - x_t) / (1 - t) - target|²         bootstrapped rows, target of steps d/2

    Returns:
        the loss, and the plain errors of both kinds of rows where there are any.
    """
    rows = torch.arange(x1.shape[0], device=x1.device)
    x_t = interpolate(noise.x0, x1, noise.t)
    guess = predict(rows, x_t, noise.t, noise.d)
    goal = x1.clone()
    if noise.bootstrap.any():
        chosen = rows[noise.bootstrap]
        start, t, half = x_t[chosen], noise.t[chosen], noise.d[chosen] / 2

        def velocity(x: Tensor, at: Tensor, d: Tensor) -> Tensor:
            return velocity_to(predict(chosen, x, at, d), x, at)

        with torch.no_grad():
            # (1 - t)² |(x̂1 - x_t) / (1 - t) - target|² is the distance of x̂1 to this point
            goal[chosen] = start + _wide(1 - t) * shortcut_target(velocity, start, t, half)
    error = (guess - goal).square().flatten(1).mean(1)
    errors = {}
    for name, which in (("flow_error", ~noise.bootstrap), ("shortcut_error", noise.bootstrap)):
        if which.any():
            errors[name] = float(error[which].detach().mean())
    return error.mean(), errors
