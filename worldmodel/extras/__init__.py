"""World models that no policy dreams in: screens, and synthetic transitions of a critic (SynthER). They need diffusers.

Nothing heavy is imported here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from real_envs.errors import UserError


def need_diffusers(wanted: str) -> None:
    """Raises ``UserError`` where diffusers, which the setting ``wanted`` takes, is not installed."""
    if importlib.util.find_spec("diffusers") is None:
        raise UserError(f"{wanted} needs the package diffusers: pip install 'imagination[diffusion]'")


@contextmanager
def loading(folder: Path, what: str, command: str) -> Iterator[None]:
    """Turns errors of the libraries into one that says that the folder holds no model of ``what``; ``command`` makes
    one.

    Raises:
        UserError: the folder is not there, not whole, or of pickles, which can hold code and are not opened.
    """
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        raise UserError(
            f"{folder} holds no model of {what} that can be opened ({lines[0] if lines else type(error).__name__}); "
            f"fit one with `{command}`"
        ) from error


__all__ = ["loading", "need_diffusers"]
