"""If these fail, compiled steps of training have another value or another gradient than their formulas."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from policy.lm.forward import hidden_before, packs
from policy.lm.fused_llama import CausalAttention, RMSNorm, RoPE, SwiGLU
from policy.lm.native import steps as native
from policy.lm.native.steps import NativeTraining, native_training
from policy.lm.pack import Pack, pack
from tests.support.compiled import needs_compiler
from tests.support.decoders import make_model

CPU = torch.device("cpu")


def compiled(dim: int = 16) -> NativeTraining:
    found = native_training(torch.float32, dim, CPU)
    assert found is not None
    return found


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def rows_that_branch(seed: int = 0) -> list[list[int]]:
    """Some longer than a chunk, some that leave others in the middle of one, one that is the beginning of another."""
    chance = random.Random(seed)
    rows = [[1, 2, 3, *(chance.randrange(50) for _ in range(n))] for n in (150, 7, 0, 64)]
    for cut, more in ((100, 90), (66, 1), (140, 30), (3, 61)):
        rows.append(rows[0][:cut] + [chance.randrange(50, 99) for _ in range(more)])
    return [*rows, [9] * 70, rows[4][:120]]


def agree(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> None:
    """Values, and gradients of a random weighting of them."""
    weights = [numbers(*x.shape, seed=7 + i).detach() for i, x in enumerate(got)]
    found, known = (
        torch.autograd.grad(sum((x * w.to(x.dtype)).sum() for x, w in zip(made, weights, strict=True)), inputs)  # type: ignore[arg-type]
        for made in (got, expected)
    )
    for a, b in zip((*got, *found), (*expected, *known), strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=2e-5)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, packing: Pack) -> Tensor:
    """Each token and head by itself, in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    found = []
    for token, (owner, position) in enumerate(zip(packing.owners, packing.positions, strict=True)):
        past = packing.index[owner, : position + 1]
        keys, values = (x[past].repeat_interleave(group, 1) for x in (k, v))
        weights = (torch.einsum("hd,thd->ht", q[token], keys) / q.shape[2] ** 0.5).softmax(-1)
        found.append(torch.einsum("ht,thd->hd", weights, values))
    return torch.stack(found)


def check_attention(heads: int, group: int, dim: int) -> None:
    packing = pack(rows_that_branch())
    n = len(packing.ids)
    given = (numbers(n, heads * group, dim), numbers(n, heads, dim, seed=1), numbers(n, heads, dim, seed=2))
    agree((CausalAttention.apply(*given, packing, compiled()),), (one_by_one(*given, packing),), given)


