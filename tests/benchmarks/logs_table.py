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

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from imagination.commands.audit import audited_before, run_audit
from imagination.commands.clone import clone
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.import_logs import COVERAGE, cover_log, import_logs
from imagination.runs.fingerprint import fingerprint
from imagination.runs.memory import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.errors import UserError, hides_traceback
from real_envs.files import write_atomically
from real_envs.importers.splits import HELDOUT, TRAIN, SimilarTasks
from real_envs.seeding import derive_seed
from real_envs.store import MANIFEST, TrajectoryStore
from tests.benchmarks.arguments import options_and_settings
from tests.benchmarks.logs_parts import REASON, WHOLE, read_parts, table

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [log.name for log in LOGS]
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with a folder for each log")
    parser.add_argument("--out", type=Path, default=Path("outputs/logs-table"))
    parser.add_argument("--logs", nargs="+", default=names, choices=names, metavar="LOG", help=" ".join(names))
    parser.add_argument("--shares", type=int, nargs="+", default=[WHOLE, 10, 30], help="per cent of training tasks")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--table", action="store_true", help="only make the table of what is there")
    options, overrides = options_and_settings(parser, "all parts")
    failed = 0
    parts = [(log, share, seed) for seed in options.seeds for share in options.shares for log in LOGS]
    for log, share, seed in [part for part in parts if part[0].name in options.logs and not options.table]:
        print(f"== {log.name}, {share} % of its training tasks, seed {seed}", flush=True)
        folder = options.out / log.name / f"share-{share}" / f"seed-{seed}"
        try:
            make_part(log, options.data, options.out, folder, share, seed, overrides)
        except Exception as error:
            if not hides_traceback(error):
                raise
            print(f"error: {error}", file=sys.stderr)
            write_atomically(folder / REASON, f"{error}\n")
            failed = 1
        write_table(options.out)
    print(write_table(options.out))
    return failed


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
        cover_log(folder, part, SimilarTasks())
    stages = [("fit_world_model", fit_world_model)] + ([("clone", clone)] if share == WHOLE else [])
    config.clone.agents = [config.imports.agent]
    for name, stage in stages:
        if RunFolder(folder, seed).summary.get("done", {}).get(name) != fingerprint(config, name):
            stage(config, folder)
            give_back_memory()
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
    found = table(parts)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "table.md", found)
    write_atomically(out / "parts.json", json.dumps([part.to_json() for part in parts], indent=1) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
