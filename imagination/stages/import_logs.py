"""Stage ``import``: logs of one's own, in whatever format, become the log of a run."""

from __future__ import annotations

import json
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from imagination.runs.lifecycle import finish, open_run
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError
from imagination.settings.importing import ImportSettings
from imagination.stages.import_judged import Outcomes
from imagination.trust.format import interval, number
from imagination.trust.looked_up import looked_up, tasks_to_look_at
from real_envs.files import write_atomically
from real_envs.importers.coverage import Coverage, quantile
from real_envs.importers.drafts import Reading
from real_envs.importers.folders import Source, sources_of
from real_envs.importers.formats import AUTO, Imported, Refusal, read
from real_envs.importers.judging import judged
from real_envs.importers.masking import Masking
from real_envs.importers.similar import SimilarTasks
from real_envs.importers.splits import HELDOUT, TRAIN, heldout_tasks
from real_envs.importers.tables import COLUMNS, Tables
from real_envs.manifest import MANIFEST
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Trajectory

COVERAGE, REFUSED, KEY = "coverage.json", "refused.jsonl", "mask.key"
_SHOWN = 5  # refusals on the terminal
_FILES = 20  # files on the terminal
_TOGETHER = 64  # episodes that are judged at a time
_LONG, _LONGEST = 1000, 8192  # characters of an observation; tokens of a context that a machine can be asked for


@dataclass(slots=True)
class Report:
    """What an import did.

    Attributes:
        added, again: episodes that the log did not have yet, and those that it had.
        paid: episodes whose success became their last reward.
        refused: records that are no episode; ``shown`` are the first of them.
        unknown: files of folders that are in no known format.
        left_out: records by the name of a field that had no place.
        masks: distinct secrets by kind; ``None`` where nothing was masked.
    """

    added: int = 0
    again: int = 0
    paid: int = 0
    refused: int = 0
    shown: list[Refusal] = field(default_factory=list)
    unknown: list[Refusal] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    masks: dict[str, int] | None = None


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
        starts = SimilarTasks()
        outcomes = Outcomes(settings, run.path)
        try:
            store = _store(run, settings, sources, masking, starts, outcomes)
            report = _append(run, settings, sources, store, masking, unknown, outcomes)
        finally:
            outcomes.close()
        coverage, shared = cover(run.path, store, starts, outcomes.to_json())
    finish(run, "import")
    for line in (*told(report, coverage, shared, outcomes.told()), *following(config, coverage)):
        print(line)


def _items(settings: ImportSettings, sources: list[Source]) -> Iterator[Imported | Refusal]:
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
    for path, found, _ in sources:
        yield from read(path, found, reading, named)


def _store(
    run: RunFolder,
    settings: ImportSettings,
    sources: list[Source],
    masking: Masking | None,
    starts: SimilarTasks,
    outcomes: Outcomes,
) -> TrajectoryStore:
    """The run's log with all tasks of the files in its splits. Reads the files once, for their tasks alone.

    ``starts`` knows afterwards how the tasks of files and log begin, as the log has it: masked. Who decides unknown
    outcomes has been checked.
    """
    meta = {"imported": True, "solved_at": settings.solved_at, "masked": settings.mask, "judged_by": outcomes.by}
    there = TrajectoryStore.open(run.log) if (run.log / MANIFEST).exists() else None
    if there is not None:
        if not there.meta.get("imported"):
            raise UserError(f"{run.log} was not imported, and further logs would change its world; use another run=")
        if changed := [key for key, value in meta.items() if there.meta.get(key) != value]:
            old = {key: there.meta.get(key) for key in changed}
            raise UserError(f"{run.log} was imported with {old}; import with the same settings, or use another run=")
    tasks: set[str] = set()
    first: Refusal | None = None
    for item in _items(settings, sources):
        if isinstance(item, Imported):
            task, start = item.episode.task_id, item.episode.start
            tasks.add(task)
            if starts.is_new(task, start):
                starts.add(task, masking.text(start) if masking else start)
            if outcomes.active:
                known = judged(item.episode, settings.solved_at)
                outcomes.offer(masking.masked(known) if masking else known)
        else:
            first = first or item
    if not tasks:
        why = f"no record is an episode; the first is refused: {first}" if first else "the files hold no records"
        raise UserError(f"nothing to import: {why}")
    outcomes.check()
    before = {task: split for split, names in (there.splits.items() if there else ()) for task in names}
    for task, start in there.starts() if there else ():
        starts.add(task, start)
    new = tasks - before.keys()
    held = heldout_tasks(new, settings.heldout, starts.groups(), before)
    splits = {TRAIN: sorted(new - held), HELDOUT: sorted(held)}
    if there is None:
        return TrajectoryStore.create(run.log, {k: v for k, v in splits.items() if v}, meta)
    there.add_tasks({split: names for split, names in splits.items() if names})
    return there


