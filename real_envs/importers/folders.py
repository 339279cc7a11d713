"""The files below a folder, each with its format: nothing is passed over without being named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from real_envs.errors import UserError
from real_envs.importers.browser_use import PAGES, BrowserUse, task_folders
from real_envs.importers.formats import AUTO, FORMATS, Format, Refusal, find_format, sample_of
from real_envs.importers.minari import Minari, datasets

Source = tuple[Path, Format, str]  # a file or a run's folder, its format, and why that one


def sources_of(name: str, path: Path) -> Iterator[Source | Refusal]:
    """A file with its format; or what a folder has: runs of browser-use, datasets of Minari, other files, sorted.

    A file of a folder is of a format that was named where it holds records of JSON or a table, or looks like that
    format. All others are refused as a whole, as are those that cannot be read.

    Raises:
        UserError: there is no such format or file, a single file is in none, or nothing below a folder is in any.
    """
    if not path.is_dir():
        yield (path, *find_format(name, path))
        return
    if name != AUTO:
        find_format(name, path)  # a misspelt one is an error, and no reason to refuse all files
    tasks = task_folders(path) if name in (AUTO, BrowserUse.name) else []
    tables = datasets(path) if name in (AUTO, Minari.name) else []
    if tasks:
        yield path, FORMATS[BrowserUse.name], f"it is a folder with {len(tasks)} tasks"
    for data in tables:
        whole = data.parent if data.name == "data" else data
        yield whole, FORMATS[Minari.name], "it is a folder with the episodes and spaces of a dataset"
    runs, own = {task.parent for task in tasks}, {*tasks, *tables}
    found = len(own)
    for file in sorted(below for below in path.rglob("*") if not below.is_dir()):
        if not own.isdisjoint(file.parents) or (file.name == PAGES and file.parent in runs):
            continue
        source = _looked_at(name, file)
        found += not isinstance(source, Refusal)
        yield source
    if not found:
        raise UserError(f"{path} is a folder, and no file below it is in a format that is known here")


def _looked_at(name: str, file: Path) -> Source | Refusal:
    try:
        sample = sample_of(file)
        if name == AUTO:
            return (file, *find_format(name, file))
        if sample.record is None and not FORMATS[name].recognises(sample):
            return Refusal(file, "the file", "", f"is not in the format {name}")
        return file, FORMATS[name], "you said so"
    except UserError as error:
        return Refusal(file, "the file", "", str(error).removeprefix(f"{file} "))
