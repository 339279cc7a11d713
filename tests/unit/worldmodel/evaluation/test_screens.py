"""How alike screens are. If these fail, a blurred dream passes for a sharp one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from worldmodel.evaluation.screens import iou, psnr, squared_error, squared_error_within, ssim, visible


def pictures(count: int = 2, side: int = 14) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    a = torch.rand(count, 3, side, side + 1, generator=rng)
    return a, (a + 0.2 * torch.randn(a.shape, generator=rng)).clamp(0, 1)


def test_psnr_by_hand() -> None:
    a = torch.zeros(3, 1, 2, 2)
    b = a.clone()
    b[0, 0, 0, 0] = 0.2  # mean squared error 0.04 / 4 = 0.01
    b[1] = 1.0
    assert [psnr(float(e)) for e in squared_error(a, b)] == pytest.approx([20.0, 0.0, 60.0])
    region = torch.tensor([[[True, True], [False, False]]] * 2 + [[[False, False], [False, False]]])
    within = squared_error_within(a, b, region)
    assert within[:2].tolist() == pytest.approx([0.04 / 2, 1.0])
    assert math.isnan(float(within[2])), "there is nothing within"


def test_ssim_is_that_of_a_plain_loop() -> None:
    a, b = pictures()
    size, sigma, c1, c2 = 11, 1.5, 0.0001, 0.0009
    weight = [[math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / (2 * sigma**2)) for j in range(size)] for i in range(size)]
    total = sum(map(sum, weight))
    for k in range(2):
        found = []
        for c in range(3):
            x, y = a[k, c].tolist(), b[k, c].tolist()
            for top in range(len(x) - size + 1):
                for left in range(len(x[0]) - size + 1):
                    ma = mb = aa = bb = ab = 0.0
                    for i in range(size):
                        for j in range(size):
                            w, p, q = weight[i][j] / total, x[top + i][left + j], y[top + i][left + j]
                            ma, mb, aa, bb, ab = ma + w * p, mb + w * q, aa + w * p * p, bb + w * q * q, ab + w * p * q
                    va, vb, cov = aa - ma * ma, bb - mb * mb, ab - ma * mb
                    found.append((2 * ma * mb + c1) * (2 * cov + c2) / ((ma * ma + mb * mb + c1) * (va + vb + c2)))
        assert float(ssim(a, b)[k]) == pytest.approx(sum(found) / len(found), abs=1e-4)
    assert ssim(a, a).tolist() == pytest.approx([1.0, 1.0])
    with pytest.raises(ValueError, match="the window"):
        ssim(a[:, :, :8], b[:, :, :8])


def test_regions_and_what_is_visible() -> None:
    a = torch.zeros(2, 3, 2, 2)
    b = a.clone()
    b[0, 1, 0, 0], b[0, 2, 1, 1], b[1, 0, 0, 1] = 0.5, 0.1, 0.13
    assert visible(a, b).tolist() == [[[True, False], [False, False]], [[False, True], [False, False]]]
    left = torch.tensor([[[True, True], [False, False]], [[False, False], [False, False]]])
    right = torch.tensor([[[False, True], [True, False]], [[False, False], [False, False]]])
    found = iou(left, right)
    assert float(found[0]) == pytest.approx(1 / 3)
    assert math.isnan(float(found[1]))
