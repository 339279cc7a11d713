"""Dreamed screens: drawn from logged turns, compared with the real ones, and measured.

Numbers come with n and interval, beside those of a model that says that nothing changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from policy.lm.engine import ContextFull
from real_envs.screens import Place
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory, Turn
from worldmodel.evaluation.intervals import ANYWHERE, SHARE, Estimate, Interval, clusters, estimate, proportion, ratio
from worldmodel.evaluation.screens import iou, psnr, squared_error, squared_error_within, ssim, visible
from worldmodel.extras.screen.data import Frames, ScreenTransition
from worldmodel.extras.screen.model import ScreenModel
from worldmodel.world_model import PredictionInvalid, WorldModel

BATCH = 8  # screens at once
Statistic = Callable[[np.ndarray], float | None]
LEAST_PIXELS = 4  # pixels that visibly differ, from which on two screens do
PARTED = 0.005  # share of a screen's pixels that visibly differ, from which on a dream has parted from reality


def dream_turns(
    model: ScreenModel,
    turns: Sequence[ScreenTransition],
    before: Sequence[Tensor],
    steps: int,
    seed: int,
    on_done: Callable[[int], None] = lambda done: None,
) -> list[Tensor]:
    """The screens after these turns, uint8 ``[3, height, width]`` each, given those before them."""
    dreamed: list[Tensor] = []
    for first in range(0, len(turns), BATCH):
        some = turns[first : first + BATCH]
        conditions = model.conditions(before[first : first + BATCH], some)
        # the same noise for a turn wherever it is dreamed
        seeds = [derive_seed(f"dreamed screen/{turn.episode}", seed, turn.turn) for turn in some]
        device = next(model.parameters()).device
        dreamed += list(model.dream(conditions.to(device), steps, seeds).cpu())
        on_done(len(dreamed))
    return dreamed


def dream_episodes(
    model: ScreenModel, episodes: Sequence[Sequence[ScreenTransition]], frames: Frames, steps: int, seed: int
) -> list[list[Tensor]]:
    """Open loop: the first real screen of each episode is given, and later ones are dreamed from dreamed ones."""
    dreamed: list[list[Tensor]] = [[] for _ in episodes]
    for number in range(max(map(len, episodes), default=0)):
        running = [k for k, episode in enumerate(episodes) if len(episode) > number]
        last = [dreamed[k][-1] if number else frames[episodes[k][0].before] for k in running]
        now = dream_turns(model, [episodes[k][number] for k in running], last, steps, seed)
        for k, screen in zip(running, now, strict=True):
            dreamed[k].append(screen)
    return dreamed


def by_episode(turns: Sequence[ScreenTransition]) -> Mapping[str, list[ScreenTransition]]:
    """Turns of each episode, as far as they follow each other without a gap."""
    episodes: dict[str, list[ScreenTransition]] = {}
    for turn in turns:
        earlier = episodes.setdefault(turn.episode, [])
        if not earlier or earlier[-1].turn + 1 == turn.turn:
            earlier.append(turn)
    return episodes


def as_pictures(screens: Sequence[Tensor]) -> Tensor:
    """Float32 ``[batch, 3, height, width]`` in [0, 1], as ``worldmodel.evaluation.screens`` reads them."""
    return torch.stack(list(screens)).float() / 255


async def dream_pages(
    world: WorldModel, episodes: Mapping[str, Trajectory], groups: Sequence[Sequence[ScreenTransition]], seed: int
) -> list[list[ScreenTransition]]:
    """The same turns with pages whose text a world model dreams, for screens that are drawn from it.

    Where the prediction cannot be read, the answer is empty, so that nothing on it is new, and the page stays.

    Args:
        episodes: that the turns are of, by id.
        groups: turns that follow each other. What comes before a group is real, and within it each page follows from
            dreamed ones; groups of one turn are thus dreamed from reality alone.
    """
    return list(await asyncio.gather(*(_dream_pages(world, episodes[g[0].episode], g, seed) for g in groups)))


async def _dream_pages(
    world: WorldModel, episode: Trajectory, group: Sequence[ScreenTransition], seed: int
) -> list[ScreenTransition]:
    first = group[0]
    history, page = list(episode.turns[: first.turn]), first.page
    session, dreamed = ("screens", first.episode, first.turn, len(group)), []
    for turn in group:
        answer, reward, ended = "", 0.0, False
        drawn = derive_seed(f"dreamed page/{turn.episode}", seed, turn.turn)
        with contextlib.suppress(PredictionInvalid, ContextFull):  # counted by ``pages_right`` of the audit
            predicted = await world.predict(episode.start, history, turn.action, drawn, session)
            answer, reward, ended = predicted.observation, predicted.reward, predicted.terminated
        dreamed.append(replace(turn, page=page, answer=answer))
        page = answer or page
        history.append(Turn(turn.action, page, reward, ended))
    world.release(session)
    return dreamed


def differ(a: Tensor, b: Tensor) -> list[bool]:
    """Whether screens differ to the eye; pictures as ``worldmodel.evaluation.screens`` reads them."""
    return [int(n) >= LEAST_PIXELS for n in visible(a, b).flatten(1).sum(1)]


def alikeness(
    turns: Sequence[ScreenTransition],
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    dreamed: Sequence[Tensor],
    seed: int,
) -> dict[str, Any]:
    """Dreamed screens beside the real ones, uint8 ``[3, height, width]`` each; ``copy`` is the screen before the turn.

    Signal-to-noise ratios are those of the mean error over all turns. Of turns that visibly change something: the error
    within the region that really changes, and the intersection over union of the regions that change in dream and
    reality. Of the others: the share that the dream leaves alone, too.
    """
    old, real, dream = as_pictures(before), as_pictures(after), as_pictures(dreamed)
    cluster = clusters([t.task_id for t in turns], [t.episode for t in turns])
    changes = differ(old, real)
    region, dreamed_region = visible(old, real), visible(old, dream)

    def mean(
        values: Tensor, which: Sequence[bool] | None = None, bounds: Interval = ANYWHERE, of: Statistic = ratio
    ) -> dict[str, Any]:
        among = which or [True] * len(turns)
        rows = [(value, 1.0) for value in compress(values.tolist(), among)]
        return estimate(rows, list(compress(cluster, among)), of, seed, bounds=bounds).to_json()

    sides = (("dream", dream), ("copy", old))
    left_alone = [not differs for differs in differ(old, dream)]
    return {
        "turns": len(turns),
        "changing_turns": sum(changes),
        "psnr": {side: mean(squared_error(shown, real), of=_pooled_psnr) for side, shown in sides},
        "ssim": {side: mean(ssim(shown, real)) for side, shown in sides},
        "changed_region_psnr": {
            side: mean(squared_error_within(shown, real, region), changes, of=_pooled_psnr) for side, shown in sides
        },
        "changed_region_iou": {"dream": mean(iou(dreamed_region, region), changes, SHARE)},
        "unchanged_left_alone": {"dream": proportion(left_alone, cluster, [not c for c in changes]).to_json()},
    }


def _pooled_psnr(total: np.ndarray) -> float | None:
    """Of the sum of squared errors and how many there are."""
    error = ratio(total)
    return None if error is None else psnr(error)


def pairs_of(turns: Sequence[ScreenTransition]) -> list[tuple[int, int]]:
    """Places of turns that begin at the same screen with different actions, each pair of actions once a screen."""
    first: dict[str, dict[str, int]] = {}
    for k, turn in enumerate(turns):
        first.setdefault(turn.before, {}).setdefault(turn.action, k)
    return [(a, b) for same in first.values() for a in same.values() for b in same.values() if a < b]


def sensitivity(
    turns: Sequence[ScreenTransition], after: Sequence[Tensor], dreamed: Sequence[Tensor]
) -> Mapping[str, Mapping[str, Any]]:
    """Does the action matter in the dream as it does in reality? From pairs of actions at the same screen.

    ``differ``: of pairs with different real outcomes, those whose dreams differ. ``own``: of these pairs, those in
    which each dream is nearer to its own outcome than to the other's (dreams that ignore the action never are both).
    ``same``: of pairs with the same real outcome, those whose dreams do not differ.
    """
    pairs = pairs_of(turns)
    if not pairs:
        nothing = Estimate(None, 0).to_json()
        return {"differ": nothing, "own": nothing, "same": nothing}
    left, right = ([pair[side] for pair in pairs] for side in (0, 1))
    real = [as_pictures([after[k] for k in side]) for side in (left, right)]
    dream = [as_pictures([dreamed[k] for k in side]) for side in (left, right)]
    apart, dreamed_apart = differ(*real), differ(*dream)

    def far(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).square().flatten(1).mean(1)

    own = (far(dream[0], real[0]) < far(dream[0], real[1])) & (far(dream[1], real[1]) < far(dream[1], real[0]))
    cluster = clusters([turns[k].task_id for k in left], [turns[k].before for k in left])

    return {
        "differ": proportion(dreamed_apart, cluster, apart).to_json(),
        "own": proportion(own.tolist(), cluster, apart).to_json(),
        "same": proportion([not d for d in dreamed_apart], cluster, [not a for a in apart]).to_json(),
    }


def compared(
    episodes: Sequence[Sequence[ScreenTransition]],
    loops: Sequence[Sequence[Tensor]],
    ahead: Sequence[Sequence[Tensor]],
    frames: Frames,
    keep: Callable[[Tensor], str],
) -> list[dict[str, Any]]:
    """A dict an episode, with a dict a turn, ready for JSON.

    Args:
        loops: the screens after each turn, dreamed from the first real screen on.
        ahead: the same, each dreamed from the real screen before it.
        keep: writes a picture and gives its name.
    """
    return [_episode(*dreamed, frames, keep) for dreamed in zip(episodes, loops, ahead, strict=True)]


def _episode(
    episode: Sequence[ScreenTransition],
    loop: Sequence[Tensor],
    ahead: Sequence[Tensor],
    frames: Frames,
    keep: Callable[[Tensor], str],
) -> dict[str, Any]:
    old = as_pictures([frames[turn.before] for turn in episode])
    real = as_pictures([frames[turn.after] for turn in episode])
    dream, next_turn = as_pictures(loop), as_pictures(ahead)
    error = squared_error(dream, real)
    off = visible(dream, real).flatten(1).float().mean(1)
    region, overlap = differ(old, real), iou(visible(old, next_turn), visible(old, real))
    height, width = frames.full
    sizes = (width, height, width, height)
    turns = [
        {
            "action": turn.action,
            "place": turn.place and [round(value / whole, 4) for value, whole in zip(turn.place, sizes, strict=True)],
            "reward": turn.reward,
            "terminated": turn.terminated,
            "real": turn.after,
            "shrunk": keep(frames[turn.after]),  # as the model sees it: what it can differ from
            "dream": keep(loop[k]),
            "ahead": keep(ahead[k]),
            "changes": region[k],
            "off": round(float(off[k]), 4),
            "parted": bool(off[k] > PARTED),
            "psnr": round(psnr(float(error[k])), 1),
            "iou": round(float(overlap[k]), 2) if region[k] else None,
        }
        for k, turn in enumerate(episode)
    ]
    return {
        "id": episode[0].episode,
        "task_id": episode[0].task_id,
        "goal": episode[0].goal,
        "start": episode[0].before,
        "parted": next((k for k, turn in enumerate(turns) if turn["parted"]), None),
        "turns": turns,
    }


# Which state of the task a screen shows, read by a small network that was trained on real screens: it looks at a square
# around the element that the action named, and says whether that is checked, selected or expanded; the log's
# observations know the answer. On dreamed screens it tells whether they show what really happened.

SIDE = 24  # pixels of the square
STEPS, LR, SQUARES = 200, 3e-3, 32
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
        rows = torch.randint(len(squares), (SQUARES,), generator=rng)
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
    flips = [q.before != q.after for q in held_questions]
    for name, screens in (("real", held.after), ("dream", dreamed), ("copy", held.before)):
        with torch.no_grad():
            answers = (probe(held.squares(held_questions, screens)) > 0).tolist()
        hits = [bool(s) == q.after for s, q in zip(answers, held_questions, strict=True)]
        agreement[name] = proportion(hits, cluster).to_json()
        agreement["flips"][name] = proportion(hits, cluster, flips).to_json()
    return agreement
