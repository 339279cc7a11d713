"""Minari's datasets: a folder with ``data/metadata.json`` and episodes of a Gymnasium environment, in HDF5 or Arrow.

Spaces that can be written as text are read: ``Text``; ``Discrete`` and ``MultiDiscrete`` where ``Reading.names`` has a
name for each value: ``{"action": ["left", "right"]}``, of components ``action.0`` and ``action.1``, of parts of a
``Dict`` ``observation.direction``; and ``Dict`` of these, as lines ``mission: go to the door``. A ``Box`` or anything
else refuses the dataset. ``infos`` are left out.

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
from real_envs.importers.drafts import EpisodeDraft, Format, Reading
from real_envs.importers.records import Record, Sample, arrow_batches, has_keys
from real_envs.store.codec import FieldError

METADATA, HDF5 = "metadata.json", "main_data.hdf5"
_SERIES = ("observations", "actions", "rewards", "terminations", "truncations")


class Minari(Format):
    name = "minari"
    about = "Minari's datasets with text spaces, or discrete ones that imports.names names; give their folder"

    def recognises(self, sample: Sample) -> str:
        good = bool(datasets(sample.path)) if sample.path.is_dir() else sample.path.name == HDF5
        return "it is a folder with the episodes and spaces of a dataset" if good else ""

    def records(self, path: Path) -> Iterator[Record]:
        for data in datasets(path) if path.is_dir() else [path.parent]:
            try:
                metadata = json.loads((data / METADATA).read_text(encoding="utf-8"))
                spaces = {at: json.loads(metadata[f"{at}_space"]) for at in ("observation", "action")}
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                yield Record(str(data.name), FieldError(METADATA, f"does not tell the spaces: {error!r:.80}"))
                continue
            if reason := next(filter(None, (unsupported(space, at) for at, space in spaces.items())), ""):
                yield Record("the dataset", FieldError("", reason))
                continue
            episodes = _hdf5_episodes(data / HDF5) if (data / HDF5).exists() else _arrow_episodes(data)
            for where, series in episodes:
                yield Record(where, {"series": series, "spaces": spaces, "metadata": metadata})

    def columns(self, value: Any) -> Mapping[str, Any]:
        metadata = value.get("metadata") if isinstance(value, dict) else None
        return metadata if isinstance(metadata, dict) else {}

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        series, spaces, metadata = value["series"], value["spaces"], value["metadata"]
        if missing := next((name for name in _SERIES if not isinstance(series.get(name), list)), None):
            raise FieldError(missing, "is missing")
        observations, actions = series["observations"], series["actions"]
        expected = {name: len(actions) + (name == "observations") for name in _SERIES}
        if wrong := next((name for name, count in expected.items() if len(series[name]) != count), None):
            raise FieldError(wrong, f"has {len(series[wrong])} entries, but there are {len(actions)} actions")
        texts = [as_text(spaces["observation"], entry, "observation", reading.names) for entry in observations]
        columns = zip(actions, texts[1:], series["rewards"], series["terminations"], strict=True)
        turns = [
            {
                "action": as_text(spaces["action"], action, "action", reading.names),
                "observation": text,
                "reward": reward,
                "terminated": ended,
            }
            for action, text, reward, ended in columns
        ]
        return EpisodeDraft(
            start=texts[0],
            turns=turns,
            agent=metadata.get("algorithm_name") or None,
            extra={"dataset": metadata.get("dataset_id")} | ({"infos": series["infos"]} if "infos" in series else {}),
        )


def datasets(path: Path) -> list[Path]:
    """The folders below a folder whose ``metadata.json`` names spaces, sorted."""
    return sorted(file.parent for file in path.rglob(METADATA) if has_keys(file, "observation_space", "action_space"))


def unsupported(space: Any, at: str) -> str:
    """Why a space, as Minari writes it, is not text: "observation.image is a Box, ..."; "" where it can be."""
    kind = space.get("type") if isinstance(space, dict) else None
    if kind == "Dict" and isinstance(space.get("subspaces"), dict):
        return next(filter(None, (unsupported(part, f"{at}.{key}") for key, part in space["subspaces"].items())), "")
    if kind in ("Text", "Discrete", "MultiDiscrete"):
        return ""
    return f"is refused as a whole: {at} is a {kind}, and only Text, Discrete, MultiDiscrete and Dict have words"


def as_text(space: Mapping[str, Any], value: Any, at: str, names: Mapping[str, Sequence[str]]) -> str:
    """A value of a space: the text itself, the name of a number, or a line for each part of a ``Dict``.

    Raises:
        FieldError: the value is not of the space, or has no name.
    """
    if space["type"] == "Dict":
        if not isinstance(value, dict):
            raise FieldError(at, f"is {value!r:.60}, not a Dict")
        parts = space["subspaces"].items()
        return "\n".join(f"{key}: {as_text(part, value.get(key), f'{at}.{key}', names)}" for key, part in parts)
    if space["type"] == "Text":
        if not isinstance(value, str):
            raise FieldError(at, f"is {value!r:.60}, not text")
        return value
    if space["type"] == "Discrete":
        return _name(value, space.get("start", 0), at, names)
    if not isinstance(value, list) or len(value) != len(space["nvec"]):
        raise FieldError(at, f"is {value!r:.60}, not a list of {len(space['nvec'])} numbers")
    starts = space.get("start") or [0] * len(value)
    return ", ".join(_name(value[i], starts[i], f"{at}.{i}", names) for i in range(len(value)))


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
        value = node.asstr(errors="replace")[()] if h5py.check_string_dtype(node.dtype) else node[()]
        return value.tolist() if hasattr(value, "tolist") else value

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
                rows += (row for batch in arrow_batches(part) for row in batch.to_pylist())
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
