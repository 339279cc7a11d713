"""``worldmodel.kind=screen``: fit, audit and compare a model that draws the next screenshot."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from imagination.evaluation.world_model_eval import heldout_tasks
from imagination.report.screens_page import audit_table, render_screens
from imagination.rollout.world_models import as_trained
from imagination.runs.lifecycle import need, resume_from, run_stage
from imagination.runs.log import read_log
from imagination.runs.models import weights_version
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError
from real_envs.files import write_atomically
from real_envs.grouping import grouped
from real_envs.screens import FOLDER, keep
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory
from worldmodel.extras import need_diffusers
from worldmodel.extras.screen.settings import ScreenSettings
from worldmodel.world_model import WorldModel

if TYPE_CHECKING:
    from torch import Tensor

    from worldmodel.extras.screen.data import Frames, ScreenTransition
    from worldmodel.extras.screen.model import ScreenModel

NAME = "screen"  # of the folder under models/, beside a world model of text
STAGE = "fit_world_model"
SAVES = 20  # training states of a fit, so that a stopped one loses little
AUDIT, COMPARISON, PAGE = "audit-screens.json", "compare-screens.json", "compare-screens.html"
DREAMED = "dreamed-screens"  # the folder of dreamed pictures
TIMED = 6  # batches that the speed is measured on


def fit_screens(config: Config, folder: Path) -> None:
    """Trains the model on turns between two screenshots. Writes ``models/screen``."""
    need_diffusers("worldmodel.kind=screen")
    from imagination.learning.screen_module import ScreenBatches, ScreenModule
    from imagination.learning.trainer import WeightAverage, make_trainer, step_loader
    from worldmodel.extras.screen.model import ScreenModel

    settings, fit = config.worldmodel.screen, config.fit
    if fit.minutes:
        raise UserError("worldmodel.kind=screen is fitted for fit.steps, whatever time they take: set fit.minutes=0")
    with run_stage(config, folder, STAGE) as run:
        train, _ = read_log(run, config.collect.validation)
        turns, frames = screenshots(run, train, settings.shrink)
        torch.manual_seed(derive_seed("screen model weights", config.seed))
        model = ScreenModel.create(settings, frames.size)
        state, done = resume_from(run, STAGE)
        run.forget(STAGE, done)
        batches = ScreenBatches(
            turns,
            frames,
            model,
            settings=settings,
            steps=fit.steps,
            unchanged_share=config.worldmodel.unchanged_share,
            seed=derive_seed("fit", config.seed),
        )
        module = ScreenModule(model, fit, partial(run.record, STAGE))
        bar = Bar("fit screens", fit.steps)
        average = WeightAverage(model, fit.average)
        every = max(1, fit.steps // SAVES)
        trainer = make_trainer(run, STAGE, bar, lambda: module.global_step, every, callbacks=[average])
        stream = step_loader(fit.steps, lambda: module.global_step, batches)
        trainer.fit(module, stream, ckpt_path=state, weights_only=True)
        model.save(run.model(NAME))
        placed = sum(turn.place is not None for turn in turns)
        measured = {
            "turns": len(turns),
            "pictures": len(frames),
            "changing_share": sum(turn.changes for turn in turns) / len(turns),
            "placed_share": placed / len(turns),
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        run.update({"screens": measured, "real_steps": {STAGE: 0}})
        if not placed:
            print(
                f"note: no turn of {run.log} says where its action went, so the model only reads the action's words; "
                "logs of this version do say it"
            )


def screenshots(run: RunFolder, episodes: list[Trajectory], shrink: int) -> tuple[list[ScreenTransition], Frames]:
    """The turns of these episodes that have screenshots, and those. Raises ``UserError``: there are none, a file is
    missing, or they have several sizes.
    """
    from worldmodel.extras.screen.data import Frames, transitions_of

    turns = transitions_of(episodes)
    if not turns:
        raise UserError(
            f"{run.log}: no turn has a screenshot before and after it, which worldmodel.kind=screen learns from; "
            "collect with env=miniwob env.options.screenshots=true, or choose another worldmodel.kind"
        )
    names = [name for turn in turns for name in (turn.before, turn.after)]
    return turns, Frames(names, [run.log / FOLDER, run.games / FOLDER], shrink)


def load_screen_model(run: RunFolder) -> ScreenModel:
    """The run's model of screens. Raises ``UserError``: it is not fitted yet, or cannot be opened."""
    need_diffusers("worldmodel.kind=screen")
    from worldmodel.extras.screen.model import ScreenModel

    model = ScreenModel.load(need(run.model(NAME), "fit-world-model worldmodel.kind=screen"))
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def audit_screens(config: Config, folder: Path) -> None:
    """Measures the model of screens on held-out turns. Writes ``audit-screens.json`` and prints it as a table."""
    session = Session.open(config, folder)
    run, model = session.run, load_screen_model(session.run)
    from imagination.evaluation import screens

    begin = time.monotonic()
    settings, seed = config.worldmodel.screen, derive_seed("audit screens", config.seed)
    held, train = _held_out(session), session.log.train
    turns, frames = screenshots(run, held, settings.shrink)
    _check_fits(config.worldmodel.screen, model, frames, run)
    train_turns, train_frames = screenshots(run, train, settings.shrink)
    before, after = _screens(frames, turns)
    world = _text_world(session, model)
    drawn_from = [turn for (turn,) in _with_dreamed_pages(world, held, [[turn] for turn in turns], seed)]
    with Bar("dream held-out turns", len(turns)) as bar:
        dreamed = screens.dream_turns(model, drawn_from, before, settings.steps, seed, lambda done: bar.advance(done))
    episodes = list(screens.by_episode(turns).values())
    loops = screens.dream_episodes(
        model, _with_dreamed_pages(world, held, episodes, seed), frames, settings.steps, seed
    )
    open_loop = [turn for episode in episodes for turn in episode]
    pages_right = sum(a.answer == b.answer for a, b in zip(drawn_from, turns, strict=True))
    result = {
        **_header("imagination-screens-audit", config, model),
        "one_turn": screens.alikeness(turns, before, after, dreamed, seed),
        "open_loop": screens.alikeness(
            open_loop, *_screens(frames, open_loop), [screen for loop in loops for screen in loop], seed
        ),
        "sensitivity": screens.sensitivity(turns, after, dreamed),
        "probe": screens.probed(
            screens.Screens(train_turns, *_screens(train_frames, train_turns), settings.shrink),
            screens.Screens(turns, before, after, settings.shrink),
            dreamed,
            seed,
        ),
        "speed": _speed(model, turns, before, settings.steps),
        "pages_right": pages_right / len(turns) if world else None,
        "notes": ["LPIPS was not measured: no package brings its weights along."],
    }
    result["seconds"] = round(time.monotonic() - begin, 1)
    write_atomically(folder / AUDIT, json.dumps(result, indent=1))
    console = Console()
    console.print(audit_table(result))
    console.print(f"audit: {folder / AUDIT}", highlight=False, soft_wrap=True)


