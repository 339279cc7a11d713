"""Other people's trainers in our dreams: ``make clients``.

Fits a tiny world model, starts ``imagine serve`` of it, and lets each client play there in an environment of its own,
in which nothing of ours is installed. What the client says of its episodes must be what the server counted: rewards
and observations can then have come from nowhere else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagination.commands.clone import clone
from tests.benchmarks.machine import hardware
from tests.support.chat_endpoint import chat_endpoint
from tests.support.imagine_serve import fit_tiny_run, imagine_serve
from tests.support.served import measured, sessions_left
from tests.support.subprocess_server import ROOT
from tests.support.tiny import TASKS, start, tiny_settings

FIT_STEPS, CLONE_STEPS = 300, 100  # so that most dreams are right, and some episodes win
SEEDS = 6  # of verifiers, which starts a process for every turn


def run_client(python: Path, module: str, spec: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What ``tests/peers/<module>.py``, run by ``python``, writes about its episodes.

    Raises:
        CalledProcessError: it failed.
    """
    asked, answered = folder / f"{module}.json", folder / f"{module}-found.json"
    asked.write_text(json.dumps(spec))
    script = ROOT / "tests/peers" / f"{module}.py"
    subprocess.run([str(python), str(script), str(asked), str(answered)], cwd=folder, check=True)
    return dict(json.loads(answered.read_text()))


@dataclass(frozen=True, slots=True)
class Counts:
    """What the server says that it has done."""

    steps: int
    failed: int
    terminated: int

    @classmethod
    def of(cls, address: str) -> Counts:
        found = measured(address)
        return cls(
            int(found["imagination_step_seconds_count",]),
            int(found.get(("imagination_refused_total", "failed"), 0)),
            int(found.get(("imagination_episodes_total", "terminated"), 0)),
        )

    def since(self, before: Counts) -> Counts:
        return Counts(self.steps - before.steps, self.failed - before.failed, self.terminated - before.terminated)


def trl(python: Path, address: str, run: Path, folder: Path) -> None:
    """
    Raises:
        AssertionError: it did not train, or not here.
    """
    before, starts = Counts.of(address), [start(task) for task in TASKS]
    spec = {"address": address, "starts": starts, "copying": 80, "updates": 3, "scratch": str(folder / "trl")}
    found = run_client(python, "dreams_trl", spec, folder)
    assert sessions_left(address) == 0
    done = Counts.of(address).since(before)
    assert (done.steps, done.failed, done.terminated) == (found["steps"], found["failures"], found["terminated"])
    assert done.steps > 0, "no rollout called the tool"
    assert found["updates"] == spec["updates"]
    assert max(found["rewards"]) > 0, "no dream paid"
    assert found["moved"] > 0, "no parameter moved"
    print(f"TRL {found['version']}: {found['updates']} updates, {done} over {found['sessions']} sockets")
    print(f"  mean rewards {found['rewards']}, largest move of a weight {found['moved']:.4f}")


def verifiers(python: Path, address: str, run: Path, folder: Path) -> None:
    """
    Raises:
        AssertionError: its episodes are not those that the server dreamed.
    """
    seeds = list(range(SEEDS))
    tasksets: list[dict[str, Any]] = [
        {"id": "dreams_verifiers", "address": address, "seeds": seeds},
        {"id": "openenv", "base_url": f"http://{address}", "resets": [{"seed": seed} for seed in seeds]},
    ]
    with chat_endpoint(run / "models" / "policy-clone") as endpoint:
        for taskset in tasksets:
            before = Counts.of(address)
            spec = {"endpoint": endpoint, "model": "policy-clone", "taskset": taskset}
            found = run_client(python, "dreams_verifiers", spec, folder)
            assert sessions_left(address) == 0
            done = Counts.of(address).since(before)
            print(f"verifiers {found['version']}, taskset {taskset['id']}: {done}")
            print(f"  rewards {found['rewards']}, turns {found['turns']}, errors {found['errors']}")
            assert len(found["rewards"]) == SEEDS
            broken = [error for error in found["errors"] if "prediction_invalid" in error]
            assert len(broken) == done.failed, "a dream that broke is an error of its episode"
            assert sum(found["rewards"]) == done.terminated, "the corridors pay 1 at their end"
            assert done.steps > 0
            if taskset["id"] == "openenv":  # it plays no empty message, and keeps no count of steps
                assert done.steps + done.failed <= sum(found["turns"])
            else:
                assert (done.steps, done.terminated) == (found["steps"], found["terminated"])
                assert found["errors"] == broken


CLIENTS = {"trl": trl, "verifiers": verifiers}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in CLIENTS:
        parser.add_argument(f"--{name}-python", type=Path, help=f"interpreter of an environment with {name}")
    asked = vars(parser.parse_args())
    pythons = {name: path.absolute() for name in CLIENTS if (path := asked[f"{name}_python"]) is not None}
    if not pythons:
        parser.error("name the interpreter of at least one client")
    print(hardware())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        folder.mkdir()
        fit_tiny_run(folder, FIT_STEPS)
        config = tiny_settings()
        config.clone.steps = CLONE_STEPS
        clone(config, folder)  # the policy that verifiers asks
        with imagine_serve(folder, seconds=3600) as served:
            for client, python in pythons.items():
                begun = time.perf_counter()
                CLIENTS[client](python, served.address, folder, Path(name))
                print(f"  {time.perf_counter() - begun:.0f} s in all")
            assert "Traceback" not in served.log.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
