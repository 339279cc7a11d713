"""The stages as calls, for programs and notebooks.

Example::

    from imagination import Run

    run = Run("outputs/mine", preset="tiny", overrides={"train.updates": 5})
    run.collect()
    run.fit_world_model().exact_match          # 0.67
    run.clone()
    run.train().success                        # [0.41, 0.5, 0.62, 0.78, 0.78], believed by the dream
    run.dream(2)[0].turns[0].observation       # "-= Kitchen =- ..."
    run.evaluate().after.train_tasks.ci95      # (0.94, 1.0), in the real games

A run is the same folder that ``imagine <stage> run=mine`` works in: either goes on with what the other has made, under
the settings that were chosen before. Errors that the user can mend are ``UserError`` or ``ConfigError``; nothing exits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagination.commands import audit as audit_stage
from imagination.commands.calling import call
from imagination.commands.clone import clone
from imagination.commands.collect import collect
from imagination.commands.evaluate import evaluate
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.loop import loop
from imagination.commands.report import report
from imagination.commands.train import train
from imagination.rollout.dream_env import DreamEnv, starts_from_log
from imagination.rollout.play import Episode, Provenance, play_with_bar
from imagination.runs.fingerprint import summary
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError, compose
from real_envs.env import Task
from real_envs.importers.jsonl import import_jsonl
from real_envs.seeding import derive_seed
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Source, Trajectory
from worldmodel.evaluation.proportions import Proportion

Stage = Callable[[Config, Path], None]


@dataclass(frozen=True)
class WorldModelResult:
    """A fitted world model.

    Attributes:
        folder: a Hugging Face checkpoint.
        exact_match: share of held-out turns whose text, reward and end it predicts exactly; ``None`` without any.
        measured: all that was measured, as in ``summary.json``.
        seconds: of wall time.
    """

    folder: Path
    exact_match: float | None
    measured: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True)
class TrainResult:
    """A trained policy.

    Attributes:
        folder: a Hugging Face checkpoint.
        updates: the metrics of each update, as in ``metrics.jsonl``.
        stopped_by: the tripwire that stopped it, or ``None``.
        real_steps: taken in the real environment; 0 in dreams alone.
        real_seconds: inside these steps and the resets before them, those of workers side by side added up.
        real_cost: of these steps, where ``env.price`` says what one costs.
        seconds: of wall time.
    """

    folder: Path
    updates: list[dict[str, Any]]
    stopped_by: str | None
    real_steps: int
    seconds: float
    real_seconds: float = 0.0
    real_cost: float | None = None

    @property
    def success(self) -> list[float]:
        """Success of each update's episodes in the world they were played in, where some began at the start."""
        found = (u.get("dream_success", u.get("real_success")) for u in self.updates)
        return [rate for rate in found if rate is not None]


@dataclass(frozen=True)
class LoopResult:
    """A policy that learned in dreams of a world model that learned from a few real steps.

    Attributes:
        folder: a Hugging Face checkpoint of the policy.
        real_steps: charged to the budget: those that the world answered.
        rounds: what each did and came to, as in ``summary.json``.
        versions: of the world model, with their data, scores and verdict.
        seconds: of wall time.
    """

    folder: Path
    real_steps: int
    rounds: list[dict[str, Any]]
    versions: list[dict[str, Any]]
    seconds: float


@dataclass(frozen=True)
class PolicyResult:
    """How often a policy succeeds: in the real environment, by split, and in the dream."""

    train_tasks: Proportion
    heldout_tasks: Proportion
    dream: Proportion


@dataclass(frozen=True)
class EvaluateResult:
    """The cloned policy (before) and the trained one (after), over the same tasks and seeds."""

    before: PolicyResult
    after: PolicyResult


@dataclass(frozen=True)
class AuditResult:
    """Whether the world model is good enough to dream in.

    Attributes:
        trust: yes, partly, no or unknown.
        sentences: the verdict and its reasons.
        measured: all that was measured, as in ``audit.json``.
        page: with charts and examples.
    """

    trust: str
    sentences: list[str]
    measured: Mapping[str, Any]
    page: Path


def load_log(path: str | Path) -> list[Trajectory]:
    """Logged episodes: of a run's folder, of a store, or of a file of JSON lines, one episode a line.

    Example::

        load_log("outputs/demo")[0].turns[0].action  # "go east"

    Raises:
        StoreError: there is no log, or it is broken.
    """
    path = Path(path)
    if path.is_file():
        return list(import_jsonl(path))
    return list(TrajectoryStore.open(path / "log" if (path / "log").is_dir() else path).read())


