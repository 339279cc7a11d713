"""Folders of logs. If these fail, files are passed over and nobody hears of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from real_envs.importers.drafts import Reading
from real_envs.importers.formats import FORMATS, Imported, RejectedRecord, log_files, read
from tests.support.refusal import refused

OWN = {"task_id": "t", "start": "s", "turns": [{"action": "a", "observation": "o"}]}
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}

REACT = b"Action: look\nObservation: A lamp.\n"
WEB = ["other/result.json", "web/history.json", "web/result.json"]  # without browser-use, JSON as any other


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "b" / "own.jsonl", OWN)
    write(tmp_path / "a.json", [CHAT])
    write(tmp_path / "c.jsonl.gz", gzip.compress(json.dumps(OWN | {"start": "z"}).encode()))
    write(tmp_path / "game.txt", b"West of House.\n> open mailbox\nA leaflet.\n")
    write(tmp_path / "printed.log", REACT)
    pq.write_table(pa.table({"pixels": [1]}), tmp_path / "pictures.parquet")
    pq.write_table(pa.Table.from_pylist([CHAT]), tmp_path / "chats.parquet")
    write(tmp_path / "prompt.py", b'TEXT = """' + REACT + b'"""')
    write(tmp_path / "README.md", b"# Runs\n\n> quoted, and no action\n")
    write(tmp_path / "b" / "shot.png", b"\x89PNG\r\n\x1a\n\0\0\n> x")
    write(tmp_path / "b" / "cut.jsonl.gz", gzip.compress(json.dumps(OWN).encode())[:-9])
    write(tmp_path / "b" / "empty.json", b"")
    write(tmp_path / "web" / "result.json", {"task_id": "w", "instruction": "Mail Bob", "passed": True})
    write(tmp_path / "web" / "history.json", {"history": []})
    write(tmp_path / "other" / "result.json", {"score": 1})
    return tmp_path


def names(folder: Path, name: str = "auto") -> tuple[list[tuple[str, str]], list[str]]:
    """Files with their formats, and those that are in none, in their order."""
    found = list(log_files(name, folder))
    known = [(s[0].relative_to(folder).as_posix(), s[1].name) for s in found if not isinstance(s, RejectedRecord)]
    return known, [s.file.relative_to(folder).as_posix() for s in found if isinstance(s, RejectedRecord)]


def test_every_file_is_read_or_named(folder: Path) -> None:
    known, unknown = names(folder)
    formats = {".": "browser-use", "a.json": "openai", "b/own.jsonl": "jsonl", "c.jsonl.gz": "jsonl"}
    formats["chats.parquet"] = "huggingface"
    assert known == [*formats.items(), ("printed.log", "react")]
    assert unknown == [
        *("README.md", "b/cut.jsonl.gz", "b/empty.json", "b/shot.png", "game.txt", "other/result.json"),
        *("pictures.parquet", "prompt.py"),
    ]
    own = {"web/result.json", "web/history.json"}
    every = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {name for name, _ in known[1:]} | set(unknown) | own == every


def test_a_named_format_takes_what_could_be_of_it(folder: Path) -> None:
    known, unknown = names(folder, "openai")
    assert [name for name, _ in known] == [
        "a.json",
        "b/own.jsonl",
        "c.jsonl.gz",
        "chats.parquet",
        *WEB[:1],
        "pictures.parquet",
        *WEB[1:],
    ]
    assert {"README.md", "game.txt", "b/shot.png"} <= set(unknown)
    assert ("game.txt", "commands") in names(folder, "commands")[0]
    assert [type(item) for item in read(folder / "chats.parquet", FORMATS["openai"], Reading())] == [Imported]
    assert names(folder, "browser-use")[0][0] == (".", "browser-use")


def test_nothing_to_read_and_misspelt_formats_are_errors(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    refused(lambda: list(log_files("auto", tmp_path / "none")), str(tmp_path / "none"), "no file")
    refused(lambda: list(log_files("opena", folder)), "'opena'", "'openai'")
    refused(lambda: list(log_files("auto", folder / "README.md")), "README.md", "no format")


def test_an_id_that_an_earlier_file_gave_is_refused(tmp_path: Path) -> None:
    files = [write(tmp_path / name / "own.jsonl", OWN | {"id": "1", "start": name}) for name in "ab"]
    named: set[str] = set()
    first, second = (list(read(file, FORMATS["jsonl"], Reading(), named)) for file in files)
    assert isinstance(first[0], Imported)
    assert isinstance(second[0], RejectedRecord)
    assert (second[0].field, "'1'" in second[0].reason) == ("id", True)


def test_a_file_that_breaks_off_is_read_up_to_there(tmp_path: Path) -> None:
    lines = "".join(json.dumps(OWN | {"start": f"{k} " * 200}) + "\n" for k in range(3_000))  # 3 MB
    path = write(tmp_path / "cut.jsonl.gz", gzip.compress(lines.encode())[:-300])
    *good, last = read(path, FORMATS["jsonl"], Reading())
    assert len(good) > 100
    assert all(isinstance(item, Imported) for item in good)
    assert isinstance(last, RejectedRecord)
    assert "rest" in last.record


def test_thoughts_and_errors_of_browser_use_are_read_or_counted(tmp_path: Path) -> None:
    thoughts = {"thinking": "A form.", "evaluation_previous_goal": None, "memory": "", "next_goal": "Send."}
    output = thoughts | {"action": [{"wait": 3}, {"go_back": None}, {"click": {"index": 1}}]}
    history = [
        {"model_output": output, "result": [{"extracted_content": "Sent 1 of 2", "error": "gone"}]},
        {"model_output": None, "result": [{"error": "no JSON"}]},
        {"model_output": {"current_state": thoughts, "action": [{"done": {}}]}, "result": None},
    ]
    write(tmp_path / "w" / "result.json", {"instruction": "Mail Bob", "passed": True})
    write(tmp_path / "w" / "history.json", {"history": history})
    (episodes,) = read(tmp_path, FORMATS["browser-use"], Reading())
    assert isinstance(episodes, Imported)
    turns = [(turn.action, turn.observation, turn.info["log.thought"]) for turn in episodes.episode.turns]
    assert turns == [
        ("wait(3)\ngo_back()\nclick(index=1)", "Sent 1 of 2\ngone", "A form.\n\nSend."),
        ("done()", "", "A form.\n\nSend."),
    ]
    assert episodes.episode.turns[-1].info["log.left_out.error of a step without an action"] == 1


def test_copies_that_programs_leave_in_a_folder_are_told(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl~", "a.jsonl.bak"):
        write(tmp_path / name, CHAT)
    found = list(log_files("auto", tmp_path))
    assert [isinstance(one, RejectedRecord) for one in found] == [False, True, True]
