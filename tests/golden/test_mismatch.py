"""If these fail, the difference between engine and trainer is measured or corrected as something else than it is.

Expected numbers are worked out by hand.
"""

from __future__ import annotations

import math

import pytest
import torch

from imagination.learning.losses.policy import engine_mismatch, ppo_clip_loss, truncated_importance
from imagination.learning.losses.terms import LossInputs
from imagination.settings.algorithm_parts import PpoClip

NAN, INF = math.nan, math.inf


def logs(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


ONE = torch.ones(1, 2, dtype=torch.float64)


def test_importance_by_hand():
    """Half as likely, three times as likely (capped at 2), exactly as likely."""
    old, engine = logs(0.2, 0.9, 0.5), logs(0.4, 0.3, 0.5)
    weight = torch.ones(1, 3, dtype=torch.float64)
    assert truncated_importance(old, engine, weight, 2.0).tolist() == [[pytest.approx(0.5), 2.0, 1.0]]
    assert truncated_importance(old, engine, weight, 5.0).tolist() == [[pytest.approx(0.5), pytest.approx(3.0), 1.0]]


def test_importance_stays_finite_and_is_a_constant():
    old = torch.tensor([0.0, -500.0], requires_grad=True)
    importance = truncated_importance(old, torch.tensor([-500.0, 0.0]), torch.ones(2), 2.0)
    assert importance.tolist() == [2.0, 0.0]
    assert not importance.requires_grad


def test_mismatch_by_hand():
    """KL(engine || trainer), exp(-d) + d - 1 with d = log(engine / trainer): 1.25 - ln 1.25 - 1 and 0.5 + ln 2 - 1."""
    k3, largest = engine_mismatch(logs(0.5, 0.3), logs(0.4, 0.6), ONE)
    assert float(k3) == pytest.approx(1.25 - math.log(1.25) - 1 + 0.5 + math.log(2) - 1)
    assert float(largest) == pytest.approx(2.0)  # the second is half as likely, which is as far off as twice
    k3, largest = engine_mismatch(logs(0.5, 0.3), logs(0.5, 0.3), ONE)
    assert (float(k3), float(largest)) == (0.0, 1.0)


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e300])
def test_tokens_without_weight_are_not_there(junk):
    weight = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    for fill in ((junk, 0.0), (0.0, junk), (junk, junk)):
        old, engine = torch.tensor([[fill[0], -1.0]]).double(), torch.tensor([[fill[1], -1.5]]).double()
        assert truncated_importance(old, engine, weight, 2.0).tolist() == [[1.0, pytest.approx(math.exp(0.5))]]
        k3, largest = engine_mismatch(old, engine, weight)
        assert float(k3) == pytest.approx(math.exp(0.5) - 1.5)
        assert float(largest) == pytest.approx(math.exp(0.5))
    k3, largest = engine_mismatch(old, engine, torch.zeros_like(weight))
    assert (float(k3), float(largest)) == (0.0, 1.0)


def test_an_engine_that_is_absurdly_off_is_a_large_number_and_not_inf():
    k3, largest = engine_mismatch(torch.tensor([0.0]), torch.tensor([-1e4]), torch.ones(1))
    assert float(largest) == pytest.approx(math.exp(20), rel=1e-4)
    assert float(k3) == pytest.approx(math.exp(20), rel=1e-4)


def test_importance_multiplies_the_loss_of_a_token():
    """Beside the ratio and its clip, not inside: 1.5 is clipped to 1.2 and then counts half."""
    logprobs = logs(0.6, 0.5).requires_grad_()
    old, advantages = logs(0.4, 0.5), torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    importance = torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    inputs = LossInputs(logprobs, old, advantages, ONE, importance=importance)
    terms = ppo_clip_loss(inputs, PpoClip(), denominator=2)
    terms.loss.backward()
    assert float(terms.loss.detach()) == pytest.approx((0.5 * -1.2 + 2.0 * 1.0) / 2)
    assert logprobs.grad.tolist() == [[0.0, pytest.approx(2.0 * 1.0 / 2)]]
    assert float(terms.means()["ratio"]) == pytest.approx((1.5 + 1.0) / 2)  # of the policy, not of the engine
    weight = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    junk = torch.tensor([[NAN, 2.0]], dtype=torch.float64)
    inputs = LossInputs(logprobs.detach(), old, advantages, weight, importance=junk)
    terms = ppo_clip_loss(inputs, PpoClip(), denominator=2)
    assert float(terms.loss) == 1.0


@pytest.mark.parametrize("cap", [0.0, 0.5, NAN])
def test_a_cap_below_one_is_refused(cap):
    """It would shrink the loss of tokens on which engine and trainer agree."""
    with pytest.raises(ValueError, match="at least 1"):
        truncated_importance(ONE, ONE, ONE, cap)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="one shape"):
        truncated_importance(ONE, ONE[:, :1], ONE, 2.0)
    with pytest.raises(ValueError, match="one shape"):
        engine_mismatch(ONE, ONE[:, :1], ONE)
