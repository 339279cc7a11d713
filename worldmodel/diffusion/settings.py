"""Settings of ``worldmodel.kind=diffusion``; nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class DiffusionSettings:
    """The world model by masked diffusion, for worldmodel.kind=diffusion.

    Attributes:
        block: tokens of a canvas, which see one another and are filled in together; a longer answer is written canvas
            by canvas. Shorter ones are learned sooner, longer ones can be filled in by fewer passes. A model is trained
            for one number.
        causal_weight: how much the next token of the text counts in training, beside the canvases (1 each).
        sampler: which tokens of a canvas are kept after a pass. entropy keeps those at the surest places, whatever was
            sampled there; confidence keeps those that were sampled with the highest probability.
        entropy_bound: nats of entropy that all places kept in one pass may have together, the least sure one aside
            (entropy); 0 fills in one unsure place a pass.
        edit: from which probability on, 0.5 or more, a token of the last page stays; 0 writes each page anew. A canvas
            then begins as what stood at its place there, and two passes look at every other token each, given the rest
            of it: what is less likely is hidden and filled in. Fewer passes where pages change little, and a page that
            clings to the one before where the model is of two minds.
        steps: passes over which a canvas is spread at most (confidence).
        threshold: probability above which a token is kept at once (confidence).
    """

    block: int = 8
    causal_weight: float = 1.0
    sampler: Literal["entropy", "confidence"] = "entropy"
    entropy_bound: float = 0.1
    edit: float = 0.0
    steps: int = 4
    threshold: float = 0.9

    def __post_init__(self) -> None:
        if self.block < 1 or self.steps < 1:
            raise ValueError("diffusion.block and diffusion.steps must be at least 1")
        if self.causal_weight < 0:
            raise ValueError(f"diffusion.causal_weight must be 0 or more, got {self.causal_weight}")
        if self.steps > self.block:
            raise ValueError(f"diffusion.steps={self.steps} passes are more than the {self.block} tokens of a canvas")
        if self.entropy_bound < 0:
            raise ValueError(f"diffusion.entropy_bound must be 0 or more, got {self.entropy_bound}")
        if self.edit and not 0.5 <= self.edit <= 1:
            raise ValueError(f"diffusion.edit must be 0 (off) or lie in [0.5, 1], got {self.edit}")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"diffusion.threshold must lie in (0, 1], got {self.threshold}")
