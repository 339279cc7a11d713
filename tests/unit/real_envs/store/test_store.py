"""If these fail, logged episodes get lost, changed or silently misread."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from real_envs.store import StoreError, TrajectoryStore, is_validation
from real_envs.store.codec import SCHEMA, encode, to_table
from real_envs.trajectory import Owner, Source, StopReason, Trace, Trajectory, Turn
from tests.support.refusal import refused

SPLITS = {"train": ["tw-1", "tw-2"], "test": ["tw-3"], "spare": ["tw-4"]}
OWNERS = (Owner.SCAFFOLD, Owner.AGENT, Owner.ENV)
TRACE = Trace(ids=(5, 9, 7), owners=OWNERS, logprobs=(None, -0.25, None), turns=(-1, 0, -1), temperature=0.7)
PLAYED = (Turn("open chest", "It is open.", 0.0, False), Turn("take coin", "Done.", 1.0, True))


def episode(name: str, task: str = "tw-1", *turns: Turn, **changes: object) -> Trajectory:
    facts = (name, task, f"{task}/g", Source.REAL, "random", 3, "You see a chest.", turns or PLAYED)
    return replace(Trajectory(*facts, StopReason.TERMINATED), **changes)  # type: ignore[arg-type]


def crashed(name: str, task: str = "tw-1") -> Trajectory:
    return episode(name, task, turns=(), stop=StopReason.ENV_CRASHED, failure="the worker died")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards: one of the split train, one of test; the split spare has none."""
    store = TrajectoryStore.create(tmp_path / "log", SPLITS, {"benchmark": "textworld"})
    store.append([episode("a", "tw-1"), crashed("b", "tw-2")])
    store.append([episode("c", "tw-3", agent="expert", source=Source.EXPERT)])
    return tmp_path / "log"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refuses(folder: Path, act: Callable[[], object], *words: str) -> None:
    """``act`` fails with one ``StoreError`` that has all the words, and the files stay as they are."""
    before = snapshot(folder)
    refused(act, *words, error=StoreError)
    assert snapshot(folder) == before


def read_all(folder: Path) -> list[Trajectory]:
    return list(TrajectoryStore.open(folder).read())


def read_ids(folder: Path) -> list[str]:
    return [t.id for t in read_all(folder)]


def edit_manifest(folder: Path, **changes: object) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(data | changes))


def edit_shard(folder: Path, number: int, change: Callable[[pa.Table], pa.Table]) -> None:
    """Writes a shard as somebody else's program might: valid Parquet, right size and hash."""
    path = folder / f"shard-{number:05d}.parquet"
    pq.write_table(change(pq.read_table(path)), path, compression="snappy")
    content = path.read_bytes()
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    shards[number] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit_manifest(folder, shards=shards)


def set_column(name: str, change: Callable[[list], list], kind: pa.DataType | None = None) -> Callable:
    def edit(table: pa.Table) -> pa.Table:
        column = table.schema.get_field_index(name)
        values = pa.array(change(table[name].to_pylist()), kind or table.schema.field(name).type)
        return table.set_column(column, name, values)

    return edit


# what is stored


def test_what_was_appended_is_read_again_with_all_its_types(tmp_path: Path) -> None:
    info: dict[str, float | str | bool] = {"confidence": 0.5, "one": 1.0, "yes": True, "no": False, "word": "1.0"}
    turns = (Turn("", "  spaces \n stay ", None, False, info), Turn("look", "", 0.0, False))
    dreamed = episode(
        "d", "tw-2", *turns, source=Source.DREAM, stop=StopReason.UNSURE, prefix_turns=1, policy_version="p3",
        world_model_version="w1", trace=TRACE, world_facts=("lamp at cellar", "safe closed"), success=False,
    )  # fmt: skip
    store = TrajectoryStore.create(tmp_path / "log", SPLITS)
    store.append([dreamed, crashed("e")])
    got, failed = read_all(tmp_path / "log")
    assert got == dreamed
    assert failed == crashed("e")
    assert got.turns[0].reward is None
    assert got.turns[1].reward == 0.0
    assert got.trace is not None
    assert failed.trace is None
    assert {key: type(value) for key, value in got.turns[0].info.items()} == {
        "confidence": float, "one": float, "yes": bool, "no": bool, "word": str
    }  # fmt: skip
    assert isinstance(got.stop, StopReason)
    assert isinstance(got.source, Source)
    assert all(isinstance(owner, Owner) for owner in got.trace.owners)


