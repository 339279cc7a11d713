"""Files that are whole or not there, and that say when they are not what was written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from real_envs.errors import UserError

CHECKSUMS = "checksums.json"
_DIGEST = "sha256"


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Puts ``content`` at ``path`` such that a crash leaves either the old file or the new one, never a part of it.

    Text is written as UTF-8. Missing folders are made.

    Raises:
        OSError: it cannot be written; what was there before is intact.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    try:
        draft.unlink(missing_ok=True)  # of a crash, or a link of somebody else's to a file outside
        with draft.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):  # of a full disk, it would take what room there is
            draft.unlink()
        raise
    if os.name == "posix":  # the new name must survive a power cut, too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return path


def read_text(path: Path) -> str:
    """Raises ``UserError``: the file is damaged, no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from error


def write_json(path: Path, data: Mapping[str, Any], ensure_ascii: bool = True) -> None:
    """Writes ``data`` atomically, with a digest of it, by which ``read_json`` notices a changed byte."""
    text = json.dumps({**data, _DIGEST: _digest(data)}, indent=1, ensure_ascii=ensure_ascii)
    write_atomically(path, text + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of ``write_json``, or of a version or a program that wrote no digest.

    Raises:
        UserError: it is no JSON object, or not what its digest was made of.
    """
    try:
        data = json.loads(read_text(path))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged, no JSON: {error}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} is damaged: no JSON object")
    digest = data.pop(_DIGEST, None)
    if digest is not None and digest != _digest(data):
        raise UserError(f"{path} was damaged or edited; take its line '{_DIGEST}' out to use it as it is")
    return data


def _digest(data: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(data))  # keys are text then
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def write_checksums(folder: Path) -> None:
    """Writes the SHA-256 of each file of ``folder``, not of its folders, into ``checksums.json`` there. Drafts that a
    killed process left are no files of it.
    """
    write_json(folder / CHECKSUMS, {path.name: _sha256(path) for path in _files(folder)})


def check_checksums(folder: Path) -> None:
    """Raises ``UserError``: a file is missing or not what it was at ``write_checksums``. Further files pass, and a
    folder without checksums.
    """
    path = folder / CHECKSUMS
    for name, digest in (read_json(path) if path.exists() else {}).items():
        if Path(name).name != name:
            raise UserError(f"{path} names '{name}', which is no file of its folder")
        if not (folder / name).is_file() or _sha256(folder / name) != digest:
            what = "was damaged or edited" if (folder / name).exists() else "is missing"
            advice = f"run the stage again that wrote it, or remove {path} to use the folder as it is"
            raise UserError(f"{folder / name} {what}; {advice}")


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS and path.suffix != ".tmp"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
