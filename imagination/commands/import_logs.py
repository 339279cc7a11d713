from __future__ import annotations

import gc
import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from imagination.commands.label_outcomes import OutcomeLabels
from imagination.evaluation.retrieval_baseline import CHARACTERS, looked_up, tasks_to_look_at
from imagination.runs.lifecycle import run_stage
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError
from imagination.settings.compose import command, listed
from real_envs.errors import printable
from real_envs.files import write_atomically
from real_envs.importers.coverage import Coverage, quantile
from real_envs.importers.drafts import LABELS, Reading
from real_envs.importers.formats import AUTO, Imported, LogFile, RejectedRecord, log_files, read
from real_envs.importers.masking import Masking
from real_envs.importers.outcomes import with_outcome
from real_envs.importers.splits import HELDOUT, TRAIN, heldout_tasks
from real_envs.importers.tables import COLUMNS, Tables
from real_envs.store import MANIFEST, Staging, TrajectoryStore
from real_envs.trajectory import Trajectory
from worldmodel.evaluation.proportions import interval, number

COVERAGE, REFUSED, KEY = "coverage.json", "refused.jsonl", "mask.key"
_INCOMING = "incoming"  # folder of episodes that are not in the log yet
_SHOWN_FILES, _SHOWN_REFUSALS, _KINDS = 20, 5, 1000  # on the terminal; kinds of refusals that are told apart
_BATCH = 64  # episodes whose outcomes are decided at a time
_LONG, _LONGEST = 1000, 8192  # characters of an observation; tokens of a context that a machine can be asked for


def import_logs(config: Config, folder: Path) -> None:
    """Import logged episodes of your own, in place of collect.

    usage: imagine import [<format>] <file or folder> ... run=<name>

    Reads logged episodes into the run's log: training tasks, and a share of tasks that is held out. What
    cannot be read is named (file, record, field), counted and left out. Reading a file again adds nothing
    twice. Secrets are masked. It says what the log covers and what it lacks to be dreamed on.

    formats:
      auto         the default: says which of these it sees, and why
      openai       chat messages with tool calls, of OpenAI, Anthropic, verifiers, tau2-bench;
                   Claude Code, Codex, LangChain, Gemini, AI SDK, OpenHands, Inspect,
                   smolagents, ATIF, AutoGen, ChatGPT's export
      traces       spans of LangSmith, Langfuse, OpenTelemetry, OpenAI's Agents SDK, LiteLLM
      aider        Aider's .aider.chat.history.md
      react        printed 'Action:' and 'Observation:', in text or a notebook
      browser-use  folders of history.json and result.json; give the run's folder
      minari       Minari's datasets with text spaces, or discrete ones that imports.names names
      intercode    parallel arrays in turn_history; a reward is the score so far
      commands     '> action' lines with the answers below them
      agentgym     conversations of from, value and loss, of ShareGPT, too
      swe-agent    files .traj
      huggingface  Parquet or JSON lines with messages, or with columns that imports.mapping names
      jsonl        our own JSON lines: task_id, start, turns of action, observation, reward

    After it: `imagine fit-world-model`, `imagine clone`, `imagine train`, `imagine audit` with the same run=.

    Reads: the files that you name
    Writes: log/, coverage.json, refused.jsonl, mask.key

    Examples:
        imagine import my-log.jsonl run=mine
        imagine import openai runs/*.json run=mine imports.solved_at=0.8 imports.heldout=0.1
        imagine import huggingface a.parquet run=mine imports.mapping.action=cmd imports.mapping.start=goal ...

    Raises:
        UserError: there are no files, one cannot be read or is in no known format, all records are refused, or the
            run's log is of a world or of other settings.
    """
    settings = config.imports
    if not settings.files:
        raise UserError("no files are named; write `imagine import my-log.jsonl run=...`")
    format = Tables.name if "action" in settings.mapping and settings.format == AUTO else settings.format
    listed = [file for name in settings.files for file in log_files(format, Path(name))]
    files = [file for file in listed if isinstance(file, LogFile)]
    _check_mapping(settings.mapping, files)
    for file in files[:_SHOWN_FILES]:
        print(printable(f"{file.path}: {file.format.name}, as {file.reason}"))
    if more := Counter(file.format.name for file in files[_SHOWN_FILES:]):
        print(f"and {more.total()} more: {', '.join(f'{count} {name}' for name, count in more.most_common())}")
    opened = run_stage(config, folder, "import", models=False)
    with opened as run, closing(OutcomeLabels(settings, run.path)) as labels:
        importing = _Import(config, run, files, labels)
        try:
            gc.disable()  # a log is many objects and no circles; see ``_add``
            report, coverage, written = importing.run([file for file in listed if isinstance(file, RejectedRecord)])
        finally:
            gc.enable()
            importing.incoming.discard()
    lines = (*report.lines(coverage), *labels.lines(), *coverage_lines(coverage, written))
    print(*map(printable, (*lines, *next_commands(config, coverage))), sep="\n")


