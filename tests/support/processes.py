"""Whether a process, of whosoever, still runs, what runs below it, and its memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def two_train(module: str, folder: Path, seconds: float = 300) -> None:
    """Runs ``python -m module folder`` in two processes of one training, as ``torchrun`` does; neither may fail."""
    with socket.socket() as free:
        free.bind(("", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    shared = {**os.environ, **address, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, str(folder)]
    logs = [folder / f"errors-{rank}" for rank in range(2)]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL, stderr=log.open("w"),
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(seconds) == 0, log.read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def below(process: int) -> list[int]:
    """All living descendants, found anew from the parents that /proc tells."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it ended meanwhile
            continue
        if state != "Z":
            parents[int(entry.name)] = int(parent)
    family = [process]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family[1:]


def resident(process: int) -> int:
    """Memory, in kB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines() if alive(process) else []
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)


def proportional(process: int) -> int:
    """Memory in kB, of which what several processes share is divided among them, so that sums count it once."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # it ended meanwhile
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