def test_nan_stays_nan_where_it_is_a_diagnosis(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "log", SPLITS)
    broken = replace(TRACE, logprobs=(None, float("nan"), None))
    turn = Turn("go", "Hm.", 0.0, False, {"entropy": float("nan")})
    store.append([episode("n", "tw-1", turn, trace=broken, stop=StopReason.ENGINE_FAILED, failure="NaN")])
    (got,) = store.read()
    assert got.trace is not None
    assert got.trace.logprobs[0] is None
    assert str(got.trace.logprobs[1]) == str(got.turns[0].info["entropy"]) == "nan"


def test_a_shard_from_before_there_were_several_contexts_is_read(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "log", SPLITS)
    store.append([episode("e", "tw-1", Turn("go", "Hall.", 0.0, False), trace=TRACE)])
    kind = SCHEMA.field("trace").type
    older = pa.struct([field for field in kind if field.name != "segments"])

    def without(traces: list) -> list:
        return [{key: value for key, value in trace.items() if key != "segments"} for trace in traces]

    edit_shard(tmp_path / "log", 0, set_column("trace", without, older))
    (got,) = read_all(tmp_path / "log")
    assert got.trace == TRACE


def test_a_split_has_its_own_tasks_only_and_the_order_of_appending(folder: Path) -> None:
    store = TrajectoryStore.open(folder)
    assert [t.id for t in store.read()] == ["a", "b", "c"]
    assert [t.id for t in store.read("train")] == ["a", "b"]
    assert [t.id for t in store.read("test")] == ["c"]
    assert store.tasks("train") == ("tw-1", "tw-2")
    assert store.ids() == {"a", "b", "c"}
    assert store.meta == {"benchmark": "textworld"}


def test_interleaved_tasks_of_many_batches_keep_their_rows(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "log", SPLITS)
    episodes = [episode(f"e{i}", f"tw-{i % 3 + 1}", start=f"start {i}") for i in range(300)]
    store.append(episodes)
    assert list(store.read("test")) == [e for e in episodes if e.task_id == "tw-3"]


