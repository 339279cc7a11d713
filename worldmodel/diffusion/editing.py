"""Editing: a canvas begins as what stood at its place on the last page, and what is likely to change is hidden again.

A model that was trained to fill in knows how likely a token is given all others only where it does not see that token.
So the canvas is looked at twice, with every other of its tokens hidden in turn, which tells each token's probability
given its neighbours, as they were. What is then unlikely is hidden and filled in like anything else. The neighbours are
those of the old page: a change that shows only in several tokens at once, each of which follows from the others, can be
overlooked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from policy.lm.engines.inprocess.drafts import Drafts

LOOKS = 2
_LAST_PAGE = Drafts()  # looks nowhere but in the text itself, where the latest place wins


@dataclass(slots=True)
class Edit:
    """A canvas that is being looked at.

    Attributes:
        draft: ``[size]``, what stood there; the mask behind it where that was shorter.
        mask: the id that hides a token.
        logprobs: ``[size]``, of the tokens of the draft, as far as they have been looked at.
        looks: how often that was.
    """

    draft: np.ndarray
    mask: int
    logprobs: np.ndarray = field(init=False)
    looks: int = 0

    def __post_init__(self) -> None:
        self.logprobs = np.full(len(self.draft), -np.inf)

    @property
    def shown(self) -> np.ndarray:
        """What the next look reads: every other token is hidden."""
        shown = self.draft.copy()
        shown[self.looks :: LOOKS] = self.mask
        return shown

    def look(self, logits: torch.Tensor) -> bool:
        """Takes in what a look has told.

        Args:
            logits: ``[hidden, vocabulary]`` of the places that were hidden in ``shown``.

        Returns:
            Whether that was the last.
        """
        places = np.flatnonzero(self.shown == self.mask)
        draft = torch.from_numpy(self.draft[places]).to(logits.device)
        told = logits.log_softmax(-1).gather(-1, draft[:, None])[:, 0].cpu().numpy()
        mine = (places % LOOKS == self.looks) & (self.draft[places] != self.mask)
        self.logprobs[places[mine]] = told[mine]
        self.looks += 1
        return self.looks == LOOKS

    def likely(self, least: float) -> tuple[np.ndarray, np.ndarray]:
        """Places whose token has at least this probability, and all log-probs, ``[size]`` each."""
        return self.logprobs >= np.log(least), self.logprobs


def draft_of(text: Sequence[int], size: int, mask: int, stop: int) -> Edit | None:
    """What followed where the last tokens of a text stood in it before; ``None`` where they are new, or a canvas has
    room for one token alone, which has no neighbours to be known by.

    Behind the end of what is found there are further ends.
    """
    found = _LAST_PAGE.propose(np.asarray(text, dtype=np.int64), stop, size)
    if found is None or size < LOOKS:
        return None
    behind = stop if found.ids[-1] == stop else mask
    return Edit(np.concatenate([found.ids, np.full(size - len(found.ids), behind, dtype=np.int64)]), mask)
