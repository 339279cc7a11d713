from __future__ import annotations

import sys
from pathlib import Path

from imagination.data.augmentation import HINDSIGHT, failed, relabelled, write_supplement
from imagination.runs.lifecycle import run_stage
from imagination.runs.log import read_log, unplayed
from imagination.runs.worlds import check_world, world_settings
from imagination.settings import Config, UserError
from real_envs.world import find_world


def relabel(config: Config, folder: Path) -> None:
    """Optional: relabel failed episodes of the log with a goal that they did reach (hindsight).

    hindsight.goals declares which observations mean which goal. A failed episode, up to the last such turn,
    becomes an expert episode of that goal. clone.supplements=[hindsight] imitates them, dream.hindsight dreams of
    their goals. With hindsight.questions new questions are composed of what all searches of the log found (env=search).

    Reads: log/
    Writes: supplements/hindsight/

    Examples:
        imagine relabel run=mine preset=textworld
        imagine relabel run=mine hindsight.max_turns=6
        imagine relabel run=mine preset=search hindsight.questions=200

    Raises:
        UserError: no goal is declared, or none of the declared ones was reached; or no question can be composed.
    """
    if config.hindsight.questions:
        return _compose(config, folder)
    if not config.hindsight.goals:
        raise UserError(
            "hindsight.goals declares no goal of this world: write pairs of a pattern over an observation and the goal "
            r'that it says was reached, such as hindsight.goals=[["You open the (\\w+)","Open the \\1."]]'
        )
    with run_stage(config, folder, "relabel") as run:
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


def _compose(config: Config, folder: Path) -> None:
    compose = getattr(find_world(config.env.name), "compose", None)
    if compose is None:
        raise UserError(f"env={config.env.name} composes no questions: set hindsight.questions=0, or env=search")
    with run_stage(config, folder, "relabel") as run:
        check_world(run, config.env)
        wanted = config.hindsight.questions
        log = [t for part in (*read_log(run, config.collect.validation), unplayed(run)) for t in part]
        episodes = compose(world_settings(config.env, config.games), log, wanted, config.seed)
        if not episodes:
            raise UserError("no new question can be composed of what the log's searches found: collect more episodes")
        place = write_supplement(run, HINDSIGHT, episodes)
        run.update({"relabelled": {"questions": len(episodes)}})
    print(f"{len(episodes)} of {wanted} new questions were composed: {place}", file=sys.stderr)
