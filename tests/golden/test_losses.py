"""If these fail, the optimiser descends something else than the papers' losses.

Expected numbers are worked out by hand or by plain Python loops over lists, written apart from the code under test.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from imagination.learning.losses.auxiliary import cross_entropy_loss, kl_k1, kl_k2, kl_k3, value_loss
from imagination.learning.losses.policy import ppo_clip_loss
from imagination.learning.losses.terms import LossInputs, token_entropy, token_logprobs
from imagination.settings.algorithm_parts import Critic, PpoClip

NAN, INF = math.nan, math.inf


def t64(x, grad=False):
    return torch.tensor(x, dtype=torch.float64, requires_grad=grad)


def plain_ppo(logp, old, adv, weight, denominator, lo, hi, dual, bound):
    total, stats = 0.0, {"clip_fraction": 0, "dual_clip_fraction": 0, "kl_k3": 0.0, "ratio": 0.0, "max": 0.0, "n": 0}
    for row in zip(logp, old, adv, weight, strict=True):
        for lp, olp, a, w in zip(*row, strict=True):
            if w == 0:
                continue
            d = max(-bound, min(bound, lp - olp))
            rho = math.exp(d)
            free, clipped = -a * rho, -a * max(1 - lo, min(1 + hi, rho))
            loss = max(free, clipped)
            if dual is not None and a < 0 and loss > -dual * a:
                loss = -dual * a
                stats["dual_clip_fraction"] += 1
            total += w * loss
            stats["clip_fraction"] += clipped > free
            stats["kl_k3"] += rho - 1 - d
            stats["ratio"] += rho
            stats["max"] = max(stats["max"], rho)
            stats["n"] += 1
    return total / denominator, stats


def plain_log_softmax(row, temperature=1.0):
    row = [x / temperature for x in row]
    top = max(row)
    total = math.log(sum(math.exp(x - top) for x in row))
    return [x - top - total for x in row]


# --- ppo_clip_loss ---


@pytest.mark.parametrize("dual", [3.0, 1.5, None])
@pytest.mark.parametrize(("lo", "hi"), [(0.2, 0.2), (0.2, 0.28)])
def test_ppo_equals_the_plain_loop(lo, hi, dual):
    rng = random.Random(0)

    def grid(draw):
        return [[draw() for _ in range(9)] for _ in range(6)]

    logp, old, adv = grid(lambda: rng.gauss(-2, 1)), grid(lambda: rng.gauss(-2, 1)), grid(lambda: rng.gauss(0, 1))
    logp[0][0], old[0][0], adv[0][0] = -1.0, -500.0, 1.0  # a ratio that only the clamp keeps finite
    weight = grid(lambda: rng.choice([0.0, 1.0, 1.0, 0.5]))
    weight[0][0] = 1.0
    expected, stats = plain_ppo(logp, old, adv, weight, 17, lo, hi, dual, 20.0)
    inputs = LossInputs(t64(logp), t64(old), t64(adv), t64(weight))
    terms = ppo_clip_loss(inputs, PpoClip(lo, hi, dual), denominator=17)
    assert float(terms.loss) == pytest.approx(expected)
    assert float(terms.tokens) == stats["n"]
    assert {k: float(v) for k, v in terms.sums.items()} == pytest.approx({k: stats[k] for k in terms.sums})
    assert float(terms.maxima["ratio"]) == pytest.approx(stats["max"])
    assert stats["clip_fraction"] > 0
    assert dual is None or stats["dual_clip_fraction"] > 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 1.0, -1.0, -1.0),  # on policy: the policy gradient -A
        (1.1, 1.0, -1.1, -1.1),  # inside: d(-A rho)/d logp = -A rho
        (1.5, 1.0, -1.2, 0.0),  # good and already more likely: nothing more to gain
        (0.5, 1.0, -0.5, -0.5),  # good and less likely: pull it back
        (0.5, -1.0, 0.8, 0.0),  # bad and already less likely
        (1.5, -1.0, 1.5, 1.5),  # bad and more likely: push it down
        (9.0, -1.0, 3.0, 0.0),  # dual clip: not more than 3 |A|
        (9.0, 1.0, -1.2, 0.0),  # dual clip is for negative advantages only
    ],
)
def test_ppo_by_hand(ratio, advantage, loss, slope):
    logprob = t64([[math.log(ratio) - 2.0]], grad=True)
    inputs = LossInputs(logprob, t64([[-2.0]]), t64([[advantage]]), t64([[1.0]]))
    terms = ppo_clip_loss(inputs, PpoClip(), denominator=1)
    terms.loss.backward()
    assert float(terms.loss.detach()) == pytest.approx(loss)
    assert logprob.grad.item() == pytest.approx(slope)


def test_ratios_under_temperature():
    """Sampled at T = 0.7 from the very policy that is trained: at the same T every ratio is 1, at T = 1 none is."""
    logits = [[2.0, -1.0, 0.5], [0.0, 3.0, 1.0]]
    ids = [0, 2]
    behavior = [plain_log_softmax(row, 0.7)[i] for row, i in zip(logits, ids, strict=True)]
    ones = t64([[1.0, 1.0]])

    def ratios(temperature):
        logprobs = token_logprobs(t64([logits]), torch.tensor([ids]), temperature)
        return ppo_clip_loss(LossInputs(logprobs, t64([behavior]), ones, ones), PpoClip(), denominator=2)

    assert float(ratios(0.7).means()["ratio"]) == pytest.approx(1.0)
    assert float(ratios(0.7).maxima["ratio"]) == pytest.approx(1.0)
    assert float(ratios(0.7).sums["kl_k3"]) == pytest.approx(0.0)
    assert float(ratios(1.0).sums["kl_k3"]) > 0.05


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e38])
def test_junk_on_observation_tokens_changes_nothing_and_masked_tokens_get_exactly_zero_gradient(junk):
    weight = torch.tensor([[0.0, 1.0, 0.0, 2.0]])
    masked = weight == 0

    def run(fill):
        logp, old, adv = (
            torch.tensor([x]).masked_fill(masked, fill).requires_grad_()
            for x in ([0.0, -1.0, 0.0, -2.0], [0.0, -1.1, 0.0, -2.3], [0.0, 1.0, 0.0, -1.0])
        )
        terms = ppo_clip_loss(LossInputs(logp, old, adv, weight), PpoClip(), denominator=3)
        terms.loss.backward()
        return logp, old, adv, terms

    logp, old, adv, terms = run(junk)
    clean_logp, _, _, clean = run(0.0)
    assert terms.loss == clean.loss
    assert terms.sums == clean.sums
    assert terms.maxima == clean.maxima
    assert torch.equal(logp.grad, clean_logp.grad)
    assert (logp.grad[masked] == 0.0).all()
    assert (logp.grad[~masked] != 0.0).all()
    assert old.grad is None  # constants
    assert adv.grad is None


def test_batch_without_weight_has_zero_loss_and_gradient():
    """One rank may hold observation tokens only; it must still take part in the backward pass."""
    logp = torch.full((2, 3), NAN, requires_grad=True)
    zeros = torch.zeros(2, 3)
    terms = ppo_clip_loss(LossInputs(logp, zeros, zeros, zeros), PpoClip(), denominator=8)
    terms.loss.backward()
    assert terms.loss == 0.0
    assert torch.equal(logp.grad, zeros)
    assert terms.means()["ratio"] == 0.0
    assert terms.maxima["ratio"] == 0.0


def test_half_precision_log_probs_are_subtracted_in_fp32():
    logp = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    inputs = LossInputs(logp, torch.tensor([[-1.001]]), torch.ones(1, 1), torch.ones(1, 1))
    terms = ppo_clip_loss(inputs, PpoClip(), denominator=1)
    assert terms.loss.dtype == torch.float32
    assert float(terms.maxima["ratio"]) == pytest.approx(math.exp(0.001), abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": torch.zeros(1, 3)}, r"advantages \(1, 3\)"),
        ({"dual_clip": 1.0}, "dual_clip .* larger than 1"),
        ({"clip_low": 1.1}, "clip_low must lie"),
        ({"denominator": 0}, "leave a loss"),
        ({"denominator": NAN}, "positive, got nan"),
    ],
)
def test_ppo_refuses(change, message):
    x = torch.zeros(1, 2)
    columns = {name: change.get(name, x) for name in ("logprobs", "behavior_logprobs", "advantages", "weight")}
    clip = {name: value for name, value in change.items() if "clip" in name}
    with pytest.raises(ValueError, match=message):
        ppo_clip_loss(LossInputs(**columns), PpoClip(**clip), change.get("denominator", 1))


# --- value_loss ---


@pytest.mark.parametrize("clip", [0.2, 1.0, None])
def test_value_loss_equals_the_plain_loop(clip):
    rng = random.Random(2)
    v, old, ret = ([[rng.gauss(0, 1) for _ in range(7)] for _ in range(4)] for _ in range(3))
    mask = [[rng.random() < 0.7 for _ in range(7)] for _ in range(4)]
    total, squared, n_clipped = 0.0, 0.0, 0
    for b in range(4):
        for t in range(7):
            if mask[b][t]:
                free = (v[b][t] - ret[b][t]) ** 2
                clipped = free
                if clip is not None:
                    clipped = (max(old[b][t] - clip, min(old[b][t] + clip, v[b][t])) - ret[b][t]) ** 2
                    n_clipped += clipped > free + 1e-12
                total += 0.5 * max(free, clipped)
                squared += free
    terms = value_loss(t64(v), t64(old), t64(ret), torch.tensor(mask), Critic(1.0, clip), denominator=13)
    assert float(terms.loss) == pytest.approx(total / 13)
    assert float(terms.sums["squared_error"]) == pytest.approx(squared)
    assert float(terms.sums["clip_fraction"]) == n_clipped
    assert float(terms.tokens) == sum(map(sum, mask))


def test_value_loss_by_hand():
    """Return 1, old value 0, clip 0.2. A value that jumped to 1 stops; one that went to 0.1 goes on with v - R."""
    values = t64([[1.0, 0.1]], grad=True)
    ones = torch.ones(1, 2).bool()
    terms = value_loss(values, t64([[0.0, 0.0]]), t64([[1.0, 1.0]]), ones, Critic(1.0, 0.2), denominator=1)
    terms.loss.backward()
    assert float(terms.loss.detach()) == pytest.approx(0.5 * 0.8**2 + 0.5 * 0.9**2)
    assert values.grad.tolist() == [[0.0, pytest.approx(-0.9)]]
    assert terms.sums["clip_fraction"] == 1


def test_rounding_does_not_look_like_clipping():
    """A thousand steps inside the clip, in fp32: none is clipped."""
    rng = torch.Generator().manual_seed(0)
    old, returns, step = (torch.randn(1, 1000, generator=rng) for _ in range(3))
    mask = torch.ones(1, 1000).bool()
    terms = value_loss(old + 0.02 * step, old, returns, mask, Critic(value_clip=0.2), denominator=1000)
    assert terms.sums["clip_fraction"] == 0


def test_value_loss_refuses():
    x, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    with pytest.raises(ValueError, match="bool mask"):
        value_loss(x, x, x, mask.float(), Critic(), denominator=1)
    with pytest.raises(ValueError, match="value_clip must be positive"):
        Critic(value_clip=0.0)
    with pytest.raises(ValueError, match=r"one shape, \[batch, time\] or \[n\], got values \(1, 2\).* mask \(2,\)"):
        value_loss(x, x, x, mask[0], Critic(), denominator=1)


# --- cross_entropy_loss ---


def test_cross_entropy_by_hand_with_junk():
    logprobs = torch.tensor([[-1.0, -3.0, NAN, INF]], requires_grad=True)
    terms = cross_entropy_loss(logprobs, torch.tensor([[1.0, 0.5, 0.0, 0.0]]), denominator=1.5)
    terms.loss.backward()
    assert float(terms.loss.detach()) == pytest.approx(2.5 / 1.5)
    assert logprobs.grad.tolist() == [[pytest.approx(-1 / 1.5), pytest.approx(-0.5 / 1.5), 0.0, 0.0]]
    assert float(terms.means()["nll"]) == 2.0


def test_cross_entropy_refuses():
    with pytest.raises(ValueError, match=r"weight \(1, 3\)"):
        cross_entropy_loss(torch.zeros(1, 2), torch.zeros(1, 3), denominator=1)


# --- KL estimators ---


@pytest.mark.parametrize(("logp", "ref"), [(-1.0, -1.5), (-1.5, -1.0), (-2.0, -2.0), (-0.1, -7.0)])
def test_kl_estimators_equal_their_formulas(logp, ref):
    d = logp - ref
    assert float(kl_k1(t64(logp), t64(ref))) == pytest.approx(d)
    assert float(kl_k2(t64(logp), t64(ref))) == pytest.approx(d * d / 2)
    assert float(kl_k3(t64(logp), t64(ref))) == pytest.approx(math.exp(-d) + d - 1)


def test_k1_and_k3_average_to_the_kl():
    """Summed over the vocabulary with the policy's probabilities, both are KL(policy || reference)."""
    p, q = plain_log_softmax([1.0, 0.0, -1.0]), plain_log_softmax([0.0, 0.5, 0.3])
    kl = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    for estimator in (kl_k1, kl_k3):
        assert float((t64(p).exp() * estimator(t64(p), t64(q))).sum()) == pytest.approx(kl)


