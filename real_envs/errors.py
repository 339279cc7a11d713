"""What a user has done wrong, and can mend."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What libraries say of a full disk where they pass on no ``OSError``: safetensors, torch, tempfile.
_FULL = ("No space left on device", "PytorchStreamWriter failed", "file write failed", "No usable temporary directory")
_DISK = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "the disk is full"),
    errno.EROFS: "the disk is read-only",
    errno.EIO: "the disk fails",
    errno.ENAMETOOLONG: "its name is too long",
}


class UserError(ValueError):
    """Something the user can mend. The message says what is wrong and what to do; no traceback is shown.

    Every error that is written for the user derives from it.
    """


def printable(line: str) -> str:
    """The line with control characters written out: a file's name, or what a log holds, must neither move a terminal's
    cursor nor look like a line of ours.
    """
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", lambda c: ascii(c[0])[1:-1], line)


def hides_traceback(error: Exception) -> bool:
    """Whether the message is enough; ``IMAGINE_TRACEBACK=1`` asks where it was raised, too."""
    return isinstance(error, UserError) and os.environ.get("IMAGINE_TRACEBACK") != "1"


@contextmanager
def with_disk_errors_named(folder: Path | None = None) -> Iterator[None]:
    """Raises ``UserError`` for an error behind which is a disk that cannot be written, such as that of ``folder``."""
    try:
        yield
    except UserError:
        raise
    except PermissionError as error:
        if error.filename is None:
            raise
        raise UserError(f"{error.filename}: this user may not read or write it") from error
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            why = _DISK.get(cause.errno or 0) if isinstance(cause, OSError) else None
            if why or any(words in str(cause) for words in _FULL):
                places = (cause.filename2, cause.filename) if isinstance(cause, OSError) else ()  # of a copy, where to
                place = next(filter(None, places), folder)
                raise UserError(
                    f"cannot write {str(place or '').removesuffix('.tmp')}: {why or _DISK[errno.ENOSPC]}; what was "
                    "written before is kept, so mend that and run the same command again"
                ) from error
            cause = cause.__cause__ or cause.__context__
        raise
