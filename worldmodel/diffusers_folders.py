"""The optional package diffusers, and folders of its models; nothing heavy is imported here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from real_envs.errors import UserError


def need_diffusers(wanted: str) -> None:
    """
    Args:
        wanted: the setting that takes it.

    Raises:
        UserError: diffusers is not installed.
    """
    if importlib.util.find_spec("diffusers") is None:
        raise UserError(f"{wanted} needs the package diffusers: pip install 'imagination[diffusion]'")


@contextmanager
def opening(folder: Path, what: str, command: str) -> Iterator[None]:
    """What fails within is a folder that holds no model.

    Args:
        what: the model should be of.
        command: makes one.

    Raises:
        UserError: in place of what the libraries raise for a folder that is not there, not whole, or of pickles, which
            can hold code and are not opened.
    """
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        said = str(error).strip().splitlines()
        raise UserError(
            f"{folder} holds no model of {what} that can be opened ({said[0] if said else type(error).__name__}); "
            f"fit one with `{command}`"
        ) from error


__all__ = ["need_diffusers", "opening"]