def _append(
    run: RunFolder,
    settings: ImportSettings,
    sources: list[Source],
    store: TrajectoryStore,
    masking: Masking | None,
    unknown: list[Refusal],
    outcomes: Outcomes,
) -> Report:
    report = Report(unknown=[_masked(file, masking) for file in unknown])
    known = set(store.ids())
    waiting: list[Trajectory] = []

    def put() -> None:
        """Into the log, with outcomes that were decided."""
        for decided in outcomes.decide(waiting):
            episode = judged(decided, settings.solved_at)
            report.added += 1
            report.paid += any(a.reward != b.reward for a, b in zip(episode.turns, decided.turns, strict=True))
            writer.add(episode)
        waiting.clear()

    with store.writer() as writer, (run.path / REFUSED).open("w", encoding="utf-8") as refused:
        refused.writelines(map(_row, report.unknown))
        for item in _items(settings, sources):
            if isinstance(item, Refusal):
                item = _masked(item, masking)
                refused.write(_row(item))
                report.refused += 1
                report.shown += [item] if len(report.shown) < _SHOWN else []
                continue
            report.left_out.update(item.left_out)
            if item.episode.id in known:
                report.again += 1
                continue
            known.add(item.episode.id)
            waiting.append(masking.masked(item.episode) if masking else item.episode)
            if len(waiting) == _TOGETHER:
                put()
        put()
    if outcomes.held_back and not store.ids():
        raise UserError(f"no episode was judged, and none is added: {outcomes.reason}")
    if masking:
        report.masks = dict(masking.found)
    return report


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


def cover(
    folder: Path, store: TrajectoryStore, starts: SimilarTasks, outcomes: Mapping[str, Any] | None = None
) -> tuple[Coverage, dict[str, Any] | None]:
    """Writes ``coverage.json``: counts over the whole log, and what looking up gets right of tasks never seen.

    The second, see ``looked_up``, reads no held-out task. ``starts`` may know how some tasks begin; ``outcomes`` says
    what a judge did.
    """
    threshold = store.meta.get("solved_at")
    split_of = {task: split for split, tasks in store.splits.items() for task in tasks}
    coverage = Coverage(solved_at=float(threshold) if isinstance(threshold, int | float) else 1.0, starts=starts)
    for episode in store.read(require_actions=False):
        coverage.add(episode, split_of[episode.task_id])
    chosen = tasks_to_look_at({task: coverage.tasks[task] for task in store.splits.get(TRAIN, ())})
    log = [t for t in store.read(TRAIN) if t.task_id in chosen] if chosen else []
    shared = looked_up(sorted(log, key=lambda t: t.id), starts.groups())
    found = coverage.to_json() | {"looked_up": shared, "judge": outcomes}
    write_atomically(folder / COVERAGE, json.dumps(found, indent=1) + "\n")
    return coverage, shared