def test_the_manifest_is_what_the_format_says(folder: Path) -> None:
    content = (folder / "shard-00000.parquet").read_bytes()
    data = json.loads((folder / "manifest.json").read_text())
    assert (data["format"], data["version"], data["splits"]) == ("imagination-trajectories", 1, SPLITS)
    assert data["shards"][0] == {
        "file": "shard-00000.parquet",
        "episodes": 2,
        "turns": 2,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def test_a_known_success_decides_and_no_failure_solves() -> None:
    solved = {(paid, success): episode("e", success=success).solved for paid, success in [(1, None), (1, False)]}
    assert solved == {(1, None): True, (1, False): False}  # the rewards of both add up to 1
    unpaid = episode("e", "tw-1", Turn("wait", "Time passes.", None, True), success=True)
    assert unpaid.solved
    assert not replace(unpaid, success=None).solved
    assert not replace(unpaid, stop=StopReason.ENV_CRASHED).solved


def test_summary_judges_by_success_where_there_is_no_reward(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "log", SPLITS)
    unpaid = episode("e", "tw-1", Turn("wait", "Time passes.", None, True), success=True)
    store.append([unpaid, replace(unpaid, id="f", success=False), replace(unpaid, id="g", success=None)])
    assert (store.summary().total.judged, store.summary().total.solved) == (2, 1)


def test_tasks_are_added_to_splits_and_none_twice(folder: Path) -> None:
    store = TrajectoryStore.open(folder)
    store.add_tasks({"test": ["tw-7"], "new": ["tw-8"]})
    store.append([episode("x", "tw-7"), episode("y", "tw-8")])
    again = TrajectoryStore.open(folder)
    assert (again.splits["test"][-1], again.splits["new"]) == ("tw-7", ("tw-8",))
    assert {t.id for t in again.read("new")} == {"y"}
    assert again.meta == {"benchmark": "textworld"}
    refuses(folder, lambda: again.add_tasks({"train": ["tw-8"]}), "'tw-8'", "split")


def test_summary_counts_by_hand(folder: Path) -> None:
    store = TrajectoryStore.open(folder)
    unmeasured = episode("u", "tw-3", Turn("look", "Dark.", None, False), stop=StopReason.TURN_LIMIT, trace=None)
    lost = episode("l", "tw-3", Turn("wait", "Time passes.", 0.0, False), stop=StopReason.TURN_LIMIT, trace=None)
    store.append([unmeasured, lost])
    summary = store.summary()
    assert (summary.total.episodes, summary.total.turns) == (5, 6)
    assert summary.total.failures == {StopReason.ENV_CRASHED: 1}
    assert (summary.total.solved, summary.total.judged) == (2, 3)  # a, c of a, c, l: a failure and no reward are out
    assert summary.by_split["spare"].episodes == 0
    assert {agent: tally.episodes for agent, tally in summary.by_agent.items()} == {"random": 4, "expert": 1}


def test_a_store_goes_on_after_it_was_opened_again(folder: Path) -> None:
    old = snapshot(folder)
    TrajectoryStore.open(folder).append([episode("d", "tw-2")])
    assert read_ids(folder) == ["a", "b", "c", "d"]
    assert all(snapshot(folder)[name] == content for name, content in old.items() if name != "manifest.json")


def test_appending_nothing_writes_nothing(folder: Path) -> None:
    before = snapshot(folder)
    TrajectoryStore.open(folder).append([])
    assert snapshot(folder) == before


def test_each_shard_is_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: hashed.append(file.name) or real(file, name))
    store = TrajectoryStore.open(folder)
    assert hashed == []
    list(store.read())
    list(store.read("train"))
    store.summary()
    assert len(hashed) == 2


def test_validation_is_a_fixed_share_that_only_grows() -> None:
    ids = [f"tw-{i}/expert/{i % 7}" for i in range(2000)]
    small, large = ({i for i in ids if is_validation(i, share)} for share in (0.1, 0.3))
    assert small < large
    assert 0.08 < len(small) / len(ids) < 0.12
    assert not any(is_validation(i, 0.0) for i in ids)
    assert all(is_validation(i, 1.0) for i in ids)
    # sha256("a") = ca978112ca1b... by coreutils; 0xca978112ca1b / 2**48 = 0.7913...
    assert is_validation("a", 0.792)
    assert not is_validation("a", 0.791)
    refused(lambda: is_validation("a", 1.5), "share", error=ValueError)


# crashes


class Killed(BaseException):
    pass


def test_a_crash_between_shard_and_manifest_leaves_the_old_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TrajectoryStore.open(folder)
    manifest, real = (folder / "manifest.json").read_bytes(), os.replace

    def dies_at_the_manifest(source: Path, target: Path) -> None:
        if Path(target).name == "manifest.json":
            raise Killed
        real(source, target)

    monkeypatch.setattr(os, "replace", dies_at_the_manifest)
    with pytest.raises(Killed):
        store.append([episode("lost")])
    monkeypatch.undo()
    orphan = folder / "shard-00002.parquet"
    assert orphan.exists()
    assert (folder / "manifest.json").read_bytes() == manifest
    assert read_ids(folder) == ["a", "b", "c"]
    orphan.write_bytes(b"half a shard")  # nobody may look into it
    TrajectoryStore.open(folder).append([episode("d")])
    assert read_ids(folder) == ["a", "b", "c", "d"]
    assert store.ids() == {"a", "b", "c"}  # the store that crashed does not count the lost episode


