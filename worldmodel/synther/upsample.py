"""More transitions of logged ones: EDM (Karras et al. 2022, arXiv 2206.00364) with a scheduler of diffusers.

As in SynthER: noise levels of training are log-normal, the network is preconditioned, 128 steps, sigma from 80 to 0.002
with rho 7, a data deviation of 1, an exponential average of the weights. Not as in SynthER: sampling is deterministic
given the first noise, by DPM-Solver++ of the second order, where the paper has Heun's method with churn. Heun's costs
two evaluations a step and diffusers has none for EDM; its Euler scheduler would churn, but only after the network has
seen the sample, so that noise and network disagree about the level.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from diffusers import EDMDPMSolverMultistepScheduler
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from real_envs.errors import UserError
from real_envs.seeding import derive_seed
from worldmodel.diffusers_folders import opening
from worldmodel.synther.denoiser import TransitionDenoiser
from worldmodel.synther.settings import SyntherSettings
from worldmodel.synther.transitions import Transitions

Network = Callable[[Tensor, Tensor], Tensor]
LOG_SIGMA = (-1.2, 1.2)  # mean and deviation of ln(sigma) in training: Karras et al. 2022, table 1
EMA = 0.995
_ROWS = 4096  # that go through the network together


def make_scheduler() -> EDMDPMSolverMultistepScheduler:
    """EDM's noise levels and preconditioning, for data of deviation 1."""
    return EDMDPMSolverMultistepScheduler(sigma_min=0.002, sigma_max=80.0, sigma_data=1.0, rho=7.0, solver_order=2)


def denoising_loss(
    network: Network, scheduler: EDMDPMSolverMultistepScheduler, clean: Tensor, sigma: Tensor, noise: Tensor
) -> Tensor:
    """``mean(lambda(sigma) |D(y + sigma n; sigma) - y|^2)``, lambda = (sigma^2 + sd^2) / (sigma sd)^2.

    Karras et al. 2022, equations 2, 7 and 8 with the weight of table 1; D is the preconditioned network.

    Args:
        clean: whitened transitions y, ``[n, F]``.
        sigma: ``[n]``.
        noise: standard normal n, ``[n, F]``.
    """
    level = sigma[:, None]
    noisy = clean + level * noise
    raw = network(scheduler.precondition_inputs(noisy, level), scheduler.precondition_noise(sigma))
    denoised = scheduler.precondition_outputs(noisy, raw, level)
    data = scheduler.config.sigma_data
    weight = (level**2 + data**2) / (level * data) ** 2
    loss: Tensor = (weight * (denoised - clean).square()).mean()
    return loss


@torch.no_grad()
def sample(
    network: Network, scheduler: EDMDPMSolverMultistepScheduler, count: int, width: int, steps: int, seed: int
) -> Tensor:
    """``[count, width]``, decided by the seed: the probability flow from noise of the largest sigma down to 0."""
    start = torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * scheduler.init_noise_sigma
    return torch.cat([_denoised(network, scheduler, part, steps) for part in start.split(_ROWS)])


def _denoised(network: Network, scheduler: EDMDPMSolverMultistepScheduler, x: Tensor, steps: int) -> Tensor:
    scheduler = copy(scheduler)  # it counts its steps
    scheduler.set_timesteps(steps)
    for noise in scheduler.timesteps:
        raw = network(scheduler.scale_model_input(x, noise), noise.expand(len(x)))
        x = scheduler.step(raw, noise, x, return_dict=False)[0]
    return x


@dataclass(frozen=True, slots=True)
class Upsampler:
    """A fitted model of transitions with its scheduler.

    Attributes:
        kept_variance: share of the states' variance that its components hold; ``None`` for one from a folder.
    """

    denoiser: TransitionDenoiser
    scheduler: EDMDPMSolverMultistepScheduler
    kept_variance: float | None = None

    @classmethod
    def fit(cls, transitions: Transitions, settings: SyntherSettings, seed: int) -> Upsampler:
        """
        Raises:
            UserError: fewer than two transitions.
        """
        if len(transitions) < 2:
            raise UserError(f"synthetic transitions are learned from logged ones, and there are {len(transitions)}")
        state = transitions.states.shape[1]
        rng = torch.Generator().manual_seed(derive_seed("synther", seed))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("synther weights", seed))
            model = TransitionDenoiser(state, min(settings.dims, state), settings.hidden, settings.layers)
        kept, scheduler = model.fit_whitening(transitions), make_scheduler()
        clean = model.encode(transitions)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA))
        optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=settings.lr)
        slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
        mean, deviation = LOG_SIGMA
        for _ in range(settings.steps):
            rows = clean[torch.randint(len(clean), (settings.batch,), generator=rng)]
            sigma = (mean + deviation * torch.randn(len(rows), generator=rng)).exp()
            optimizer.zero_grad()
            denoising_loss(model, scheduler, rows, sigma, torch.randn(rows.shape, generator=rng)).backward()
            optimizer.step()
            slower.step()
            average.update_parameters(model)
        return cls(cast(TransitionDenoiser, average.module.eval()), scheduler, kept)

    def sample(self, count: int, steps: int, seed: int) -> Transitions:
        """Synthetic transitions, decided by the seed."""
        width = self.denoiser.width
        return self.denoiser.decode(sample(self.denoiser, self.scheduler, count, width, steps, seed))

    def save(self, folder: Path) -> None:
        """``denoiser/`` and ``scheduler/`` as diffusers writes them."""
        self.denoiser.save_pretrained(folder / "denoiser", safe_serialization=True)
        self.scheduler.save_pretrained(folder / "scheduler")

    @classmethod
    def load(cls, folder: Path) -> Upsampler:
        """
        Raises:
            UserError: the folder holds no such model, or its weights are no safetensors; pickles, which can hold code,
                are not opened.
        """
        with opening(folder, "transitions", "imagine fit-critic critic.synther.ratio=0.5"):
            denoiser = TransitionDenoiser.from_pretrained(
                folder / "denoiser", use_safetensors=True, local_files_only=True
            )
            scheduler = EDMDPMSolverMultistepScheduler.from_pretrained(folder / "scheduler", local_files_only=True)
        return cls(denoiser.eval(), scheduler)
