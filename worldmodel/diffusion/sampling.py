"""Which tokens of a canvas are kept after a pass: diffusers' schedulers, on the places that are still hidden.

``EntropySampler`` is ``EntropyBoundScheduler`` (Ben-Hamu et al. 2025, arXiv 2505.24857). It chooses places by their
entropy before it looks at what was sampled there. With a bound of 0 and a model whose conditionals belong to one joint
distribution it samples exactly from that. The scheduler refills the rest with random tokens, for models of uniform
noise; here the rest stays hidden instead, as in the paper.

``ConfidenceSampler`` is ``BlockRefinementScheduler``, as LLaDA2 is sampled by. It samples first and keeps the most
probable tokens, so above temperature 0 it writes likely words more often than the model would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from policy.lm.engines.inprocess.drafts import Drafts
from worldmodel.diffusion.settings import DiffusionSettings
from worldmodel.extras import need_diffusers

MASK = 0  # stands for a hidden token in what schedulers are shown, which is nothing but hidden tokens
EDIT_PASSES = 2
_LAST_PAGE = Drafts()  # it knows the text itself alone, in which the latest place wins


@dataclass(frozen=True, slots=True)
class FilledTokens:
    """What a pass has decided, ``[hidden]`` each: which places are filled, with what, and its log-probability."""

    where: Tensor
    tokens: Tensor
    logprobs: Tensor


class Sampler(Protocol):
    def __call__(self, logits: Tensor, temperature: float, step: int, generator: torch.Generator) -> FilledTokens:
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
    def __init__(self, settings: DiffusionSettings) -> None:
        from diffusers import EntropyBoundScheduler

        # one temperature throughout: logits come divided by it
        self._scheduler: Any = EntropyBoundScheduler(settings.entropy_bound, t_max=1.0, t_min=1.0)

    def __call__(self, logits: Tensor, temperature: float, step: int, generator: torch.Generator) -> FilledTokens:
        logits = logits / (temperature or 1.0)
        hidden = torch.full((1, len(logits)), MASK, device=logits.device)
        output = self._scheduler.step(logits[None], 0, hidden, generator=generator)
        tokens, probabilities = output.sampled_tokens[0], output.sampled_probs[0]
        if temperature == 0:  # which places are kept does not depend on what was sampled there
            probabilities, tokens = logits.softmax(-1).max(-1)
        return FilledTokens(output.accepted_index[0], tokens, probabilities.log())


class ConfidenceSampler:
    def __init__(self, settings: DiffusionSettings) -> None:
        from diffusers import BlockRefinementScheduler

        self._scheduler: Any = BlockRefinementScheduler(settings.block, settings.steps, settings.threshold)
        self._scheduler.set_timesteps(settings.steps)

    def __call__(self, logits: Tensor, temperature: float, step: int, generator: torch.Generator) -> FilledTokens:
        hidden = torch.full((1, len(logits)), MASK, device=logits.device)
        output = self._scheduler.step(
            logits[None], step, hidden, mask_token_id=MASK, temperature=temperature, generator=generator
        )
        return FilledTokens(output.transfer_index[0], output.sampled_tokens[0], output.sampled_probs[0].log())


@dataclass(slots=True)
class CanvasEdit:
    """A canvas that begins as what stood at its place on the last page; what is likely to change is hidden again.

    A model that was trained to fill in knows how likely a token is given all others only where it does not see that
    token. So two passes read the canvas with every other of its tokens hidden in turn, which gives each token's
    probability given its neighbours, as they were. What is then unlikely is hidden and filled in like anything else.
    The neighbours are those of the old page: a change that shows only in several tokens at once, each of which follows
    from the others, can be overlooked.
    """

    draft: np.ndarray  # ``[size]``, what stood there; the mask behind it where that was shorter
    mask: int
    # ``[size]``, of the tokens of the draft, as far as passes have scored them
    logprobs: np.ndarray = field(init=False)
    passes: int = 0

    def __post_init__(self) -> None:
        self.logprobs = np.full(len(self.draft), -np.inf)

    @property
    def shown(self) -> np.ndarray:
        shown = self.draft.copy()
        shown[self.passes :: EDIT_PASSES] = self.mask
        return shown

    def score(self, logits: Tensor) -> bool:
        """Takes in the log-probs of a pass; whether that was the last.

        Args:
            logits: ``[hidden, vocabulary]`` of the places that were hidden in ``shown``.
        """
        places = np.flatnonzero(self.shown == self.mask)
        draft = torch.from_numpy(self.draft[places]).to(logits.device)
        logprobs = logits.log_softmax(-1).gather(-1, draft[:, None])[:, 0].cpu().numpy()
        scored = (places % EDIT_PASSES == self.passes) & (self.draft[places] != self.mask)
        self.logprobs[places[scored]] = logprobs[scored]
        self.passes += 1
        return self.passes == EDIT_PASSES

    def likely(self, least: float) -> tuple[np.ndarray, np.ndarray]:
        """Places whose token has at least this probability, and all log-probs, ``[size]`` each."""
        return self.logprobs >= np.log(least), self.logprobs


def draft_of(text: Sequence[int], size: int, mask: int, stop: int) -> CanvasEdit | None:
    """What followed where the last tokens of a text stood in it before; ``None`` where they are new, or a canvas has
    room for one token alone, which has no neighbours to be known by.

    Behind the end of what is found there are further ends.
    """
    draft = _LAST_PAGE.propose(np.asarray(text, dtype=np.int64), stop, size)
    if draft is None or size < EDIT_PASSES:
        return None
    behind = stop if draft.ids[-1] == stop else mask
    return CanvasEdit(np.concatenate([draft.ids, np.full(size - len(draft.ids), behind, dtype=np.int64)]), mask)
