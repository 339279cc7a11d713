"""If these fail, models are multiplied wrongly on some processors, or learn from wrong gradients there."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from policy.lm import native as products
from policy.lm.native import linear, linear_onto

there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
CHOSEN = pytest.param(
    True, id="oneDNN", marks=pytest.mark.skipif(not there, reason="this build of torch has no oneDNN")
)
AMD = "vendor_id\t: AuthenticAMD\ncpu family\t: {}\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 {}\n"


@pytest.fixture(params=[CHOSEN, pytest.param(False, id="as torch does")], autouse=True)
def multiplied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Both ways, whatever this processor would choose; what was asked of oneDNN."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: request.param)
    asked = Mock(side_effect=products._product, chosen=request.param)
    monkeypatch.setattr(products, "_product", asked)
    return asked


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows", [1, 15, 16, 40, 200])
@pytest.mark.parametrize(("out", "into"), [(96, 32), (32, 96), (64, 64), (1, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_and_their_gradients_are_those_of_plain_arithmetic(
    rows: int, out: int, into: int, biased: bool, multiplied: Mock
) -> None:
    """Against the definition in fp64: ``x w' + b``, gradients ``g w``, ``g' x`` and the sum of ``g`` over rows."""
    x, weight, grad = numbers(rows, into), numbers(out, into), numbers(rows, out)
    bias = numbers(out) if biased else None
    asked = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    made = linear(x, weight, bias)
    got = torch.autograd.grad(made, asked, grad)
    assert multiplied.call_count == (3 if multiplied.chosen and rows >= 16 else 0)
    x, weight, grad = x.detach().double(), weight.detach().double(), grad.double()
    expected = torch.einsum("ni,oi->no", x, weight) + (0 if bias is None else bias.detach().double())
    torch.testing.assert_close(made.double(), expected, atol=1e-4, rtol=1e-5)
    gradients = [torch.einsum("no,oi->ni", grad, weight), torch.einsum("no,ni->oi", grad, x), grad.sum(0)]
    for one, other in zip(got, gradients, strict=False):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [3, 50])
def test_a_sum_leaves_its_parts_as_they_were(rows: int) -> None:
    """``onto`` is needed again where gradients flow, and belongs to the caller where they do not."""
    onto, x, weight = numbers(rows, 24), numbers(rows, 40), numbers(24, 40)
    before = onto.clone()
    expected = onto.double() + x.double() @ weight.double().T
    with torch.inference_mode():
        torch.testing.assert_close(linear_onto(onto, x, weight).double(), expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(onto, before)
    onto.requires_grad_()
    made = linear_onto(onto, x, weight)
    torch.testing.assert_close(made.detach().double(), expected, atol=1e-4, rtol=1e-5)
    (grad,) = torch.autograd.grad(made.sum(), onto)
    assert torch.equal(grad, torch.ones_like(before))
    assert torch.equal(onto.detach(), before)


def test_only_what_needs_a_gradient_gets_one(multiplied: Mock) -> None:
    """Frozen weights cost no product, and without gradients nothing is kept for them."""
    x, weight = numbers(32, 8).requires_grad_(), numbers(8, 8)
    linear(x, weight).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    assert multiplied.call_count == (2 if multiplied.chosen else 0)
    assert not linear(x.detach(), weight).requires_grad
    with torch.no_grad():
        assert not linear(x, weight).requires_grad


def test_other_numbers_are_left_to_torch(multiplied: Mock) -> None:
    """Half precision has its own paths, autocast decides by itself, and fp64 is not rounded."""
    x, weight = numbers(32, 16), numbers(24, 16)
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    assert linear(x.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    assert linear(x.view(2, 16, 16), weight).shape == (2, 16, 24)
    assert not multiplied.called


def test_products_of_views_are_right() -> None:
    """Chosen rows, joined heads and turned weights come as views."""
    wide, weight = numbers(64, 48), numbers(20, 24)
    for x in (wide[:, :24], wide[::2, 24:], numbers(24, 64).T):
        expected = (x.double() @ weight.double().T).float()
        torch.testing.assert_close(linear(x, weight), expected, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(linear(x, weight.T.contiguous().T), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "wide"),
    [
        (AMD.format(26, "avx512f"), True),
        (AMD.format(25, "avx512f"), False),
        (AMD.format(26, "sse2"), False),
        (AMD.format(26, "avx512f").replace("AuthenticAMD", "GenuineIntel"), False),
        ("", False),
    ],
)
def test_which_processors_have_a_faster_library(tmp_path: Path, text: str, wide: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert not products._is_wide_amd(cpuinfo)
    cpuinfo.write_text(text, encoding="utf-8")
    assert products._is_wide_amd(cpuinfo) is wide
