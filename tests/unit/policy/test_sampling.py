"""If these fail, tokens are drawn from another distribution than the one their log-probs are of."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from policy.lm.engine import Sampling
from policy.lm.engines.inprocess.engine import sample


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
    ],
)
def test_numbers_out_of_range_are_named(wrong: dict[str, object], message: str) -> None:
    """They come from users' settings; sampled with, they would be NaN or no tokens at all."""
    with pytest.raises(ValueError, match=message):
        Sampling(**{"max_tokens": 3, "stop": 0, **wrong})  # type: ignore[arg-type]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


@pytest.mark.parametrize("vocab", [1, 4, 65, 3000])
def test_tokens_are_drawn_where_the_sum_passes_the_number(vocab: int) -> None:
    """A plain loop in fp64 over the cumulative sum: the first token that lifts it above the number is the one."""
    temperatures = [0.0, 0.3, 1.0, 2.5]
    uniforms = [0.0, 1 - 2**-53, *np.random.default_rng(vocab).random(30).tolist()]
    logits = noise(len(temperatures) * len(uniforms), vocab) * 4
    if vocab > 3:
        logits[:, [0, vocab // 2, vocab - 1]] = -torch.inf  # never drawn, not even by the first and the last number
    asked = torch.tensor([(t, u) for t in temperatures for u in uniforms], dtype=torch.float64)
    ids, logprobs = sample(logits, *asked.T.contiguous())
    for row, (temperature, uniform) in enumerate(asked.tolist()):
        weights = (logits[row].double() / (temperature or 1.0)).softmax(0).tolist()
        got = int(ids[row])
        if temperature == 0:
            assert got == weights.index(max(weights))
        else:
            below = sum(weights[:got])
            assert below - 1e-6 <= uniform <= below + weights[got] + 1e-6
        assert weights[got] > 0
        assert float(logprobs[row]) == pytest.approx(math.log(weights[got]), abs=1e-5)


def test_rows_are_drawn_as_often_as_they_are_likely_whatever_is_beside_them() -> None:
    """Of 20,000 numbers spread evenly, each token gets its share of them; alone, a row gets the same."""
    row = noise(1, 33) * 2
    numbers = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    ids, logprobs = sample(row.expand(20_000, 33), torch.ones(20_000), numbers)
    shares = torch.bincount(ids, minlength=33) / 20_000
    torch.testing.assert_close(shares, row[0].softmax(0), atol=1.1e-4, rtol=0)
    for at in (0, 777, 19_999):
        alone = sample(row, torch.ones(1), numbers[at : at + 1])
        assert (alone[0][0], alone[1][0]) == (ids[at], logprobs[at])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_has_no_log_prob_and_harms_no_other(bad: float, temperature: float) -> None:
    logits = noise(3, 70)
    asked = torch.full((3,), temperature), torch.full((3,), 0.4, dtype=torch.float64)
    expected = sample(logits, *asked)
    logits[1, 5] = bad
    ids, logprobs = sample(logits, *asked)
    assert (logprobs.isfinite() == torch.tensor([True, False, True])).all()
    assert 0 <= int(ids[1]) < 70
    for kept in (0, 2):
        assert (ids[kept], logprobs[kept]) == (expected[0][kept], expected[1][kept])
