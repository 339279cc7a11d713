"""Stage ``import``: logs of one's own, in whatever format, become the log of a run."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from imagination.commands.import_judged import Outcomes
from imagination.commands.import_told import REFUSED, Report, following, told
from imagination.evaluation.retrieval_baseline import CHARACTERS, looked_up, tasks_to_look_at
from imagination.runs.lifecycle import finish, open_run
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError
from imagination.settings.data import ImportSettings
from real_envs.files import write_atomically
from real_envs.importers.coverage import Coverage
from real_envs.importers.drafts import Reading
from real_envs.importers.folders import Source, sources_of
from real_envs.importers.formats import AUTO, Imported, Refusal, read
from real_envs.importers.judging import judged
from real_envs.importers.masking import Masking
from real_envs.importers.similar import SimilarTasks
from real_envs.importers.splits import HELDOUT, TRAIN, heldout_tasks
from real_envs.importers.tables import COLUMNS, Tables
from real_envs.incoming import Incoming
from real_envs.manifest import MANIFEST
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Trajectory

COVERAGE, KEY = "coverage.json", "mask.key"
_INCOMING = "incoming"  # folder of episodes that are not in the log yet
_FILES = 20  # files on the terminal
_TOGETHER = 64  # episodes that are judged at a time


def import_logs(config: Config, folder: Path) -> None:
    """Reads ``imports.files`` into ``log/`` and says what the log covers now.

    Raises:
        UserError: there are no files, one cannot be read or is in no known format, no record is an episode, or the
            run's log is of a world or of other settings.
    """
    settings = config.imports
    if not settings.files:
        raise UserError("no files are named; write `imagine import auto my-log.jsonl run=...`")
    chosen = Tables.name if settings.mapping and settings.format == AUTO else settings.format
    looked_at = [source for name in settings.files for source in sources_of(chosen, Path(name))]
    sources = [source for source in looked_at if not isinstance(source, Refusal)]
    unknown = [source for source in looked_at if isinstance(source, Refusal)]
    if settings.mapping and (strange := set(settings.mapping) - set(COLUMNS)):
        raise UserError(f"imports.mapping names '{min(strange)}'; known are {', '.join(COLUMNS)}")
    run = open_run(config, folder, "import", models=False)
    for path, found, why in sources[:_FILES]:
        print(f"{path}: {found.name}, as {why}")
    if more := Counter(found.name for _, found, _ in sources[_FILES:]):
        print(f"and {more.total()} more: {', '.join(f'{count} {name}' for name, count in more.most_common())}")
    with run.timed("import"):
        masking = Masking(_key(run)) if settings.mask else None
        outcomes = Outcomes(settings, run.path)
        taking = _Import(run, settings, sources, masking, outcomes)
        try:
            report, coverage, counted = taking.run(unknown)
        finally:
            taking.incoming.discard()
            outcomes.close()
    finish(run, "import")
    for line in (*told(report, coverage, counted, outcomes.told()), *following(config, coverage)):
        print(line)


class _Import:
    """One import. The files are read once: their episodes wait in ``incoming`` until it is known who is held out.

    Only a goal or a judge, which is measured before it decides anything, takes a look ahead.
    """

    def __init__(
        self,
        run: RunFolder,
        settings: ImportSettings,
        sources: list[Source],
        masking: Masking | None,
        outcomes: Outcomes,
    ) -> None:
        self.incoming = Incoming(run.log.with_name(_INCOMING))
        self._run, self._settings, self._sources = run, settings, sources
        self._masking, self._outcomes = masking, outcomes

    def run(self, unknown: list[Refusal]) -> tuple[Report, Coverage, dict[str, Any]]:
        """Imports, and writes ``coverage.json``, which it returns as well.

        Args:
            unknown: files of folders that are in no known format.

        Raises:
            UserError: see ``import_logs``.
        """
        settings, outcomes = self._settings, self._outcomes
        solved_at = settings.solved_at
        meta = {"imported": True, "solved_at": solved_at, "masked": settings.mask, "judged_by": outcomes.by}
        there = _there(self._run, meta)
        coverage = Coverage(solved_at=_threshold(meta))
        if there is not None and there.ids():
            for episode in there.read(require_actions=False):
                coverage.count(episode)
        if outcomes.active:
            for item in self._items():
                if isinstance(item, Imported):
                    outcomes.offer(self._masked(judged(item.episode, solved_at)))
            outcomes.check()
        report = Report(unknown=[_masked(file, self._masking) for file in unknown])
        tasks = self._read(report, coverage, there)
        store = self._split(tasks, meta, there, coverage)
        store.adopt(self.incoming)
        if outcomes.held_back and not store.ids():
            raise UserError(f"no episode was judged, and none is added: {outcomes.reason}")
        return report, coverage, covered(self._run.path, store, coverage, outcomes.to_json())

    def _items(self) -> Iterator[Imported | Refusal]:
        settings = self._settings
        reading = Reading(
            settings.agent,
            settings.system,
            settings.mapping,
            settings.observation,
            settings.reward,
            settings.done,
            settings.names,
        )
        named: set[str] = set()
        for path, found, _ in self._sources:
            yield from read(path, found, reading, named)

    def _masked(self, episode: Trajectory) -> Trajectory:
        return self._masking.masked(episode) if self._masking else episode

    def _read(self, report: Report, coverage: Coverage, there: TrajectoryStore | None) -> set[str]:
        """The tasks of the files. New episodes are in ``incoming`` and ``coverage`` then."""
        tasks: set[str] = set()
        known = set(there.ids()) if there else set()
        waiting: list[Trajectory] = []

        def put() -> None:
            """On its way into the log, with outcomes that were decided."""
            for decided in self._outcomes.decide(waiting):
                episode = judged(decided, self._settings.solved_at)
                report.added += 1
                report.paid += [turn.reward for turn in episode.turns] != [turn.reward for turn in decided.turns]
                self.incoming.add(episode)
                coverage.count(episode)
            waiting.clear()

        with (self._run.path / REFUSED).open("w", encoding="utf-8") as refused:
            refused.writelines(map(_row, report.unknown))
            for item in self._items():
                if isinstance(item, Refusal):
                    item = _masked(item, self._masking)
                    refused.write(_row(item))
                    report.refuse(item)
                    continue
                episode, starts = item.episode, coverage.starts
                tasks.add(episode.task_id)
                if starts.is_new(episode.task_id, episode.start):
                    starts.add(episode.task_id, self._masking.text(episode.start) if self._masking else episode.start)
                report.left_out.update(item.left_out)
                if episode.id in known:
                    report.again += 1
                    continue
                known.add(episode.id)
                waiting.append(self._masked(episode))
                if len(waiting) == _TOGETHER:
                    put()
            put()
        if not tasks:
            refused_all = report.shown and f"no record is an episode; the first is refused: {report.shown[0]}"
            raise UserError(f"nothing to import: {refused_all or 'the files hold no records'}")
        if self._masking:
            report.masks = dict(self._masking.found)
        return tasks

    def _split(
        self, tasks: set[str], meta: Mapping[str, object], there: TrajectoryStore | None, coverage: Coverage
    ) -> TrajectoryStore:
        """The run's log with all tasks of the files in its splits, which ``coverage`` knows afterwards."""
        starts = coverage.starts
        before = {task: split for split, names in (there.splits.items() if there else ()) for task in names}
        for task, start in there.starts() if there else ():
            starts.add(task, start)
        new = tasks - before.keys()
        held = heldout_tasks(new, self._settings.heldout, starts.groups(), before)
        splits = {TRAIN: sorted(new - held), HELDOUT: sorted(held)}
        splits = {split: names for split, names in splits.items() if names}
        if there is None:
            store = TrajectoryStore.create(self._run.log, splits, meta)
        else:
            store = there
            store.add_tasks(splits)
        coverage.split_of = {task: split for split, names in store.splits.items() for task in names}
        return store


