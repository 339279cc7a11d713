"""Minari's datasets, laid out as Minari 0.5 writes them. If these fail, actions or rewards are another step's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from real_envs.importers.drafts import Reading
from real_envs.importers.formats import Imported, RejectedRecord, find_format, log_files, read
from real_envs.trajectory import StopReason, Trajectory, Turn
from tests.support.refusal import in_a_line, refused

TEXT = {"type": "Text", "max_length": 99, "min_length": 1, "charset": "ab"}
MOVES = {"type": "Discrete", "dtype": "int64", "start": 1, "n": 2}
PAIR = {"type": "MultiDiscrete", "dtype": "int64", "nvec": [2, 2], "start": [0, 1]}
PARTS = {"type": "Dict", "subspaces": {"mission": TEXT, "facing": MOVES}}
BOX = {"type": "Box", "dtype": "float32", "shape": [2], "low": [0, 0], "high": [1, 1]}

SAID: dict[str, Any] = {"observations": ["a hall", "a room", "You win"], "actions": ["go", "take"]}
WON = {"rewards": [0.25, 1.0], "terminations": [False, True], "truncations": [False, False]}
CUT = {"rewards": [0.0, 0.0], "terminations": [False, False], "truncations": [False, True]}
BOTH = pytest.mark.parametrize("form", ["hdf5", "arrow"])


def dataset(folder: Path, form: str, *episodes: dict[str, Any], seen: Any = TEXT, acted: Any = TEXT) -> Path:
    data = folder / "demo" / "text-v0" / "data"
    data.mkdir(parents=True)
    spaces = {"observation_space": json.dumps(seen), "action_space": json.dumps(acted)}
    told = {"data_format": form, "dataset_id": "demo/text-v0", "algorithm_name": "ppo", **spaces}
    (data / "metadata.json").write_text(json.dumps(told))
    if form == "hdf5":
        _hdf5(data / "main_data.hdf5", episodes)
    else:
        for number, episode in enumerate(episodes):
            _arrow(data / str(number), episode)
    return data.parent


def _arrow(folder: Path, episode: dict[str, Any]) -> None:
    """A row a step, and one more for the last observation."""
    folder.mkdir()
    (folder / "metadata.json").write_text(json.dumps({"id": int(folder.name)}))
    rows = len(episode["observations"])
    table = pa.table({key: pa.array((values + [None] * rows)[:rows]) for key, values in episode.items()})
    with pa.OSFile(str(folder / "part-0.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _hdf5(path: Path, episodes: tuple[dict[str, Any], ...]) -> None:
    h5py = pytest.importorskip("h5py")

    def put(group: Any, key: str, values: list[Any]) -> None:
        if isinstance(values[0], dict):
            inner = group.create_group(key)
            for part in values[0]:
                put(inner, part, [value[part] for value in values])
        else:
            group.create_dataset(key, data=values, dtype=h5py.string_dtype() if isinstance(values[0], str) else None)

    with h5py.File(path, "w") as file:
        for number, episode in enumerate(episodes):
            group = file.create_group(f"episode_{number}")
            for key, values in episode.items():
                put(group, key, values)


def items(path: Path, **reading: Any) -> tuple[list[Trajectory], list[RejectedRecord]]:
    found = list(read(path, find_format("auto", path)[0], Reading(**reading)))
    return [i.episode for i in found if isinstance(i, Imported)], [i for i in found if isinstance(i, RejectedRecord)]


@BOTH
def test_an_episode_of_texts(tmp_path: Path, form: str) -> None:
    episodes, refusals = items(dataset(tmp_path, form, SAID | WON, SAID | CUT))
    assert refusals == []
    assert [e.start for e in episodes] == ["a hall", "a hall"]
    note = {"log.dataset": "demo/text-v0"}
    assert episodes[0].turns == (Turn("go", "a room", 0.25, False), Turn("take", "You win", 1.0, True, note))
    assert [e.stop for e in episodes] == [StopReason.TERMINATED, StopReason.TURN_LIMIT]
    assert episodes[0].agent == "ppo"


@BOTH
def test_numbers_are_told_by_their_names(tmp_path: Path, form: str) -> None:
    seen = [{"mission": "find the key", "facing": 1}, {"mission": "find the key", "facing": 2}]
    one = {"observations": seen, "actions": [[1, 2]], "rewards": [1.0], "terminations": [True], "truncations": [False]}
    path = dataset(tmp_path, form, one, seen=PARTS, acted=PAIR)
    names = {"observation.facing": ["north", "south"], "action.0": ["walk", "run"], "action.1": ["left", "right"]}
    (episode,), refusals = items(path, names=names)
    assert refusals == []
    assert episode.start == "mission: find the key\nfacing: north"
    assert episode.turns[0].action == "run, right"
    assert episode.turns[0].observation == "mission: find the key\nfacing: south"
    _, (missing,) = items(path, names={key: value for key, value in names.items() if key != "action.1"})
    assert (missing.field, "imports.names.action.1=[...]" in missing.reason) == ("action.1", True)
    _, (few,) = items(path, names=names | {"action.0": ["walk"]})
    assert few.reason.startswith("is 1")
    assert "imports.names.action.0" in few.reason


def test_what_has_no_words_is_refused_in_one_line(tmp_path: Path) -> None:
    picture = {"type": "Dict", "subspaces": {"mission": TEXT, "image": BOX}}
    episodes, (refusal,) = items(dataset(tmp_path, "arrow", SAID | WON, SAID | CUT, seen=picture))
    assert episodes == []
    in_a_line(str(refusal), "text-v0", "observation.image", "Box", "Text, Discrete, MultiDiscrete and Dict")


def test_an_episode_that_lacks_something_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    early = SAID | WON | {"terminations": [True, False]}
    nobody = {key: value for key, value in (SAID | WON).items() if key != "rewards"}
    episodes, refusals = items(dataset(tmp_path, "arrow", early, nobody, SAID | WON))
    assert [e.total_reward for e in episodes] == [1.25]
    assert [(r.record, r.field) for r in refusals] == [("episode 0", "turns[0].terminated"), ("episode 1", "rewards")]


def test_datasets_are_found_in_folders_and_broken_ones_named(tmp_path: Path) -> None:
    dataset(tmp_path, "arrow", SAID | WON)
    (tmp_path / "demo" / "namespace_metadata.json").write_text("{}")
    found = list(log_files("auto", tmp_path))
    assert [(s[0].name, s[1].name) for s in found if not isinstance(s, RejectedRecord)] == [("text-v0", "minari")]
    assert [s.file.name for s in found if isinstance(s, RejectedRecord)] == ["namespace_metadata.json"]
    (tmp_path / "demo" / "text-v0" / "data" / "0" / "part-0.arrow").write_bytes(b"ARROW1 no more")
    refused(lambda: items(tmp_path / "demo" / "text-v0"), "text-v0", "Arrow")


def test_hdf5_without_h5py_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = dataset(tmp_path, "arrow")
    (folder / "data" / "main_data.hdf5").touch()
    monkeypatch.setitem(sys.modules, "h5py", None)
    refused(lambda: items(folder), "pip install 'imagination[minari]'")
