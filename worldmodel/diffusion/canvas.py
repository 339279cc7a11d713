"""Canvases: stretches of an answer whose tokens see one another, behind a past that is read from left to right.

What a model reads is the text as a causal model reads it, so its keys and values are those of any other prompt and can
be kept from turn to turn. Canvases stand beside the text: each sees all of the text before its first token and all of
itself, and nothing sees a canvas but itself. So one pass trains every canvas of an episode, as in block diffusion
(Arriola et al. 2025, arXiv 2503.09573, section 3.3), where the clean text and its noisy blocks are one sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policy.lm.engine import UnsupportedModel
from policy.lm.forward import attention_window, decoder, evaluating

TEXT, NOWHERE = -1, -2  # where columns of a layout belong that are of no canvas


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
    what came of it.

    Attributes:
        places: for the action with an end behind it.
        told: tokens of what came of it that are given at most, the first ones.
        between: what stands between an action and its answer.
        before: what stands between the end of an answer and the next action.
    """

    places: int
    told: int
    between: tuple[int, ...]
    before: tuple[int, ...]

    def canvas(self, action: Sequence[int], answer: Sequence[int], stop: int) -> tuple[int, ...]:
        """An action longer than its places is cut."""
        asked = (*action, *[stop] * self.places)[: self.places]
        return (*asked, *self.between, *answer[: self.told])

    def canvases(self, row: int, ids: list[int], weights: Sequence[float], stop: int, context: int) -> list[Canvas]:
        """One for each action between two answers of a text that has its places; arguments as of ``canvases``.

        The first action of a text is left out: it has no answer before it, by whose end it would be found.
        """
        found: list[Canvas] = []
        next_user = (stop, *self.before)  # alone, a stop may also end what users say
        stops = (at for at, token in enumerate(ids) if token == stop)
        starts = [at + len(next_user) for at in stops if tuple(ids[at : at + len(next_user)]) == next_user]
        for start, behind in zip(starts, [*starts[1:], len(ids)], strict=False):
            begin = next((at for at in range(start, behind) if weights[at]), None)
            if begin is None or stop not in ids[begin:behind]:
                continue
            action, told = ids[start : begin - len(self.between)], ids[begin - len(self.between) : begin]
            if tuple(told) == self.between and 0 < len(action) < self.places:
                piece = self.canvas(action, ids[begin : ids.index(stop, begin) + 1], stop)
                if start + len(piece) <= context:
                    found.append(Canvas(row, start, piece, weights[begin], self.places))
        return found


@dataclass(frozen=True, slots=True)
class Layout:
    """Texts with their canvases behind them, as one rectangle: its ``n`` columns are the longest text's and the most
    tokens that the canvases of a row have.

    Attributes:
        ids, positions: ``[rows, n]``; the canvases hold what is right.
        seen: ``[rows, n, n]``, which columns each one sees.
        row, column: ``[tokens]``, where the tokens of the canvases stand, one canvas after the other.
    """

    ids: Tensor
    positions: Tensor
    seen: Tensor
    row: Tensor
    column: Tensor


def lay_out(input_ids: Tensor, chosen: Sequence[Canvas]) -> Layout:
    """
    Args:
        input_ids: ``[rows, time]``, padded on the right.
        chosen: canvases of these rows; none of a row is fine.
    """
    rows, time = input_ids.shape
    device = input_ids.device
    begins: list[int] = []  # of each canvas behind its text
    behind = [0] * rows  # tokens of the canvases of each row
    for canvas in chosen:
        begins.append(behind[canvas.row])
        behind[canvas.row] += len(canvas.ids)

    def per_token(values: Iterable[int]) -> Tensor:
        repeated = [v for value, canvas in zip(values, chosen, strict=True) for v in [value] * len(canvas.ids)]
        return torch.tensor(repeated, dtype=torch.long, device=device)

    def whole(value: int) -> Tensor:
        return torch.full((rows, n), value, dtype=torch.long, device=device)

    n = time + max(behind)
    row, start = per_token(canvas.row for canvas in chosen), per_token(canvas.start for canvas in chosen)
    inside = torch.tensor([k for canvas in chosen for k in range(len(canvas.ids))], dtype=torch.long, device=device)
    column = time + per_token(begins) + inside
    ids, positions, past, group = whole(0), whole(0), whole(0), whole(NOWHERE)
    ids[:, :time] = input_ids
    ids[row, column] = torch.tensor([i for canvas in chosen for i in canvas.ids], dtype=torch.long, device=device)
    positions[:, :time] = torch.arange(time, device=device)
    positions[row, column] = start + inside
    past[:, :time] = torch.arange(time, device=device) + 1  # how much of the text each column sees
    past[row, column] = start
    group[:, :time] = TEXT
    group[row, column] = per_token(range(len(chosen)))
    of_text = torch.arange(time, device=device) < past[:, :, None]
    of_canvas = group[:, :, None] == group[:, None, time:]  # what is nowhere sees what is nowhere: none sees nothing
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
    layout = lay_out(text, [Canvas(0, 2, (3, 4), 1.0, 2)])
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