def told(
    report: Report, coverage: Coverage, shared: Mapping[str, Any] | None, outcomes: Iterable[str] = ()
) -> Iterator[str]:
    """What an import did and what the log covers now, line by line."""
    found = coverage.to_json()
    yield ""
    yield f"{report.added} episodes added" + (f", {report.again} were in the log already" if report.again else "")
    if report.refused:
        yield f"{report.refused} records refused, all of them in {REFUSED}:"
        yield from (f"  {refusal}" for refusal in report.shown)
    if report.unknown:
        yield f"{len(report.unknown)} files of folders left alone, all of them in {REFUSED}:"
        yield from (f"  {refusal}" for refusal in report.unknown[:_SHOWN])
    if report.left_out:
        names = ", ".join(f"{name} ({count})" for name, count in report.left_out.most_common(8))
        yield f"fields without a place in the log, left out: {names}"
    if report.masks is None:
        yield "secrets are not masked: imports.mask=false"
    else:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.masks.items())) or "none found"
        yield f"secrets masked: {kinds}; imports.mask=false keeps them"
    if report.paid:
        worth = f"{coverage.solved_at:g}"
        yield f"{report.paid} episodes state success and no reward: it is the last turn's reward now, {worth} or 0"
    yield from outcomes
    rewards, lengths, success = found["rewards"], found["turns_per_episode"], found["success"]
    splits = ", ".join(f"{count} {split}" for split, count in found["tasks"].items())
    yield ""
    yield f"the log: {coverage.episodes} episodes of {len(coverage.tasks)} tasks ({splits}), {coverage.turns} turns"
    yield f"  turns per episode  {lengths['least']} to {lengths['most']}, median {lengths['median']}"
    yield f"  distinct           {found['distinct_actions']} actions, {found['distinct_observations']} observations"
    paid = f"{rewards['turns']} turns state one, {rewards['turns_not_zero']} of them not 0"
    yield f"  rewards            {paid}, {rewards['of_these_at_the_end']} of these at the end"
    yield f"  success            known in {success['known']} episodes, {success['solved']} solved"
    yield f"  ends               {coverage.terminated} episodes ended by the world, {coverage.failed} broke"
    yield f"  refused actions    {coverage.invalid} turns"
    same = found["determinism"]
    if same["same_answer"] is not None:
        yield f"  determinism        {same['same_answer']:.1%} of turns whose state and action occur more than once"
    yield f"  duplicates         {found['duplicate_turns']} turns"
    yield f"  held out           {found['heldout_turns_in_train']} of its turns are in training tasks, too"
    if shared is not None:
        share, between, turns = (shared["exact"][key] for key in ("value", "ci95", "n"))
        right = f"{number(share)} {interval(between)} of {turns} turns"
        yield f"  looked up          {right} are answered rightly by the most similar turn of another task"
    if (near := found["near_duplicates"])["tasks"]:
        yield (
            f"  near-duplicates    {near['tasks']} tasks in {near['groups']} groups begin nearly alike and are kept "
            f"together; split one by one, {near['leaks_if_split_by_task']} held-out ones would have a double in train"
        )
    yield ""
    missing = found["missing"]
    yield from ("missing for dreams:", *(f"  {line}" for line in missing)) if missing else ("nothing is missing",)


def following(config: Config, coverage: Coverage) -> Iterator[str]:
    """The commands that come next, with limits that the log would not fit raised to what it needs.

    Tokens are guessed: models from scratch write about two characters by one in the worst of logs.
    """
    episode, action = quantile(coverage.episode_sizes), quantile(coverage.action_sizes)
    longest = max(2 * config.max_action_tokens, 128 * math.ceil(action / 128))
    dreamed = config.dream.max_turns * longest + 2  # else train would refuse: the actions of a dream have to fit
    needs = (
        ("worldmodel.context", episode, config.worldmodel.context),
        ("policy.context", max(episode, dreamed), config.policy.context),
        ("dream.max_tokens", quantile(coverage.observation_sizes), config.dream.max_tokens),
        ("max_action_tokens", action, config.max_action_tokens),
    )
    raised = [
        f"{key}={min(64 * math.ceil(size / 2 / 64), _LONGEST)}"
        for key, size, limit in needs
        if min(size / 2, _LONGEST) > limit
    ]
    agents = ",".join(agent for agent, _ in coverage.agents.most_common(3))
    solved_expert = any(agent == "expert" for agent in coverage.agents)
    yield ""
    yield "next:"
    if quantile(coverage.observation_sizes) > 2 * _LONGEST:
        yield (
            f"  observations of {quantile(coverage.observation_sizes):,} characters are too long for a small model; "
            "fit-world-model will refuse them: import shorter ones, such as without what no action changes"
        )
    elif quantile(coverage.observation_sizes) > _LONG:
        yield "  observations are long: with worldmodel.kind=delta the world model writes only what changes"
    yield " ".join([f"  imagine fit-world-model run={config.run}", *raised])
    yield f"  imagine clone run={config.run} clone.agents=[{agents}]"
    yield f"  imagine train run={config.run}" + ("" if solved_expert else " train.expert_share=0")
    yield f"  imagine audit run={config.run}"
    if raised:
        yield "the run keeps these limits; they are guesses from above, long ones cost time and memory"
