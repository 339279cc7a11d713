"""If these fail, compiled steps of decoding are wrong, or a machine without a compiler cannot dream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from policy.lm.engines.inprocess.slots import Blocks, SlotCache
from policy.lm.native import steps as native
from tests.support.compiled import needs_compiler

CPU = torch.device("cpu")
TIME = 150
KINDS = [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)]  # a sum, rounded once


def filled(heads: int, dim: int, dtype: torch.dtype) -> SlotCache:
    cache = SlotCache(1, heads, dim, 6, TIME, dtype, CPU)
    cache.kv.copy_(torch.randn(cache.kv.shape, generator=torch.Generator().manual_seed(heads)) * 2)
    return cache


def attended(cache: SlotCache, q: torch.Tensor, slots: list[int], starts: list[int], counts: list[int]) -> torch.Tensor:
    group = q.shape[1] // cache.kv.shape[3]
    blocks = Blocks(np.array(slots), np.array(starts), np.array(counts), group, cache)
    assert len(blocks.plan) == sum(count <= native.MOST_TOKENS[q.dtype] for count in counts)
    return blocks.attend(q, *cache.kv[0])


@needs_compiler
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (1, 3), (2, 2), (1, 5)])
@pytest.mark.parametrize(("dtype", "tolerance"), KINDS)
def test_attention_is_that_of_each_query_alone(
    heads: int, group: int, dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Blocks of all lengths, positions from the first to the last: a plain loop in fp64."""
    cache = filled(heads, dim, dtype)
    slots, starts, counts = [0, 1, 2, 3, 4, 5], [0, 40, 0, TIME - 2, TIME - 60, 31], [1, 3, 70, 2, 60, 12]
    check_attention(cache, heads * group, slots, starts, counts, tolerance)


def check_attention(
    cache: SlotCache, query_heads: int, slots: list[int], starts: list[int], counts: list[int], tolerance: float
) -> None:
    _, _, _, heads, _, dim = cache.kv.shape
    dtype, group = cache.kv.dtype, query_heads // heads
    joined = torch.randn(sum(counts), heads * group + 2, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    q = joined[:, : heads * group]  # as it comes from a joined projection: rows are not neighbours
    got, done = attended(cache, q, slots, starts, counts), 0
    for slot, start, count in zip(slots, starts, counts, strict=True):
        for position in range(start, start + count):
            keys, values = cache.kv[0, :, slot, :, : position + 1].double().repeat_interleave(group, 1)
            scores = torch.einsum("htd,hd->ht", keys, q[done].double()) / dim**0.5
            expected = torch.einsum("ht,htd->hd", scores.softmax(-1), values)
            torch.testing.assert_close(got[done].double(), expected, rtol=tolerance, atol=4 * tolerance)
            done += 1


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), KINDS)
def test_weights_far_below_the_highest_vanish_and_large_scores_do_not_overflow(
    dtype: torch.dtype, tolerance: float
) -> None:
    cache = filled(1, 64, dtype)
    cache.kv[0, 0, 0] = 0.0
    cache.kv[0, 0, 0, 0, 17] = 100.0
    got = attended(cache, torch.full((1, 1, 64), 100.0, dtype=dtype), [0], [40], [1])
    torch.testing.assert_close(got[0, 0], cache.kv[0, 1, 0, 0, 17], rtol=tolerance, atol=tolerance)


