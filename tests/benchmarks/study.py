"""What the experiments share: options, parts that are made once, tables and figures.

An experiment makes parts (a world, an arm, a seed), each in a folder below ``--out``, and writes ``table.md`` after
every part. What exists is not made again, and what was interrupted goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from imagination.runs.fingerprint import fingerprint
from imagination.runs.machine import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config
from real_envs.errors import hides_traceback
from real_envs.files import write_atomically
from worldmodel.evaluation.proportions import Proportion, difference_ci95

DASH = "–"  # what is not there yet, or was not measured
# Okabe and Ito's colours, which all common kinds of colour blindness keep apart
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def make_parser(description: str | None, out: str, seeds: Sequence[int]) -> argparse.ArgumentParser:
    """A parser with the options of all experiments; those given here are defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--table", action="store_true", help="only make the table of what is there")
    return parser


def options_and_settings(
    parser: argparse.ArgumentParser, of: str, words: Sequence[str] | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the settings KEY=VALUE that stand anywhere between them.

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
    """The settings of all worlds, and behind them those of this one, ``<world>:KEY=VALUE``."""
    others = tuple(f"{name}:" for name in (*worlds, world))
    shared = [word for word in settings if not word.startswith(others)]
    return shared + [word.removeprefix(f"{world}:") for word in settings if word.startswith(f"{world}:")]


def run_parts(
    options: argparse.Namespace, parts: Iterable[tuple[str, Callable[[], object]]], write_table: Callable[[], str]
) -> int:
    """Makes each part, by its name, and writes the table after each; 1 where one could not be made. A bug is raised."""
    failed = 0
    for name, make in () if options.table else parts:
        print(f"== {name}", flush=True)
        try:
            make()
        except Exception as error:
            if not hides_traceback(error):
                raise
            print(f"error: {name}: {error}", file=sys.stderr)
            failed = 1
        write_table()
        give_back_memory()
    print(write_table())
    return failed


def run_once(config: Config, folder: Path, *commands: Callable[[Config, Path], None]) -> None:
    """Runs each command that has not run with these settings."""
    for command in commands:
        name = command.__name__
        if RunFolder(folder, config.seed).summary.get("done", {}).get(name) != fingerprint(config, name):
            print(f"== {folder}: {name.replace('_', ' ')}", flush=True)
            command(config, folder)
            give_back_memory()


def pooled(results: Sequence[Mapping[str, Any]]) -> Proportion:
    """One proportion of several seeds, from JSON; each seed has held-out tasks of its own."""
    parts = [Proportion.from_json(result) for result in results]
    by_task = {f"{k}/{task}": counts for k, part in enumerate(parts) for task, counts in part.by_task.items()}
    return Proportion(sum(hits for hits, _ in by_task.values()), sum(n for _, n in by_task.values()), by_task=by_task)


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, *rows]
    text = [f"| {' | '.join(map(str, line))} |\n" for line in lines]
    return "".join([text[0], "|---" * len(head) + "|\n", *text[1:]])


def write_files(out: Path, **texts: str) -> str:
    """Writes ``<name>.md`` for ``table``, ``<name>.json`` for others; returns the table."""
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomically(out / f"{name}.{'md' if name == 'table' else 'json'}", text)
    return texts["table"]


def interval(ends: Sequence[float] | None, form: str = ".2f") -> str:
    """``" [0.10, 0.20]"``; nothing where there is none."""
    return "" if ends is None else f" [{ends[0]:{form}}, {ends[1]:{form}}]"


def estimate(value: float | None, ends: Sequence[float] | None, form: str = ".2f") -> str:
    """``"0.15 [0.10, 0.20]"``, or a dash."""
    return DASH if value is None else f"{value:{form}}{interval(ends, form)}"


def difference(after: Proportion | None, before: Proportion | None) -> str:
    """The difference of two rates with its interval, paired by task; a dash where one was not measured."""
    if before is None or after is None or before.rate is None or after.rate is None:
        return DASH
    return estimate(after.rate - before.rate, difference_ci95(after, before), "+.2f")


@contextmanager
def figure(target: Path, *grid: int, dpi: int = 120, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its panels without frames, which is saved at the end.

    Args:
        grid: rows and columns of panels.
        options: of ``matplotlib.pyplot.subplots``.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, panels = plt.subplots(*grid, layout="constrained", **options)
    yield picture, panels
    for panel in picture.axes:
        panel.spines[["top", "right"]].set_visible(False)
    picture.savefig(target, dpi=dpi, facecolor="white")
    plt.close(picture)
