"""If these fail, a full disk is a traceback, or a fault of ours is taken for one."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from real_envs.errors import UserError, with_disk_errors_named
from tests.support.refusal import refused


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "run/summary.json.tmp")


def copied() -> None:
    """As ``shutil`` raises it: the first name is what was read."""
    raise OSError(errno.ENOSPC, "No space left on device", "/tmp/draft", None, "run/model.ckpt")


def chained() -> None:
    """As torch raises it: from what its writer does after the disk was full."""
    try:
        full()
    finally:
        raise RuntimeError("unexpected pos 64 vs 0")


def in_words() -> None:
    """As safetensors does."""
    raise ValueError("I/O error: No space left on device (os error 28)")


def no_right() -> None:
    raise PermissionError(errno.EACCES, "Permission denied", "log.jsonl")


def _named(raises: Callable[[], None]) -> None:
    with with_disk_errors_named(Path("outputs/mine")):
        raises()


def test_what_a_disk_is_behind_is_one_line_that_names_the_file() -> None:
    refused(lambda: _named(full), "run/summary.json:", "full")
    refused(lambda: _named(copied), "run/model.ckpt:", "full")
    refused(lambda: _named(chained), "run/summary.json:", "full")
    refused(lambda: _named(in_words), "outputs/mine", "full")
    refused(lambda: _named(no_right), "log.jsonl")


def test_other_errors_stay_what_they_are() -> None:
    def no_file() -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file", "x")

    def handled() -> None:
        try:
            no_right()
        except PermissionError:
            raise ValueError("shapes differ")  # noqa: B904

    def said() -> None:
        raise UserError("no log")

    for raises, error in ((no_file, FileNotFoundError), (handled, ValueError), (said, UserError)):
        with pytest.raises(error) as caught:
            _named(raises)
        assert type(caught.value) is error
