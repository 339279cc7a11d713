"""Files that are whole or not there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


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