def test_a_full_disk_is_an_error_and_the_store_can_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TrajectoryStore.open(folder)
    manifest = (folder / "manifest.json").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused(lambda: store.append([episode("d")]), "shard-00002.parquet", "No space left", error=StoreError)
    assert (folder / "manifest.json").read_bytes() == manifest
    monkeypatch.undo()
    store.append([episode("d")])
    assert read_ids(folder) == ["a", "b", "c", "d"]


def test_ctrl_c_keeps_all_finished_episodes(folder: Path) -> None:
    def collect() -> None:
        with TrajectoryStore.open(folder).writer(shard_turns=4) as writer:
            for i in range(5):  # of two turns each: shards of 2, 2 and the rest
                writer.add(episode(f"n{i}"))
            assert len(list(folder.glob("*.parquet"))) == 4
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect()
    assert read_ids(folder) == ["a", "b", "c", "n0", "n1", "n2", "n3", "n4"]
    assert len(list(folder.glob("*.parquet"))) == 5


def test_a_bad_episode_is_named_when_it_is_added_and_costs_no_other(folder: Path) -> None:
    def collect() -> None:
        with TrajectoryStore.open(folder).writer() as writer:
            writer.add(episode("d"))
            writer.add(episode("a"))

    refused(collect, "'a'", "already", error=StoreError)
    assert read_ids(folder) == ["a", "b", "c", "d"]


def test_failed_episodes_without_turns_are_flushed_too(folder: Path) -> None:
    with TrajectoryStore.open(folder).writer(shard_turns=2) as writer:
        writer.add(crashed("d"))
        writer.add(crashed("e"))
        assert read_ids(folder) == ["a", "b", "c", "d", "e"]


# bad input: making and appending


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"train": ["x"], "test": ["y", "x"]}, ("splits.test[1]", "'x'", "'train' already")),
        ({"train": ["x", "x"]}, ("splits.train[1]", "'train' already")),
        ({}, ("'splits'", "at least one")),
        ({"train": "tw-1"}, ("splits.train", "not a list")),
        ({"train": [7]}, ("splits.train[0]", "7")),
        ({"train": {"x"}}, ("cannot be JSON", "set")),
    ],
)
def test_create_refuses_bad_splits_and_leaves_no_folder(tmp_path: Path, splits: dict, words: tuple[str, ...]) -> None:
    refuses(tmp_path, lambda: TrajectoryStore.create(tmp_path / "new", splits), "manifest.json", *words)
    assert not (tmp_path / "new").exists()


def test_create_refuses_meta_that_json_cannot_hold(tmp_path: Path) -> None:
    for meta in ({"loss": float("nan")}, {"path": Path("x")}):
        refuses(tmp_path, lambda meta=meta: TrajectoryStore.create(tmp_path / "new", SPLITS, meta), "cannot be JSON")


def test_create_leaves_a_store_alone_even_one_that_lost_its_manifest(folder: Path) -> None:
    refuses(folder, lambda: TrajectoryStore.create(folder, SPLITS), str(folder), "already")
    (folder / "manifest.json").unlink()
    refuses(folder, lambda: TrajectoryStore.create(folder, SPLITS), str(folder), "already")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (episode("a"), ("'a'", "already")),
        (episode("x", "tw-33"), ("'x'", "'task_id' is 'tw-33'", "'tw-3'?")),
        (episode("x", "tw-1", Turn(None, "Hm.", None, False)), ("'x'", "'turns[0].action'", "missing")),  # type: ignore[arg-type]
        (episode("x", "tw-1", Turn("go", "Hm.", float("nan"), False)), ("'turns[0].reward' is nan",)),
        (episode("x", "tw-1", Turn("go", "Hm.", 0.0, 1)), ("'turns[0].terminated' is 1",)),  # type: ignore[arg-type]
        (episode("x", "tw-1", Turn("go", "\ud800", 0.0, False)), ("'turns[0].observation'", "surrogate")),
        (episode("x", "tw-1", Turn("go", "", 0.0, False, {"k": [1]})), ("'turns[0].info['k']' is [1]",)),  # type: ignore[dict-item]
        (episode("x", seed=2**63), ("'seed' is 9223372036854775808", "64 bits")),
        (episode("x", prefix_turns=3), ("'prefix_turns' is 3", "2 turns")),
        (episode("x", stop="terminate"), ("'stop' is 'terminate'", "'terminated'?")),
    ],
)
def test_append_refuses_an_episode_and_with_it_the_whole_shard(
    folder: Path, bad: Trajectory, words: tuple[str, ...]
) -> None:
    store = TrajectoryStore.open(folder)
    refuses(folder, lambda: store.append([episode("good"), bad]), str(folder), *words)
    assert store.ids() == {"a", "b", "c"}