def _check_mapping(mapping: Mapping[str, str], files: list[LogFile]) -> None:
    """Raises ``UserError`` for a column that nothing would read."""
    if strange := mapping.keys() - set(COLUMNS):
        raise UserError(f"imports.mapping names '{min(strange)}'; known are {', '.join(COLUMNS)}")
    of_turns = sorted(mapping.keys() - set(LABELS))
    if of_turns and "action" not in mapping:
        raise UserError(
            f"imports.mapping.{of_turns[0]} does nothing without imports.mapping.action and imports.mapping.observation"
        )
    other = next((file for file in files if file.format.name != Tables.name), None)
    if of_turns and other:
        raise UserError(
            f"imports.mapping.{of_turns[0]} does nothing in the format {other.format.name}, in which {other.path} is "
            f"read; there are {', '.join(LABELS)}, or `imagine import {Tables.name}`"
        )


@dataclass(slots=True)
class ImportReport:
    """What an import did."""

    added: int = 0  # episodes that the log did not have yet
    known: int = 0  # episodes that it had
    rewards_added: int = 0  # episodes whose success became their last reward
    refused: int = 0  # records that are no episode
    refusals: Alike = field(default_factory=lambda: Alike())
    unknown: list[RejectedRecord] = field(default_factory=list)  # files of folders that are in no known format
    left_out: Counter[str] = field(default_factory=Counter)  # records by a field that has no place in the log
    masks: Mapping[str, int] | None = None  # distinct secrets by kind; ``None`` if nothing was masked

    def refuse(self, refusal: RejectedRecord) -> None:
        self.refused += 1
        self.refusals.add(refusal)

    def lines(self, coverage: Coverage) -> list[str]:
        known = f", {self.known} were in the log already" if self.known else ""
        lines = ["", f"{self.added} episodes added{known}"]
        if self.refused:
            lines.append(f"{self.refused} records refused, all of them in {REFUSED}:")
            lines += self.refusals.lines()
        if self.unknown:
            suffixes = Counter(file.file.suffix or "without suffix" for file in self.unknown).most_common(8)
            kinds, alike = ", ".join(f"{suffix} ({count})" for suffix, count in suffixes), Alike()
            for file in self.unknown:
                alike.add(file, file.file.suffix)
            lines.append(f"{len(self.unknown)} files of folders left alone, {kinds}, all of them in {REFUSED}:")
            lines += alike.lines()
        if self.left_out:
            names = ", ".join(f"{name} ({count})" for name, count in self.left_out.most_common(8))
            lines.append(f"fields without a place in the log, left out: {names}")
        if self.masks is None:
            lines.append("secrets are not masked: imports.mask=false")
        else:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.masks.items())) or "none found"
            lines.append(f"secrets masked: {kinds}; imports.mask=false keeps them")
        if self.rewards_added:
            lines.append(
                f"{self.rewards_added} episodes state success and no reward: "
                f"it is the last turn's reward now, {coverage.solved_at:g} or 0"
            )
        return lines


class Alike:
    """Refusals, of which those that say the same are one: the first of them, and how many there are."""

    def __init__(self) -> None:
        self._kinds: dict[object, tuple[RejectedRecord, int]] = {}

    def add(self, refusal: RejectedRecord, where: str = "") -> None:
        """``where``: in place of the file, if it may differ. The fields of the messages of a chat are alike."""
        wording = tuple(re.sub(r"\d+", "0", text) for text in (refusal.field, refusal.reason))
        key: object = (where or refusal.file, wording)
        if key not in self._kinds and len(self._kinds) >= _KINDS:
            key = ""  # a reason may quote the record: not as many as the file has
        first, count = self._kinds.get(key, (refusal, 0))
        self._kinds[key] = first, count + 1

    @property
    def first(self) -> RejectedRecord | None:
        return next((refusal for refusal, _ in self._kinds.values()), None)

    def lines(self) -> list[str]:
        kinds = list(self._kinds.values())
        more = sum(count for _, count in kinds[_SHOWN_REFUSALS:])
        lines = [f"  {first}{f' ({count} alike)' if count > 1 else ''}" for first, count in kinds[:_SHOWN_REFUSALS]]
        return [*lines, *([f"  and {more} others"] if more else [])]


