"""What experiments share: runs of several seeds, arms that train or fit once more with other settings, tables."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from imagination.commands.check_train import check
from imagination.commands.clone import clone
from imagination.commands.collect import collect
from imagination.commands.evaluate import play_real
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.reflect import reflect
from imagination.commands.relabel import relabel
from imagination.commands.train import train
from imagination.data.augmentation import HINDSIGHT, MADE_BY
from imagination.evaluation.costs import KEYS, real_costs
from imagination.loop.origin import read_beside
from imagination.runs.fingerprint import fingerprint, state
from imagination.runs.lifecycle import need
from imagination.runs.machine import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.scale.ray_envs import real_tasks
from imagination.session import Session
from imagination.settings import Config, UserError
from imagination.settings.compose import load_on_top, merge_overrides, remembered_overrides
from real_envs.files import write_atomically
from real_envs.worker_pool import real_interaction
from worldmodel.evaluation.proportions import summarise
from worldmodel.rules.rule_set import FILE

Arms = Mapping[str, str]  # settings by name
SHARED = ("games", "log", "tokenizer", "models/policy-clone")


def train_arm(config: Config, source: Path, there: Path) -> dict[str, Any]:
    """Trains the clone of the run in ``source`` by ``config`` and plays the result in the real games.

    An arm that was finished with these settings from this clone and these world models is not trained again.

    Returns:
        as ``play_clone``, ``wall_seconds`` of the training, ``dream_success`` of its first and last update (``None`` in
        real games) and ``stopped_by``, what the tripwire that stopped it wrote, or ``None``.
    """
    start = RunFolder(source, config.seed)
    need(start.model("policy-clone"), "clone")
    members = [f"models/{path.name}" for path in sorted(source.glob("models/worldmodel*"))]
    members += read_beside(start, config.experience, bool(config.dream.hindsight), critic=True)
    origin = hash_of(source, ["models/policy-clone", *members])
    run = RunFolder(there, config.seed, f"{fingerprint(config)}/{origin}")
    if run.summary.get("done", {}).get("arm") == run.settings:
        return dict(run.summary["arm"])
    shared = [name for name in SHARED if name != "tokenizer" or (source / name).exists()]  # a checkpoint has its own
    shared += ["origin"] * start.origin.exists()  # its episodes are a part of the log
    outdated = ("checkpoints", "models/critic", f"models/{FILE}", "supplements", "origin")
    _copy(source, there, (*shared, *members), outdated)
    run.update({key: start.summary[key] for key in ("world_model_form", "best_return") if key in start.summary})
    train(config, there)
    result = asyncio.run(_play(config, run, "policy"))
    for key in (key for key in KEYS if "train" in run.summary.get(key, {})):
        result.setdefault(key, {})["train"] = run.summary[key]["train"]
    lines = [line for line in run.metrics("train") if "dream_success" in line]
    result |= {
        "wall_seconds": run.summary["wall_seconds"]["train"],
        "dream_success": [lines[0]["dream_success"], lines[-1]["dream_success"]] if lines else None,
        "stopped_by": (run.summary.get("tripwires") or {}).get("stopped_by"),
    }
    run.update({"arm": result, "done": {"arm": run.settings}})
    return result


def _copy(source: Path, there: Path, names: Sequence[str], outdated: Sequence[str]) -> None:
    """Copies files and folders; what was there of them, perhaps of an earlier source or half a copy, goes first."""
    for name in (*outdated, *names):
        (there / name).unlink() if (there / name).is_file() else shutil.rmtree(there / name, ignore_errors=True)
    for name in names:
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (source / name).is_dir() else shutil.copy)(source / name, there / name)


def play_clone(config: Config, source: Path) -> dict[str, Any]:
    """How the clone of a run does in the real games, over the same tasks and seeds as every arm.

    Returns:
        ``train_tasks`` and ``heldout_tasks`` (as ``Proportion.to_json``), ``real_steps`` by stage and what else they
        cost (``imagination.evaluation.costs``).
    """
    return asyncio.run(_play(config, RunFolder(source, config.seed), "policy-clone"))


async def _play(config: Config, run: RunFolder, name: str) -> dict[str, Any]:
    session = Session(config, run)
    tasks, policy = real_tasks(session), session.policy(name)
    agent = session.agent(policy, config.evaluate.temperature)
    before = real_interaction()
    result: dict[str, Any] = {}
    for split in ("train", "heldout"):
        episodes = await play_real(config, tasks, agent, policy.version, "after", split)
        result[f"{split}_tasks"] = summarise(episodes).success.to_json()
    await tasks.close()
    result |= real_costs("evaluate", real_interaction() - before, config.env.price)
    return result


def hash_of(root: Path, folders: Sequence[str]) -> str:
    """A short hash of these files of ``root`` and all files of these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(p for p in (root / folder, *(root / folder).rglob("*")) if p.is_file()):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()[:12]


