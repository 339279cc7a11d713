"""How alike two screens are: pure functions of pictures, float ``[batch, channels, height, width]`` in [0, 1].

LPIPS is not here, as no package brings its weights along.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

VISIBLE = 0.125  # of the range of a channel: a pixel that differs by less looks the same


def squared_error(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared error of each picture, ``[batch]``."""
    return (a - b).square().flatten(1).mean(1)


def squared_error_within(a: Tensor, b: Tensor, region: Tensor) -> Tensor:
    """The same of the pixels of a region alone, bool ``[batch, height, width]``; nan where that is empty."""
    return ((a - b).square().mean(1) * region).flatten(1).sum(1) / region.flatten(1).sum(1)


def psnr(error: float) -> float:
    """Peak signal-to-noise ratio in decibels of a mean squared error: ``-10 log10(error)``.

    Equal pictures, whose ratio is infinite, get 60, the ratio of a quarter of a step of 8 bits.
    """
    return -10 * math.log10(max(error, 1e-6))


def ssim(a: Tensor, b: Tensor, window: int = 11, sigma: float = 1.5) -> Tensor:
    """Structural similarity, a mean over channels and places, ``[batch]``; 1 for equal pictures.

    With means, variances and covariance under a Gaussian window, C1 = 0.01² and C2 = 0.03²::

        (2 μa μb + C1) (2 σab + C2) / ((μa² + μb² + C1) (σa² + σb² + C2))

    Wang et al., IEEE Transactions on Image Processing 13 (2004) 600-612, eq. 13, with the window of its section III-C;
    only windows that lie within the picture count.

    Raises:
        ValueError: a picture is smaller than the window.
    """
    if min(a.shape[2:]) < window:
        raise ValueError(f"pictures of {tuple(a.shape[2:])} are smaller than the window of {window}")
    at = torch.arange(window, dtype=a.dtype) - (window - 1) / 2
    bell = torch.exp(-(at**2) / (2 * sigma**2))
    kernel = torch.outer(bell / bell.sum(), bell / bell.sum())[None, None]

    def mean(x: Tensor) -> Tensor:
        return F.conv2d(x.flatten(0, 1)[:, None], kernel.to(x)).unflatten(0, x.shape[:2])[:, :, 0]

    c1, c2 = 0.01**2, 0.03**2
    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2
    cov = mean(a * b) - mean_a * mean_b
    alike = (2 * mean_a * mean_b + c1) * (2 * cov + c2)
    return (alike / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).flatten(1).mean(1)


def visible(a: Tensor, b: Tensor) -> Tensor:
    """Which pixels visibly differ in some channel: bool ``[batch, height, width]``."""
    return ((a - b).abs() > VISIBLE).any(1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of regions, bool ``[batch, height, width]``, as ``[batch]``; nan where both are empty."""
    both, either = (a & b).flatten(1).sum(1).float(), (a | b).flatten(1).sum(1).float()
    return both / either
