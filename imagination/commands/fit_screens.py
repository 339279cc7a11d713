"""``fit-world-model`` with ``worldmodel.kind=screen``: a model of pictures learns from the log's screenshots."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from imagination.runs.lifecycle import finish, need, open_run, resume_from
from imagination.runs.log import read_log
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError
from real_envs.screens import FOLDER
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory
from worldmodel.diffusers_folders import need_diffusers

if TYPE_CHECKING:
    from worldmodel.screen.frames import Frames, Transition
    from worldmodel.screen.model import ScreenModel

NAME = "screen"  # of the folder under models/, beside a world model of text
STAGE = "fit_world_model"
SAVES = 20  # training states of a fit, so that a stopped one loses little


def fit_screens(config: Config, folder: Path) -> None:
    """Trains the model on turns between two screenshots. Writes ``models/screen``."""
    need_diffusers("worldmodel.kind=screen")
    from imagination.learning.screen_module import ScreenBatches, ScreenModule
    from imagination.learning.trainer import StepStream, WeightAverage, make_trainer
    from worldmodel.screen.model import ScreenModel

    run = open_run(config, folder, STAGE)
    settings, fit = config.worldmodel.screen, config.fit
    with run.timed(STAGE):
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
        stream = StepStream(fit.steps, lambda: module.global_step, batches)
        trainer.fit(module, stream, ckpt_path=state, weights_only=True)
        model.save(run.model(NAME))
        placed = sum(turn.place is not None for turn in turns)
        run.update(
            {
                "screens": {
                    "turns": len(turns),
                    "pictures": len(frames),
                    "changing_share": sum(turn.changes for turn in turns) / len(turns),
                    "placed_share": placed / len(turns),
                    "parameters": sum(p.numel() for p in model.parameters()),
                },
                "real_steps": {STAGE: 0},
            }
        )
        if not placed:
            print(
                f"note: no turn of {run.log} says where its action went, so the model only reads the action's words; "
                "logs of this version do say it"
            )
    finish(run, STAGE)


def screenshots(run: RunFolder, episodes: list[Trajectory], shrink: int) -> tuple[list[Transition], Frames]:
    """The turns of these episodes that have screenshots, and those.

    Raises:
        UserError: there are none, a file is missing, or they have several sizes.
    """
    from worldmodel.screen.frames import Frames, transitions_of

    turns = transitions_of(episodes)
    if not turns:
        raise UserError(
            f"{run.log}: no turn has a screenshot before and after it, which worldmodel.kind=screen learns from; "
            "collect with env=miniwob env.options.screenshots=true, or choose another worldmodel.kind"
        )
    names = [name for turn in turns for name in (turn.before, turn.after)]
    return turns, Frames(names, [run.log / FOLDER, run.games / FOLDER], shrink)


def load_screen_model(run: RunFolder) -> ScreenModel:
    """The run's model of screens.

    Raises:
        UserError: it is not fitted yet, or cannot be opened.
    """
    need_diffusers("worldmodel.kind=screen")
    from worldmodel.screen.model import ScreenModel

    model = ScreenModel.load(need(run.model(NAME), "fit-world-model worldmodel.kind=screen"))
    return model.to("cuda" if torch.cuda.is_available() else "cpu")
