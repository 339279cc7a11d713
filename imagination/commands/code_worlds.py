"""``worldmodel.kind=code``: fit a world model that is a Python function."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict
from functools import partial

from imagination.rollout.world_models import UNFINISHED
from imagination.runs import processes
from imagination.runs.log import rewarded
from imagination.session import Session
from imagination.settings import UserError
from worldmodel.calibration import FILE
from worldmodel.code.world_model import save_world
from worldmodel.code.write import write_world


def fit_code(session: Session) -> None:
    """Has the function written, tested on logged turns and repaired; the best version is the run's world model.

    Raises:
        UserError: the server, its model or its key is missing, or it never answered; or no turn has a reward.
        EngineUnavailable: this system cannot confine the code.
    """
    run, settings = session.run, session.config.worldmodel
    if processes.count() > 1:
        raise UserError("worldmodel.kind=code trains nothing: leave devices, num_nodes and strategy out")
    if not settings.code.url:
        raise UserError(
            "worldmodel.kind=code is written by a language model: set worldmodel.code.url to the address of its "
            "server, such as http://localhost:8000/v1, and worldmodel.code.model to its name there"
        )
    train, held = (settings.goal.relabel_log(log) for log in session.log)
    rewarded(run, train, settings.goal)
    progress = partial(print, file=sys.stderr, flush=True)
    with closing(settings.code.open("worldmodel.code")) as server:
        written = write_world(train, held, server, settings.code, session.config.seed, progress)
    if not written.source:
        raise UserError("worldmodel.code.url: no question was answered; see the lines above")
    run.update({"world_model_form": UNFINISHED})  # until it is measured; an unanswered request leaves the model before
    (run.model("worldmodel") / FILE).unlink(missing_ok=True)  # of that model
    score = {key: value for key, value in asdict(written).items() if key != "source"}
    save_world(written.source, {**score, "model": server.model}, run.model("worldmodel"))
    run.update({"code_world": {**score, "model": server.model}})
