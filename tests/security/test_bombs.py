"""Small files that grow, and names that climb. If these fail, a log or a run of a stranger takes the memory of this
machine, or reads and writes where it should not.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from imagination.report.page import Pictures
from real_envs.importers import records
from real_envs.importers.drafts import Reading
from real_envs.importers.formats import FORMATS, Imported, LogFile, RejectedRecord, log_files, read
from real_envs.screens import copy_screens, screens_of
from real_envs.store import MANIFEST, StoreError, TrajectoryStore
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.refusal import in_a_line, refused
from tests.support.tiny import write_log

TURN = {"action": "x", "observation": "y", "reward": 1.0, "terminated": True}
EPISODE = {"task_id": "a", "start": "s", "turns": [TURN]}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
KEYS = ", ".join(f'"key {k}": {k}' for k in range(200_000))


def imported(file: Path) -> list[Imported | RejectedRecord]:
    (one,) = log_files("auto", file)
    assert isinstance(one, LogFile)
    return list(read(one.path, one.format, Reading()))


def rejected(file: Path, *tokens: str) -> None:
    """The record after the first is refused, in a line; the first one is an episode."""
    good, bad = imported(file)
    assert isinstance(good, Imported)
    assert isinstance(bad, RejectedRecord)
    in_a_line(str(bad), file.name, *tokens)


@pytest.mark.parametrize("line", [b"x", b"[" * 1000, b'{"a": [],', b"\n"])
def test_a_gzipped_bomb_is_refused(line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_UNPACKED", 1 << 20)
    file = tmp_path / "log.jsonl.gz"
    file.write_bytes(gzip.compress(line * ((4 << 20) // len(line)), 9))
    refused(lambda: imported(file), file.name, "200 times")
    file.write_bytes(gzip.compress(json.dumps(EPISODE).encode() + b"\n" + line * ((4 << 20) // len(line)), 9))
    refused(lambda: imported(file), file.name, "200 times")


def test_what_repeats_itself_a_lot_is_no_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_UNPACKED", 1 << 16)
    file = tmp_path / "log.jsonl.gz"
    lines = [
        json.dumps(EPISODE | {"id": str(k), "start": hashlib.sha256(bytes(k)).hexdigest() * 40}) for k in range(99)
    ]
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert sum(map(len, lines)) > 10 * file.stat().st_size
    assert len(imported(file)) == 99


def test_a_table_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_UNPACKED", 1 << 20)
    for packing in ("zstd", "gzip"):
        file = tmp_path / f"{packing}.parquet"
        pq.write_table(pa.table({"messages": ["a" * (8 << 20)]}), file, compression=packing, use_dictionary=False)
        refused(lambda file=file: imported(file), file.name, "200 times")


@pytest.mark.parametrize("packing", ["lz4", "zstd"])
@pytest.mark.parametrize("opened", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_with_packed_buffers_is_refused(opened: Callable[..., Any], packing: str, tmp_path: Path) -> None:
    """Plain ones are read: in a column, and in a dictionary beside it."""
    table = pa.table(
        {"messages": [json.dumps(CHAT["messages"])] * 2, "agent": pa.array(["a", "b"]).dictionary_encode()}
    )
    for name, compression in (("packed", packing), ("plain", None)):
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with opened(str(tmp_path / f"{name}.arrow"), table.schema, options=options) as file:
            file.write_table(table)
    refused(lambda: imported(tmp_path / "packed.arrow"), "packed.arrow", "packed buffers", "Parquet")
    agents = [one.episode.agent for one in imported(tmp_path / "plain.arrow") if isinstance(one, Imported)]
    assert agents == ["a", "b"]


@pytest.mark.parametrize("good", [EPISODE, CHAT], ids=["own", "chat"])
def test_hundreds_of_thousands_of_keys_are_refused(good: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(f"{json.dumps(good)}\n{{{KEYS}, {json.dumps(good)[1:]}")
    rejected(file, "line 2", "10,000")


def test_hundreds_of_thousands_of_keys_within_a_turn_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    bad = json.dumps(EPISODE).replace('"action"', f'{KEYS}, "action"')
    file.write_text(f"{json.dumps(EPISODE)}\n{bad}")
    rejected(file, "line 2", "10,000")


def _call(function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": function}]}


NESTED: dict[str, Callable[[Any], Any]] = {
    "jsonl": lambda it: EPISODE | {"more": it},
    "jsonl turn": lambda it: EPISODE | {"turns": [TURN | {"observation": it}]},
    "openai content": lambda it: {"messages": [{"role": "user", "content": it}, *CHAT["messages"]]},
    "openai": lambda it: {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [{"function": it}]}]},
    "openai argument": lambda it: {
        "messages": [
            *CHAT["messages"],
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": it}}]},
        ]
    },
    "agentgym": lambda it: {"conversations": [{"from": "human", "value": it}, {"from": "gpt", "value": "x"}]},
    "intercode": lambda it: {"query": "q", "turn_history": {"actions": [it], "observations": ["x"], "rewards": [1]}},
    "commands": lambda it: {"problem": it, "trace": "> go\nA hall."},
    "huggingface": lambda it: CHAT | {"more": it},
}


@pytest.mark.parametrize("place", NESTED)
def test_a_thousand_levels_end_no_import(place: str, tmp_path: Path) -> None:
    """Each depth around the recursion limit, as other parts of the reading stop at other depths."""
    file = tmp_path / "log.jsonl"
    depths = [*range(880, 1000, 3), 2000, 100_000]
    marked = json.dumps(NESTED[place]("MARK"))
    lines = [marked.replace('"MARK"', f"{'[' * depth}{']' * depth}") for depth in depths]
    lines += [marked.replace('"MARK"', '{"a":' * depth + "1" + "}" * depth) for depth in depths]
    file.write_text("\n".join([*lines, json.dumps(NESTED[place]("x"))]))
    items = list(read(file, FORMATS[place.split()[0]], Reading()))
    assert {item.record for item in items if isinstance(item, RejectedRecord)} >= {
        f"line {k + 1}" for k in range(len(lines)) if depths[k % len(depths)] >= 2000
    }
    assert len(items) == len(lines) + 1


def test_shards_and_pictures_of_a_log_lie_in_its_folder(tmp_path: Path) -> None:
    write_log(tmp_path)
    manifest = tmp_path / "log" / MANIFEST
    content = json.loads(manifest.read_text())
    shutil.copy(tmp_path / "log" / content["shards"][0]["file"], tmp_path / "outside.parquet")
    for climbing in ("../outside.parquet", str(tmp_path / "outside.parquet"), "..", "a\\..\\b", "a\0"):
        content["shards"][0]["file"] = climbing
        manifest.write_text(json.dumps(content))
        refused(lambda: TrajectoryStore.open(tmp_path / "log"), MANIFEST, error=StoreError)
    (tmp_path / "screens").mkdir()
    (tmp_path / "secret.png").write_text("secret")
    info = {"screenshot": "../secret.png", "screenshot_before": str(tmp_path / "secret.png")}
    turn = Turn("x", "y", 0.0, True, info)
    episode = Trajectory("e", "t", "g", Source.REAL, "a", 0, "s", (turn,), StopReason.TERMINATED)
    names = list(screens_of([episode]))
    copy_screens(names, tmp_path / "screens", tmp_path / "copied")
    pictures = Pictures([tmp_path / "screens"])
    for name in names:
        pictures.place(name)
    assert names == []
    assert pictures.addresses == []
    assert not (tmp_path / "copied").exists()
