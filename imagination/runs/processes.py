"""Processes that compute the gradients of one training together, as ``torchrun`` starts them.

All run the same command on the same batches. Each computes the loss of some of the rows, and the gradients are added
up: every part of a loss is divided by counts of the whole batch, so that the sum is what one process computes. The
first process works in the run's folder, the others in copies that they remove.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, distributed

from imagination.settings import UserError

COMMANDS = ("fit-world-model", "clone", "train")
T = TypeVar("T")
P = ParamSpec("P")


def started() -> int:
    """How many processes were started together; 1 without ``torchrun``."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process among those that train together."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def count() -> int:
    """How many processes train together."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


@contextmanager
def joined(command: str, folder: Path) -> Iterator[Path]:
    """Connects this process with the others, and gives the folder to work in: the run's in the first process, in others
    a copy of it, and these say nothing but their errors.

    Raises:
        UserError: the command is none that processes share.
    """
    if command not in COMMANDS:
        raise UserError(f"torchrun starts {started()} processes, and only {', '.join(COMMANDS)} share their work")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        with tempfile.TemporaryDirectory(prefix="imagination-") as place, open(os.devnull, "w") as nowhere:
            distributed.barrier()  # each has written down the settings
            if rank():
                folder = shutil.copytree(folder, Path(place) / folder.name)
            distributed.barrier()
            with redirect_stdout(nowhere if rank() else sys.stdout), redirect_stderr(nowhere if rank() else sys.stderr):
                yield folder
    finally:
        distributed.destroy_process_group()


def leave() -> None:
    """Ends all processes but the first: what is left of the command is not shared."""
    if rank():
        raise SystemExit(0)


def own(items: Iterable[T]) -> Iterator[T]:
    """The part of ``items`` that this process takes: every n-th, one at a time."""
    return islice(items, rank(), None, count())


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
    trained = [p for p in parameters if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    for p, gradient in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = gradient.view_as(p)
