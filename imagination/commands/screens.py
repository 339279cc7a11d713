"""``audit`` and ``compare`` with ``worldmodel.kind=screen``: dreamed screens measured, and shown beside real ones."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from imagination.commands.fit_screens import load_screen_model, screenshots
from imagination.evaluation.world_model_eval import heldout_tasks
from imagination.report.screens.page import render_screens
from imagination.report.screens.text import audit_table
from imagination.rollout.world_models import as_trained
from imagination.runs.lifecycle import need
from imagination.runs.models import weights_version
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError
from real_envs.files import write_atomically
from real_envs.screens import FOLDER, keep
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory
from worldmodel.screen.settings import ScreenSettings
from worldmodel.world_model import WorldModel

if TYPE_CHECKING:
    from torch import Tensor

    from worldmodel.screen.frames import Frames, Transition
    from worldmodel.screen.model import ScreenModel

AUDIT, COMPARISON, PAGE = "audit-screens.json", "compare-screens.json", "compare-screens.html"
DREAMED = "dreamed-screens"  # the folder of dreamed pictures
TIMED = 6  # batches that the speed is measured on


def audit_screens(config: Config, folder: Path) -> None:
    """Measures the model of screens on held-out turns. Writes ``audit-screens.json`` and prints it as a table."""
    session = Session.open(config, folder)
    run, model = session.run, load_screen_model(session.run)
    from imagination.evaluation.screens.dreams import dream_episodes, dream_turns
    from imagination.evaluation.screens.measure import alikeness, sensitivity
    from imagination.evaluation.screens.probe import Screens, probed

    begin = time.monotonic()
    settings, seed = config.worldmodel.screen, derive_seed("audit screens", config.seed)
    held, train = _held_out(session), session.log.train
    turns, frames = screenshots(run, held, settings.shrink)
    _check_fits(config.worldmodel.screen, model, frames, run)
    taught, taught_frames = screenshots(run, train, settings.shrink)
    before, after = _screens(frames, turns)
    world = _text_world(session, model)
    told = [turn for (turn,) in _told(world, held, [[turn] for turn in turns], seed)]
    with Bar("dream held-out turns", len(turns)) as bar:
        dreamed = dream_turns(model, told, before, settings.steps, seed, lambda done: bar.advance(done))
    episodes = _episodes(turns)
    loops = dream_episodes(model, _told(world, held, episodes, seed), frames, settings.steps, seed)
    played = [turn for episode in episodes for turn in episode]
    found = {
        "format": "imagination-screens-audit",
        "version": 1,
        "run": config.run,
        "seed": config.seed,
        "model_version": weights_version(model),
        "steps": settings.steps,
        "one_turn": alikeness(turns, before, after, dreamed, seed),
        "open_loop": alikeness(
            played,
            *_screens(frames, played),
            [screen for loop in loops for screen in loop],
            seed,
        ),
        "sensitivity": sensitivity(turns, after, dreamed),
        "probe": probed(
            Screens(taught, *_screens(taught_frames, taught), settings.shrink),
            Screens(turns, before, after, settings.shrink),
            dreamed,
            seed,
        ),
        "speed": _speed(model, turns, before, settings.steps),
        "pages_right": _share_right(told, turns) if world else None,
        "notes": ["LPIPS was not measured: no package brings its weights along."],
    }
    found["seconds"] = round(time.monotonic() - begin, 1)
    write_atomically(folder / AUDIT, json.dumps(found, indent=1))
    console = Console()
    console.print(audit_table(found))
    console.print(f"audit: {folder / AUDIT}", highlight=False, soft_wrap=True)


def compare_screens(config: Config, folder: Path) -> None:
    """Dreams held-out episodes again with their own actions. Writes ``compare-screens.html`` and its numbers."""
    session = Session.open(config, folder)
    run, model = session.run, load_screen_model(session.run)
    from imagination.evaluation.screens.compare import compared
    from imagination.evaluation.screens.dreams import dream_episodes, dream_turns

    settings, seed = config.worldmodel.screen, derive_seed("audit screens", config.seed)
    held = _held_out(session)
    turns, frames = screenshots(run, held, settings.shrink)
    _check_fits(config.worldmodel.screen, model, frames, run)
    world = _text_world(session, model)
    chosen: dict[str, list[list[Transition]]] = {}
    for episode in _episodes(turns):
        chosen.setdefault(episode[0].task_id, []).append(episode)
    most = config.evaluate.tasks or None
    episodes = [e for task in list(chosen)[:most] for e in chosen[task][: max(1, config.compare.logged)]]
    loops = dream_episodes(model, _told(world, held, episodes, seed), frames, settings.steps, seed)
    alone = iter(_told(world, held, [[turn] for episode in episodes for turn in episode], seed))
    ahead = []
    for episode in episodes:
        some = [turn for _ in episode for turn in next(alone)]
        ahead.append(dream_turns(model, some, [frames[turn.before] for turn in episode], settings.steps, seed))
    told = compared(episodes, loops, ahead, frames, lambda screen: _keep(screen, folder / DREAMED))
    found = {
        "format": "imagination-screens-comparison",
        "version": 1,
        "run": config.run,
        "seed": config.seed,
        "model_version": weights_version(model),
        "steps": settings.steps,
        "size": list(frames.size),
        "episodes": told,
    }
    write_atomically(folder / COMPARISON, json.dumps(found, allow_nan=False))
    pictures = [folder / DREAMED, run.log / FOLDER, run.games / FOLDER]
    write_atomically(folder / PAGE, render_screens(found, pictures))
    parted = sum(episode["parted"] is not None for episode in told)
    print(f"{len(episodes)} episodes dreamed from their first screen; {parted} part visibly from reality")
    print(f"side by side: {folder / PAGE}")


def _held_out(session: Session) -> list[Trajectory]:
    """Logged episodes of held-out tasks, or else those held out for validation.

    Raises:
        UserError: there are neither.
    """
    held = heldout_tasks(session.run) or session.log.held
    if not held:
        raise UserError(
            f"{session.run.log} has no episode that nothing was trained on; collect some: "
            "collect.heldout_episodes=3, or raise collect.validation"
        )
    return sorted(held, key=lambda t: t.id)


def _text_world(session: Session, model: ScreenModel) -> WorldModel | None:
    """The world model of text that says what screens are drawn from; ``None`` where they are drawn without.

    Raises:
        UserError: the run has none.
    """
    if not model.shape.page_words:
        return None
    need(session.run.model("worldmodel"), "fit-world-model worldmodel.kind=text")
    settings = as_trained(session.run, session.config.worldmodel)
    as_text = Session(replace(session.config, worldmodel=settings), session.run)
    return as_text.world_model(session.log.train, temperature=0.0, served=False)


def _told(
    world: WorldModel | None, held: list[Trajectory], groups: list[list[Transition]], seed: int
) -> list[list[Transition]]:
    """The turns as screens are drawn from them: with dreamed pages, where pages count."""
    if world is None:
        return groups
    from imagination.evaluation.screens.pages import dream_pages

    return asyncio.run(dream_pages(world, {t.id: t for t in held}, groups, seed))


def _share_right(told: list[Transition], turns: list[Transition]) -> float:
    return sum(a.answer == b.answer for a, b in zip(told, turns, strict=True)) / len(turns)


def _check_fits(settings: ScreenSettings, model: ScreenModel, frames: Frames, run: RunFolder) -> None:
    """
    Raises:
        UserError: the model was fitted to screens of another size, or to fewer steps.
    """
    if settings.steps > model.shape.finest:
        raise UserError(
            f"worldmodel.screen.steps={settings.steps}: the model was fitted to {model.shape.finest} steps at most "
            "(worldmodel.screen.finest)"
        )
    wanted = (model.shape.height, model.shape.width)
    if frames.size != wanted or frames.shrink != model.shape.shrink:
        (h, w), (height, width) = frames.size, wanted
        raise UserError(
            f"{run.log} has screens of {w}x{h} pixels (shrunk by {frames.shrink}), but the model draws "
            f"{width}x{height} (by {model.shape.shrink}); run `imagine fit-world-model` with these settings first"
        )


def _screens(frames: Frames, turns: list[Transition]) -> tuple[list[Tensor], list[Tensor]]:
    """The real screens before and after these turns."""
    return [frames[turn.before] for turn in turns], [frames[turn.after] for turn in turns]


def _episodes(turns: list[Transition]) -> list[list[Transition]]:
    from imagination.evaluation.screens.dreams import by_episode

    return list(by_episode(turns).values())


def _keep(screen: Tensor, folder: Path) -> str:
    return keep(screen.permute(1, 2, 0).contiguous().numpy(), folder)


def _speed(model: ScreenModel, turns: list[Transition], before: list[Tensor], steps: int) -> dict[str, Any]:
    """Screens a second, of the processor's time that passes, eight at once."""
    from imagination.evaluation.screens.dreams import BATCH, dream_turns

    rows = [k % len(turns) for k in range(BATCH * TIMED)]
    some, screens = [turns[k] for k in rows], [before[k] for k in rows]
    dream_turns(model, some[:BATCH], screens[:BATCH], steps, 0)
    begin, used = time.monotonic(), time.process_time()
    dream_turns(model, some, screens, steps, 0)
    wall, used = time.monotonic() - begin, time.process_time() - used
    return {
        "screens_per_second": round(len(rows) / wall, 2),
        "screens_per_core_second": round(len(rows) / used, 2),
        "threads": torch.get_num_threads(),
    }
