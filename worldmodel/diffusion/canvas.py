"""Canvases: stretches of an answer whose tokens see one another, behind a past that is read from left to right.

What a model reads is the text as a causal model reads it, so its keys and values are those of any other prompt and can
be kept from turn to turn. Canvases stand beside the text: each sees all of the text before its first token and all of
itself, and nothing sees a canvas but itself. So one pass trains every canvas of an episode, as in block diffusion
(Arriola et al. 2025, arXiv 2503.09573, section 3.3), where the clean text and its noisy blocks are one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policy.lm.engine import UnsupportedModel
from policy.lm.forward import attention_window, decoder, evaluating


@dataclass(frozen=True, slots=True)
class Canvas:
    """A canvas and what belongs in it.

    Attributes:
        row: whose text it is of.
        start: the position of its first token; it sees the text before that.
        ids: what is right; behind the end of an answer, further ends.
        weight: of the turn.
        asked: how many of its first tokens are to be filled in; the rest is given.
    """

    row: int
    start: int
    ids: tuple[int, ...]
    weight: float
    asked: int


def canvases(
    row: int, ids: Sequence[int], weights: Sequence[float], block: int, stop: int, context: int
) -> list[Canvas]:
    """The answers of a text, cut into canvases.

    An answer is a run of tokens with a weight; it is over behind ``stop``. The last canvas of an answer is filled up
    with ``stop``. A run that does not end in ``stop`` was cut, and only its full canvases are taken: the rest would
    teach where the cut was.

    Args:
        ids, weights: of the text, ``[time]``.
        block: tokens of a canvas.
        context: canvases that reach beyond it are left out.

    Example::

        canvases(0, [7, 5, 6, 2, 7], [0, 1, 1, 1, 0], block=2, stop=2, context=8)
        # [Canvas(0, 1, (5, 6), 1, 2), Canvas(0, 3, (2, 2), 1, 2)]
    """
    found: list[Canvas] = []
    at = 0
    while at < len(ids):
        if not weights[at]:
            at += 1
            continue
        begin = at
        while at < len(ids) and weights[at] and ids[at] != stop:
            at += 1
        ended = at < len(ids) and bool(weights[at])
        at += ended
        for start in range(begin, at, block):
            piece = tuple(ids[start : min(start + block, at)])
            if (len(piece) == block or ended) and start + block <= context:
                found.append(Canvas(row, start, piece + (stop,) * (block - len(piece)), weights[start], block))
    return found


@dataclass(frozen=True, slots=True)
class Inverse:
    """The question which action led here, as a canvas behind the past: places for the action, filled up with ends, and
    what came of it, as far as the canvas goes.

    Attributes:
        places: for the action with an end behind it.
        between: what stands between an action and its answer.
        before: what stands between the end of an answer and the next action.
    """

    places: int
    between: tuple[int, ...]
    before: tuple[int, ...]

    def canvas(self, action: Sequence[int], answer: Sequence[int], block: int, stop: int) -> tuple[int, ...]:
        """``[block]``; an action longer than its places is cut."""
        asked = (*action, *[stop] * self.places)[: self.places]
        given = (*asked, *self.between, *answer, *[stop] * block)
        return given[:block]

    def canvases(
        self, row: int, ids: list[int], weights: Sequence[float], block: int, stop: int, context: int
    ) -> list[Canvas]:
        """One for each action between two answers of a text that has its places; arguments as of ``canvases``.

        The first action of a text is left out: it has no answer before it, by whose end it would be found.
        """
        found: list[Canvas] = []
        next_user = (stop, *self.before)  # alone, a stop may also end what users say
        stops = (at for at, token in enumerate(ids) if token == stop)
        starts = [at + len(next_user) for at in stops if tuple(ids[at : at + len(next_user)]) == next_user]
        for start, behind in zip(starts, [*starts[1:], len(ids)], strict=False):
            begin = next((at for at in range(start, behind) if weights[at]), None)
            if begin is None or stop not in ids[begin:behind] or start + block > context:
                continue
            action, told = ids[start : begin - len(self.between)], ids[begin - len(self.between) : begin]
            if tuple(told) == self.between and 0 < len(action) < self.places:
                answer = ids[begin : ids.index(stop, begin) + 1]
                piece = self.canvas(action, answer, block, stop)
                found.append(Canvas(row, start, piece, weights[begin], self.places))
        return found


@dataclass(frozen=True, slots=True)
class Layout:
    """Texts with their canvases behind them, as one rectangle of ``n = time + most canvases of a row * block`` columns.

    Attributes:
        ids, positions: ``[rows, n]``; the canvases hold what is right.
        seen: ``[rows, n, n]``, which columns each one sees.
        row, column: ``[canvases, block]``, where the tokens of each canvas stand.
    """

    ids: Tensor
    positions: Tensor
    seen: Tensor
    row: Tensor
    column: Tensor


def lay_out(input_ids: Tensor, chosen: Sequence[Canvas], block: int) -> Layout:
    """
    Args:
        input_ids: ``[rows, time]``, padded on the right.
        chosen: canvases of these rows, those of a row one after the other; none of a row is fine.
    """
    rows, time = input_ids.shape
    device = input_ids.device
    place: list[int] = []  # of each canvas among those of its row
    count = [0] * rows
    for canvas in chosen:
        place.append(count[canvas.row])
        count[canvas.row] += 1
    most = max(count)
    row = torch.tensor([canvas.row for canvas in chosen], dtype=torch.long, device=device)[:, None].expand(-1, block)
    begins = time + block * torch.tensor(place, dtype=torch.long, device=device)
    inside = torch.arange(block, device=device)
    column = begins[:, None] + inside
    starts = torch.tensor([canvas.start for canvas in chosen], dtype=torch.long, device=device)[:, None]

    n = time + most * block
    ids = torch.zeros(rows, n, dtype=torch.long, device=device)
    ids[:, :time] = input_ids
    ids[row, column] = torch.tensor([canvas.ids for canvas in chosen], dtype=torch.long, device=device)
    positions = torch.zeros(rows, n, dtype=torch.long, device=device)
    positions[:, :time] = torch.arange(time, device=device)
    positions[row, column] = starts + inside
    past = torch.zeros(rows, n, dtype=torch.long, device=device)  # how much of the text each column sees
    past[:, :time] = torch.arange(time, device=device) + 1
    past[row, column] = starts.expand(-1, block)
    of_text = torch.arange(time, device=device) < past[:, :, None]
    group = torch.cat(
        [torch.full((time,), -1, device=device), torch.arange(most, device=device).repeat_interleave(block)]
    )
    of_canvas = (group[:, None] == group[None, time:]).expand(rows, -1, -1)
    return Layout(ids, positions, torch.cat([of_text, of_canvas], 2), row, column)


def canvas_states(model: Any, layout: Layout, ids: Tensor) -> Tensor:
    """Final hidden states ``[rows, n, hidden]`` of a layout that holds ``ids``: the canvases, some of it masked."""
    seen = layout.seen[:, None]
    if model.config._attn_implementation == "eager":  # it adds the mask to the scores
        seen = torch.where(seen, 0.0, torch.finfo(model.dtype).min).to(model.dtype)
    states: Tensor = decoder(model)(
        input_ids=ids, attention_mask=seen, position_ids=layout.positions, use_cache=False
    ).last_hidden_state
    return states


@torch.no_grad()
def check_canvases(model: Any, context: int) -> None:
    """Whether canvases can stand beside a text in this model: the text must not notice them, and they must see all of
    themselves. Asked of the model itself, with a few tokens.

    Raises:
        UnsupportedModel: they cannot.
    """
    window = attention_window(model.config)
    if window is not None and window < context:
        raise UnsupportedModel(
            f"{model.config.model_type} attends to {window} tokens: lower worldmodel.context to that for diffusion"
        )
    text = torch.arange(1, 5, device=model.device)[None]
    layout = lay_out(text, [Canvas(0, 2, (3, 4), 1.0, 2)], 2)
    other = layout.ids.clone()
    other[0, -1] = 1
    with evaluating(model):
        alone = decoder(model)(input_ids=text, use_cache=False).last_hidden_state[0].float()
        beside, changed = (canvas_states(model, layout, ids)[0].float() for ids in (layout.ids, other))
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 5e-2
    same = (beside[:4] - alone).norm() <= tolerance * alone.norm()
    seen = (changed[4] - beside[4]).norm() > 0
    if not (same and seen and torch.equal(beside[:4], changed[:4])):
        raise UnsupportedModel(
            f"{model.config.model_type} does not attend as it is told, which worldmodel.kind=diffusion needs: choose a "
            "model with standard attention"
        )
