"""The machine that a run has, and the memory that one stage leaves to the next."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import platform
from pathlib import Path


def cores(control_groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Processor cores that this process may use: those it is bound to, and no more than its container is given."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(control_groups)
    return bound if quota == math.inf else max(1, min(bound, math.ceil(quota)))


def _quota(control_groups: Path) -> float:
    """Processors' worth of time that the container may use (cgroup v2, then v1); infinite where nothing limits it."""
    places = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
    for files in places:
        try:
            words = " ".join((control_groups / name).read_text() for name in files).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # not there, or "max"
            continue
        if quota > 0 and period > 0:
            return quota / period
    return math.inf


def processor() -> str:
    """The processor's name where the system tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def give_back_memory() -> None:
    """Returns freed memory to the system; glibc would keep what a stage's many differently shaped tensors left."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
