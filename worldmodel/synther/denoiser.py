"""The network that takes noise from transitions, and how transitions look to it. A model of diffusers, so that its
checkpoint is a config and safetensors, opened without running any code from them."""

from __future__ import annotations

from typing import cast

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import GaussianFourierProjection
from torch import Tensor, nn
from torch.nn import functional as F

from worldmodel.synther.transitions import Transitions

_NUMBERS = 3  # reward, done, return
_FOURIER = 8  # random frequencies of the noise level, each a sine and a cosine: 16 numbers as in the paper


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
        state: width of a hidden state.
        dims: of its principal components, at most ``state``.
        hidden: width of the network.
        layers: residual blocks.
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
        """Takes components, means and deviations from these transitions.

        Returns:
            the share of the states' variance that the components hold.
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
