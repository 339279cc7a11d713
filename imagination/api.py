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
import contextvars
import ctypes
import logging
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from imagination.commands import audit as audit_stage
from imagination.commands.clone import clone
from imagination.commands.collect import collect
from imagination.commands.evaluate import evaluate
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.loop import loop
from imagination.commands.report import report
from imagination.commands.train import train
from imagination.rollout.dream_env import DreamEnv, starts_from_log
from imagination.rollout.play import Episode, Provenance, play_with_bar
from imagination.runs.fingerprint import summary as read_summary
from imagination.runs.lock import locked
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError, compose
from imagination.settings.schema import schema_keys
from real_envs.env import Task
from real_envs.importers.jsonl import import_jsonl
from real_envs.importers.outcomes import with_outcome
from real_envs.seeding import derive_seed
from real_envs.store import TrajectoryStore
from real_envs.store.codec import nearest
from real_envs.trajectory import Source, Trajectory
from worldmodel.evaluation.proportions import Proportion

Stage = Callable[[Config, Path], None]
T = TypeVar("T")
_WHICH = ("before", "after")


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a stage made.

    Attributes:
        folder: a Hugging Face checkpoint.
        seconds: of wall time.
    """

    folder: Path
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WorldModelResult(StageResult):
    """A fitted world model.

    Attributes:
        measured: on held-out turns, as in ``summary.json``.
    """

    measured: Mapping[str, Any]

    @property
    def exact_match(self) -> float | None:
        """Share of held-out turns whose text, reward and end it predicts exactly; ``None`` without any."""
        return self.measured.get("exact_match")


@dataclass(frozen=True, kw_only=True)
class TrainResult(StageResult):
    """A trained policy.

    Attributes:
        updates: the metrics of each update, as in ``metrics.jsonl``.
        stopped_by: the tripwire that stopped it, or ``None``.
        real_steps: taken in the real environment; 0 in dreams alone.
        real_seconds: inside these steps and the resets before them, those of workers side by side added up.
        real_cost: of these steps, where ``env.price`` says what one costs.
    """

    updates: list[dict[str, Any]]
    stopped_by: str | None
    real_steps: int
    real_seconds: float
    real_cost: float | None

    @property
    def success(self) -> list[float]:
        """Success of each update's episodes in the world they were played in, where some began at the start."""
        rates = (u.get("dream_success", u.get("real_success")) for u in self.updates)
        return [rate for rate in rates if rate is not None]


