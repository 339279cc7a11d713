from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from imagination.commands.check_train import check
from imagination.commands.experiments.arms import markdown, play_clone, train_arm, write_results
from imagination.evaluation.world_model_eval import few_episodes, heldout_tasks
from imagination.runs.lifecycle import need
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config
from worldmodel.evaluation.proportions import Proportion


def few_shot(config: Config, folder: Path) -> None:
    """Train in dreams of new tasks, given a few logged episodes of each; no model is fitted again.

    Takes the run's world model and clone, and at most few_shot.episodes logged episodes of each held-out
    task (log them with collect.heldout_episodes=20). Dreams begin where those episodes did; what they have
    shown stands in the world model's prompt where it was fitted with worldmodel.facts. Beside it, the same
    clone is trained in the real tasks by about as many real steps as the log of them took.

    Reads: games/, log/, models/worldmodel/, models/policy-clone/
    Writes: few-shot/, few-shot.json, few-shot.md

    Examples:
        imagine few-shot run=mine
        imagine few-shot run=mine few_shot.episodes=5 few_shot.control=false

    Raises:
        UserError: an earlier stage is missing, or no episode of a held-out task is logged.
    """
    run = RunFolder(folder, config.seed)
    need(run.games / "games.json", "collect")
    need(run.model("worldmodel"), "fit-world-model")
    episodes = few_episodes(heldout_tasks(run), config.few_shot.episodes)
    spent = sum(len(episode.turns) for episode in episodes)
    dreams = deepcopy(config)
    dreams.train.tasks, dreams.train.world, dreams.train.updates = "heldout", "dream", config.few_shot.updates
    dreams.train.task_episodes = config.few_shot.episodes
    real = deepcopy(dreams)  # it reads, as experts, no other episodes of the log than the dreams do
    turns = spent / len(episodes) * config.train.groups * config.train.group_size
    real.train.world, real.train.updates = "real", max(1, round(spent / turns))
    for arm in (dreams, real) if config.few_shot.control else (dreams,):
        check(arm)  # before anything is played
    print("== the clone", flush=True)
    result: dict[str, Any] = {
        "tasks": len({episode.task_id for episode in episodes}),
        "episodes": len(episodes),
        "real_steps_logged": spent,
        "clone": play_clone(config, folder),
    }
    print("== dreams of the new tasks", flush=True)
    result["dreams"] = train_arm(dreams, folder, folder / "few-shot" / "dreams")
    if config.few_shot.control:
        print("== control: the real tasks, by about as many real steps", flush=True)
        result["control"] = train_arm(real, folder, folder / "few-shot" / "control")
    write_results(folder, "few-shot", result, few_shot_table(result))


def few_shot_table(result: dict[str, Any]) -> str:
    """A line each for the clone, dreams and control, in Markdown; real steps are those spent on the new tasks."""
    spent, rows = result["real_steps_logged"], []
    arms = [("cloned from other tasks", result["clone"], 0), ("dreams of the new tasks", result["dreams"], spent)]
    if "control" in result:
        arms.append(("the real tasks", result["control"], result["control"]["real_steps"]["train"]))
    for name, arm, steps in arms:
        success = Proportion.from_json(arm["heldout_tasks"])
        rows.append([name, success.cell, success.n, f"{steps:,}"])
    table = markdown(["policy", "real success on the new tasks", "n", "real steps there"], rows)
    intro = f"{result['tasks']} new tasks, {result['episodes']} logged episodes of them."
    return "\n".join([intro, "", *table]) + "\n"
