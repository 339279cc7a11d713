"""Logs of other people: what a world model of each is worth, and whether the import foretold it.

    python -m tests.benchmarks.logs_table --data ../shared/data
    python -m tests.benchmarks.logs_table --logs webshop_react --shares 100 --seeds 1 fit.steps=400
    python -m tests.benchmarks.logs_table --table

A part is one log, a share of its training tasks (of a seed, a smaller share lies within a larger one) and one seed. Its
held-out tasks are the same for all shares and seeds, and nothing is chosen by them. Each part is a run folder: the log
of its share, ``coverage.json`` with what the import says of that share alone, the fitted world model, and for all
training tasks also a cloned policy and the audit. No part has a simulator, so one turn ahead and open loop are all that
can be measured.

What exists is not done again, and what was interrupted goes on. A part that cannot be made is a line with its reason.
Writes ``<out>/table.md`` after every part. ``--table`` only reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from imagination.commands.audit import audited_before, run_audit
from imagination.commands.clone import clone
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.import_logs import COVERAGE, import_logs
from imagination.evaluation.verdict import show
from imagination.runs.machine import give_back_memory
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.errors import UserError
from real_envs.files import write_atomically
from real_envs.importers.splits import HELDOUT, TRAIN
from real_envs.seeding import derive_seed
from real_envs.store import MANIFEST, TrajectoryStore
from tests.benchmarks.fidelity_table import correlated, correlation
from tests.benchmarks.study import DASH, make_parser, markdown, options_and_settings, run_once, run_parts, write_files
from tests.support.coverage import cover_log
from worldmodel.evaluation.proportions import number

REASON = "reason.txt"  # why a part could not be made
WHOLE = 100  # per cent of the training tasks
TURNS = ("1", "4", "8")  # of an open-loop dream
SETTINGS = (
    *("logger=none", "imports.heldout=0.2", "collect.validation=0"),  # what is not held out is trained on
    *(f"{model}.{size}" for model in ("worldmodel", "policy") for size in ("hidden=96", "layers=3", "mlp=256")),
    *("fit.steps=500", "fit.copying_steps=30", "fit.batch_tokens=2048", "fit.average=0.95"),
    *("clone.steps=60", "clone.copying_steps=0", "clone.batch_tokens=2048", "audit.pairs=60"),
)


@dataclass(frozen=True, slots=True)
class Log:
    """A log that somebody published.

    Attributes:
        files: below the folder of all data, with wildcards.
        settings: limits that its turns need, as ``imagine import`` names them.
    """

    name: str
    files: str
    settings: tuple[str, ...]


LOGS = (
    Log("alfworld_adapt", "*.json", ("max_action_tokens=192",)),
    Log("webshop_react", "*.ipynb", ("dream.max_tokens=384", "max_action_tokens=128")),
    Log(
        "webarena_infinity",
        "gmail",
        ("worldmodel.kind=delta", "dream.max_tokens=8192", "worldmodel.context=8192", "max_action_tokens=256"),
    ),
    Log("intercode", "bash/*/*.json", ("dream.max_tokens=384", "max_action_tokens=192")),
    Log(
        "tau_bench",
        "*.json",
        (
            "imports.system=false",
            "imports.heldout=0.1",
            "dream.max_tokens=1408",
            "max_action_tokens=448",
            "worldmodel.context=3072",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Part:
    """One log, one share of its training tasks, one seed.

    Attributes:
        share: per cent of the training tasks.
        coverage: ``coverage.json`` of the share; ``None`` where it is not there.
        measured: ``world_model.heldout_tasks`` of ``summary.json``, likewise.
        audit: ``audit.json``, likewise; only of all training tasks.
        reason: why the part could not be made; empty where it could.
    """

    log: str
    share: int
    seed: int
    coverage: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None
    audit: Mapping[str, Any] | None = None
    reason: str = ""

    @property
    def foretold(self) -> float | None:
        """Share of turns that looking up another task answers rightly; ``None`` where nothing could be asked."""
        return self.shared["exact"]["value"] if self.shared else None

    @property
    def right(self) -> float | None:
        """Exact match of the world model on held-out tasks."""
        return None if self.measured is None else self.measured["exact_match"]

    @property
    def shared(self) -> Mapping[str, Any]:
        """What the import says of looking up; empty where it says nothing."""
        return (self.coverage or {}).get("looked_up") or {}

    def to_json(self) -> dict[str, Any]:
        """All of it in plain values, of the audit what the table shows."""
        verdict = None if self.audit is None else self.audit["verdict"]
        return {**asdict(self), "audit": verdict, "foretold": self.foretold, "right": self.right}


def main() -> int:
    parser = make_parser(__doc__, "outputs/logs-table", [0])
    names = [log.name for log in LOGS]
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with a folder for each log")
    parser.add_argument("--logs", nargs="+", default=names, choices=names, metavar="LOG", help=" ".join(names))
    parser.add_argument("--shares", type=int, nargs="+", default=[WHOLE, 10, 30], help="per cent of training tasks")
    options, overrides = options_and_settings(parser, "all parts")

    def make(log: Log, share: int, seed: int) -> None:
        folder = options.out / log.name / f"share-{share}" / f"seed-{seed}"
        try:
            make_part(log, options.data, options.out, folder, share, seed, overrides)
        except Exception as error:
            write_atomically(folder / REASON, f"{error}\n")
            raise

    parts = [
        (f"{log.name}, {share} % of its training tasks, seed {seed}", partial(make, log, share, seed))
        for seed, share, log in product(options.seeds, options.shares, LOGS)
        if log.name in options.logs
    ]
    return run_parts(options, parts, lambda: write_table(options.out))


def make_part(log: Log, data: Path, out: Path, folder: Path, share: int, seed: int, overrides: list[str]) -> None:
    """The log of a share, its forecast, the world model, and of all tasks the policy and the audit, as far as missing.

    Raises:
        UserError: the log is not there, or nothing of it fits the settings.
    """
    words = [*SETTINGS, *log.settings, *overrides, f"seed={seed}"]
    config = load_config([*words, f"run={log.name}"], Config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REASON).unlink(missing_ok=True)
    whole = out / log.name / "imported"
    if not (whole / COVERAGE).exists():
        config.imports.files = sorted(str(path) for path in (data / log.name).glob(log.files))
        if not config.imports.files:
            raise UserError(f"{data / log.name} has no {log.files}; name the folder of all logs: --data")
        import_logs(config, whole)
    if not (folder / COVERAGE).exists():
        part = cut(TrajectoryStore.open(whole / "log"), folder / "log", share / WHOLE, seed)
        cover_log(folder, part)
    config.clone.agents = [config.imports.agent]
    run_once(config, folder, fit_world_model, *([clone] if share == WHOLE else []))
    if share == WHOLE and audited_before(config, folder) is None:
        run_audit(config, folder)
        give_back_memory()


def cut(whole: TrajectoryStore, folder: Path, share: float, seed: int) -> TrajectoryStore:
    """A log with a share of the training tasks, chosen by chance, and all held-out ones; episodes as they are."""
    tasks = sorted(whole.tasks(TRAIN), key=lambda task: derive_seed(f"share of a log: {task}", seed))
    chosen = sorted(tasks[: max(1, round(share * len(tasks)))])
    if (folder / MANIFEST).exists():  # half of it, perhaps
        there = TrajectoryStore.open(folder)
    else:
        there = TrajectoryStore.create(folder, {TRAIN: chosen, HELDOUT: whole.tasks(HELDOUT)}, whole.meta)
    known, wanted = there.ids(), {*chosen, *whole.tasks(HELDOUT)}
    with there.writer() as writer:
        for episode in whole.read(require_actions=False):
            if episode.task_id in wanted and episode.id not in known:
                writer.add(episode)
    return there


def write_table(out: Path) -> str:
    """``table.md`` and ``parts.json`` of all parts that are there; what the first says."""
    parts = read_parts(out, [log.name for log in LOGS])
    return write_files(out, table=table(parts), parts=json.dumps([part.to_json() for part in parts], indent=1) + "\n")


def read_parts(out: Path, order: Sequence[str]) -> list[Part]:
    """All parts that are there, in order of logs, shares and seeds."""
    parts = []
    for folder in out.glob("*/share-*/seed-*"):
        share, seed = (int(name.rpartition("-")[2]) for name in (folder.parent.name, folder.name))
        summary = _json(folder / "summary.json") or {}
        reason = (folder / REASON).read_text(encoding="utf-8").strip() if (folder / REASON).exists() else ""
        parts.append(
            Part(
                folder.parent.parent.name,
                share,
                seed,
                _json(folder / "coverage.json"),
                summary.get("world_model", {}).get("heldout_tasks"),
                _json(folder / "audit.json"),
                reason,
            )
        )
    return sorted(parts, key=lambda part: (order.index(part.log), -part.share, part.seed))


def _json(path: Path) -> dict[str, Any] | None:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def table(parts: Sequence[Part]) -> str:
    """The audits, what they say, the forecasts, and how well these rank."""
    return "\n".join([_audits(parts), *_verdicts(parts), "", _forecasts(parts), _ranks(parts)])


def _audits(parts: Sequence[Part]) -> str:
    head = ["log", "seed", "held-out tasks", "exact", "text", "token F1", "reward precision", "reward recall"]
    head += [f"open loop, turn {k}" for k in TURNS] + ["verdict"]
    return markdown(head, [[part.log, part.seed, *_audit_cells(part)] for part in parts if part.share == WHOLE])


def _audit_cells(part: Part) -> list[str]:
    if part.audit is None:
        return [DASH] * (6 + len(TURNS)) + [part.reason or DASH]
    held = part.audit["sets"]["held_out"]
    found = [held["exact"], held["text"], held["token_f1"], held["reward"]["precision"], held["reward"]["recall"]]
    found += [held["drift"]["exact_at"].get(k) for k in TURNS]
    return [str(held["tasks"]), *(DASH if one is None else show(one) for one in found), part.audit["verdict"]["trust"]]


def _verdicts(parts: Sequence[Part]) -> list[str]:
    return [
        f"- {part.log}, seed {part.seed}: {' '.join(part.audit['verdict']['sentences'])}"
        for part in parts
        if part.audit is not None
    ]


def _forecasts(parts: Sequence[Part]) -> str:
    head = ["log", "share", "seed", "training tasks", "training turns", "looked up", "exact on held-out tasks"]
    rows = []
    for part in parts:
        shared, held = part.shared, part.measured
        sizes = [f"{shared[key]:,}" for key in ("tasks", "turns")] if shared else [DASH, DASH]
        cells = [part.log, f"{part.share} %", str(part.seed), *sizes, show(shared["exact"]) if shared else DASH]
        rows.append([*cells, f"{number(part.right)}, n={held['n']:,}" if held else part.reason or DASH])
    return markdown(head, rows)


def _ranks(parts: Sequence[Part]) -> str:
    """How well the forecast, and the number of training turns alone, rank the parts by what was measured."""
    by: dict[str, Callable[[Part], float | None]] = {
        "looked up": lambda part: part.foretold,
        "number of training turns": lambda part: part.shared.get("turns"),
    }
    head = ["ranked by", "Spearman with exact match, over parts", "the same, interval over logs", "mean distance"]
    rows = []
    for title, value in by.items():
        known = [(part.log, value(part), part.right) for part in parts]
        there = [(log, said, right) for log, said, right in known if said is not None and right is not None]
        pairs = [(said, right) for _, said, right in there]
        over_logs = correlation(pairs, cluster=[log for log, _, _ in there])
        apart = sum(abs(said - right) for said, right in pairs) / len(pairs) if pairs else None
        distance = DASH if apart is None or title != "looked up" else f"{apart:.2f}"
        rows.append([title, correlated(correlation(pairs)), correlated(over_logs), distance])
    return markdown(head, rows)


if __name__ == "__main__":
    sys.exit(main())
