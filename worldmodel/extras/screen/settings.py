"""Settings of ``worldmodel.kind=screen``; nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field

HEADS = 4  # that attend to the words of pages


@dataclass
class ScreenSettings:
    """The world model of pictures, for worldmodel.kind=screen; it is fitted by fit.steps, fit.lr and their kin.

    Attributes:
        shrink: pixels of a screenshot, each way, that are one pixel of the model.
        patch: pixels of the model, each way, that are one place of its network.
        channels: of the network's levels; each further one sees half the width and height.
        words: words of the action, and as many of the task, that it reads at most.
        page_words: words of what the page's text newly says after the turn, that it reads besides; 0 draws from screen
            and action alone. A log says what the page said; in dreams the run's world model of text says it, which has
            to be fitted too.
        word_features: hashed features that tell words apart.
        finest: steps of the finest way from noise to a picture, a power of two; fewer steps are learned from it.
        steps: from noise to a dreamed picture, a power of two up to finest.
        bootstrap: share of each batch that learns a long step from two short ones.
        batch: turns of an optimiser step.
        crop: pixels of the model, each way, of the window that a turn is learned from, drawn anew each time and mostly
            around its action: most of a screen has nothing to teach. 0 takes whole screens.
        whole_share: of the steps, the last ones, that learn from whole screens all the same: the network normalises by
            means over all that it reads, and those of a screen are others than those of a window.
        whole_batch: turns of such a step.
    """

    shrink: int = 2
    patch: int = 4
    channels: list[int] = field(default_factory=lambda: [32, 64, 96])
    words: int = 12
    page_words: int = 0
    word_features: int = 256
    finest: int = 16
    steps: int = 4
    bootstrap: float = 0.25
    batch: int = 16
    crop: int = 48
    whole_share: float = 0.15
    whole_batch: int = 4

    def __post_init__(self) -> None:
        for name in ("shrink", "patch", "words", "word_features", "batch", "whole_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"screen.{name} must be at least 1, got {getattr(self, name)}")
        if self.page_words < 0 or (self.page_words and self.word_features % HEADS):
            raise ValueError(
                f"screen.page_words must be 0 (off) or more, with screen.word_features a multiple of {HEADS}; got "
                f"{self.page_words} and {self.word_features}"
            )
        if not self.channels or any(width < 8 or width % 8 for width in self.channels):
            raise ValueError(f"screen.channels must be multiples of 8, one a level, got {self.channels}")
        if self.crop < 0 or self.crop % self.multiple:
            raise ValueError(
                f"screen.crop must be 0 (whole screens) or a multiple of {self.multiple}, which is screen.patch times "
                f"2 for each further level of screen.channels; got {self.crop}"
            )
        for name in ("finest", "steps"):
            if getattr(self, name) < 1 or getattr(self, name).bit_count() != 1:
                raise ValueError(f"screen.{name} must be a power of two, got {getattr(self, name)}")
        if self.steps > self.finest:
            raise ValueError(f"screen.steps={self.steps} must not be more than screen.finest={self.finest}")
        for name in ("bootstrap", "whole_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"screen.{name} must lie in [0, 1], got {getattr(self, name)}")

    @property
    def multiple(self) -> int:
        """Of which the width and height of what the network reads must be multiples."""
        return int(self.patch * 2 ** (len(self.channels) - 1))
