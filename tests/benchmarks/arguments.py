"""What all benchmarks of runs take: options of their own, and settings of ours wherever they stand between them."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from real_envs.errors import hides_traceback


def options_and_settings(
    parser: ArgumentParser, of: str, words: Sequence[str] | None = None
) -> tuple[Namespace, list[str]]:
    """
    Args:
        of: what the settings are of, for ``--help``.
        words: those of the command line by default.
    """
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help=f"settings of {of}, such as fit.steps=600")
    words = sys.argv[1:] if words is None else words
    settings = [word for word in words if "=" in word and not word.startswith("-")]
    options = parser.parse_args([word for word in words if word not in settings])
    if options.settings:
        parser.error(f"{options.settings[0]} is no setting: write KEY=VALUE")
    return options, settings


def settings_of(world: str, settings: Sequence[str], worlds: Iterable[str]) -> list[str]:
    """Those that are of all worlds, and behind them those of this one, ``<world>:KEY=VALUE``."""
    others = tuple(f"{name}:" for name in (*worlds, world))
    mine = [word for word in settings if not word.startswith(others)]
    return mine + [word.removeprefix(f"{world}:") for word in settings if word.startswith(f"{world}:")]


@contextmanager
def going_on(part: str, failed: list[str]) -> Iterator[None]:
    """Says in a line that a part cannot be made and adds its name to ``failed``; a mistake of ours is raised."""
    try:
        yield
    except Exception as error:
        if not hides_traceback(error):
            raise
        print(f"error: {part}: {error}", file=sys.stderr)
        failed.append(part)
