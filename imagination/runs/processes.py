"""Processes that compute the gradients of one training together, as ``torchrun`` starts them.

All run the same command on the same batches. Each computes the loss of some of the rows, and the gradients are added
up: every part of a loss is divided by counts of the whole batch, so that the sum is what one process computes. The
first process works in the run's folder, the others in copies that they remove.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import Store
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor

from imagination.runs.machine import cores
from imagination.settings import UserError

COMMANDS = ("fit-world-model", "clone", "train", "pretrain")
_GRACE = 5.0  # seconds in which all that wait for a process have noticed
T = TypeVar("T")
P = ParamSpec("P")


def rank() -> int:
    """The number of this process among those that train together."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def count() -> int:
    """How many processes train together."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def check(command: str, devices: int, num_nodes: int) -> None:
    """Raises ``UserError``: these processes cannot share the work of this command."""
    started, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    gpus = torch.cuda.device_count()
    if command not in COMMANDS:
        by = f"torchrun starts {started} processes" if started > 1 else "devices, num_nodes or strategy are set"
        raise UserError(f"{by}, and only {', '.join(COMMANDS)} share their work")
    if "WORLD_SIZE" in os.environ and (devices not in (0, here) or num_nodes not in (1, started // here)):
        raise UserError(
            f"devices={devices} num_nodes={num_nodes}, and torchrun has started {here} processes on each of "
            f"{started // here} machines: leave both out"
        )
    if gpus and devices > gpus:
        raise UserError(f"devices={devices}, and this machine has {gpus} GPUs")
    if num_nodes > 1 and not {"WORLD_SIZE", "MASTER_ADDR"} & set(os.environ):
        raise UserError(
            f"num_nodes={num_nodes}: set MASTER_ADDR to the first machine's address on each of them, or start "
            "with torchrun (docs/gpus.md)"
        )


def start(words: Sequence[str], devices: int, num_nodes: int) -> int:
    """Runs the command in as many processes by torch's elastic launcher; its exit code. Raises ``UserError``: a process
    died.
    """
    devices, address = max(1, devices), os.environ.get("MASTER_ADDR")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // devices)))
    launch = LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=devices,
        run_id="imagination",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0" if address is None else f"{address}:{os.environ.get('MASTER_PORT', '29500')}",
        max_restarts=0,
    )
    try:
        elastic_launch(launch, sys.executable)("-m", "imagination", *words)
    except SignalException:
        return 130
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        if failure.exitcode == 2:  # it has said why
            return 2
        how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        raise UserError(f"process {number} died ({how}), and the others were ended") from error
    return 0


@contextmanager
def joined(folder: Path, wait_minutes: float) -> Iterator[Path]:
    """Connects this process with the others, and gives the folder to work in: the run's in the first process, in others
    a copy of it, and these say nothing but their errors.

    Raises:
        UserError: a process did not answer in time. ``SystemExit``: another process says so.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, number, size = next(distributed.rendezvous("env://"))
    limit = timedelta(minutes=wait_minutes)
    distributed.init_process_group(backend, store=store, rank=number, world_size=size, timeout=limit)
    try:
        with tempfile.TemporaryDirectory(prefix="imagination-") as place, open(os.devnull, "w") as nowhere:
            distributed.barrier()  # each has written down the settings
            if rank():
                large = shutil.ignore_patterns("corpus", "*.shards")  # read where they are
                folder = shutil.copytree(folder, Path(place) / folder.name, ignore=large)
            distributed.barrier()
            with redirect_stdout(nowhere if rank() else sys.stdout), redirect_stderr(nowhere if rank() else sys.stderr):
                yield folder
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        _blame(store, number, size, wait_minutes, error)
    finally:
        distributed.destroy_process_group()


def _blame(store: Store, number: int, size: int, wait_minutes: float, error: RuntimeError) -> None:
    """Processes that waited in vain sign up; the first of them names who did not."""
    store.set(f"waits/{number}", "")
    if store.check(["named"]):
        raise SystemExit(2)
    others, deadline = set(range(size)) - {number}, time.monotonic() + _GRACE
    while others and time.monotonic() < deadline:
        others = {other for other in others if not store.check([f"waits/{other}"])}
        time.sleep(0.1)
    if not others:
        raise error
    if number == min(set(range(size)) - others):
        store.set("named", "")
        names = " and ".join(map(str, sorted(others)))
        raise UserError(f"process {names} did not answer for {wait_minutes:g} minutes (wait_minutes); all were ended")
    raise SystemExit(2)


def leave() -> None:
    """Ends all processes but the first: what is left of the command is not shared."""
    if rank():
        raise SystemExit(0)


def dealt(tokens: Sequence[int]) -> list[list[int]]:
    """Indices of rows for each process, by the tokens of each: the longest first, each to who has fewest so far."""
    rows, load = [list[int]() for _ in range(count())], [0] * count()
    for row in sorted(range(len(tokens)), key=lambda row: -tokens[row]):
        least = load.index(min(load))
        rows[least].append(row)
        load[least] += tokens[row]
    return [sorted(own) for own in rows]


def missing_passes(passes: Sequence[Sequence[object]]) -> int:
    """How many more passes than this process some other one makes, of ``passes`` by process."""
    return max(map(len, passes)) - len(passes[rank()])


def from_first(make: Callable[P, T]) -> Callable[P, T]:
    """``make``, which only the first process calls; all get what it returns. Raises ``SystemExit``: it raised in the
    first process.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if count() == 1:
            return make(*args, **kwargs)
        shared: list[T | None] = [None]
        broken = True
        try:
            if rank() == 0:
                shared = [make(*args, **kwargs)]
            broken = False
        finally:  # an error is raised here, and the others must not wait for a result
            failed = [broken]
            distributed.broadcast_object_list(failed)
            if not failed[0]:
                distributed.broadcast_object_list(shared)
        if failed[0]:
            raise SystemExit(1)
        assert shared[0] is not None
        return shared[0]

    return call


def gathered(items: Sequence[T]) -> list[T]:
    """The items of all processes."""
    if count() == 1:
        return list(items)
    everything: list[Sequence[T]] = [[] for _ in range(count())]
    distributed.all_gather_object(everything, items)
    return [item for part in everything for item in part]


@torch.no_grad()
def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Adds up the gradients of all processes; one that had no row of a batch adds zeros."""
    if count() == 1:
        return
    trained = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]  # those are summed already
    if not trained:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    for p, gradient in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = gradient.view_as(p)
