"""Does the simulation of players (``imagine scale-sim``) say how long real trainings with one and two players take?

    imagine demo preset=tiny run=tiny
    python -m tests.benchmarks.scale_simulation --run outputs/tiny

Two trainings without players, the second of half as many groups, give what a round of turns and what learning takes.
From these alone, trainings with players are simulated; then they are run. All trainings play the same dreams, with one
thread a process. Each is done several times, in turns, and the fastest counts, as other work on the machine only ever
makes one slower. The first update, in which players load and warm up, does not count.

Prints a line a training and writes ``<out>/scale-simulation.json``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from imagination.commands.experiments.scale_sim import played_as
from imagination.runs.run_folder import RunFolder
from imagination.scale.dispatch import groups_at_once
from imagination.scale.simulation import Workload, simulate
from tests.benchmarks.measure import arguments

GROUPS, UPDATES = 16, 16
PLAYERS = [(1, 0), (2, 0), (1, 1), (2, 1)]  # players and max_staleness


@dataclass(frozen=True)
class Measured:
    seconds: float  # an update, without the first
    turns: float  # an update
    pace: float  # turns a second while they are played
    work: Workload


def trained(source: Path, folder: Path, *words: str) -> Measured:
    """A training of a copy of a run, in a process of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("checkpoints", "rollouts.jsonl", "metrics.jsonl"))
    command = ["train", f"run={folder.name}", f"output={folder.parent}", "preset=tiny", "logger=none"]
    command += ["tripwires.enabled=false", f"train.updates={UPDATES}", "train.checkpoint_every=1000", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "imagination", *command], check=True, env=environment, capture_output=True)
    run = RunFolder(folder, 0)
    updates = run.metrics("train")
    seconds = (updates[-1]["time"] - updates[0]["time"]) / (len(updates) - 1)
    turns = fmean(update["turns"] for update in updates)
    return Measured(seconds, turns, run.summary["speed"]["turns_per_second"], played_as(folder))


def workload(whole: Measured, half: Measured) -> Workload:
    """From trainings without players: a round takes some seconds and some more for each episode in it."""
    plays = [m.turns / m.pace for m in (whole, half)]
    rounds = max(whole.work.turns)
    each = (plays[0] - plays[1]) / (whole.turns - half.turns)
    fixed = max(0.0, plays[0] - each * whole.turns) / rounds
    return replace(
        whole.work,
        round_seconds=lambda rows: fixed + each * rows,
        learn_seconds=max(0.0, whole.seconds - plays[0]),
    )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="a run of the preset tiny, with its clone")
    parser.add_argument("--times", type=int, default=3, help="that each training is done")
    options = parser.parse_args()
    designs = {"whole": (GROUPS, ""), "half": (GROUPS // 2, "")}
    designs |= {f"{p} {s}": (GROUPS, f"scale=ray scale.players={p} train.max_staleness={s}") for p, s in PLAYERS}
    best: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(1 if options.quick else options.times):
            for name, (groups, words) in designs.items():
                measured = trained(options.run, Path(scratch) / "run", f"train.groups={groups}", *words.split())
                print(f"{name}: {measured.seconds:.3f} s, {measured.pace:.0f} turns/s", flush=True)
                best[name] = min(measured, best.get(name, measured), key=lambda m: m.seconds)
    work, rows = workload(best["whole"], best["half"]), []
    for players, most in PLAYERS:
        at_once = groups_at_once(64 // work.group_size, GROUPS, most, players)
        simulated, real = simulate(work, players, at_once, most, UPDATES).seconds, best[f"{players} {most}"].seconds
        rows.append({"players": players, "max_staleness": most, "measured": real, "simulated": simulated})
        error = f"{simulated / real - 1:+.0%}"
        print(f"{players} players, staleness {most}: {real:.3f} s, simulated {simulated:.3f} ({error})")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "scale-simulation.json").write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