def compare_screens(config: Config, folder: Path) -> None:
    """Dreams held-out episodes again with their own actions. Writes ``compare-screens.html`` and its numbers."""
    session = Session.open(config, folder)
    run, model = session.run, load_screen_model(session.run)
    from imagination.evaluation.screens import by_episode, compared, dream_episodes, dream_turns

    settings, seed = config.worldmodel.screen, derive_seed("audit screens", config.seed)
    held = _held_out(session)
    turns, frames = screenshots(run, held, settings.shrink)
    _check_fits(config.worldmodel.screen, model, frames, run)
    world = _text_world(session, model)
    chosen = grouped(by_episode(turns).values(), lambda episode: episode[0].task_id)
    most = config.evaluate.tasks or None
    episodes = [e for task in list(chosen)[:most] for e in chosen[task][: max(1, config.compare.logged)]]
    loops = dream_episodes(model, _with_dreamed_pages(world, held, episodes, seed), frames, settings.steps, seed)
    alone = iter(_with_dreamed_pages(world, held, [[turn] for episode in episodes for turn in episode], seed))
    ahead = []
    for episode in episodes:
        some = [turn for _ in episode for turn in next(alone)]
        ahead.append(dream_turns(model, some, [frames[turn.before] for turn in episode], settings.steps, seed))

    def keep_screen(screen: Tensor) -> str:
        return keep(screen.permute(1, 2, 0).contiguous().numpy(), folder / DREAMED)

    compared_episodes = compared(episodes, loops, ahead, frames, keep_screen)
    result = {
        **_header("imagination-screens-comparison", config, model),
        "size": list(frames.size),
        "episodes": compared_episodes,
    }
    write_atomically(folder / COMPARISON, json.dumps(result, allow_nan=False))
    pictures = [folder / DREAMED, run.log / FOLDER, run.games / FOLDER]
    write_atomically(folder / PAGE, render_screens(result, pictures))
    parted = sum(episode["parted"] is not None for episode in compared_episodes)
    print(f"{len(episodes)} episodes dreamed from their first screen; {parted} part visibly from reality")
    print(f"side by side: {folder / PAGE}")