def test_append_refuses_the_same_id_twice_in_one_call(folder: Path) -> None:
    store = TrajectoryStore.open(folder)
    refuses(folder, lambda: store.append([episode("x"), episode("x", "tw-2")]), "'x'", "already")


def test_append_notices_another_writer(folder: Path) -> None:
    mine, theirs = TrajectoryStore.open(folder), TrajectoryStore.open(folder)
    theirs.append([episode("d")])
    refuses(folder, lambda: mine.append([episode("e")]), "manifest.json", "changed")


# bad input: opening and reading


def test_a_missing_folder_or_manifest_is_named(tmp_path: Path, folder: Path) -> None:
    refuses(folder, lambda: TrajectoryStore.open(tmp_path / "lgo"), str(tmp_path / "lgo"), "no such folder")
    (folder / "manifest.json").unlink()
    refuses(folder, lambda: TrajectoryStore.open(folder), str(folder / "manifest.json"), "no such file", "create")


@pytest.mark.parametrize("content", [b"", b'{"format": ', b"\xff\xfe\xff", b"[" * 100_000, b"[1]"])
def test_a_manifest_that_is_no_json_is_named(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    refuses(folder, lambda: TrajectoryStore.open(folder), str(folder / "manifest.json"), "no JSON")


SHARD = {"file": "s.parquet", "episodes": 1, "turns": 1, "bytes": 1, "sha256": "00"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "minari"}, ("'format' is 'minari'", "imagination-trajectories")),
        ({"version": 2}, ("version 2 is unknown", "readable: 1")),
        ({"version": True}, ("version True is unknown",)),
        ({"version": "1"}, ("version '1' is unknown",)),
        ({"split": {}}, ("'split'", "'splits'?")),
        ({"splits": []}, ("'splits' is no object",)),
        ({"splits": {"train": ["t"], "test": ["t"]}}, ("splits.test[0]", "'train' already")),
        ({"shards": {}}, ("'shards' is {}",)),
        ({"shards": [3]}, ("'shards[0]' is 3",)),
        ({"shards": [{"file": "s.parquet"}]}, ("'shards[0]' has the keys",)),
        ({"shards": [SHARD | {"turns": "2"}]}, ("'shards[0].turns' is '2'",)),
        ({"shards": [SHARD | {"bytes": -1}]}, ("'shards[0].bytes' is -1",)),
        ({"shards": [SHARD | {"file": "../s.parquet"}]}, ("'shards[0].file' is '../s.parquet'",)),
        ({"shards": [SHARD, SHARD]}, ("'shards[1].file'", "twice")),
        ({"meta": None}, ("'meta' is None",)),
    ],
)
def test_a_wrong_field_of_the_manifest_is_named(folder: Path, changes: dict, words: tuple[str, ...]) -> None:
    edit_manifest(folder, **changes)
    refuses(folder, lambda: TrajectoryStore.open(folder), str(folder / "manifest.json"), *words)


