"""Which tokens of a canvas are kept after a pass: diffusers' schedulers, on the places that are still hidden.

``EntropySampler`` is ``EntropyBoundScheduler`` (Ben-Hamu et al. 2025, arXiv 2505.24857). It chooses places by their
entropy before it looks at what was sampled there. With a bound of 0 and a model whose conditionals belong to one joint
distribution it samples exactly from that. The scheduler refills the rest with random tokens, for models of uniform
noise; here the rest stays hidden instead, as in the paper.

``ConfidenceSampler`` is ``BlockRefinementScheduler``, as LLaDA2 is sampled by. It samples first and keeps the most
probable tokens, so above temperature 0 it writes likely words more often than the model would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from worldmodel.diffusers_folders import need_diffusers
from worldmodel.diffusion.settings import DiffusionSettings

MASK = 0  # stands for a hidden token in what schedulers are shown, which is nothing but hidden tokens


@dataclass(frozen=True, slots=True)
class Kept:
    """What a pass has decided, ``[hidden]`` each: which places are filled, with what, and its log-probability."""

    where: Tensor
    tokens: Tensor
    logprobs: Tensor


class Sampler(Protocol):
    def __call__(self, logits: Tensor, temperature: float, step: int, generator: torch.Generator) -> Kept:
        """
        Args:
            logits: ``[hidden, vocabulary]`` of the places that are still hidden.
            temperature: 0 takes the most likely token, with its probability at temperature 1.
            step: how many passes this canvas has had.
            generator: the only source of chance, on the device of the logits.
        """
        ...


def make_sampler(settings: DiffusionSettings) -> Sampler:
    """
    Raises:
        UserError: diffusers is not installed.
    """
    need_diffusers("worldmodel.kind=diffusion")
    return EntropySampler(settings) if settings.sampler == "entropy" else ConfidenceSampler(settings)


class EntropySampler:
    """See the module."""

    def __init__(self, settings: DiffusionSettings) -> None:
        from diffusers import EntropyBoundScheduler

        # one temperature throughout: logits come divided by it
        self._scheduler: Any = EntropyBoundScheduler(settings.entropy_bound, t_max=1.0, t_min=1.0)

    def __call__(self, logits: Tensor, temperature: float, step: int, generator: torch.Generator) -> Kept:
        logits = logits / (temperature or 1.0)
        hidden = torch.full((1, len(logits)), MASK, device=logits.device)
        found = self._scheduler.step(logits[None], 0, hidden, generator=generator)
        tokens, probabilities = found.sampled_tokens[0], found.sampled_probs[0]
        if temperature == 0:  # which places are kept does not depend on what was sampled there
            probabilities, tokens = logits.softmax(-1).max(-1)
        return Kept(found.accepted_index[0], tokens, probabilities.log())


class ConfidenceSampler:
    """See the module."""

    def __init__(self, settings: DiffusionSettings) -> None:
        from diffusers import BlockRefinementScheduler

        self._scheduler: Any = BlockRefinementScheduler(settings.block, settings.steps, settings.threshold)
        self._scheduler.set_timesteps(settings.steps)

    def __call__(self, logits: Tensor, temperature: float, step: int, generator: torch.Generator) -> Kept:
        hidden = torch.full((1, len(logits)), MASK, device=logits.device)
        found = self._scheduler.step(
            logits[None], step, hidden, mask_token_id=MASK, temperature=temperature, generator=generator
        )
        return Kept(found.transfer_index[0], found.sampled_tokens[0], found.sampled_probs[0].log())
