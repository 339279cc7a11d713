from __future__ import annotations

import sys
from pathlib import Path

from imagination.data.augmentation import HINDSIGHT, failed, relabelled, write_supplement
from imagination.runs.lifecycle import finish, open_run
from imagination.runs.log import read_log
from imagination.settings import Config, UserError


def relabel(config: Config, folder: Path) -> None:
    """Optional: failed episodes of the log, retold with a goal that they did reach.

    hindsight.goals declares what the world's words say was reached. A failed episode up to the last such
    turn becomes one of an expert with that goal. clone.supplements=[hindsight] imitates them.

    Reads: log/
    Writes: supplements/hindsight/

    Examples:
        imagine relabel run=mine preset=textworld
        imagine relabel run=mine hindsight.max_turns=6

    Raises:
        UserError: no goal is declared, or none of the declared ones was reached.
    """
    if not config.hindsight.goals:
        raise UserError(
            "hindsight.goals declares no goal of this world: write pairs of a pattern over an observation and the goal "
            r'that it says was reached, such as hindsight.goals=[["You open the (\\w+)","Open the \\1."]]'
        )
    run = open_run(config, folder, "relabel")
    with run.timed("relabel"):
        train, _ = read_log(run, config.collect.validation)
        missed = [episode for episode in train if failed(episode)]
        retold = [relabelled(episode, config.hindsight, config.worldmodel.refusals) for episode in missed]
        episodes = [episode for episode in retold if episode is not None]
        summary = f"{len(episodes)} of {len(missed)} failed episodes reached a goal that hindsight.goals declares"
        if not episodes:
            raise UserError(f"{summary}, and whose start has a place for it (hindsight.place)")
        place = write_supplement(run, HINDSIGHT, episodes)
        run.update({"relabelled": {"failed": len(missed), "episodes": len(episodes)}})
    print(f"{summary}: {place}", file=sys.stderr)
    finish(run, "relabel")