def test_a_missing_field_of_the_manifest_is_named(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": "imagination-trajectories", "version": 1, "splits": {"t": []}}')
    refuses(folder, lambda: TrajectoryStore.open(folder), "manifest.json", "'shards'", "missing")


def test_a_missing_or_truncated_shard_is_named_when_the_store_is_opened(folder: Path) -> None:
    shard = folder / "shard-00001.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    words = (f"has {len(content) - 10} bytes, not {len(content)}", "truncated")
    refuses(folder, lambda: TrajectoryStore.open(folder), str(shard), *words)
    shard.unlink()
    refuses(folder, lambda: TrajectoryStore.open(folder), str(shard), "is missing")


def test_a_shard_with_a_flipped_bit_is_named_before_any_of_it_is_used(folder: Path) -> None:
    shard = folder / "shard-00001.parquet"
    content = bytearray(shard.read_bytes())
    content[40] ^= 1
    shard.write_bytes(content)
    store = TrajectoryStore.open(folder)
    refuses(folder, lambda: list(store.read()), str(shard), "sha256")
    refuses(folder, lambda: store.append([episode("d")]), str(shard), "sha256")


def test_a_shard_that_vanishes_while_the_store_is_open_is_named(folder: Path) -> None:
    store = TrajectoryStore.open(folder)
    list(store.read())
    (folder / "shard-00000.parquet").unlink()
    refuses(folder, lambda: list(store.read()), "shard-00000.parquet", "is missing")


def test_a_shard_that_is_no_parquet_is_named(folder: Path) -> None:
    content = b"these are no columns"
    (folder / "shard-00000.parquet").write_bytes(content)
    shard = SHARD | {"file": "shard-00000.parquet", "bytes": 20, "sha256": hashlib.sha256(content).hexdigest()}
    edit_manifest(folder, shards=[shard])
    refuses(folder, lambda: read_all(folder), "shard-00000.parquet", "no readable Parquet")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda table: table.drop_columns(["start"]), ("'start'",)),
        (lambda table: table.slice(0, 1), ("has 1 rows", "says 2 episodes")),
        (set_column("stop", lambda v: [v[0], "crashed"]), ("row 1, field 'stop' is 'crashed'",)),
        (set_column("source", lambda v: ["rael", v[1]]), ("row 0, field 'source' is 'rael'", "'real'?")),
        (set_column("seed", lambda v: ["3", "3"], pa.string()), ("row 0, field 'seed' is '3'", "whole number")),
        (set_column("start", lambda v: [v[0], None]), ("row 1, field 'start' is null",)),
        (set_column("task_id", lambda v: [v[0], "tw-9"]), ("row 1, field 'task_id' is 'tw-9'", "in no split")),
        (set_column("id", lambda v: ["a", "a"]), ("row 1, field 'id' is 'a'", "earlier row")),
        (set_column("world_facts", lambda v: [["a"], ["b", None]]), ("row 1, field 'world_facts[1]' is null",)),
        (set_column("success", lambda v: ["no", None], pa.string()), ("row 0, field 'success' is 'no'",)),
        (set_column("turns", lambda v: [v[0], None]), ("row 1, field 'turns' is null",)),
        (set_column("turns", lambda v: [[v[0][0], v[0][1] | {"action": None}], []]), ("row 0", "'turns[1].action'")),
        (set_column("turns", lambda v: [[v[0][0] | {"info": [{"key": "k"}]}], []]), ("row 0", "'turns[0].info['k']'")),
    ],
)
def test_a_wrong_value_in_a_shard_is_named_by_row_and_field(
    folder: Path, edit: Callable[[pa.Table], pa.Table], words: tuple[str, ...]
) -> None:
    edit_shard(folder, 0, edit)
    refuses(folder, lambda: read_all(folder), str(folder / "shard-00000.parquet"), *words)


@pytest.mark.parametrize("column", ["world_facts", "success"])
def test_a_shard_of_before_there_was_a_column_is_read(folder: Path, column: str) -> None:
    before = read_all(folder)
    edit_shard(folder, 0, lambda table: table.drop_columns([column]))
    assert read_all(folder) == before


def test_a_trace_that_contradicts_itself_is_named(folder: Path) -> None:
    bad = {"ids": [1], "owners": [0], "logprobs": [-1.0], "turns": [-1], "temperature": 1.0}
    edit_shard(folder, 0, set_column("trace", lambda v: [None, bad]))
    refuses(folder, lambda: read_all(folder), "shard-00000.parquet", "row 1, field 'trace'", "SCAFFOLD")