class _Import:
    """One import. The files are read once: episodes wait in ``incoming`` until the held-out tasks are known.

    Only a goal or a judge, which is measured before it decides anything, reads them twice.
    """

    def __init__(self, config: Config, run: RunFolder, files: list[LogFile], labels: OutcomeLabels) -> None:
        self.incoming = Staging(run.log.with_name(_INCOMING))
        self._run, self._settings, self._files, self._labels = run, config.imports, files, labels
        self._masking = Masking(_mask_key(run)) if config.imports.mask else None
        self._stated = set[str]()  # ids that records state

    def run(self, unknown: list[RejectedRecord]) -> tuple[ImportReport, Coverage, dict[str, Any]]:
        """Imports, and writes ``coverage.json``, which is returned as well; raises as ``import_logs`` does."""
        settings, labels = self._settings, self._labels
        meta = {"imported": True, "solved_at": settings.solved_at, "masked": settings.mask, "judged_by": labels.by}
        earlier = _earlier_log(self._run, meta)
        coverage = Coverage(solved_at=1.0 if settings.solved_at is None else settings.solved_at)
        stored: dict[str, int] = {}
        if earlier is not None and earlier.ids():
            for episode in earlier.read(require_actions=False):
                coverage.count(episode)
                stored[episode.id] = _content_hash(episode)
        if labels.by is not None:
            for item in self._items():
                if isinstance(item, Imported):
                    labels.offer(self._masked(with_outcome(item.episode, settings.solved_at)))
            labels.check()
        report = ImportReport(unknown=[self._masked_refusal(file) for file in unknown])
        tasks = self._read(report, coverage, stored)
        store = self._split(tasks, meta, earlier, coverage)
        store.adopt(self.incoming)
        if labels.held_back and not store.ids():
            raise UserError(f"no episode was judged, and none is added: {labels.reason}")
        return report, coverage, write_coverage(self._run.path, store, coverage, labels.to_json())

    def _items(self) -> Iterator[Imported | RejectedRecord]:
        reading = Reading(**{option.name: getattr(self._settings, option.name) for option in fields(Reading)})
        self._stated = set()
        for file in self._files:
            yield from read(file.path, file.format, reading, self._stated)

    def _masked(self, episode: Trajectory) -> Trajectory:
        return self._masking.masked(episode) if self._masking else episode

    def _masked_refusal(self, refusal: RejectedRecord) -> RejectedRecord:
        """A reason quotes the record."""
        return replace(refusal, reason=self._masking.text(refusal.reason)) if self._masking else refusal

    def _is_other(self, episode: Trajectory, known: int | None) -> bool:
        """Whether a stored episode of the same id says something else. Masks are made only where texts differ."""
        # an id that the log does not state is a hash
        same = known is None or episode.id not in self._stated or known == _content_hash(episode)
        return not same and known != _content_hash(self._masked(episode))

    def _read(self, report: ImportReport, coverage: Coverage, stored: dict[str, int]) -> set[str]:
        """The tasks of the files. New episodes, with ids that ``stored`` lacks, go to ``incoming`` and ``coverage``."""
        tasks: set[str] = set()
        starts = coverage.starts
        batch: list[Trajectory] = []
        with (self._run.path / REFUSED).open("w", encoding="utf-8") as refused:
            refused.writelines(map(_row, report.unknown))
            for item in self._items():
                if isinstance(item, Imported) and self._is_other(item.episode, stored.get(item.episode.id)):
                    reason = f"is '{item.episode.id}', like that of another episode of the log"
                    item = RejectedRecord(item.file, item.record, "id", reason)
                if isinstance(item, RejectedRecord):
                    item = self._masked_refusal(item)
                    refused.write(_row(item))
                    report.refuse(item)
                    continue
                episode = item.episode
                tasks.add(episode.task_id)
                if starts.is_new(episode.task_id, episode.start):
                    starts.add(episode.task_id, self._masking.text(episode.start) if self._masking else episode.start)
                report.left_out.update(item.left_out)
                if episode.id in stored:
                    report.known += 1
                    continue
                stored[episode.id] = 0  # no other record of these files states it
                batch.append(self._masked(episode))
                if len(batch) == _BATCH:
                    self._add(batch, report, coverage)
                    batch = []
            self._add(batch, report, coverage)
        if not tasks:
            refusal = report.refusals.first
            first = refusal and f"all records are refused; the first: {refusal}"
            raise UserError(f"nothing to import: {first or 'the files hold no records'}")
        if self._masking:
            report.masks = self._masking.counts
        return tasks

    def _add(self, episodes: list[Trajectory], report: ImportReport, coverage: Coverage) -> None:
        for labelled in self._labels.label(episodes):
            episode = with_outcome(labelled, self._settings.solved_at)
            report.added += 1
            report.rewards_added += [turn.reward for turn in episode.turns] != [turn.reward for turn in labelled.turns]
            self.incoming.add(episode)
            coverage.count(episode)
        gc.collect(0)  # of those made since the last time, so it costs nothing

    def _split(
        self, tasks: set[str], meta: Mapping[str, object], earlier: TrajectoryStore | None, coverage: Coverage
    ) -> TrajectoryStore:
        """The run's log with all tasks of the files in its splits, which ``coverage`` knows afterwards."""
        starts = coverage.starts
        before = {task: split for split, names in (earlier.splits.items() if earlier else ()) for task in names}
        for task, start in earlier.starts() if earlier else ():
            starts.add(task, start)
        new = tasks - before.keys()
        held_out = heldout_tasks(new, self._settings.heldout, starts.groups(), before)
        splits = {TRAIN: sorted(new - held_out), HELDOUT: sorted(held_out)}
        splits = {split: names for split, names in splits.items() if names}
        if earlier is None:
            store = TrajectoryStore.create(self._run.log, splits, meta)
        else:
            store = earlier
            store.add_tasks(splits)
        coverage.split_of = {task: split for split, names in store.splits.items() for task in names}
        return store


