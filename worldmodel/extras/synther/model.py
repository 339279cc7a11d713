"""More transitions of logged ones: EDM (Karras et al. 2022, arXiv 2206.00364) with a scheduler of diffusers.

As in SynthER: noise levels of training are log-normal, the network is preconditioned, 128 steps, sigma from 80 to 0.002
with rho 7, a data deviation of 1, an exponential average of the weights. Not as in SynthER: sampling is deterministic
given the first noise, by DPM-Solver++ of the second order, where the paper has Heun's method with churn. Heun's costs
two evaluations a step and diffusers has none for EDM; its Euler scheduler would churn, but only after the network has
seen the sample, so that noise and network disagree about the level.

The denoiser is a model of diffusers, so that its checkpoint is a config and safetensors, opened without running code.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from diffusers import ConfigMixin, EDMDPMSolverMultistepScheduler, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import GaussianFourierProjection
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from real_envs.errors import UserError
from real_envs.seeding import derive_seed
from worldmodel.extras import loading
from worldmodel.extras.synther.settings import SyntherSettings
from worldmodel.extras.synther.transitions import Transitions

_NUMBERS = 3  # reward, done, return
_FOURIER = 8  # random frequencies of the noise level, each a sine and a cosine: 16 numbers as in the paper
Network = Callable[[Tensor, Tensor], Tensor]
LOG_SIGMA = (-1.2, 1.2)  # mean and deviation of ln(sigma) in training: Karras et al. 2022, table 1
EMA = 0.995
_ROWS = 4096  # that go through the network together


class _Block(nn.Module):
    """``x + linear(relu(norm(x)))``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.linear(F.relu(self.norm(x))))


class TransitionDenoiser(ModelMixin, ConfigMixin):
    """The residual MLP of SynthER (Lu et al. 2023, arXiv 2303.06614, appendix B), over whitened transitions.

    A transition of width F = 2 dims + 3 is its two states, each in its principal components, its reward, whether it
    ended and its return, every number scaled to mean 0 and deviation 1 over the log. Hidden states of a language model
    are correlated and wide; the paper scales each dimension alone. The last layer starts at 0.

    Args:
        dims: of its principal components, at most ``state``.
    """

    @register_to_config
    def __init__(self, state: int, dims: int, hidden: int = 256, layers: int = 4) -> None:
        super().__init__()
        if not 1 <= dims <= state:
            raise ValueError(f"dims must lie in [1, {state}], the width of a state, got {dims}")
        self.dims, self.width = dims, 2 * dims + _NUMBERS
        self.read = nn.Linear(self.width, hidden)
        self.noise_level = GaussianFourierProjection(_FOURIER, set_W_to_weight=False, log=False)
        self.read_noise = nn.Sequential(nn.Linear(2 * _FOURIER, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.blocks = nn.ModuleList(_Block(hidden) for _ in range(layers))
        self.write = nn.Linear(hidden, self.width)
        nn.init.zeros_(self.write.weight)
        nn.init.zeros_(self.write.bias)
        self.register_buffer("centre", torch.zeros(state))
        self.register_buffer("directions", torch.eye(dims, state))
        self.register_buffer("mean", torch.zeros(self.width))
        self.register_buffer("deviation", torch.ones(self.width))

    def forward(self, sample: Tensor, noise: Tensor) -> Tensor:
        """The raw output ``[n, F]`` that EDM's preconditioning makes a denoised transition of.

        Args:
            sample: ``[n, F]``, scaled by EDM's c_in.
            noise: ``[n]``, EDM's c_noise.
        """
        x = self.read(sample) + self.read_noise(self.noise_level(noise))
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.write(F.relu(x)))

    @torch.no_grad()
    def fit_whitening(self, transitions: Transitions) -> float:
        """Takes components, means and deviations from these; returns the share of the states' variance that the
        components hold.
        """
        states = torch.cat([transitions.states, transitions.next_states]).double()
        centre = states.mean(0)
        values, vectors = torch.linalg.eigh((states - centre).T @ (states - centre) / len(states))  # ascending
        self.centre.copy_(centre)
        self.directions.copy_(vectors[:, -self.dims :].T.flip(0))
        self.mean.zero_()
        self.deviation.fill_(1.0)
        columns = self.encode(transitions)
        spread = columns.std(0, correction=0)
        self.mean.copy_(columns.mean(0))
        self.deviation.copy_(torch.where(spread > 1e-6, spread, 1.0))  # what never varies stays what it is
        return float(values[-self.dims :].sum() / values.sum().clamp(min=1e-12))

    @torch.no_grad()
    def encode(self, transitions: Transitions) -> Tensor:
        """Whitened, ``[n, F]``."""
        numbers = (transitions.rewards, transitions.dones.float(), transitions.returns)
        parts = [self._components(transitions.states), self._components(transitions.next_states)]
        return (torch.cat([*parts, *(x[:, None] for x in numbers)], 1) - self.mean) / self.deviation

    @torch.no_grad()
    def decode(self, columns: Tensor) -> Transitions:
        """The other way round; a transition ended where its number says so by more than one half, as in the paper."""
        columns = columns * self.deviation + self.mean
        states, next_states, numbers = columns.split([self.dims, self.dims, _NUMBERS], 1)
        reward, done, total = numbers.unbind(1)
        back = self.directions
        return Transitions(states @ back + self.centre, next_states @ back + self.centre, reward, done > 0.5, total)

    def _components(self, states: Tensor) -> Tensor:
        return cast(Tensor, (states.float() - self.centre) @ self.directions.T)


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
    """A fitted model of transitions with its scheduler."""

    denoiser: TransitionDenoiser
    scheduler: EDMDPMSolverMultistepScheduler
    # share of the states' variance that its components hold; ``None`` for one from a folder
    kept_variance: float | None = None

    @classmethod
    def fit(cls, transitions: Transitions, settings: SyntherSettings, seed: int) -> Upsampler:
        """Raises ``UserError`` for fewer than two transitions."""
        if len(transitions) < 2:
            raise UserError(f"synthetic transitions are learned from logged ones, and there are {len(transitions)}")
        state = transitions.states.shape[1]
        rng = torch.Generator().manual_seed(derive_seed("synther", seed))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("synther weights", seed))
            model = TransitionDenoiser(state, min(settings.dims, state), settings.hidden, settings.layers)
        kept_variance, scheduler = model.fit_whitening(transitions), make_scheduler()
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
        return cls(cast(TransitionDenoiser, average.module.eval()), scheduler, kept_variance)

    def sample(self, count: int, steps: int, seed: int) -> Transitions:
        width = self.denoiser.width
        return self.denoiser.decode(sample(self.denoiser, self.scheduler, count, width, steps, seed))

    def save(self, folder: Path) -> None:
        """``denoiser/`` and ``scheduler/`` as diffusers writes them."""
        self.denoiser.save_pretrained(folder / "denoiser", safe_serialization=True)
        self.scheduler.save_pretrained(folder / "scheduler")

    @classmethod
    def load(cls, folder: Path) -> Upsampler:
        """Raises ``UserError`` where the folder holds no such model, see ``loading``."""
        with loading(folder, "transitions", "imagine fit-critic critic.synther.ratio=0.5"):
            denoiser = TransitionDenoiser.from_pretrained(
                folder / "denoiser", use_safetensors=True, local_files_only=True
            )
            scheduler = EDMDPMSolverMultistepScheduler.from_pretrained(folder / "scheduler", local_files_only=True)
        return cls(denoiser.eval(), scheduler)
