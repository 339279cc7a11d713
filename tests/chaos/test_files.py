"""Damaged bytes in small files. If these fail, a changed digit is read as if it had been written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from real_envs.errors import UserError
from real_envs.files import CHECKSUMS, check_checksums, read_json, write_checksums, write_json

DATA = {"seed": 7, "steps": {"collect": 120}, "hardware": "2 × EPYC", "share": 0.125, "none": None, "nan": [1e-300]}


@pytest.mark.parametrize("ascii_only", [True, False])
def test_no_bit_of_a_file_with_a_digest_changes_unseen(tmp_path: Path, ascii_only: bool) -> None:
    """Every third bit, each place of a byte among them: what is read is what was written, or the file is named."""
    path = tmp_path / "summary.json"
    write_json(path, DATA, ascii_only)
    whole, named = path.read_bytes(), list[str]()
    assert read_json(path) == DATA
    bits = range(0, len(whole) * 8, 3)
    for at in bits:
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            read = read_json(path)
        except UserError as error:
            named.append(str(error))
        else:
            # a bit of the digest's own name leaves it without a digest, and with a key that nobody reads
            assert {key: read[key] for key in DATA} == DATA, at
    assert len(named) > 0.6 * len(bits)
    assert all(str(path) in line and "\n" not in line for line in named)


def test_a_torn_file_is_named_and_one_of_another_program_is_read(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, DATA)
    whole = path.read_bytes()
    for size in range(len(whole) - 2):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"summary\.json"):
            read_json(path)
    path.write_text(json.dumps(DATA))
    assert read_json(path) == DATA


@pytest.mark.parametrize("damage", ["bit", "end", "missing", "list"])
def test_a_file_that_is_not_as_it_was_written_is_named(tmp_path: Path, damage: str) -> None:
    for name in ("weights", "tokenizer"):
        (tmp_path / name).write_bytes(bytes(range(256)))
    check_checksums(tmp_path)  # none are there yet
    (tmp_path / f"{CHECKSUMS}.tmp").write_text("of a process that was killed")
    write_checksums(tmp_path)
    (tmp_path / f"{CHECKSUMS}.tmp").unlink(missing_ok=True)
    (tmp_path / "calibration").write_text("written later")
    check_checksums(tmp_path)
    path = tmp_path / (CHECKSUMS if damage == "list" else "weights")
    whole = bytearray(path.read_bytes())
    whole[40] ^= 1
    path.write_bytes(whole[:-1] if damage == "end" else whole)
    if damage == "missing":
        path.unlink()
    with pytest.raises(UserError, match=path.name):
        check_checksums(tmp_path)
