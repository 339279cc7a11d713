"""What this machine can do at best: the rates that the benchmarks are held against, measured in the same run."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F


def best_seconds(work: Callable[[], object], seconds: float = 1.0) -> float:
    """The fastest of many repetitions within about ``seconds``: what the work costs undisturbed."""
    for _ in range(3):
        work()
    found, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until or len(found) < 5:
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        found.append(time.perf_counter() - begin)
    return min(found)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def products_seconds(shapes: Sequence[tuple[int, int]], tokens: int, dtype: torch.dtype, device: str = "cpu") -> float:
    """Time of the linear layers of a model (``[out, in]`` each) on ``tokens`` tokens, and of nothing else."""
    weights = [torch.randn(out, into, device=device).to(dtype) for out, into in shapes]
    inputs = [torch.randn(tokens, into, device=device).to(dtype) for _, into in shapes]

    def work() -> None:
        with torch.inference_mode():
            for x, w in zip(inputs, weights, strict=True):
                F.linear(x, w)

    return best_seconds(work)


def copy_rate(device: str = "cpu") -> float:
    """Bytes per second that reading and writing memory reach together, in a copy of 256 MiB."""
    source = torch.zeros(1 << 26, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source))


def hardware() -> str:
    """The processor or card with its count of cores, as results are labelled."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"
