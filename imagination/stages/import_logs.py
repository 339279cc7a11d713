"""Stage ``import``: logs of one's own, in whatever format, become the log of a run."""

from __future__ import annotations

import json
import math
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from imagination.runs.lifecycle import finish, open_run
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError
from imagination.settings.importing import ImportSettings
from real_envs.files import write_atomically
from real_envs.importers.coverage import Coverage, quantile
from real_envs.importers.drafts import Reading
from real_envs.importers.formats import AUTO, Format, Imported, Refusal, find_format, read
from real_envs.importers.judging import heldout_tasks, judged
from real_envs.importers.masking import Masking
from real_envs.importers.tables import COLUMNS, Tables
from real_envs.manifest import MANIFEST
from real_envs.store import TrajectoryStore

COVERAGE, REFUSED, KEY = "coverage.json", "refused.jsonl", "mask.key"
_SHOWN = 5  # refusals on the terminal
_LONG, _LONGEST = 1000, 8192  # characters of an observation; tokens of a context that a machine can be asked for


@dataclass(slots=True)
class Report:
    """What an import did.

    Attributes:
        found, added: episodes that could be read, and of these those that the log did not have yet.
        paid: episodes whose success became their last reward.
        refused: records that are no episode; ``shown`` are the first of them.
        left_out: records by the name of a field that had no place.
        masks: distinct secrets by kind; ``None`` where nothing was masked.
    """

    found: int = 0
    added: int = 0
    paid: int = 0
    refused: int = 0
    shown: list[Refusal] = field(default_factory=list)
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
    sources = [(Path(name), *find_format(chosen, Path(name))) for name in settings.files]
    if settings.mapping and (strange := set(settings.mapping) - set(COLUMNS)):
        raise UserError(f"imports.mapping names '{min(strange)}'; known are {', '.join(COLUMNS)}")
    run = open_run(config, folder, "import")
    for path, found, why in sources:
        print(f"{path}: {found.name}, as {why}")
    with run.timed("import"):
        store = _store(run, settings, sources)
        report = _append(run, settings, sources, store)
        coverage = _covered(store)
    write_atomically(run.path / COVERAGE, json.dumps(coverage.to_json(), indent=1) + "\n")
    finish(run, "import")
    for line in (*told(report, coverage), *following(config, coverage)):
        print(line)


def _items(settings: ImportSettings, sources: list[tuple[Path, Format, str]]) -> Iterator[Imported | Refusal]:
    reading = Reading(
        settings.agent,
        settings.system,
        settings.mapping,
        settings.observation,
        settings.reward,
        settings.done,
    )
    for path, found, _ in sources:
        yield from read(path, found, reading)


def _store(run: RunFolder, settings: ImportSettings, sources: list[tuple[Path, Format, str]]) -> TrajectoryStore:
    """The run's log with all tasks of the files in its splits. Reads the files once, for their tasks alone."""
    meta = {"imported": True, "solved_at": settings.solved_at, "masked": settings.mask}
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
            tasks.add(item.episode.task_id)
        else:
            first = first or item
    if not tasks:
        why = f"no record is an episode; the first is refused: {first}" if first else "the files hold no records"
        raise UserError(f"nothing to import: {why}")
    new = tasks - {task for split in there.splits.values() for task in split} if there is not None else tasks
    held = heldout_tasks(new, settings.heldout)
    splits = {"train": sorted(new - held), "heldout": sorted(held)}
    if there is None:
        return TrajectoryStore.create(run.log, {k: v for k, v in splits.items() if v}, meta)
    there.add_tasks({split: names for split, names in splits.items() if names})
    return there


def _append(
    run: RunFolder, settings: ImportSettings, sources: list[tuple[Path, Format, str]], store: TrajectoryStore
) -> Report:
    report = Report()
    masking = Masking(_key(run)) if settings.mask else None
    known = set(store.ids())
    with store.writer() as writer, (run.path / REFUSED).open("w", encoding="utf-8") as refused:
        for item in _items(settings, sources):
            if isinstance(item, Refusal):
                if masking:  # a reason quotes what it found
                    item = replace(item, reason=masking.text(item.reason))
                refused.write(json.dumps(asdict(item) | {"file": str(item.file)}) + "\n")
                report.refused += 1
                report.shown += [item] if len(report.shown) < _SHOWN else []
                continue
            report.found += 1
            report.left_out.update(item.left_out)
            if item.episode.id in known:
                continue
            known.add(item.episode.id)
            episode = judged(item.episode, settings.solved_at)
            report.added += 1
            report.paid += episode.turns != item.episode.turns
            writer.add(masking.masked(episode) if masking else episode)
    if masking:
        report.masks = dict(masking.found)
    return report


def _key(run: RunFolder) -> bytes:
    """The run's own, so that a second import gives the same secret the same mask."""
    path = run.path / KEY
    if not path.exists():
        write_atomically(path, secrets.token_hex(32))
        path.chmod(0o600)
    return path.read_bytes()


def _covered(store: TrajectoryStore) -> Coverage:
    split_of = {task: split for split, tasks in store.splits.items() for task in tasks}
    coverage = Coverage()
    for episode in store.read(require_actions=False):
        coverage.add(episode, split_of[episode.task_id])
    return coverage


def told(report: Report, coverage: Coverage) -> Iterator[str]:
    """What an import did and what the log covers now, line by line."""
    found = coverage.to_json()
    yield ""
    again = report.found - report.added
    yield f"{report.added} episodes added" + (f", {again} were in the log already" if again else "")
    if report.refused:
        yield f"{report.refused} records refused, all of them in {REFUSED}:"
        yield from (f"  {refusal}" for refusal in report.shown)
    if report.left_out:
        names = ", ".join(f"{name} ({count})" for name, count in report.left_out.most_common(8))
        yield f"fields without a place in the log, left out: {names}"
    if report.masks is None:
        yield "secrets are not masked: imports.mask=false"
    else:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.masks.items())) or "none found"
        yield f"secrets masked: {kinds}; imports.mask=false keeps them"
    if report.paid:
        yield f"{report.paid} episodes state success and no reward: it is the last turn's reward now, 1 or 0"
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
    yield ""
    missing = found["missing"]
    yield from ("missing for dreams:", *(f"  {line}" for line in missing)) if missing else ("nothing is missing",)


def following(config: Config, coverage: Coverage) -> Iterator[str]:
    """The commands that come next, with limits that the log would not fit raised to what it needs.

    Tokens are guessed: models from scratch write about two characters by one in the worst of logs.
    """
    needs = (
        ("worldmodel.context", quantile(coverage.episode_sizes), config.worldmodel.context),
        ("policy.context", quantile(coverage.episode_sizes), config.policy.context),
        ("dream.max_tokens", quantile(coverage.observation_sizes), config.dream.max_tokens),
        ("max_action_tokens", quantile(coverage.action_sizes), config.max_action_tokens),
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
    if quantile(coverage.observation_sizes) > _LONG:
        yield "  observations are long: with worldmodel.kind=delta the world model writes only what changes"
    yield " ".join([f"  imagine fit-world-model run={config.run}", *raised])
    yield f"  imagine clone run={config.run} clone.agents=[{agents}]"
    yield f"  imagine train run={config.run}" + ("" if solved_expert else " train.expert_share=0")
    yield f"  imagine audit run={config.run}"
    if raised:
        yield "the run keeps these limits; they are guesses from above, long ones cost time and memory"
