"""Memory that a stage leaves to the next one."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def give_back_memory() -> None:
    """Returns freed memory to the system; glibc would keep what a stage's many differently shaped tensors left."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
