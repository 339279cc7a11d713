"""What this machine can do at best: the rates that the benchmarks are held against, measured in the same run.

They are rates of torch's default device: ``with torch.device("cuda")`` measures the card.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from imagination.runs.machine import cores, processor
from policy.lm.compiled import native_attention
from policy.lm.native import linear

MUCH_STOLEN = 0.05  # more of the machine's time than this makes its numbers doubtful


class StolenTime:
    """How much of this machine's time the host gave to other virtual machines since this object was made.

    Nothing in such a machine sees that but the kernel; where it does not tell, nothing was stolen.
    """

    def __init__(self) -> None:
        self._begin, self._before = time.monotonic(), _stolen_seconds()

    def share(self) -> float:
        """Of the time of all cores, 0 to 1."""
        passed = (time.monotonic() - self._begin) * (os.cpu_count() or 1)
        return (_stolen_seconds() - self._before) / passed if passed else 0.0


def _stolen_seconds(stat: Path = Path("/proc/stat")) -> float:
    """Since the machine started, of all cores; the eighth number of ``cpu`` in proc(5)."""
    if not stat.exists():
        return 0.0
    return int(stat.read_text(encoding="utf-8").splitlines()[0].split()[8]) / os.sysconf("SC_CLK_TCK")


def hardware() -> str:
    """The processor with its number of cores, as results are labelled."""
    return f"{processor()}, {cores()} cores"


def synchronize() -> None:
    """Waits for what a card still has to do, if one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def best_seconds(work: Callable[[], object], seconds: float = 1.0) -> float:
    """The fastest of many repetitions within about ``seconds``: what the work costs undisturbed."""
    return best_in_turns([work], seconds)[0]


def best_in_turns(works: Sequence[Callable[[], object]], seconds: float = 1.0) -> list[float]:
    """The fastest repetition of each, one of each after the other until about ``seconds`` are over.

    Works that are compared should take about as long as each other: a machine that others use, too, is undisturbed for
    a millisecond far more often than for half a second.
    """
    for work in [*works] * 3:
        work()
    best, rounds = [math.inf] * len(works), 0
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or rounds < 5:
        for index, work in enumerate(works):
            synchronize()
            begin = time.perf_counter()
            work()
            synchronize()
            best[index] = min(best[index], time.perf_counter() - begin)
        rounds += 1
    return best


def products_seconds(shapes: Sequence[tuple[int, int]], tokens: int, dtype: torch.dtype, seconds: float = 1.0) -> float:
    """Time of the linear layers of a model (``[out, in]`` each) on ``tokens`` tokens, and of nothing else."""
    return best_seconds(products(shapes, tokens, dtype), seconds)


def products(shapes: Sequence[tuple[int, int]], tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    """The work that ``products_seconds`` measures."""
    weights = [torch.randn(out, into).to(dtype) for out, into in shapes]
    inputs = {into: torch.randn(tokens, into).to(dtype) for _, into in shapes}

    def work() -> None:
        with torch.inference_mode():
            for w in weights:
                linear(inputs[w.shape[1]], w)

    return _captured(work)


def attention_products(
    layers: int, rows: int, heads: tuple[int, int], time: int, dim: int, dtype: torch.dtype, seconds: float = 1.0
) -> Callable[[], None]:
    """The two matrix products of attention for one token a row (``heads``: of queries, of keys), as work to measure.

    That of torch, or our compiled attention where it is faster, although that computes a softmax, too: each is tried
    for about ``seconds``.
    """
    queries, keys = heads
    cache = [torch.randn(2, rows, keys, time, dim).to(dtype) for _ in range(layers)]
    query = torch.randn(rows * keys, queries // keys, dim).to(dtype)

    def work() -> None:
        with torch.inference_mode():
            for kv in cache:
                k, v = kv.flatten(1, 2)
                torch.bmm(torch.bmm(query, k.transpose(1, 2)), v)

    native = native_attention(dtype, dim, query.device)
    if native is None:
        return _captured(work)
    row = np.arange(rows)
    plan = np.stack([row, np.full(rows, time - 1), np.ones(rows, dtype=np.int64), row], 1)
    flat, out = query.view(rows, queries, dim), torch.empty(rows, queries, dim, dtype=dtype)

    def compiled() -> None:
        for k, v in cache:
            native(flat, k, v, plan, out)

    by_torch, by_us = best_in_turns([work, compiled], 2 * seconds)
    return compiled if by_us < by_torch else work


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    """On a card, the same as a CUDA graph: what it costs to launch kernels is no limit of the card."""
    if torch.get_default_device().type != "cuda":
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return lambda _tensors=work: graph.replay()  # type: ignore[misc]  # which live as long as the graph


def matmul_rate(
    sizes: Sequence[int] = (1024, 1536, 2048), seconds: float = 1.0, dtype: torch.dtype = torch.float32
) -> float:
    """FLOP/s of a large square matrix product, the best of several sizes: what the machine can do."""
    rates = []
    for size in sizes:
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        rates.append(2 * size**3 / best_seconds(lambda a=a, b=b: linear(a, b), seconds))  # type: ignore[misc]
    return max(rates)


def copy_rate(seconds: float = 1.0) -> float:
    """Bytes per second that reading and writing memory reach together, in a copy of 256 MiB."""
    source = torch.zeros(1 << 26)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), seconds)
