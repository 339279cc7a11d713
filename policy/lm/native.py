"""Compiled attention for decoding on CPUs: ``attention.cpp``, built once by the machine's own compiler.

Where there is none, everything works without it, slower. ``IMAGINATION_NATIVE=0`` leaves it out.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

SWITCH = "IMAGINATION_NATIVE"
_SOURCE = Path(__file__).with_name("attention.cpp")
_COMPILE = "-std=c++17 -O3 -march=native -mprefer-vector-width=512 -fno-math-errno -fno-trapping-math -fPIC -fopenmp"
_DIMS = (32, 64, 96, 128)
_NAMES = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}
# In bf16, longer blocks are left to torch, which multiplies matrices where processors have instructions for them.
MOST_TOKENS = {torch.float32: 1 << 30, torch.bfloat16: 32}


class NativeAttention:
    """Softmax attention of at most ``most`` new tokens a row, each to what its slot holds up to its own position."""

    def __init__(self, function: Any, dtype: torch.dtype) -> None:
        self._function, self.most = function, MOST_TOKENS[dtype]

    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: np.ndarray, out: torch.Tensor
    ) -> None:
        """Writes the rows of ``out`` that ``plan`` names.

        Args:
            q: ``[n, query_head, dim]``; the heads of a token are neighbours.
            keys, values: ``[slot, head, time, dim]``, contiguous.
            plan: ``[row, 4]`` of int64: slot, first position, number of tokens, index of the first of them in ``q``.
            out: ``[n, query_head, dim]``, contiguous.
        """
        _, query_heads, dim = q.shape
        _, heads, time, _ = keys.shape
        if q.stride()[1:] != (dim, 1):
            q = q.contiguous()
        self._function(
            q.data_ptr(), q.stride(0), keys.data_ptr(), values.data_ptr(), out.data_ptr(), plan.ctypes.data,
            len(plan), heads, query_heads // heads, dim, time, torch.get_num_threads(),
        )  # fmt: skip


def native_attention(dtype: torch.dtype, dim: int, device: torch.device) -> NativeAttention | None:
    """For keys and values of this kind; ``None`` where they are of another, or nothing could be compiled."""
    if device.type != "cpu" or dtype not in _NAMES or dim not in _DIMS or os.environ.get(SWITCH) == "0":
        return None
    library = _library()
    return None if library is None else NativeAttention(getattr(library, _NAMES[dtype]), dtype)


@cache
def _library() -> ctypes.CDLL | None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if sys.platform != "linux" or platform.machine() != "x86_64" or compiler is None:
        return None
    if "avx2" not in _processor().split():
        return None
    try:
        library = ctypes.CDLL(str(_built(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home folder
        output = getattr(error, "stderr", None) or error
        print(f"note: {_SOURCE.name} could not be compiled, decoding is slower without it: {output}", file=sys.stderr)
        return None
    for name in _NAMES.values():
        function = getattr(library, name)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = [pointer, number, *[pointer] * 4, *[number] * 5, ctypes.c_int]
        function.restype = None
    return library


def _built(compiler: str) -> Path:
    """The shared library for this source, compiler and processor; made where it is missing.

    Raises:
        OSError: nothing can be written.
        subprocess.SubprocessError: the compiler failed, or took minutes.
    """
    openmp = _openmp_of_torch()
    sources = [path.read_text() for path in sorted(_SOURCE.parent.glob("attention*"))]
    made_of = [*sources, _COMPILE, compiler, str(openmp), _processor()]
    key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imagination"
    path = folder / f"attention-{key}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        parts = [Path(work) / "attention.o", Path(work) / "attention.so"]
        # linked with the threads of torch itself: a second pool would fight with the first for the cores
        link = [str(openmp)] if openmp else ["-fopenmp"]
        for command in (
            [compiler, *_COMPILE.split(), "-c", str(_SOURCE), "-o", str(parts[0])],
            [compiler, "-shared", str(parts[0]), *link, "-o", str(parts[1])],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        os.replace(parts[1], path)
    return path


def _openmp_of_torch() -> Path | None:
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for path in sorted(folder.glob("libgomp*.so*")):
            return path
    return None


def _processor() -> str:
    """What ``-march=native`` depends on: a home folder may be shared by machines of several kinds."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


__all__ = ["MOST_TOKENS", "SWITCH", "NativeAttention", "native_attention"]