def test_k3_keeps_its_digits_near_zero():
    """In fp32, exp(-d) + d - 1 at d = 1e-4 is rounding noise (it is 5e-9); a KL penalty must not be noise."""
    assert float(kl_k3(torch.tensor(1e-4), torch.tensor(0.0))) == pytest.approx(0.5e-8, rel=2e-3)


def test_kl_refuses():
    with pytest.raises(ValueError, match="kl_k3 needs"):
        kl_k3(torch.zeros(1, 2), torch.zeros(1, 3))


# --- token_logprobs, token_entropy ---


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_logprobs_and_entropy_equal_the_plain_loop(temperature):
    rng = random.Random(3)
    logits = [[[rng.gauss(0, 3) for _ in range(11)] for _ in range(4)] for _ in range(2)]
    ids = [[rng.randrange(11) for _ in range(4)] for _ in range(2)]
    logp = [[plain_log_softmax(row, temperature) for row in seq] for seq in logits]
    expected = [[row[i] for row, i in zip(*pair, strict=True)] for pair in zip(logp, ids, strict=True)]
    entropy = [[-sum(math.exp(x) * x for x in row) for row in seq] for seq in logp]
    torch.testing.assert_close(token_logprobs(t64(logits), torch.tensor(ids), temperature), t64(expected))
    torch.testing.assert_close(token_entropy(t64(logits), temperature), t64(entropy))