def test_the_number_of_a_bad_row_is_that_in_the_file_also_when_a_split_is_read(folder: Path) -> None:
    store = TrajectoryStore.open(folder)
    store.append([episode(f"e{i}", "tw-3" if i % 2 else "tw-1") for i in range(150)])
    edit_shard(folder, 2, set_column("start", lambda v: [*v[:101], None, *v[102:]]))
    refuses(folder, lambda: list(TrajectoryStore.open(folder).read("test")), "row 101, field 'start'")
    assert len(list(TrajectoryStore.open(folder).read("train"))) == 77


def test_somebody_elses_shard_with_more_columns_and_large_strings_is_read(folder: Path) -> None:
    def edit(table: pa.Table) -> pa.Table:
        table = set_column("start", lambda v: v, pa.large_string())(table)
        return table.append_column("note", pa.array(["x", "y"]))

    before = read_all(folder)
    edit_shard(folder, 0, edit)
    assert read_all(folder) == before


def test_an_unknown_split_gets_a_hint(folder: Path) -> None:
    store = TrajectoryStore.open(folder)
    for act in (lambda: store.read("trian"), lambda: store.tasks("trian")):
        refuses(folder, act, "manifest.json", "'trian'", "'train'?", "spare, test, train")


def test_a_split_without_episodes_is_an_error_of_the_call_itself(folder: Path) -> None:
    store = TrajectoryStore.open(folder)
    refuses(folder, lambda: store.read("spare"), "manifest.json", "'spare'", "no episodes")


def test_an_empty_store_is_an_error_when_read_but_not_when_opened(tmp_path: Path) -> None:
    TrajectoryStore.create(tmp_path / "log", SPLITS)
    store = TrajectoryStore.open(tmp_path / "log")
    refuses(tmp_path, store.read, "manifest.json", "no episodes")
    assert store.summary().total.episodes == 0


def test_a_log_in_which_nobody_acts_is_an_error_but_can_be_looked_at(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "log", SPLITS)
    mute = episode("m", "tw-2", Turn(" ", "Hm?", None, False), stop=StopReason.TURN_LIMIT)
    store.append([crashed("x"), mute])
    refuses(tmp_path, store.read, "manifest.json", "action", "2 episodes, 1 turns")
    refuses(tmp_path, lambda: store.read("train"), "'train'", "action")
    assert [t.id for t in store.read(require_actions=False)] == ["x", "m"]
    assert store.summary().total.failures == {StopReason.ENV_CRASHED: 1}
    store.append([episode("a")])  # one action is enough, and nothing is left out then
    assert [t.id for t in store.read()] == ["x", "m", "a"]


def test_a_slow_world_does_not_keep_its_episodes_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed without a chance to end in order, a log of hours would otherwise be lost up to its last shard."""
    now = [0.0]
    monkeypatch.setattr("real_envs.store.trajectory_store.time.monotonic", lambda: now[0])
    store = TrajectoryStore.create(tmp_path, {"train": ["t"]})
    writer = store.writer(shard_turns=1000)  # nobody leaves a `with`: the process dies
    for k, at in enumerate((10.0, 59.0, 61.0, 70.0)):
        now[0] = at
        writer.add(episode(f"e{k}", "t"))
    assert [t.id for t in TrajectoryStore.open(tmp_path).read()] == ["e0", "e1", "e2"]


def test_turns_written_column_by_column_are_those_of_the_rows() -> None:
    """Shards are the same bytes as from rows, which is what others write."""
    noted = Turn("a", "b", None, False, {"n": 1, "x": 0.5, "t": "é", "f": True})
    plain = Turn("", "", 1.5, True)
    kinds: list[tuple[Turn, ...]] = [(), (plain,), (noted, plain), (), (plain, noted, plain)]
    made = [
        Trajectory(f"e{k}", "t", "g", Source.REAL, "a", k, "s", turns, StopReason.TURN_LIMIT, failure=None)
        for k, turns in enumerate(kinds)
    ]
    for some in (made, made[:1], made[1:2], []):
        assert to_table(some).equals(pa.Table.from_pylist([encode(one) for one in some], schema=SCHEMA))