class Run:
    """A run and its folder; nothing is written before the first stage.

    Args:
        folder: such as ``outputs/mine``; its last part is the run's name.
        preset: of ``configs/preset/``, such as ``tiny``.
        overrides: settings by dotted key or group, ``{"algorithm": "ppo", "train.updates": 5}``. They come on top of
            what was chosen for this run before.

    Raises:
        ConfigError: a key, a group or a value is wrong.
    """

    def __init__(
        self, folder: str | Path, preset: str | None = None, overrides: Mapping[str, Any] | None = None
    ) -> None:
        folder = Path(folder)
        words = [compose.override("output", str(folder.parent)), compose.override("run", folder.name)]
        words += [compose.override("preset", preset)] if preset else []
        words += [compose.override(key, value) for key, value in (overrides or {}).items()]
        self._resolved = compose.resolve(words, Config)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def config(self) -> Config:
        """The settings of this run."""
        return self._resolved.config

    @property
    def folder(self) -> Path:
        return self._resolved.folder

    def use_log(self, episodes: Iterable[Trajectory], heldout: Iterable[str] = ()) -> TrajectoryStore:
        """Makes a log of one's own the log of this run, in place of ``collect``.

        Args:
            episodes: such as ``load_log("my-log.jsonl")``.
            heldout: ids of the tasks that nothing is trained on.

        Raises:
            UserError: the run has a log already.
        """
        if (self.folder / "log" / "manifest.json").exists():
            raise UserError(f"{self.folder / 'log'} is there already; take another folder for another log")
        episodes, held = list(episodes), set(heldout)
        tasks = sorted({episode.task_id for episode in episodes})
        splits = {"train": [t for t in tasks if t not in held], "heldout": [t for t in tasks if t in held]}
        store = TrajectoryStore.create(self.folder / "log", {split: ids for split, ids in splits.items() if ids})
        store.append(episodes)
        return store

    def collect(self) -> TrajectoryStore:
        """Lets scripted agents play and logs them; what is logged already is kept."""
        self._do(collect)
        return TrajectoryStore.open(self.folder / "log")

    def fit_world_model(self) -> WorldModelResult:
        """Fits the world model to the log and measures it on held-out episodes."""
        self._do(fit_world_model)
        found = self._summary
        measured = found["world_model"]
        folder = self.folder / "models" / "worldmodel"
        return WorldModelResult(folder, measured.get("exact_match"), measured, found["wall_seconds"]["fit_world_model"])

    def clone(self) -> Path:
        """Makes the starting policy by imitation; the folder of its checkpoint."""
        self._do(clone)
        return self.folder / "models" / "policy-clone"

    def train(self) -> TrainResult:
        """Trains the policy in dreams, or where ``train.world`` says."""
        self._do(train)
        found = self._summary
        return TrainResult(
            folder=self.folder / "models" / "policy",
            updates=RunFolder(self.folder, self.config.seed).metrics("train"),
            stopped_by=found.get("tripwires", {}).get("stopped_by"),
            real_steps=found["real_steps"]["train"],
            seconds=found["wall_seconds"]["train"],
            real_seconds=found["real_seconds"]["train"],
            real_cost=found.get("real_cost", {}).get("train"),
        )

    def loop(self) -> LoopResult:
        """Acts a little for real, refits, dreams and improves until ``loop.budget`` real steps are spent."""
        self._do(loop)
        found = self._summary
        told = found["loop"]
        return LoopResult(
            folder=self.folder / "models" / "policy",
            real_steps=told["charged"],
            rounds=told["rounds"],
            versions=told["versions"],
            seconds=found["wall_seconds"]["loop"],
        )

    def dream(self, episodes: int, policy: str | None = None) -> list[Trajectory]:
        """Lets a policy play in the world model, from the beginnings of logged tasks in turn.

        Args:
            episodes: how many.
            policy: ``policy``, ``policy-clone`` or another folder of ``models/``; by default the best there is.

        Raises:
            UserError: there is no such model yet.
        """
        if policy is None:
            policy = "policy" if (self.folder / "models" / "policy").exists() else "policy-clone"
        return call(lambda: asyncio.run(_dream(self.config, self.folder, episodes, policy)))

    def evaluate(self) -> EvaluateResult:
        """Plays the cloned and the trained policy in the real environment and in dreams."""
        self._do(evaluate)
        found = self._summary["policy"]
        keys = ("train_tasks", "heldout_tasks", "dream_success")
        before, after = (
            PolicyResult(*(Proportion.from_json(found[which][key]) for key in keys)) for which in ("before", "after")
        )
        return EvaluateResult(before, after)

    def audit(self) -> AuditResult:
        """Measures whether the world model is good enough to dream in."""
        self._resolved.remember()
        found = call(lambda: audit_stage.run_audit(self.config, self.folder))
        page = audit_stage.audit_files(self.folder, self.config.audit.world_model)[1]
        return AuditResult(found["verdict"]["trust"], found["verdict"]["sentences"], found, page)

    def report(self) -> Path:
        """Writes the page of the run, from what there is so far."""
        self._do(report)
        return self.folder / "report.html"

    @property
    def _summary(self) -> dict[str, Any]:
        return summary(self.folder)

    def _do(self, stage: Stage) -> None:
        self._resolved.remember()
        call(lambda: stage(self.config, self.folder))


async def _dream(config: Config, folder: Path, count: int, policy: str) -> list[Trajectory]:
    session = Session.open(config, folder)
    world, player = session.world_model(), session.policy(policy)
    agent = session.agent(player, config.evaluate.temperature, policy)
    starts = starts_from_log(session.log.train, branch=False)
    guard = session.guard()
    names = sorted(starts)
    episodes = []
    for k in range(count):
        start = starts[names[k % len(names)]]
        task = Task(start.task_id, {"start": names[k % len(names)]})
        seed = derive_seed("api", config.seed, k)
        episodes.append(Episode(f"api/{start.task_id}/{k}", task, f"api/{start.task_id}", seed))
    return await play_with_bar(
        f"dream {policy}",
        episodes,
        lambda: DreamEnv(world, starts, guard),
        agent,
        Provenance(Source.DREAM, player.version, world.version, session.solved_at),
        config.dream.max_turns,
        concurrency=128,
    )
