"""Settings of the upsampling of transitions; nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SyntherSettings:
    """Synthetic transitions beside the logged ones (SynthER, arXiv 2303.06614)."""

    ratio: float = 0.0  #: share of each batch that is synthetic; 0 makes none and needs no diffusers
    samples: int = 10_000  #: synthetic transitions that are made, once
    dims: int = 32  #: principal components of a hidden state that are modelled; what the others say is lost
    hidden: int = 256  #: width of the denoiser
    layers: int = 4  #: residual blocks of the denoiser
    steps: int = 3000  #: optimiser steps of the denoiser
    batch: int = 256  #: transitions of such a step
    lr: float = 1e-3  #: of its Adam, down to 0 along a cosine
    denoising_steps: int = 128  #: from noise to a transition

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise ValueError(f"synther.ratio must lie in [0, 1), got {self.ratio}")
        for name in ("samples", "dims", "hidden", "layers", "steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"synther.{name} must be at least 1, got {getattr(self, name)}")
        if self.denoising_steps < 2:
            raise ValueError(f"synther.denoising_steps must be at least 2, got {self.denoising_steps}")
        if not self.lr > 0:
            raise ValueError(f"synther.lr must be above 0, got {self.lr}")