def check_steps(width: int) -> None:
    def both(step: Callable[..., Tensor | tuple[Tensor, ...]], x: Tensor, *more: object) -> None:
        got, expected = step(x, *more, compiled()), step(x.double(), *more, None)
        agree(*(made if isinstance(made, tuple) else (made,) for made in (got, expected)), (x,))  # type: ignore[arg-type]

    both(RMSNorm.apply, numbers(6, width), 1e-5)
    both(RMSNorm.apply, numbers(6, 3, width), 1e-5)
    both(RMSNorm.apply, numbers(33_000 // width, width), 1e-5)  # enough for threads
    both(SwiGLU.apply, numbers(33_000 // width, 2 * width))
    both(SwiGLU.apply, (numbers(6, 2 * width) * 30).detach().requires_grad_())


def check_turns(dim: int, n: int) -> None:
    joined, angles = numbers(n, 7, dim), torch.rand(n, 1, dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    rotation, counts = torch.polar(torch.full_like(angles, 1.5), angles), [3, 2, 2]  # YaRN makes them longer, too
    expected = RoPE.apply(joined.double(), rotation.to(torch.complex128), counts, None)
    agree(RoPE.apply(joined, rotation, counts, compiled()), expected, (joined,))


@needs_compiler
@pytest.mark.parametrize("dim", [16, 48, 64, 128])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (1, 3), (2, 2), (1, 5)])
def test_attention_is_that_of_each_token_to_its_own_past(heads: int, group: int, dim: int) -> None:
    check_attention(heads, group, dim)


@needs_compiler
@pytest.mark.parametrize("width", [4, 15, 16, 200])
def test_norms_and_gates_are_those_of_torch(width: int) -> None:
    check_steps(width)


@needs_compiler
@pytest.mark.parametrize("dim", [16, 64])
def test_heads_are_turned_as_by_torch(dim: int) -> None:
    check_turns(dim, 5)
    check_turns(dim, 300)  # enough for threads


@needs_compiler
@pytest.mark.skipif("avx2" not in native._processor().split(), reason="the processor is too old for compiled steps")
@pytest.mark.usefixtures("narrower")
def test_processors_with_narrower_vectors_learn_alike() -> None:
    check_attention(2, 2, 48)
    check_steps(15)
    check_turns(16, 5)


@needs_compiler
def test_any_number_of_threads_agrees_and_the_same_number_exactly() -> None:
    packing, before = pack(rows_that_branch(3)), torch.get_num_threads()
    n = len(packing.ids)
    given, made = (numbers(n, 3, 32), numbers(n, 3, 32, seed=1), numbers(n, 3, 32, seed=2)), compiled()
    found = []
    try:
        for threads in (1, 2, 2, 3, 40):
            torch.set_num_threads(threads)
            out = CausalAttention.apply(*given, packing, made)
            found.append((out, *torch.autograd.grad(out.square().sum(), given)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(found[1], found[2], strict=True))


@needs_compiler
def test_weights_far_below_the_highest_vanish_and_large_scores_do_not_overflow() -> None:
    packing = pack([[1, 2, 3]])
    q = torch.full((3, 1, 16), 60.0).requires_grad_()
    k = torch.stack([torch.full((1, 16), x) for x in (-60.0, 60.0, 59.0)]).requires_grad_()
    v = torch.stack([torch.full((1, 16), x) for x in (5.0, 2.0, 7.0)]).requires_grad_()
    out = CausalAttention.apply(q, k, v, packing, compiled())
    assert out[:, 0, 0].tolist() == [5.0, 2.0, 2.0]
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert grads[2][:, 0, 0].tolist() == [1.0, 2.0, 0.0]
    assert not grads[0].any()
    assert not grads[1].any()


@needs_compiler
@pytest.mark.parametrize("where", [0, 1, 2])
def test_nan_stays_in_its_branch(where: int) -> None:
    """It may reach tokens just before it, whose weights of 0 it is multiplied with, but no other row."""
    packing = pack([[1, 2, 3], [1, 4]])  # as tokens 1 4 2 3
    given = [numbers(4, 1, 16, seed=i).detach() for i in range(3)]
    given[where][2] = torch.nan
    out = CausalAttention.apply(*given, packing, compiled())
    assert out.isnan().any(-1).flatten().tolist() == [False, False, True, where != 0]  # a query is its own


@needs_compiler
def test_training_in_fp32_goes_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nobody would notice if it went the slow one."""
    asked: list[str] = []
    for name in ("attention", "attention_backward", "rms_norm", "swiglu", "rope"):
        own = getattr(NativeTraining, name)
        monkeypatch.setattr(NativeTraining, name, lambda *a, _f=own, _n=name: (asked.append(_n), _f(*a))[1])
    torch.manual_seed(0)
    model = make_model("llama-wide")
    rows = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]])
    packs(model, 4)
    asked.clear()
    hidden_before(model, rows, torch.ones_like(rows), rows > 2).states.sum().backward()
    assert {name: asked.count(name) for name in set(asked)} == {
        "attention": 2,
        "attention_backward": 2,
        "rms_norm": 5,
        "swiglu": 2,
        "rope": 2,
    }


def test_other_numbers_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_training(torch.float64, 64, CPU) is None
    assert native_training(torch.float32, 8, CPU) is None
    monkeypatch.setenv(native.SWITCH, "0")
    assert native_training(torch.float32, 64, CPU) is None
