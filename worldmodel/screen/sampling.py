"""From noise to a picture, along the velocity that a model tells; the steps are those of diffusers' scheduler."""

from __future__ import annotations

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from worldmodel.screen.objective import Velocity

TRAIN_STEPS = 1000  # diffusers counts noise in thousandths


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Euler steps on a straight line. Its sigma is our ``1 - t``, and its model output points from picture to noise."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=TRAIN_STEPS, shift=1.0)


@torch.no_grad()
def sample(velocity: Velocity, noise: Tensor, steps: int, scheduler: FlowMatchEulerDiscreteScheduler) -> Tensor:
    """The picture at the end of ``steps`` equal steps.

    Args:
        velocity: of ``(x_t, t, d)``, with ``d = 1 / steps``.
        noise: ``[batch, channels, height, width]``, standard normal.
    """
    # a scheduler counts its steps; and the sigmas that it would choose itself do not divide the line evenly
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
    scheduler.set_timesteps(sigmas=[1 - k / steps for k in range(steps)], device=noise.device)
    x, batch = noise, noise.shape[0]
    d = torch.full((batch,), 1 / steps, device=noise.device)
    for k, timestep in enumerate(scheduler.timesteps):
        t = torch.full((batch,), k / steps, device=noise.device)
        x = scheduler.step(-velocity(x, t, d), timestep, x, return_dict=False)[0]
    return x