@dataclass(frozen=True, kw_only=True)
class LoopResult(StageResult):
    """A policy that learned in dreams of a world model that learned from a few real steps; as in ``summary.json``.

    Attributes:
        real_steps: charged to the budget: those that the world answered.
        rounds: what each did and came to.
        versions: of the world model, with their data, scores and verdict.
    """

    real_steps: int
    rounds: list[dict[str, Any]]
    versions: list[dict[str, Any]]


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
        for key, value in (overrides or {}).items():
            is_text = isinstance(value, str) and schema_keys(Config).get(key) is str  # "'Yes'" and "[Yy]es" as they are
            words.append(f"{key}={compose.listed([value])[1:-1]}" if is_text else compose.override(key, value))
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
        """Makes a log of one's own the log of this run, in place of ``collect``. A success without rewards becomes the
        last turn's, as with ``imagine import``.

        Args:
            episodes: such as ``load_log("my-log.jsonl")``.
            heldout: ids of the tasks that nothing is trained on.

        Raises:
            UserError: the run has a log already, or no episode is of a task that is to be held out.
        """
        if (self.folder / "log" / "manifest.json").exists():
            raise UserError(f"{self.folder / 'log'} is there already; take another folder for another log")
        episodes, held = list(map(with_outcome, episodes)), set(heldout)
        tasks = sorted({episode.task_id for episode in episodes})
        if strange := held.difference(tasks):
            raise UserError(f"heldout: no episode is of task '{min(strange)}'; {nearest(min(strange), tasks)}")
        splits = {"train": [t for t in tasks if t not in held], "heldout": [t for t in tasks if t in held]}
        with locked(self.folder, "use-log"):
            store = TrajectoryStore.create(self.folder / "log", {split: ids for split, ids in splits.items() if ids})
            store.append(episodes)
        return store

    def collect(self) -> TrajectoryStore:
        """Lets scripted agents play and logs them; what is logged already is kept."""
        self._do(collect)
        return TrajectoryStore.open(self.folder / "log")

    def fit_world_model(self) -> WorldModelResult:
        """Fits the world model to the log and measures it on held-out episodes."""
        summary = self._do(fit_world_model)
        return WorldModelResult(**self._made(summary, "fit_world_model"), measured=summary["world_model"])

    def clone(self) -> Path:
        """Makes the starting policy by imitation; the folder of its checkpoint."""
        self._do(clone)
        return self.folder / "models" / "policy-clone"

    def train(self) -> TrainResult:
        """Trains the policy in dreams, or where ``train.world`` says."""
        summary = self._do(train)
        return TrainResult(
            **self._made(summary, "train"),
            updates=RunFolder(self.folder, self.config.seed).metrics("train"),
            stopped_by=(summary.get("tripwires") or {}).get("stopped_by"),
            **{key: summary.get(key, {}).get("train") for key in ("real_steps", "real_seconds", "real_cost")},
        )

    def loop(self) -> LoopResult:
        """Acts a little for real, refits, dreams and improves until ``loop.budget`` real steps are spent."""
        summary = self._do(loop)
        state = summary["loop"]
        made = self._made(summary, "loop")
        return LoopResult(**made, real_steps=state["charged"], rounds=state["rounds"], versions=state["versions"])

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
        played, keys = self._do(evaluate)["policy"], ("train_tasks", "heldout_tasks", "dream_success")
        results = (PolicyResult(*(Proportion.from_json(played[which][key]) for key in keys)) for which in _WHICH)
        return EvaluateResult(*results)

    def audit(self) -> AuditResult:
        """Measures whether the world model is good enough to dream in."""
        with locked(self.folder, "audit"):
            self._resolved.remember()
            audited = call(lambda: audit_stage.run_audit(self.config, self.folder))
        page = audit_stage.audit_files(self.folder, self.config.audit.world_model)[1]
        return AuditResult(audited["verdict"]["trust"], audited["verdict"]["sentences"], audited, page)

    def report(self) -> Path:
        """Writes the page of the run, from what there is so far."""
        call(lambda: report(self.config, self.folder))
        return self.folder / "report.html"

    def _do(self, stage: Stage) -> dict[str, Any]:
        """Runs a stage; what ``summary.json`` says then."""
        with locked(self.folder, stage.__name__.replace("_", "-")):
            self._resolved.remember()
            call(lambda: stage(self.config, self.folder))
        return read_summary(self.folder)

    def _made(self, summary: Mapping[str, Any], stage: str) -> dict[str, Any]:
        name = "worldmodel" if stage == "fit_world_model" else "policy"
        return {"folder": self.folder / "models" / name, "seconds": summary["wall_seconds"][stage]}


async def _dream(config: Config, folder: Path, count: int, policy: str) -> list[Trajectory]:
    session = Session.open(config, folder)
    world, player = session.paying(session.world_model()), session.policy(policy)
    agent = session.agent(player, config.evaluate.temperature, policy)
    starts = starts_from_log(session.known, branch=False)
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


def call(work: Callable[[], T]) -> T:
    """What ``work`` returns. What it sets for its process, a command may leave behind; here it is put back.

    Stages use ``asyncio.run``, which cannot run inside a running event loop, such as a notebook's: there, ``work`` has
    a thread of its own, and this one waits. Ctrl-C stops it with a ``KeyboardInterrupt`` everywhere.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _restored(work)
    return _in_a_thread(lambda: _restored(work))


def _in_a_thread(work: Callable[[], T]) -> T:
    future: Future[T] = Future()

    def target() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # told to the caller, whatever it is
            future.set_exception(error)

    # with the context of the caller, by which a notebook knows the cell that output belongs to
    thread = threading.Thread(target=contextvars.copy_context().run, args=(target,), daemon=True)
    try:
        thread.start()
        return future.result()
    except KeyboardInterrupt:
        if thread.ident is None or future.done():
            raise
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
        return future.result()


def _restored(work: Callable[[], T]) -> T:
    try:
        with _process_as_it_was():
            return work()
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning makes a plain exit of Ctrl-C
            raise KeyboardInterrupt from None
        raise


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Puts back what stages set for the whole process: environment, random states, threads, warnings, verbosity."""
    environment, numbers, arrays = dict(os.environ), random.getstate(), np.random.get_state()
    tensors, threads = torch.get_rng_state(), torch.get_num_threads()
    log = logging.getLogger("lightning.pytorch")
    level, bars = log.level, transformers_logging.is_progress_bar_enabled()
    try:
        # of oneDNN, read when torch first multiplies: its cache would grow to gigabytes with the shapes of text
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
        with warnings.catch_warnings():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        random.setstate(numbers)
        np.random.set_state(arrays)
        torch.set_rng_state(tensors)
        torch.set_num_threads(threads)
        log.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
