"""Whole runs as tasks of Ray: experiments over seeds and arms on the machines of a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from imagination.runs.side_by_side import side_by_side
from imagination.scale.ray_envs import connect, resources
from imagination.settings import UserError
from imagination.settings.scale import ScaleSettings


def run_jobs(
    settings: ScaleSettings, work: Callable[..., Any], jobs: Mapping[str, tuple[Any, ...]], folder: Path, at_once: int
) -> dict[str, Any]:
    """``side_by_side``; with scale=ray on a cluster, where a job takes what a player would: as many at once as fit.

    Raises:
        UserError: there is no running cluster; see also ``side_by_side``.
    """
    if settings.name == "none":
        return side_by_side(work, jobs, folder, at_once)
    if not (settings.address or os.environ.get("RAY_ADDRESS")):
        raise UserError("scale=ray runs experiments on a cluster that is there: set scale.address or RAY_ADDRESS")
    # the processes of this machine only wait, pass on what is said, and end what they wait for when they are stopped
    return side_by_side(partial(_on_cluster, settings, os.getcwd(), work), jobs, folder, len(jobs))


def _on_cluster(settings: ScaleSettings, folder: str, work: Callable[..., Any], *arguments: Any) -> Any:
    ray = connect(settings, 0, log=True)
    needs = resources(settings.cpus_per_player, settings.gpus_per_player, settings.gb_per_player)
    try:
        return ray.get(ray.remote(max_retries=0, **needs)(_there).remote(folder, work, arguments))
    except UserError as error:  # Ray's error is of the type of its cause as well
        raise UserError(str(getattr(error, "cause", error))) from None
    except ray.exceptions.RayError as error:
        raise UserError(f"its task on the cluster was lost: {error}") from error


def _there(folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    os.chdir(folder)  # paths are relative to where the command was given
    return work(*arguments)
