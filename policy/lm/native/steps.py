"""Compiled steps on CPUs, built once by the machine's own compiler: attention, norms and gates.

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
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policy.lm.pack import Pack

SWITCH = "IMAGINATION_NATIVE"
_NAMES = ("attention", "layers", "tree_attention", "layers_training")
_SOURCES = [Path(__file__).with_name(f"{name}.cpp") for name in _NAMES]
_COMPILE = "-std=c++17 -O3 -march=native -mprefer-vector-width=512 -fno-math-errno -fno-trapping-math -fPIC -fopenmp"
_DIMS = (32, 64, 96, 128)
_KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_OF_KIND = {
    "attend": [_POINTER, _NUMBER, *[_POINTER] * 4, *[_NUMBER] * 5, ctypes.c_int],
    "rms_norm": [*[_POINTER] * 3, *[_NUMBER] * 2, ctypes.c_float, ctypes.c_int],
    "swiglu": [*[_POINTER] * 2, *[_NUMBER] * 2, ctypes.c_int],
    "rope_and_store": [*[_POINTER] * 6, *[_NUMBER] * 5, ctypes.c_int],
}
_ARGUMENTS = {f"{name}_{kind}": given for name, given in _OF_KIND.items() for kind in _KINDS.values()}
_ARGUMENTS |= {
    "tree_attention": [*[_POINTER] * 7, *[_NUMBER] * 4, ctypes.c_int],
    "tree_attention_backward": [*[_POINTER] * 11, *[_NUMBER] * 5, ctypes.c_int],
    "rms_norm": [*[_POINTER] * 3, *[_NUMBER] * 2, ctypes.c_float, ctypes.c_int],
    "rms_norm_backward": [*[_POINTER] * 4, *[_NUMBER] * 2, ctypes.c_int],
    "swiglu_backward": [*[_POINTER] * 3, *[_NUMBER] * 2, ctypes.c_int],
    "rope_split": [*[_POINTER] * 5, *[_NUMBER] * 4, ctypes.c_int],
    "rope_join": [*[_POINTER] * 5, *[_NUMBER] * 4, ctypes.c_int],
}
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


class NativeLayers:
    """What a Llama-like decoder computes between its matrix products, each in one pass; in fp32, rounded once."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._rms_norm, self._swiglu, self._rope_and_store = (
            getattr(library, f"{name}_{_KINDS[dtype]}") for name in ("rms_norm", "swiglu", "rope_and_store")
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm of ``[n, width]``, as ``torch.nn.functional.rms_norm``."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps, torch.get_num_threads())
        return out

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[n, 2 * width]``: ``[n, width]``."""
        n, width = len(gate_up), gate_up.shape[1] // 2
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty(n, width)
        self._swiglu(gate_up.data_ptr(), out.data_ptr(), n, width, torch.get_num_threads())
        return out

    def rope_and_store(
        self,
        joined: torch.Tensor,
        rotations: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Turns queries and keys in place, and writes keys and values to their places.

        Args:
            joined: ``[n, query_head + 2 * head, dim]``, contiguous: queries, keys, values.
            rotations: ``[position, dim / 2]``, complex64; pairs of neighbours in ``dim`` are turned by them.
            slots, positions: ``[n]`` of int64.
            keys, values: ``[slot, head, time, dim]``, contiguous.
        """
        n, all_heads, dim = joined.shape
        _, heads, time, _ = keys.shape
        self._rope_and_store(
            joined.data_ptr(), rotations.data_ptr(), slots.ctypes.data, positions.ctypes.data, keys.data_ptr(),
            values.data_ptr(), n, all_heads - 2 * heads, heads, dim, time, torch.get_num_threads(),
        )  # fmt: skip


def native_attention(dtype: torch.dtype, dim: int, device: torch.device) -> NativeAttention | None:
    """For keys and values of this kind; ``None`` where they are of another, or nothing could be compiled."""
    library = library_for(dtype, device) if dim in _DIMS else None
    return None if library is None else NativeAttention(getattr(library, f"attend_{_KINDS[dtype]}"), dtype)


def native_layers(dtype: torch.dtype, device: torch.device) -> NativeLayers | None:
    """For numbers of this kind; ``None`` as with ``native_attention``."""
    library = library_for(dtype, device)
    return None if library is None else NativeLayers(library, dtype)