def _header(kind: str, config: Config, model: ScreenModel) -> dict[str, Any]:
    about = {"format": kind, "version": 1, "run": config.run, "seed": config.seed}
    return about | {"model_version": weights_version(model), "steps": config.worldmodel.screen.steps}


def _held_out(session: Session) -> list[Trajectory]:
    """Logged episodes of held-out tasks, or else those held out for validation. Raises ``UserError``: there are
    neither.
    """
    held = heldout_tasks(session.run) or session.log.held
    if not held:
        raise UserError(
            f"{session.run.log} has no episode that nothing was trained on; collect some: "
            "collect.heldout_episodes=3, or raise collect.validation"
        )
    return sorted(held, key=lambda t: t.id)


def _text_world(session: Session, model: ScreenModel) -> WorldModel | None:
    """The world model of text that says what screens are drawn from; ``None`` where they are drawn without. Raises
    ``UserError``: the run has none.
    """
    if not model.shape.page_words:
        return None
    need(session.run.model("worldmodel"), "fit-world-model worldmodel.kind=text")
    settings = as_trained(session.run, session.config.worldmodel)
    as_text = Session(replace(session.config, worldmodel=settings), session.run)
    return as_text.world_model(session.log.train, temperature=0.0, served=False)


def _with_dreamed_pages(
    world: WorldModel | None, held: list[Trajectory], groups: list[list[ScreenTransition]], seed: int
) -> list[list[ScreenTransition]]:
    """The turns as screens are drawn from them: with dreamed pages, where pages count."""
    if world is None:
        return groups
    from imagination.evaluation.screens import dream_pages

    return asyncio.run(dream_pages(world, {t.id: t for t in held}, groups, seed))


def _check_fits(settings: ScreenSettings, model: ScreenModel, frames: Frames, run: RunFolder) -> None:
    """Checks that the model can draw these screens. Raises ``UserError``: the model was fitted to screens of another
    size, or to fewer steps.
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


def _screens(frames: Frames, turns: list[ScreenTransition]) -> tuple[list[Tensor], list[Tensor]]:
    """The real screens before and after these turns."""
    return [frames[turn.before] for turn in turns], [frames[turn.after] for turn in turns]


def _speed(model: ScreenModel, turns: list[ScreenTransition], before: list[Tensor], steps: int) -> dict[str, Any]:
    """Screens a second, of the processor's time that passes, eight at once."""
    from imagination.evaluation.screens import BATCH, dream_turns

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
