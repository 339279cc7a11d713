"""Minari's datasets: a folder with ``data/metadata.json`` and episodes of a Gymnasium environment, in HDF5 or Arrow.

What can be told in words is read: spaces that are ``Text``; ``Discrete`` and ``MultiDiscrete`` where every value has a
name, in ``Reading.names``: ``{"action": ["left", "right"]}``, of components ``action.0`` and ``action.1``, of parts of
a ``Dict`` ``observation.direction``; and ``Dict`` of these, told as lines ``mission: go to the door``. A ``Box`` or
anything else refuses the dataset. ``infos`` have no place.

An episode has one observation more than actions. Rewards are what a step earned, ``terminations`` the world's end; the
agent is the dataset's ``algorithm_name``. Formats: Minari 0.5, https://minari.farama.org/content/dataset_standards/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from real_envs.errors import UserError
from real_envs.importers.drafts import Draft, Reading
from real_envs.importers.records import Record, Sample
from real_envs.rows import FieldError

METADATA, HDF5 = "metadata.json", "main_data.hdf5"
_SERIES = ("observations", "actions", "rewards", "terminations", "truncations")


class Minari:
    """See the module."""

    name = "minari"
    about = "Minari's datasets with text spaces, or discrete ones that imports.names names; give their folder"

    def recognises(self, sample: Sample) -> str:
        good = bool(datasets(sample.path)) if sample.path.is_dir() else sample.path.name == HDF5
        return "it is a folder with the episodes and spaces of a dataset" if good else ""

    def records(self, path: Path) -> Iterator[Record]:
        for data in datasets(path) if path.is_dir() else [path.parent]:
            try:
                told = json.loads((data / METADATA).read_text(encoding="utf-8"))
                spaces = {at: json.loads(told[f"{at}_space"]) for at in ("observation", "action")}
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                yield Record(str(data.name), FieldError(METADATA, f"does not tell the spaces: {error!r:.80}"))
                continue
            if wrong := next(filter(None, (unfit(space, at) for at, space in spaces.items())), ""):
                yield Record("the dataset", FieldError("", wrong))
                continue
            episodes = _hdf5_episodes(data / HDF5) if (data / HDF5).exists() else _arrow_episodes(data)
            for where, series in episodes:
                yield Record(where, {"series": series, "spaces": spaces, "told": told})

    def draft(self, value: Any, reading: Reading) -> Draft:
        series, spaces, told = value["series"], value["spaces"], value["told"]
        if missing := next((name for name in _SERIES if not isinstance(series.get(name), list)), None):
            raise FieldError(missing, "is missing")
        seen, acted = series["observations"], series["actions"]
        if len(seen) != len(acted) + 1:
            raise FieldError("observations", f"has {len(seen)} entries, but there are {len(acted)} actions")
        if short := next((name for name in _SERIES[2:] if len(series[name]) != len(acted)), None):
            raise FieldError(short, f"has {len(series[short])} entries, but there are {len(acted)} actions")
        texts = [in_words(spaces["observation"], entry, "observation", reading.names) for entry in seen]
        turns = [
            {
                "action": in_words(spaces["action"], action, "action", reading.names),
                "observation": text,
                "reward": reward,
                "terminated": ended,
            }
            for action, text, reward, ended in zip(
                acted, texts[1:], series["rewards"], series["terminations"], strict=True
            )
        ]
        return Draft(
            start=texts[0],
            turns=turns,
            agent=told.get("algorithm_name") or None,
            extra={"dataset": told.get("dataset_id")} | ({"infos": series["infos"]} if "infos" in series else {}),
        )


def datasets(path: Path) -> list[Path]:
    """The folders below a folder whose ``metadata.json`` tells of spaces, sorted."""
    return sorted(found.parent for found in path.rglob(METADATA) if _tells_spaces(found))


def _tells_spaces(path: Path) -> bool:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(told, dict) and "observation_space" in told and "action_space" in told


def unfit(space: Any, at: str) -> str:
    """Why a space, as Minari writes it, cannot be told in words: "observation.image is a Box, ..."; "" where it can."""
    kind = space.get("type") if isinstance(space, dict) else None
    if kind == "Dict" and isinstance(space.get("subspaces"), dict):
        return next(filter(None, (unfit(part, f"{at}.{key}") for key, part in space["subspaces"].items())), "")
    if kind in ("Text", "Discrete", "MultiDiscrete"):
        return ""
    return f"is refused as a whole: {at} is a {kind}, and only Text, Discrete, MultiDiscrete and Dict have words"


def in_words(space: Mapping[str, Any], value: Any, at: str, names: Mapping[str, Sequence[str]]) -> str:
    """A value of a space: the text itself, the name of a number, or a line for each part of a ``Dict``.

    Raises:
        FieldError: the value is not of the space, or has no name.
    """
    if space["type"] == "Dict":
        if not isinstance(value, dict):
            raise FieldError(at, f"is {value!r:.60}, not a Dict")
        parts = space["subspaces"].items()
        return "\n".join(f"{key}: {in_words(part, value.get(key), f'{at}.{key}', names)}" for key, part in parts)
    if space["type"] == "Text":
        if not isinstance(value, str):
            raise FieldError(at, f"is {value!r:.60}, not text")
        return value
    if space["type"] == "Discrete":
        return _name(value, space.get("start", 0), at, names)
    if not isinstance(value, list) or len(value) != len(space["nvec"]):
        raise FieldError(at, f"is {value!r:.60}, not a list of {len(space['nvec'])} numbers")
    starts = space.get("start") or [0] * len(value)
    told = [_name(value[i], starts[i], f"{at}.{i}", names) for i in range(len(value))]
    return ", ".join(told)


def _name(value: Any, first: int, at: str, names: Mapping[str, Sequence[str]]) -> str:
    if at not in names:
        raise FieldError(at, f"has numbers without names: say imports.names.{at}=[...], from the first value on")
    if not isinstance(value, int) or not 0 <= value - first < len(names[at]):
        raise FieldError(at, f"is {value!r:.40}, which has no name in imports.names.{at}")
    return str(names[at][value - first])


def _hdf5_episodes(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """
    Raises:
        UserError: h5py is not installed.
        OSError: the file cannot be read.
    """
    try:
        import h5py  # only these files need it
    except ImportError:
        raise UserError(f"{path} is HDF5, which needs h5py: pip install 'imagination[minari]'") from None

    def values(node: Any) -> Any:
        if isinstance(node, h5py.Group):
            parts = {key: values(child) for key, child in node.items()}
            return [dict(zip(parts, row, strict=False)) for row in zip(*parts.values(), strict=False)]
        found = node.asstr(errors="replace")[()] if h5py.check_string_dtype(node.dtype) else node[()]
        return found.tolist() if hasattr(found, "tolist") else found

    with h5py.File(path) as file:
        for name in sorted(file, key=lambda name: (len(name), name)):  # episode_2 before episode_10
            group = file[name]
            yield name, {key: [] if key == "infos" else values(group[key]) for key in group}


def _arrow_episodes(data: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows are steps, and one more for the last observation.

    Raises:
        OSError: a file cannot be read, or is no Arrow.
    """
    folders = [folder for folder in data.iterdir() if folder.is_dir()]
    for folder in sorted(folders, key=lambda folder: (len(folder.name), folder.name)):
        rows: list[dict[str, Any]] = []
        try:
            for part in sorted(folder.glob("*.arrow")):
                with pa.memory_map(str(part)) as source:
                    rows += pa.ipc.open_file(source).read_all().to_pylist()
        except pa.ArrowException as error:
            raise OSError(f"is no readable Arrow: {error}") from error
        columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
        yield (
            f"episode {folder.name}",
            {
                name: [] if name == "infos" else column if name == "observations" else column[:-1]
                for name, column in columns.items()
            },
        )