def _there(run: RunFolder, meta: Mapping[str, object]) -> TrajectoryStore | None:
    """The run's log, where it has one.

    Raises:
        UserError: it was not imported, or with other settings.
    """
    if not (run.log / MANIFEST).exists():
        return None
    there = TrajectoryStore.open(run.log)
    if not there.meta.get("imported"):
        raise UserError(f"{run.log} was not imported, and further logs would change its world; use another run=")
    if changed := [key for key, value in meta.items() if there.meta.get(key) != value]:
        old = {key: there.meta.get(key) for key in changed}
        raise UserError(f"{run.log} was imported with {old}; import with the same settings, or use another run=")
    return there


def _masked(refusal: Refusal, masking: Masking | None) -> Refusal:
    """A reason quotes what it found."""
    return replace(refusal, reason=masking.text(refusal.reason)) if masking else refusal


def _row(refusal: Refusal) -> str:
    return json.dumps(asdict(refusal) | {"file": str(refusal.file)}) + "\n"


def _key(run: RunFolder) -> bytes:
    """The run's own, so that a second import gives the same secret the same mask."""
    path = run.path / KEY
    if not path.exists():
        write_atomically(path, secrets.token_hex(32))
        path.chmod(0o600)
    return path.read_bytes()


def cover(folder: Path, store: TrajectoryStore, starts: SimilarTasks) -> tuple[Coverage, dict[str, Any]]:
    """Reads the whole log, and writes ``coverage.json`` of it; see ``covered``. ``starts`` may know how tasks begin."""
    coverage = Coverage(solved_at=_threshold(store.meta), starts=starts)
    coverage.split_of = {task: split for split, tasks in store.splits.items() for task in tasks}
    for episode in store.read(require_actions=False):
        coverage.starts.add(episode.task_id, episode.start)
        coverage.count(episode)
    return coverage, covered(folder, store, coverage)


def covered(
    folder: Path, store: TrajectoryStore, coverage: Coverage, outcomes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Writes ``coverage.json``: what was counted, and what looking up gets right of tasks never seen. Returns it.

    The second, see ``looked_up``, is of a sample of a large log, and reads no held-out task.

    Args:
        coverage: of all episodes of the log.
        outcomes: what a judge did.
    """
    train = store.splits.get(TRAIN, ())
    chosen = tasks_to_look_at({task: coverage.tasks[task] for task in train})
    chosen &= tasks_to_look_at({task: coverage.read_sizes[task] for task in train}, CHARACTERS)
    log = sorted(store.of_tasks(chosen), key=lambda t: t.id)
    shared = looked_up(log, coverage.starts.groups(), sampled=len(chosen) < len(train))
    found = coverage.to_json() | {"looked_up": shared, "judge": outcomes}
    write_atomically(folder / COVERAGE, json.dumps(found, indent=1) + "\n")
    return found


def _threshold(meta: Mapping[str, object]) -> float:
    """The total reward that solves an episode of a log."""
    found = meta.get("solved_at")
    return float(found) if isinstance(found, int | float) else 1.0
