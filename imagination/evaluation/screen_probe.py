"""Which state of the task a screen shows, read by a small network that was trained on real screens.

It looks at a square around the element that the action named, and says whether the element is checked, selected or
expanded; the log's observations know the answer. On dreamed screens it tells whether they show what really happened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from real_envs.screens import Place
from worldmodel.evaluation.intervals import clusters, proportion
from worldmodel.extras.screen.data import ScreenTransition

SIDE = 24  # pixels of the square
STEPS, LR, BATCH = 200, 3e-3, 32
_NUMBER = re.compile(r"\w+\(\s*['\"]?(\d+)")
_KINDS = ("checkbox", "radio", "tab", "option")
_STATES = frozenset({"checked", "selected", "expanded"})


@dataclass(frozen=True, slots=True)
class Question:
    """An element whose state a screen shows: whether it is marked on the page before and after a turn."""

    turn: int  # place among the turns
    before: bool
    after: bool


def marked(page: str, number: int) -> bool | None:
    """Whether an element of a page is checked, selected or expanded; ``None`` where it is none that can be."""
    line = next((line for line in page.splitlines() if line.startswith(f"[{number}] ")), "")
    words = line.split()
    if len(words) < 2 or words[1] not in _KINDS:
        return None
    return bool(_STATES & set(re.split(r"['\"]", line)[-1].split()))  # not those of a name, which is quoted


def questions_of(turns: Sequence[ScreenTransition]) -> list[Question]:
    """Of turns that say where their element was, those whose pages know its state before and after."""
    questions = []
    for k, turn in enumerate(turns):
        named = _NUMBER.match(turn.action)
        if turn.place is None or named is None:
            continue
        states = [marked(page, int(named[1])) for page in (turn.page, turn.answer)]
        if None not in states:
            questions.append(Question(k, bool(states[0]), bool(states[1])))
    return questions


def square(screen: Tensor, place: Place, shrink: int) -> Tensor:
    """Float32 ``[3, SIDE, SIDE]`` in [-0.5, 0.5] around the centre of an element; edges are repeated.

    ``screen`` is uint8 ``[3, height, width]``, ``place`` in pixels of the screenshot, ``shrink`` times as large.
    """
    wide = F.pad(screen[None].float() / 255 - 0.5, (SIDE,) * 4, mode="replicate")[0]
    height, width = screen.shape[1:]
    y = min(max(round((place.y + place.height / 2) / shrink), 0), height) + SIDE // 2
    x = min(max(round((place.x + place.width / 2) / shrink), 0), width) + SIDE // 2
    return wide[:, y : y + SIDE, x : x + SIDE]


class ScreenProbe(nn.Module):
    """``[batch, 3, SIDE, SIDE]`` to the log-odds that the element in the middle is marked, ``[batch]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()),
            nn.Linear(32 * (SIDE // 4) ** 2, 1),
        )

    def forward(self, squares: Tensor) -> Tensor:
        logits: Tensor = self.layers(squares)
        return logits[:, 0]


def train_probe(squares: Tensor, states: Tensor, seed: int) -> ScreenProbe:
    """A probe for these squares of real screens; ``states`` is bool ``[n]``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        probe = ScreenProbe()
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=LR, weight_decay=0.01)
    for _ in range(STEPS):
        rows = torch.randint(len(squares), (BATCH,), generator=rng)
        loss = F.binary_cross_entropy_with_logits(probe(squares[rows]), states[rows].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return probe.eval()


@dataclass(frozen=True, slots=True)
class Screens:
    """Turns with the screens before and after them, uint8 ``[3, height, width]``, and their shrinking."""

    turns: Sequence[ScreenTransition]
    before: Sequence[Tensor]
    after: Sequence[Tensor]
    shrink: int

    def squares(self, questions: Sequence[Question], screens: Sequence[Tensor]) -> Tensor:
        places = [self.turns[q.turn].place for q in questions]
        return torch.stack(
            [square(screens[q.turn], p, self.shrink) for q, p in zip(questions, places, strict=True) if p is not None]
        )


def probed(train: Screens, held: Screens, dreamed: Sequence[Tensor], seed: int) -> Mapping[str, Any] | None:
    """Agreement of what the probe reads with the state that the log knows, on held-out turns; ``None`` without any.

    ``real`` are the real screens after the turns, which is what the probe itself can; ``dream`` the dreamed ones;
    ``copy`` the screens before the turns. ``flips`` are the same of turns that really change the state.
    """
    train_questions, held_questions = questions_of(train.turns), questions_of(held.turns)
    if not train_questions or not held_questions:
        return None
    squares = torch.cat([train.squares(train_questions, train.after), train.squares(train_questions, train.before)])
    states = torch.tensor([q.after for q in train_questions] + [q.before for q in train_questions])
    probe = train_probe(squares, states, seed)
    agreement: dict[str, Any] = {"taught": len(states), "flips": {}}
    asked_turns = [held.turns[q.turn] for q in held_questions]
    cluster = clusters([turn.task_id for turn in asked_turns], [turn.episode for turn in asked_turns])
    flips = [k for k, q in enumerate(held_questions) if q.before != q.after]
    for name, screens in (("real", held.after), ("dream", dreamed), ("copy", held.before)):
        with torch.no_grad():
            answers = (probe(held.squares(held_questions, screens)) > 0).tolist()
        hits = [bool(s) == q.after for s, q in zip(answers, held_questions, strict=True)]
        agreement[name] = proportion(hits, cluster).to_json()
        agreement["flips"][name] = proportion([hits[k] for k in flips], [cluster[k] for k in flips]).to_json()
    return agreement