def test_logprobs_are_stable_and_fp32():
    """Logits of 10,000 in bf16: exp would overflow, and bf16 sums would keep two digits."""
    logits = torch.tensor([[[10_000.0, 9_984.0, -10_000.0]]], dtype=torch.bfloat16)
    got = token_logprobs(logits, torch.tensor([[1]]))
    assert got.dtype == torch.float32
    first, second = logits[0, 0, :2].double().tolist()
    assert float(got) == pytest.approx(second - first - math.log1p(math.exp(second - first)))


def test_entropy_has_the_gradient_of_its_formula():
    """dH/dlogit_i = -p_i (log p_i + H)."""
    row = [1.0, 0.0, -2.0]
    log_p = plain_log_softmax(row)
    entropy = -sum(math.exp(x) * x for x in log_p)
    logits = t64([[row]], grad=True)
    token_entropy(logits).sum().backward()
    torch.testing.assert_close(logits.grad[0, 0], t64([-math.exp(x) * (x + entropy) for x in log_p]))


def test_entropy_of_forbidden_tokens():
    """A vocabulary entry at -inf cannot be sampled: no entropy, and no NaN in the gradient."""
    logits = torch.tensor([[[0.0, 0.0, -INF]]], requires_grad=True)
    entropy = token_entropy(logits)
    entropy.sum().backward()
    assert float(entropy.detach()) == pytest.approx(math.log(2))
    assert logits.grad.isfinite().all()


def test_logprobs_refuse():
    logits, ids = torch.zeros(1, 2, 3), torch.zeros(1, 2).long()
    with pytest.raises(ValueError, match="positive temperature, got 0"):
        token_logprobs(logits, ids, 0.0)
    with pytest.raises(ValueError, match="ids must have"):
        token_logprobs(logits, ids[:, :1])
    with pytest.raises(ValueError, match=r"logits \[batch, time, vocab\]"):
        token_entropy(logits[0, 0])
    with pytest.raises(ValueError, match="bool mask"):
        token_entropy(logits, mask=ids)
