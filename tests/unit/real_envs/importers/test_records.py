"""Records come out of files one at a time, whatever lies between them. If these fail, episodes get lost on the way."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real_envs.importers import records
from real_envs.importers.records import json_records, text_lines
from real_envs.store.codec import FieldError

VALUE = {"a": 'say "hi" \\ [}] {', "b": [1, 2.5, None, True, {"c": "é☕"}], "d": {}}


def values(path: Path) -> list[Any]:
    return [record.value for record in json_records(path)]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_arrays_and_named_records_do_not_depend_on_where_the_reading_stops(
    tmp_path: Path, chunk: int, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, named = tmp_path / "array.json", tmp_path / "named.json"
    array.write_text(json.dumps([VALUE] * 5, indent=indent))
    named.write_text(json.dumps({f"k{i}": VALUE for i in range(5)}, indent=indent))
    head = records._CHUNK
    expected = [("record 1", "record 'k0'"), ("record 5", "record 'k4'")]
    assert head == 1 << 20
    monkeypatch.setattr(records, "_CHUNK", max(chunk, 2))
    found, others = list(json_records(array)), list(json_records(named))
    assert [record.value for record in found] == [record.value for record in others] == [VALUE] * 5
    assert [(a.where, b.where) for a, b in zip(found, others, strict=True) if a.where[-1] in "15"] == expected


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers(), max_size=3), max_size=5))
def test_any_objects_come_back(tmp_path_factory: pytest.TempPathFactory, found: list[dict[str, Any]]) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "a.json").write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, found)), encoding="utf-8")
    assert values(folder / "a.json") == values(folder / "a.jsonl") == found


def test_a_bad_line_is_one_record_and_the_next_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n\n{"a": \n{"b": "\xff"}\n{"a": 2}\n')
    found = list(json_records(tmp_path / "a.jsonl"))
    assert [record.where for record in found] == ["line 1", "line 3", "line 4", "line 5"]
    assert [isinstance(record.value, FieldError) for record in found] == [False, True, True, False]


@pytest.mark.parametrize("text", ['[{"a": 1},', '[{"a": 1}] and more', '[{"a": 1}]\n\n2', '{"k": {"a": 1}} {"b": 1}'])
@pytest.mark.parametrize("chunk", [2, 1 << 20])
def test_what_follows_or_breaks_off_is_told(
    tmp_path: Path, text: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_text(text)
    monkeypatch.setattr(records, "_CHUNK", chunk)
    good, bad = values(tmp_path / "a.json")
    assert good == {"a": 1}
    assert "rest of" in bad.reason


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a": ]', '[{"a": 1}, {"a"', '[{"a": 1} {"b": 2}]', '[{"a": 1}, nul]'])
def test_an_array_that_breaks_is_read_up_to_there(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    good, bad = values(tmp_path / "a.json") if text.count("}") < 2 else [{"a": 1}, values(tmp_path / "a.json")[-1]]
    assert good == {"a": 1}
    assert isinstance(bad, FieldError)
    assert "rest of" in bad.reason


def test_lines_are_known_without_their_suffix_and_one_object_is_one_record(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": {}}\n{"a": {}}\n')
    assert values(tmp_path / "a.json") == [{"a": {}}, {"a": {}}]
    (tmp_path / "c.json").write_text('[{"a": 1}]\n[{"a": 2}, 3]\n')
    assert values(tmp_path / "c.json") == [[{"a": 1}], [{"a": 2}, 3]]
    (tmp_path / "b.json").write_text(json.dumps({"messages": [1], "reward": 1}, indent=1))
    assert values(tmp_path / "b.json") == [{"messages": [1], "reward": 1}]


def test_gzipped_files_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}\n'))
    assert values(tmp_path / "a.jsonl.gz") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("form", ["array", "lines"])
def test_a_file_larger_than_what_may_be_in_memory(tmp_path: Path, form: str) -> None:
    path = tmp_path / ("a.json" if form == "array" else "a.jsonl")
    record = json.dumps({"text": "x" * 10_000})
    with path.open("w") as file:  # 40 MB
        file.write("[" if form == "array" else "")
        for k in range(4000):
            file.write(record + ("\n" if form == "lines" else "," if k < 3999 else "]"))
    tracemalloc.start()
    try:
        assert sum(len(found.value["text"]) for found in json_records(path)) == 40_000_000
        assert tracemalloc.get_traced_memory()[1] < 12_000_000
    finally:
        tracemalloc.stop()


WIDE = [
    ("utf-8-sig", b""),
    ("utf-16", b""),
    ("utf-16-be", b"\xfe\xff"),
    ("utf-16-le", b""),
    ("utf-16-be", b""),
    ("utf-32", b""),
]


@pytest.mark.parametrize(("encoding", "mark"), WIDE)
@pytest.mark.parametrize("zipped", [False, True])
def test_files_of_windows_are_read_as_any_other(tmp_path: Path, encoding: str, mark: bytes, zipped: bool) -> None:
    def stored(name: str, text: str) -> Path:
        content = mark + text.replace("\n", "\r\n").encode(encoding)
        path = tmp_path / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(content) if zipped else content)
        return path

    line = json.dumps(VALUE | {"long": "ä☕" * 5000}, ensure_ascii=False)
    assert values(stored("a.jsonl", f"{line}\n{line}\n")) == [json.loads(line)] * 2
    assert values(stored("a.json", f"[{line},\n{line}]")) == [json.loads(line)] * 2
    assert values(stored("b.json", line)) == [json.loads(line)]
    assert list(text_lines(stored("a.txt", "> lük\nA\x0cB\u2028C\n"))) == ["> lük\n", "A\x0cB\u2028C\n"]


def test_bytes_that_are_no_utf_8_are_named_or_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"a": "ä"}\n{"a": 1}\n'.encode("latin-1"))
    first, second = values(tmp_path / "a.jsonl")
    assert "UTF-8" in first.reason
    assert second == {"a": 1}
    (tmp_path / "a.txt").write_bytes(b"a\xe4b\n")
    assert list(text_lines(tmp_path / "a.txt")) == ["a\udce4b\n"]


def test_an_object_with_a_list_of_objects_is_one_record_whatever_stands_before_it(tmp_path: Path) -> None:
    trajectory = {"info": {"exit_status": "Submitted"}, "messages": [{"role": "user"}], "format": "1"}
    (tmp_path / "a.json").write_text(json.dumps(trajectory))
    assert values(tmp_path / "a.json") == [trajectory]
    rollout = {"info": {"id": 1}, "prompt": "2+2?", "completion": "4"}
    (tmp_path / "c.json").write_text(json.dumps(rollout, indent=1))
    assert values(tmp_path / "c.json") == [rollout]
    named = {"0": {"a": 1}, "mean": 0.5, "ids": [1, 2]}
    (tmp_path / "b.json").write_text(json.dumps(named))
    assert values(tmp_path / "b.json") == [{"a": 1}, 0.5, [1, 2]]


ODD = [
    *(b"-0", b"1e5", b"18446744073709551615", b"18446744073709551616", b"-9223372036854775809", b"1" * 400, b"1E400"),
    *(b"0.30000000000000004", b"1.7976931348623157e308", b"4.9e-324", b"NaN", b"-Infinity", b"01", b"1.", b"[1,]"),
    *(b'"\\ud800"', b'"\\ud83d\\ude00"', b'"a\tb"', b'"\xff"', b'"\\u0000"', b'{"a": 1, "b": 2, "a": 3}'),
    *(b"\xef\xbb\xbf[]", b'{"a": "\xc3\xa9\\u00e9"}', b"nul", b'"', b"{} {}", b" [] \r"),
]


@pytest.mark.parametrize("line", ODD)
def test_a_faster_parser_reads_and_refuses_the_same(
    line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("orjson", reason="pip install 'imagination[fast]'")
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n[2]\n")

    def shown() -> list[str]:
        return [f"{record.where} {record.value!r}" for record in json_records(path)]

    fast = shown()
    monkeypatch.setattr(records, "orjson", None)
    assert fast == shown()
    assert len(fast) == 3


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=9))
def test_a_faster_parser_reads_the_same_values(value: Any) -> None:
    line = json.dumps(value).encode()
    assert repr(records._loads(line)) == repr(json.loads(line))


@pytest.mark.parametrize("text", ["\\ud800", "\\uD800", "\\\\ud800"])
def test_only_lines_without_half_surrogate_pairs_are_taken_for_whole(text: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"a": "é\\u00e9"}}\n{{"a": "{text}"}}\n')
    assert [record.whole for record in json_records(path)] == [True, False]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, lambda b: pa.compress(b, "zstd", True)])
def test_packed_files_are_known_by_their_first_bytes(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "a.jsonl").write_bytes(pack(b'{"a": 1}\n{"a": 2}\n'))
    assert values(tmp_path / "a.jsonl") == [{"a": 1}, {"a": 2}]
    (tmp_path / "cut.jsonl").write_bytes(pack(b'{"a": 1}\n' * 9)[:-9])
    with pytest.raises((OSError, EOFError)):
        values(tmp_path / "cut.jsonl")


@pytest.mark.parametrize("between", [":", " : "])
@pytest.mark.parametrize(("name", "form"), [("a.jsonl", "%s\n%s"), ("a.json", "[%s,\n%s]")])
def test_an_object_that_has_a_key_twice_with_two_values_is_no_record(
    tmp_path: Path, name: str, form: str, between: str
) -> None:
    for inner in ('"reward"%s1, "a": {"reward": 1}, "reward"%s0', '"a": [{"b"%s"\\\\", "reward": 1, "reward"%s0}]'):
        broken, good = inner % (between, between), '"a": "\\"reward\\":", "b": 1, "b": 1'
        (tmp_path / name).write_text(form % (f"{{{broken}}}", f"{{{good}}}"))
        wrong, right = values(tmp_path / name)
        assert isinstance(wrong, FieldError)
        assert (wrong.field, right) == ("reward", {"a": '"reward":', "b": 1})
    (tmp_path / "b.json").write_text('{"prompt": "x",\n"reward": 1,\n"reward": 0}')
    (alone,) = values(tmp_path / "b.json")
    assert isinstance(alone, FieldError)
