"""One process at a time writes into a run folder: it holds the lock of the file ``.lock`` there, as the system knows.

The system releases the lock of a process that has ended, however it did; what the file says is only for who is refused.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from real_envs.errors import UserError, with_disk_errors_named

if sys.platform != "win32":
    import fcntl

_FILE = ".lock"
_PATIENCE = 1.0  # seconds that a holder which is just ending is waited for
# What a stage writes before it has made anything.
_FIRST = {"config.yaml", "overrides.json", "summary.json", "mask.key", "log/manifest.json", _FILE}
_held: dict[Path, int] = {}  # open lock files of this process, by folder


@contextmanager
def locked(folder: Path, stage: str) -> Iterator[None]:
    """Keeps other processes from writing into ``folder``, which is made; this one may lock it again within.

    A new folder goes again where the stage was refused before it had made anything.

    Raises:
        UserError: another process writes there, the disk is full or read-only, or there can be no such folder.
    """
    place = folder.resolve()
    if place in _held:
        yield
        return
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    with with_disk_errors_named(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _held[place] = _lock(folder, stage)
        except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
            raise UserError(f"{folder} cannot be a run's folder: {error.filename}: {error.strerror}") from error
        except (OSError, UserError):
            _remove_empty(new)
            raise
        try:
            with with_disk_errors_named(folder):
                yield
        except UserError:
            if new and _holds_nothing(folder):
                shutil.rmtree(folder, ignore_errors=True)
                _remove_empty(new[1:])
            raise
        finally:
            with suppress(OSError):  # the folder is gone, or the disk is read-only by now
                (folder / _FILE).unlink(missing_ok=True)
            os.close(_held.pop(place))


def made(folder: Path) -> dict[str, int]:
    """When each file of the folder was written, but for those that a stage writes before it has made anything."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.stat().st_mtime_ns for name, path in files.items() if name not in _FIRST}


def is_locked(folder: Path) -> bool:
    """Whether another process writes into ``folder``."""
    if sys.platform == "win32" or folder.resolve() in _held:
        return False
    try:
        with (folder / _FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a disk without locks
        return False
    return False


def _lock(folder: Path, stage: str) -> int:
    """The open lock file. It is removed before it is released, so one that was locked may be no longer there."""
    path, until = folder / _FILE, time.monotonic() + _PATIENCE
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 1000).decode(errors="replace")
            os.close(file)
            if time.monotonic() > until:
                raise UserError(_refusal(folder, holder)) from None
            time.sleep(0.05)
            continue
        except OSError as error:  # some network disks have no locks
            print(
                f"note: {folder} cannot be locked ({error.strerror}); see to it that no other stage writes there",
                file=sys.stderr,
            )
        if path.exists() and path.stat().st_ino == os.fstat(file).st_ino:
            break
        os.close(file)
    now = datetime.now().astimezone().isoformat(" ", "seconds")
    os.ftruncate(file, 0)
    os.write(
        file, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "stage": stage, "since": now}).encode()
    )
    return file


def _refusal(folder: Path, holder: str) -> str:
    try:
        by = "`imagine {stage}` since {since} (process {pid} on {host})".format(**json.loads(holder))
    except (ValueError, KeyError, TypeError):  # it is just about to write it
        by = "another process"
    return f"{folder} is being written by {by}; wait until that ends, or take another run="


def _holds_nothing(folder: Path) -> bool:
    """Whether there is no file but ``_FIRST`` and empty ones."""
    inside = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    return {path.relative_to(folder).as_posix().removesuffix(".tmp") for path in inside} <= _FIRST


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):  # another run is there by now
        for folder in folders:
            folder.rmdir()


def _forget_in_a_fork() -> None:
    """A forked process would hold the lock of its parent beyond that one's end."""
    for file in _held.values():
        os.close(file)
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_in_a_fork)
