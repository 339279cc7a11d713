"""Episodes that are written before their split is known. If these fail, an import loses some, or half of it stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from real_envs.store import Staging, StoreError, TrajectoryStore
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.refusal import refused


def episode(name: str, task: str, turns: int = 2, seen: str = "a hall") -> Trajectory:
    played = tuple(Turn("go", f"{seen} {k}", 0.0, False) for k in range(turns))
    return Trajectory(name, task, "g", Source.REAL, "a", 0, "start", played, StopReason.TURN_LIMIT)


def waiting(folder: Path, *episodes: Trajectory, shard_turns: int = 4096) -> Staging:
    incoming = Staging(folder, shard_turns)
    for found in episodes:
        incoming.add(found)
    return incoming


def test_what_waited_is_in_the_log_as_if_it_had_been_written_there(tmp_path: Path) -> None:
    episodes = [episode(f"e{k}", f"t{k % 2}") for k in range(5)]
    incoming = waiting(tmp_path / "incoming", *episodes, shard_turns=4)
    assert not (tmp_path / "log").exists()
    splits = {"train": ["t0"], "heldout": ["t1"]}
    store = TrajectoryStore.create(tmp_path / "log", splits)
    store.adopt(incoming)
    plain = TrajectoryStore.create(tmp_path / "plain", splits)
    with plain.writer(shard_turns=4) as writer:
        for found in episodes:
            writer.add(found)
    log, other = ({path.name: path.read_bytes() for path in (tmp_path / x).iterdir()} for x in ("log", "plain"))
    assert log == other
    assert len(log) == 4  # three shards and the manifest
    assert list(store.read()) == list(TrajectoryStore.open(tmp_path / "log").read()) == episodes
    assert store.ids() == {found.id for found in episodes}
    assert not incoming.folder.exists()


def test_all_or_nothing_is_taken(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "log", {"train": ["t0"]})
    store.append([episode("old", "t0")])
    before = {path.name: path.read_bytes() for path in (tmp_path / "log").iterdir()}
    for wrong, token in ((episode("new", "t9"), "'t9'"), (episode("old", "t0"), "'old'")):
        staged = waiting(tmp_path / "incoming", episode("fine", "t0"), wrong)
        refused(lambda staged=staged: store.adopt(staged), token, error=StoreError)  # type: ignore[misc]
    assert {path.name: path.read_bytes() for path in (tmp_path / "log").iterdir()} == before
    store.adopt(waiting(tmp_path / "incoming", episode("fine", "t0")))
    assert [found.id for found in store.read()] == ["old", "fine"]


def test_what_an_earlier_process_left_is_not_taken(tmp_path: Path) -> None:
    waiting(tmp_path / "incoming", episode("left", "t0")).flush()
    incoming = waiting(tmp_path / "incoming", episode("new", "t0"))
    store = TrajectoryStore.create(tmp_path / "log", {"train": ["t0"]})
    store.adopt(incoming)
    assert [found.id for found in store.read()] == ["new"]


def test_long_observations_do_not_gather_in_memory(tmp_path: Path) -> None:
    page = "x" * 3_000_000
    incoming = waiting(tmp_path / "incoming", *(replace(episode(f"e{k}", "t", 2, page), id=f"e{k}") for k in range(6)))
    assert [shard.episodes for shard in incoming.shards] == [3, 3]


def test_the_episodes_of_some_tasks_are_read_alone(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "log", {"train": ["t0", "t1"], "heldout": ["t2"]})
    store.adopt(waiting(tmp_path / "incoming", *(episode(f"e{k}", f"t{k % 3}") for k in range(6))))
    assert [found.id for found in store.of_tasks(["t1"])] == ["e1", "e4"]
    assert list(store.of_tasks([])) == []