def _earlier_log(run: RunFolder, meta: Mapping[str, object]) -> TrajectoryStore | None:
    """The run's log, where it has one. Raises ``UserError``: it was not imported, or with other settings."""
    if not (run.log / MANIFEST).exists():
        return None
    log = TrajectoryStore.open(run.log)
    if not log.meta.get("imported"):
        raise UserError(f"{run.log} was not imported, and further logs would change its world; use another run=")
    if changed := {key: log.meta.get(key) for key, value in meta.items() if log.meta.get(key) != value}:
        raise UserError(f"{run.log} was imported with {changed}; import with the same settings, or use another run=")
    return log


def _content_hash(episode: Trajectory) -> int:
    """A short digest of what was said and done; of success and rewards the log may know more than the record."""
    return hash((episode.start, *((turn.action, turn.observation) for turn in episode.turns)))


def _row(refusal: RejectedRecord) -> str:
    return json.dumps(asdict(refusal) | {"file": str(refusal.file)}) + "\n"


def _mask_key(run: RunFolder) -> bytes:
    """The run's own, so that a second import gives the same secret the same mask."""
    path = run.path / KEY
    if not path.exists():
        write_atomically(path, secrets.token_hex(32))
        path.chmod(0o600)
    return path.read_bytes()


def write_coverage(
    folder: Path, store: TrajectoryStore, coverage: Coverage, outcomes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Writes ``coverage.json``, which is returned: the counts, and the retrieval baseline for tasks never seen.

    The baseline (``looked_up``) is of a sample of a large log, and reads no held-out task. ``outcomes`` are those of
    ``OutcomeLabels.to_json``.
    """
    train = store.splits.get(TRAIN, ())
    chosen = tasks_to_look_at({task: coverage.tasks[task] for task in train})
    chosen &= tasks_to_look_at({task: coverage.read_sizes[task] for task in train}, CHARACTERS)
    log = sorted(store.of_tasks(chosen), key=lambda t: t.id)
    baseline = looked_up(log, coverage.starts.groups(), sampled=len(chosen) < len(train))
    written = coverage.to_json() | {"looked_up": baseline, "judge": outcomes}
    write_atomically(folder / COVERAGE, json.dumps(written, indent=1) + "\n")
    return written


def coverage_lines(coverage: Coverage, written: Mapping[str, Any]) -> list[str]:
    """The report on a log; ``written`` is its ``coverage.json``."""
    rewards, lengths, success = written["rewards"], written["turns_per_episode"], written["success"]
    left_out = [f"{kind} ({count})" for kind, count in written["left_out"].items()]
    splits = ", ".join(f"{count} {split}" for split, count in written["tasks"].items())
    lines = [
        "",
        f"the log: {coverage.episodes} episodes of {len(coverage.tasks)} tasks ({splits}), {coverage.turns} turns",
        f"  turns per episode  {lengths['least']} to {lengths['most']}, median {lengths['median']}",
        f"  distinct           {written['distinct_actions']} actions, {written['distinct_observations']} observations",
        f"  rewards            {rewards['turns']} turns state one, {rewards['turns_not_zero']} of them not 0, "
        f"{rewards['of_these_at_the_end']} of these at the end",
        f"  success            known in {success['known']} episodes, {success['solved']} solved",
        f"  ends               {coverage.terminated} episodes ended by the world, {coverage.failed} broke",
        f"  refused actions    {coverage.invalid} turns",
        f"  parts left out     {', '.join(left_out) or 'none'}",
    ]
    if (same := written["determinism"]["same_answer"]) is not None:
        lines.append(f"  determinism        {same:.1%} of turns whose state and action occur more than once")
    lines.append(f"  duplicates         {written['duplicate_turns']} turns")
    lines.append(f"  held out           {written['heldout_turns_in_train']} of its turns are in training tasks, too")
    if (baseline := written["looked_up"]) is not None:
        share, between, turns = (baseline["exact"][key] for key in ("value", "ci95", "n"))
        sample = f", of a sample of {baseline['episodes']} episodes" if baseline["sampled"] else ""
        lines.append(
            f"  looked up          {number(share)} {interval(between)} of {turns} turns are answered rightly by the "
            f"most similar turn of another task{sample}"
        )
    if (near := written["near_duplicates"])["tasks"]:
        lines.append(
            f"  near-duplicates    {near['tasks']} tasks in {near['groups']} groups begin nearly alike and are kept "
            f"together; split one by one, {near['leaks_if_split_by_task']} held-out ones would duplicate a "
            "training task"
        )
    missing = [f"  {line}" for line in written["missing"]]
    return [*lines, "", *(["missing for dreams:", *missing] if missing else ["nothing is missing"])]


def next_commands(config: Config, coverage: Coverage) -> list[str]:
    """The commands that come next, with limits that the log would not fit raised to what it needs.

    Tokens are estimated: models from scratch write about two characters by one in the worst of logs.
    """
    episode, action = quantile(coverage.episode_sizes), quantile(coverage.action_sizes)
    observation = quantile(coverage.observation_sizes)
    longest = max(2 * config.max_action_tokens, 128 * math.ceil(action / 128))
    dreamed = config.dream.max_turns * longest + 2  # else train would refuse: the actions of a dream have to fit
    needs = (
        ("worldmodel.context", episode, config.worldmodel.context),
        ("policy.context", max(episode, dreamed), config.policy.context),
        ("dream.max_tokens", observation, config.dream.max_tokens),
        ("max_action_tokens", action, config.max_action_tokens),
    )
    raised = [
        f"{key}={min(64 * math.ceil(size / 2 / 64), _LONGEST)}"
        for key, size, limit in needs
        if min(size / 2, _LONGEST) > limit
    ]
    agents = listed(agent for agent, _ in coverage.agents.most_common(3))
    # what all of them solved makes the best clone to dream with: docs/results.md, "Other things to do with a log"
    solved = len(coverage.agents) <= 3 and 20 <= coverage.solved < coverage.episodes
    imitated = [f"clone.agents={agents}", *(["clone.solved_only=true"] if solved else [])]
    has_expert = "expert" in coverage.agents and coverage.solved
    goal = [] if coverage.rewarded_turns else ["worldmodel.goal.observation=PATTERN"]
    lines = ["", "next:"]
    if observation > 2 * _LONGEST:
        lines.append(
            f"  observations of {observation:,} characters are too long for a small model; "
            "fit-world-model will refuse them: import shorter ones, such as without what no action changes"
        )
    elif observation > _LONG:
        lines.append("  observations are long: with worldmodel.kind=delta the world model writes only what changes")
    lines += [
        f"  {command('fit-world-model', config, *raised, *goal)}",
        f"  {command('clone', config, *imitated)}",
        f"  {command('train', config, *([] if has_expert else ['train.expert_share=0']))}",
        f"  {command('audit', config)}",
    ]
    if raised:
        lines.append("the run keeps these limits; they are rounded up: lower them to save time and memory")
    return lines