def library_for(dtype: torch.dtype, device: torch.device) -> ctypes.CDLL | None:
    """The compiled functions; ``None`` where they do not know this kind of numbers, or could not be compiled."""
    if device.type != "cpu" or dtype not in _KINDS or os.environ.get(SWITCH) == "0":
        return None
    return _library()


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
        names = ", ".join(path.name for path in _SOURCES)
        print(f"note: {names} could not be compiled, all is slower without: {output}", file=sys.stderr)
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def _built(compiler: str) -> Path:
    """The shared library for this source, compiler and processor; made where it is missing.

    Raises:
        OSError: nothing can be written.
        subprocess.SubprocessError: the compiler failed, or took minutes.
    """
    openmp = _openmp_of_torch()
    headers = sorted(_SOURCES[0].parent.glob("*.h"))
    sources = [path.read_text() for path in (*_SOURCES, *headers)]
    made_of = [*sources, _COMPILE, compiler, str(openmp), _processor()]
    key = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imagination"
    path = folder / f"compiled-{key}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        parts, made = [f"{work}/{source.stem}.o" for source in _SOURCES], Path(work) / path.name
        # linked with the threads of torch itself: a second pool would fight with the first for the cores
        link = [str(openmp)] if openmp else ["-fopenmp"]
        for command in (
            *([compiler, *_COMPILE.split(), "-c", str(s), "-o", o] for s, o in zip(_SOURCES, parts, strict=True)),
            [compiler, "-shared", *parts, *link, "-o", str(made)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        os.replace(made, path)
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


_WIDEST = 16  # numbers of a vector


class NativeTraining:
    """Each function computes what ``policy.lm.fused_llama`` says it does; all tensors are contiguous."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def attention(self, q: Tensor, k: Tensor, v: Tensor, packing: Pack) -> tuple[Tensor, Tensor]:
        """Causal attention of each token to its past: ``[n, query_head, dim]``, and levels ``[n, query_head]``.

        Args:
            q: ``[n, query_head, dim]``.
            k, v: ``[n, head, dim]``.
        """
        n, query_heads, dim = q.shape
        out, levels = torch.empty_like(q), q.new_empty(n, query_heads)
        self._library.tree_attention(
            *_pointers(q, k, v, out, levels), packing.chunks.ctypes.data, packing.runs.ctypes.data,
            len(packing.chunks), query_heads, k.shape[1], dim, torch.get_num_threads(),
        )  # fmt: skip
        return out, levels

    def attention_backward(self, saved: Sequence[Tensor], grad: Tensor, packing: Pack) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values; saved are those, and what ``attention`` made of them."""
        q, k, v, _, _ = saved
        n, query_heads, dim = q.shape
        grads = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        self._library.tree_attention_backward(
            *_pointers(*saved, grad, *grads), packing.chunks.ctypes.data, packing.runs.ctypes.data,
            len(packing.chunks), n, query_heads, k.shape[1], dim, torch.get_num_threads(),
        )  # fmt: skip
        return grads

    def rms_norm(self, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``[..., width]`` over its root mean square, and the factors ``[..., 1]``."""
        y, scales = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
        self._library.rms_norm(*_pointers(x, y, scales), scales.numel(), x.shape[-1], eps, torch.get_num_threads())
        return y, scales

    def rms_norm_backward(self, grad: Tensor, y: Tensor, scales: Tensor) -> Tensor:
        """The gradient of ``rms_norm``."""
        out = torch.empty_like(y)
        given = _pointers(grad, y, scales, out)
        self._library.rms_norm_backward(*given, scales.numel(), y.shape[-1], torch.get_num_threads())
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``[n, 2 * width]``."""
        n, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(n, width)
        self._library.swiglu_float32(*_pointers(gate_up, out), n, width, torch.get_num_threads())
        return out

    def swiglu_backward(self, gate_up: Tensor, grad: Tensor) -> Tensor:
        """The gradient of ``swiglu``."""
        out = torch.empty_like(gate_up)
        self._library.swiglu_backward(*_pointers(gate_up, grad, out), *grad.shape, torch.get_num_threads())
        return out

    def rope(self, joined: Tensor, rotation: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, and values of ``[n, head, dim]``.

        Args:
            rotation: ``[n, 1, dim / 2]``, complex; pairs of neighbours are rotated.
            counts: heads of each.
        """
        n, _, dim = joined.shape
        q, k, v = (joined.new_empty(n, heads, dim) for heads in counts)
        self._turn(self._library.rope_split, joined, rotation, (q, k, v))
        return q, k, v

    def rope_backward(self, grads: tuple[Tensor, Tensor, Tensor], rotation: Tensor) -> Tensor:
        """The gradient of ``rope``."""
        n, _, dim = grads[0].shape
        joined = rotation.real.new_empty(n, sum(grad.shape[1] for grad in grads), dim)
        self._turn(self._library.rope_join, joined, rotation, grads)
        return joined

    def _turn(
        self, function: ctypes._NamedFuncPointer, joined: Tensor, rotation: Tensor, parts: Sequence[Tensor]
    ) -> None:
        n, queries, dim = parts[0].shape
        assert rotation.numel() * 2 == n * dim
        given = _pointers(joined, rotation, *parts)
        function(*given, n, queries, parts[1].shape[1], dim, torch.get_num_threads())


def native_training(dtype: torch.dtype, dim: int, device: torch.device) -> NativeTraining | None:
    """For heads of ``dim`` numbers; ``None`` where they do not fill vectors, or nothing could be compiled."""
    library = library_for(dtype, device) if dtype == torch.float32 and dim % _WIDEST == 0 else None
    return None if library is None else NativeTraining(library)


def _pointers(*tensors: Tensor) -> list[int]:
    assert all(x.is_contiguous() and x.dtype in (torch.float32, torch.complex64) for x in tensors)
    return [tensor.data_ptr() for tensor in tensors]