@needs_compiler
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit, as a dream is the same whatever else is dreamed; nor on what lies behind its own position."""
    cache = filled(1, 64, torch.float32)
    slots, starts, counts = [0, 1, 4, 5], [3, 33, 60, 5], [1, 2, 8, 80]
    q = torch.randn(91, 3, 64, generator=torch.Generator().manual_seed(1))
    together, done = attended(cache, q, slots, starts, counts), 0
    for slot, start, count in zip(slots, starts, counts, strict=True):
        cache.kv[0, :, slot, :, start + count :] = torch.nan
        alone = attended(cache, q[done : done + count], [slot], [start], [count])
        assert torch.equal(alone, together[done : done + count])
        done += count


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_nan_stays_nan_and_stays_in_its_row(where: str, dtype: torch.dtype, tokens: int) -> None:
    cache, q = filled(1, 32, dtype), torch.ones(2 * tokens, 1, 32, dtype=dtype)
    rows = ([0, 1], [75, 75], [tokens, tokens])
    clean = attended(cache, q, *rows)
    broken = {"query": q[0, 0], "key": cache.kv[0, 0, 0, 0, 3], "value": cache.kv[0, 1, 0, 0, 3]}[where]
    broken[7] = torch.nan
    got = attended(cache, q, *rows)
    assert got[0, 0, 7].isnan()
    assert torch.equal(got[tokens:], clean[tokens:])


def layers(dtype: torch.dtype) -> native.NativeLayers:
    found = native.native_layers(dtype, CPU)
    assert found is not None
    return found


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def check_norm(dtype: torch.dtype, width: int, tolerance: float) -> None:
    x, weight = random((7, width), dtype), random((width,), dtype, 1)
    got = layers(dtype).rms_norm(x, weight, 1e-5)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    x[3, 2] = torch.nan
    broken = layers(dtype).rms_norm(x, weight, 1e-5)
    assert broken[3].isnan().all()
    assert torch.equal(broken[4:], got[4:])


def check_gate(dtype: torch.dtype, width: int, tolerance: float) -> None:
    gate_up = random((7, 2 * width), dtype)
    gate_up[2, :4] = torch.tensor([200.0, -200.0, 0.0, torch.nan], dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    got = layers(dtype).swiglu(gate_up)
    torch.testing.assert_close(got.double(), gate * gate.sigmoid() * up, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert got.isnan().sum() == 1


def check_places(dim: int, dtype: torch.dtype, tolerance: float) -> None:
    """Queries and keys are turned, values are not; all go where they belong, and nothing else is touched."""
    joined, angles = random((3, 2 * 2 + 2 * 2, dim), dtype), random((9, dim // 2), torch.float32, 1)
    before, kv = joined.clone(), torch.full((2, 4, 2, 9, dim), 1e4, dtype=dtype)
    slots, positions = np.array([3, 0, 3]), np.array([8, 0, 2])
    layers(dtype).rope_and_store(joined, torch.polar(torch.ones_like(angles), angles), slots, positions, kv[0], kv[1])
    a, b = before[:, :6].double().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = (f(angles[positions].double())[:, None] for f in (torch.cos, torch.sin))
    expected = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    torch.testing.assert_close(joined[:, :6].double(), expected, rtol=tolerance, atol=4 * tolerance)
    assert torch.equal(joined[:, 6:], before[:, 6:])
    for n, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        assert torch.equal(kv[0, slot, :, position], joined[n, 4:6])
        assert torch.equal(kv[1, slot, :, position], joined[n, 6:])
    assert (kv > 9e3).sum() == kv.numel() - 2 * 3 * 2 * dim


def check_rounding() -> None:
    """bfloat16 is rounded to the nearest, ties to even; a NaN and what overflows stay what they are."""
    numbers = torch.cat([1 + torch.arange(128) / 128, torch.tensor([torch.inf, -torch.inf, torch.nan])]).bfloat16()
    joined = torch.ones(1, 3, 2 * len(numbers), dtype=torch.bfloat16)
    where, kv = np.zeros(1, dtype=np.int64), torch.zeros(2, 1, 1, *joined.shape[::2], dtype=torch.bfloat16)
    for more in (0.0, 2**-8 - 2**-16, 2**-8, 2**-8 + 2**-16):  # half of what lies between two of the numbers is 2^-8
        joined[0, 0, ::2], joined[0, 0, 1::2] = numbers, 1.0
        rotations = torch.full((1, len(numbers)), complex(1.0, -more))  # a number becomes itself and 1 * more
        layers(torch.bfloat16).rope_and_store(joined, rotations, where, where, kv[0], kv[1])
        torch.testing.assert_close(
            joined[0, 0, ::2], (numbers.float() + more).bfloat16(), rtol=0, atol=0, equal_nan=True
        )


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("width", [4, 15, 16, 200])
def test_norms_and_gates_are_those_of_a_plain_formula(width: int, dtype: torch.dtype, tolerance: float) -> None:
    check_norm(dtype, width, tolerance)
    check_gate(dtype, width, tolerance)


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), KINDS)
@pytest.mark.parametrize("dim", [6, 16, 40, 64])
def test_keys_and_values_are_turned_and_kept(dim: int, dtype: torch.dtype, tolerance: float) -> None:
    check_places(dim, dtype, tolerance)


@needs_compiler
def test_bfloat16_is_rounded_to_the_nearest() -> None:
    check_rounding()


@needs_compiler
@pytest.mark.skipif("avx2" not in native._processor().split(), reason="the processor is too old for compiled attention")
@pytest.mark.parametrize(("dtype", "tolerance"), KINDS)
@pytest.mark.usefixtures("narrower")
def test_processors_with_narrower_vectors_attend_alike(dtype: torch.dtype, tolerance: float) -> None:
    for dim in (32, 96):
        check_attention(filled(2, dim, dtype), 6, [0, 1, 3, 5], [0, 40, TIME - 60, 20], [1, 2, 60, 1], tolerance)
    check_norm(dtype, 100, tolerance)
    check_gate(dtype, 100, tolerance)
    check_places(40, dtype, tolerance)
    check_rounding()


def test_a_processor_without_wide_vectors_leaves_it_to_torch(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(native, "_processor", lambda: "flags : fpu sse sse2")
    assert filled(1, 64, torch.float32).native is None


@needs_compiler
def test_a_compiler_that_fails_is_named_and_torch_goes_on(
    fresh: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    fresh.setenv("CXX", str(compiler))
    assert filled(1, 64, torch.float32).native is None
    assert "no such header" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "imagination").iterdir()] == [], "no half a library is left"


@pytest.mark.parametrize(("name", "value"), [("CXX", "no-such-compiler"), (native.SWITCH, "0")])
def test_without_a_compiler_or_by_wish_torch_attends(fresh: pytest.MonkeyPatch, name: str, value: str) -> None:
    fresh.setenv(name, value)
    cache = filled(1, 64, torch.float32)
    assert cache.native is None
    q = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    blocks = Blocks(np.array([1, 3]), np.array([9, 4]), np.array([1, 1]), 3, cache)
    assert (len(blocks.plan), len(blocks.rectangles)) == (0, 1)
    got = blocks.attend(q, *cache.kv[0])
    for row, (slot, seen) in enumerate([(1, 10), (3, 5)]):
        keys, values = cache.kv[0, :, slot, 0, :seen]
        expected = (q[row] @ keys.T / 8).softmax(-1) @ values
        torch.testing.assert_close(got[row], expected, rtol=1e-5, atol=1e-6)


def test_other_kinds_of_keys_are_left_to_torch() -> None:
    assert native.native_attention(torch.float32, 80, CPU) is None
    assert native.native_attention(torch.float16, 64, CPU) is None
    assert native.native_attention(torch.float32, 64, torch.device("meta")) is None