STAGES = {stage.__name__: stage for stage in (collect, fit_world_model, reflect, relabel, clone, train)}
SEEDS = (0, 1, 2)


def stages_of(config: Config, until: str = "train") -> list[str]:
    """The ``STAGES`` of a run in order, up to ``until``: supplements are made where the clone or dreams read them."""
    read = {MADE_BY[name] for name in (*config.clone.supplements, *([HINDSIGHT] if config.dream.hindsight else []))}
    names = [name for name in STAGES if name not in MADE_BY.values() or name in read]
    return names[: names.index(until) + 1]


def seed_config(config: Config, seed: int) -> Config:
    """The settings of one of several seeds; checkpoints of its policy are kept on the way, for audits."""
    changed = deepcopy(config)
    changed.seed = seed
    changed.clone.keep_every = config.clone.keep_every or max(1, config.clone.steps // 5)
    changed.train.keep_every = config.train.keep_every or max(1, config.train.updates // 6)
    return changed


def named_runs(named: Sequence[str], key: str) -> list[Path]:
    """The runs that the setting ``key`` names. Raises ``UserError``: one is not there."""
    paths = [Path(name) for name in named]
    for path in paths:
        if not (path / "summary.json").exists():
            raise UserError(f"{key}: {path} holds no run (no summary.json)")
    return paths


def prepared_run(config: Config, folder: Path, seed: int, until: str = "train") -> Path:
    """The run of a seed under ``folder``, taken as far as the stage ``until``.

    A stage that it has finished, with whatever settings, is not done again.
    """
    changed, path = seed_config(config, seed), folder / f"seed-{seed}"
    for name in stages_of(config, until):
        if not RunFolder(path, seed).summary.get("done", {}).get(name):
            print(f"== seed {seed}: {name.replace('_', ' ')}", flush=True)
            STAGES[name](changed, path)
            give_back_memory()
    return path


def note_kept(config: Config, folder: Path, until: str = "train") -> None:
    """Says which stages ``prepared_run`` will keep, although they were done with other settings."""
    for seed in SEEDS:
        changed, path = seed_config(config, seed), folder / f"seed-{seed}"
        if kept := [name for name in stages_of(config, until) if state(changed, path, name) == "other settings"]:
            what = ", ".join(kept).replace("_", " ")
            print(f"note: {path} keeps what was done with other settings: {what}; another run= begins anew", flush=True)


def fit_beside(config: Config, source: Path, there: Path) -> None:
    """Fits a world model to the log of the run in ``source``, in a run folder ``there`` of its own.

    One that was fitted with these settings to this log is not fitted again; one that was interrupted goes on.
    """
    origin = hash_of(source, ["log", "origin"])
    run = RunFolder(there, config.seed)
    made = f"{fingerprint(config, 'fit_world_model')}/{origin}"
    if run.summary.get("fitted_as") == made:
        return
    if run.summary.get("log_of") != origin:
        names = [name for name in ("games", "log", "origin") if (source / name).exists()]
        _copy(source, there, names, outdated=("checkpoints", "origin"))
        run.update({"log_of": origin})
    fit_world_model(config, there)
    run.update({"fitted_as": made})


def check_arms(arms: Arms, path: Path, folder: Path) -> None:
    """Checks arms of the run in ``path``, or of runs that ``folder`` will hold, before hours of work.

    Raises:
        UserError: two names would be one folder, or settings contradict each other.
        ConfigError: a setting has no such key, or not that type.
    """
    slugs_of(arms)
    for settings in arms.values():
        _config_with(path, folder, settings)


def slugs_of(arms: Arms) -> dict[str, str]:
    """A folder name for each arm. Raises ``UserError``: two would share one, or there is nothing to make one of."""
    slugs = {name: re.sub(r"\W+", "-", name).strip("-").lower() for name in arms}
    if len(set(slugs.values())) < len(arms) or not all(slugs.values()):
        raise UserError(f"they need names that differ in letters or digits, got {sorted(arms)}")
    return slugs


def config_of_arm(path: Path, folder: Path, settings: str) -> Config:
    """A run's own settings, on top those of the experiment in ``folder``, on top those of an arm. Raises ``UserError``:
    they contradict each other; ``ConfigError``: a setting has no such key, or not that type.
    """
    config = _config_with(path, folder, settings)
    config.seed = int(RunFolder(path, config.seed).summary["seed"])
    return config


def _config_with(path: Path, folder: Path, settings: str) -> Config:
    own = merge_overrides(remembered_overrides(path), remembered_overrides(folder))
    config = load_on_top(own, shlex.split(settings), Config)
    check(config)
    return config


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table."""
    lines = ["|" + "|".join(f" {cell} " if cell != "" else " " for cell in row) + "|" for row in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def write_results(folder: Path, name: str, results: Any, table: str) -> None:
    """Writes ``<name>.json`` and ``<name>.md``, and prints the table."""
    write_atomically(folder / f"{name}.json", json.dumps(results, indent=1))
    write_atomically(folder / f"{name}.md", table)
    print(table)
