"""Does the simulation of players (``imagine scale-sim``) say how long real trainings with one and two players take?

    imagine demo preset=tiny run=tiny
    python -m tests.benchmarks.scale_simulation --run outputs/tiny

Two small trainings with one player, the second of half as many groups, give what a round of turns and what the rest of
an update takes. From these alone, larger ones with one player and with two are simulated; then they are run. All play
dreams of one run, with one thread a process. The first update, in which players load and warm up, does not count.

Other work on the machine makes all of them slower. So the time counts in which neither the learner nor a player (on
average over the players) stood in the kernel's queue for a core (``run delay`` of ``/proc/<pid>/schedstat``), each
training is done several times, in turns, and the fastest counts. The time as it was is printed as well.

Prints a line a training and writes ``<out>/scale-simulation.json``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from imagination.commands.experiments.scale_sim import played_as
from imagination.runs.run_folder import RunFolder
from imagination.scale.dispatch import groups_at_once
from imagination.scale.simulation import Workload, simulate
from tests.benchmarks.measure import arguments

KNOWN, GROUPS, UPDATES = (12, 24), 48, 10
PLAYERS = [(1, 0), (2, 0), (2, 1)]  # players and max_staleness


@dataclass(frozen=True)
class Measured:
    seconds: float  # an update, without the first, while no process waited for a core
    wall: float  # the same as it was
    turns: float  # an update
    pace: float  # turns a second while they are played
    busy: float  # share of the time of its players
    work: Workload


def trained(source: Path, folder: Path, *words: str) -> Measured:
    """A training of a copy of a run, in a process of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("checkpoints", "rollouts.jsonl", "metrics.jsonl"))
    command = ["train", f"run={folder.name}", f"output={folder.parent}", "preset=tiny", "logger=none"]
    command += ["tripwires.enabled=false", f"train.updates={UPDATES}", "train.checkpoint_every=1000", *words]
    process = subprocess.Popen(
        [sys.executable, "-m", "imagination", *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run, queued = RunFolder(folder, 0), list[list[float]]()
    for count in (1, UPDATES):
        while len(run.metrics("train")) < count and process.poll() is None:
            time.sleep(0.02)
        queued.append(seconds_in_queue(process.pid))
    if process.wait():
        raise RuntimeError(f"failed: imagine {' '.join(command)}")
    learner, *players = (after - before for before, after in zip(*queued, strict=True))
    updates = run.metrics("train")
    wall = updates[-1]["time"] - updates[0]["time"]
    share = 1 - (learner + (fmean(players) if players else 0.0)) / wall
    turns, wall = fmean(update["turns"] for update in updates), wall / (UPDATES - 1)
    speed = run.summary["speed"]
    busy = speed.get("players_busy", 1.0)
    return Measured(wall * share, wall, turns, speed["turns_per_second"] / share, busy, played_as(folder))


def seconds_in_queue(pid: int) -> list[float]:
    """That the busiest thread has waited for a core, of the learner and of each of its players."""
    waited = []
    for process in [pid, *sorted(p for p in descendants(pid) if called(p).startswith("ray::_PlayerActor"))]:
        threads = [path.read_text().split() for path in Path(f"/proc/{process}/task").glob("*/schedstat")]
        waited.append(max((int(computed), int(queue)) for computed, queue, _ in threads)[1] / 1e9)
    return waited


def descendants(pid: int) -> list[int]:
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it is gone meanwhile
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    below = [pid]
    for process in below:  # which grows
        below += [child for child, parent in parents.items() if parent == process]
    return below[1:]


def called(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def workload(half: Measured, whole: Measured) -> Workload:
    """Of an update of ``GROUPS``, from smaller ones of one player: a round takes some seconds and some more for each
    episode in it, what is not playing some seconds and some more for each turn.
    """
    fixed, each = fitted((m.turns, m.turns / m.pace) for m in (half, whole))
    base, learned = fitted((m.turns, m.seconds - m.turns / m.pace) for m in (half, whole))
    rounds = max(whole.work.turns)
    turns = whole.turns * GROUPS / KNOWN[1]
    return replace(
        whole.work,
        groups=GROUPS,
        round_seconds=lambda rows: fixed / rounds + each * rows,
        learn_seconds=base + learned * turns,
    )


def fitted(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """What there is at 0, and the slope; neither is negative."""
    (x, y), (x2, y2) = points
    slope = max(0.0, (y2 - y) / (x2 - x))
    return max(0.0, y2 - slope * x2), slope


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="a run of the preset tiny, with its clone")
    parser.add_argument("--times", type=int, default=3, help="that each training is done")
    options = parser.parse_args()
    designs = {f"{n} groups": (n, 1, 0) for n in KNOWN} | {f"{p} {s}": (GROUPS, p, s) for p, s in PLAYERS}
    best: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(1 if options.quick else options.times):
            for name, (groups, players, most) in designs.items():
                words = ("scale=ray", f"train.groups={groups}", f"scale.players={players}")
                measured = trained(options.run, Path(scratch) / "run", *words, f"train.max_staleness={most}")
                line = f"{measured.seconds:.3f} s ({measured.wall:.3f}), {measured.pace:.0f} turns/s"
                print(f"{name}: {line}, players busy {measured.busy:.2f}", flush=True)
                best[name] = min(measured, best.get(name, measured), key=lambda m: m.seconds)
    work, rows = workload(*(best[f"{n} groups"] for n in KNOWN)), []
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
