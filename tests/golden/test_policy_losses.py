"""If these fail, the optimiser descends something else than the papers' losses.

Expected losses are plain Python loops over lists, written apart from the code under test; expected slopes are
worked out by hand or are differences of those loops.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from imagination.learning.losses.auxiliary import EntropyHistory, entropy_loss, expert_policy_loss, kl_loss
from imagination.learning.losses.policy import (
    cispo_loss,
    gspo_loss,
    ppo_clip_loss,
    reinforce_loss,
    row_segments,
    segment_mean,
    turn_ratio_loss,
    turn_segments,
)
from imagination.learning.losses.terms import LossInputs, token_entropy, token_weights
from imagination.settings.algorithm_parts import (
    Entropy,
    Kl,
    PolicyGradient,
    PpoClip,
    SequenceClip,
    TurnClip,
    WeightClip,
)

NAN, INF = math.nan, math.inf


def t64(x, grad=False):
    return torch.tensor(x, dtype=torch.float64, requires_grad=grad)


class Drawn:
    """Lists [rows][time] of everything a loss reads; ratios on both sides of the clips; two tokens in a turn."""

    def __init__(self, seed, rows=4, time=8, spread=0.5):
        rng = random.Random(seed)

        def grid(draw):
            return [[draw() for _ in range(time)] for _ in range(rows)]

        self.logp = grid(lambda: rng.uniform(-3, -0.2))
        self.old = [[x + rng.gauss(0, spread) for x in row] for row in self.logp]
        self.adv = grid(lambda: rng.gauss(0, 1))
        self.weight = grid(lambda: rng.choice([0.0, 1.0, 1.0, 0.5]))
        self.weight[0][0] = 1.0
        self.importance = grid(lambda: rng.uniform(0, 2))
        self.turn = [[t // 2 if t % 4 != 3 else -1 for t in range(time)] for _ in range(rows)]
        for row, turns in zip(self.weight, self.turn, strict=True):
            for t, k in enumerate(turns):
                row[t] *= k >= 0
        self.segment = [[b] * time for b in range(rows)]
        self.turns = [[b * 100 + k for k in row] for b, row in enumerate(self.turn)]

    def tokens(self, logp=None):
        """(row, time, log-prob, old, advantage, weight, importance) of tokens with weight."""
        logp = self.logp if logp is None else logp
        for b, row in enumerate(self.weight):
            for t, w in enumerate(row):
                if w:
                    yield b, t, logp[b][t], self.old[b][t], self.adv[b][t], w, self.importance[b][t]

    def inputs(self, logprobs, *, importance=True, **segments):
        """The tensors of these lists, for the log-probs of a policy that is trained."""
        factors = t64(self.importance) if importance else None
        return LossInputs(logprobs, t64(self.old), t64(self.adv), t64(self.weight), importance=factors, **segments)

    def geometric(self, names, logp=None):
        """{segment: geometric mean of the ratios of its tokens}."""
        found = {}
        for b, t, lp, old, *_ in self.tokens(logp):
            found.setdefault(names[b][t], []).append(lp - old)
        return {name: math.exp(sum(d) / len(d)) for name, d in found.items()}


def plain_clip(ratio, a, lo, hi, dual=None):
    loss = max(-a * ratio, -a * max(1 - lo, min(1 + hi, ratio)))
    return min(loss, -dual * a) if dual is not None and a < 0 else loss


def slopes(plain, logp, step=1e-6):
    """Central differences of a plain loss by each log-prob."""
    out = []
    for b, row in enumerate(logp):
        out.append([])
        for t in range(len(row)):
            values = []
            for sign in (1, -1):
                moved = [list(r) for r in logp]
                moved[b][t] += sign * step
                values.append(plain(moved))
            out[-1].append((values[0] - values[1]) / (2 * step))
    return out


def check(loss, plain, drawn, tolerance=1e-5):
    """Value and gradient of ``loss(logprobs)`` against the plain loop."""
    logprobs = t64(drawn.logp, grad=True)
    terms = loss(logprobs)
    terms.loss.backward()
    assert float(terms.loss.detach()) == pytest.approx(plain(drawn.logp))
    torch.testing.assert_close(logprobs.grad, t64(slopes(plain, drawn.logp)), atol=tolerance, rtol=tolerance)
    return terms


# --- segments ---


def test_segments_by_hand():
    mask = torch.tensor([[True, True, False, True], [True, False, False, True]])
    assert row_segments(mask).tolist() == [[0] * 4, [1] * 4]
    assert turn_segments(torch.tensor([[0, 0, -1, 2], [0, -1, -1, 1]])).tolist() == [[0, 0, -1, 2], [3, -2, -2, 4]]
    x, active = t64([[1.0, 3.0, NAN, 5.0]]), torch.tensor([[True, True, False, True]])
    assert segment_mean(x, active, torch.tensor([[7, 7, -9, 2]])).tolist() == [[2.0, 2.0, 0.0, 5.0]]
    assert segment_mean(x, torch.zeros_like(active), torch.zeros(1, 4).long()).tolist() == [[0.0] * 4]
    assert segment_mean(torch.zeros(0), torch.zeros(0).bool(), torch.zeros(0).long()).shape == (0,)
    with pytest.raises(ValueError, match=r"segments .*integers"):
        segment_mean(x, active, torch.zeros(1, 4))


# --- PPO, DAPO ---


@pytest.mark.parametrize(("lo", "hi", "dual"), [(0.2, 0.2, 3.0), (0.2, 0.28, None)])
def test_ppo_gradient_equals_the_differences(lo, hi, dual):
    d = Drawn(0, spread=1.2)

    def plain(logp):
        return (
            sum(w * i * plain_clip(math.exp(lp - old), a, lo, hi, dual) for _, _, lp, old, a, w, i in d.tokens(logp))
            / 9
        )

    terms = check(lambda logprobs: ppo_clip_loss(d.inputs(logprobs), PpoClip(lo, hi, dual), denominator=9), plain, d)
    assert terms.sums["clip_fraction"] > 0
    assert dual is None or terms.sums["dual_clip_fraction"] > 0


# --- GSPO ---


@pytest.mark.parametrize("eps", [(3e-4, 4e-4), (0.2, 0.3)])
def test_gspo_equals_the_plain_loop(eps):
    d = Drawn(1, rows=6)

    def plain(logp):
        s = d.geometric(d.segment, logp)
        return sum(w * i * plain_clip(s[b], a, *eps) for b, _, _, _, a, w, i in d.tokens(logp)) / 7

    terms = check(
        lambda logprobs: gspo_loss(
            d.inputs(logprobs, sequences=torch.tensor(d.segment)), SequenceClip(*eps), denominator=7
        ),
        plain,
        d,
    )
    assert 0 < float(terms.means()["clip_fraction"]) < 1


def test_gspo_token_form_has_the_value_of_the_sequence_and_the_slope_of_the_token():
    """Inside the clip the slope by a token's log-prob is -A s w / denominator: its own, none of its neighbours'."""
    d = Drawn(2, spread=0.05)
    logprobs = t64(d.logp, grad=True)
    inputs = d.inputs(logprobs, importance=False, sequences=torch.tensor(d.segment))
    terms = gspo_loss(inputs, SequenceClip(0.5, 0.5, token_form=True), denominator=5)
    terms.loss.backward()
    s = d.geometric(d.segment)
    expected = torch.zeros(4, 8).double()
    total = 0.0
    for b, t, _, _, a, w, _ in d.tokens():
        expected[b, t] = -a * s[b] * w / 5
        total += -a * s[b] * w / 5
    torch.testing.assert_close(logprobs.grad, expected)
    assert float(terms.loss.detach()) == pytest.approx(total)


def test_both_forms_agree_where_a_sequence_has_one_advantage():
    d = Drawn(3, rows=5, spread=0.3)
    adv = t64([[row[0]] * 8 for row in d.adv])
    mask = t64(d.weight) != 0
    weights, denominator = token_weights(mask, "sequence_mean")
    grads = []
    for token_form in (False, True):
        logprobs = t64(d.logp, grad=True)
        inputs = LossInputs(logprobs, t64(d.old), adv, weights, sequences=torch.tensor(d.segment))
        terms = gspo_loss(inputs, SequenceClip(0.1, 0.1, token_form), denominator=denominator)
        terms.loss.backward()
        grads.append((terms.loss.detach(), logprobs.grad))
    torch.testing.assert_close(*grads)


def test_the_ratio_of_a_long_episode_does_not_explode():
    """4,000 tokens, each half a percent likelier: exp of the sum is 4.6e8, the sequence's ratio is 1.005."""
    old = torch.zeros(1, 4000)
    ones, row = torch.ones(1, 4000), torch.zeros(1, 4000).long()
    inputs = LossInputs(old + 0.005, old, ones, ones, sequences=row)
    terms = gspo_loss(inputs, SequenceClip(clip_high=1.0), denominator=4000)
    assert float(terms.maxima["ratio"]) == pytest.approx(math.exp(0.005), abs=1e-5)


# --- turn-level ratios ---


@pytest.mark.parametrize("correct", [False, True])
def test_turn_ratios_equal_the_plain_loop(correct):
    d = Drawn(4, rows=6, spread=0.8)
    start = d.geometric(d.turns)

    def plain(logp):
        rho, total = d.geometric(d.turns, logp), 0.0
        for b, t, _, _, a, w, i in d.tokens(logp):
            name = d.turns[b][t]
            # the correction is a constant: that of the point at which the gradient is taken
            excess = abs(start[name] - max(0.8, min(1.3, start[name])))
            total += w * i * plain_clip(rho[name], a, 0.2, 0.3, 3.0) / (1 + (excess if correct else 0.0))
        return total / 11

    terms = check(
        lambda logprobs: turn_ratio_loss(
            d.inputs(logprobs, turns=torch.tensor(d.turns)),
            TurnClip(0.2, 0.3, correct_bias=correct),
            denominator=11,
        ),
        plain,
        d,
    )
    assert 0 < float(terms.means()["clip_fraction"]) < 1
    if correct:
        assert 0 < float(terms.means()["bias_weight"]) < 1


def test_bias_correction_by_hand():
    """Ratios 4 and 1 make a turn of 2, outside 1.2 by 0.8: counts 1 / 1.8. A turn inside the clip counts in full."""
    now, old = t64([[math.log(4.0), 0.0, math.log(1.1)]]), t64([[0.0, 0.0, 0.0]])
    turn, ones = torch.tensor([[3, 3, 5]]), t64([[1.0, 1.0, 1.0]])
    terms = turn_ratio_loss(LossInputs(now, old, -ones, ones, turns=turn), TurnClip(), denominator=1)
    assert float(terms.loss) == pytest.approx(2 * 2.0 / 1.8 + 1.1)
    assert float(terms.sums["bias_weight"]) == pytest.approx(2 / 1.8 + 1)


# --- CISPO, REINFORCE ---


@pytest.mark.parametrize("bounds", [(0.0, 5.0), (0.8, 1.2), (0.0, 1.5)])
def test_cispo_equals_the_plain_loop(bounds):
    d = Drawn(5, spread=1.5)
    fixed = {(b, t): max(bounds[0], min(bounds[1], math.exp(lp - old))) for b, t, lp, old, *_ in d.tokens()}

    def plain(logp):
        return sum(-w * i * a * fixed[b, t] * lp for b, t, lp, _, a, w, i in d.tokens(logp)) / 6

    terms = check(lambda logprobs: cispo_loss(d.inputs(logprobs), WeightClip(*bounds), denominator=6), plain, d)
    n = sum(fixed[b, t] != math.exp(lp - old) for b, t, lp, old, *_ in d.tokens())
    assert float(terms.sums["clip_fraction"]) == n > 0


def test_cispo_keeps_the_gradient_that_ppo_clips_away():
    """Ratio 6, good action: PPO has no gradient left, CISPO the slope -5."""
    for loss, clip, slope in ((cispo_loss, WeightClip(), -5.0), (ppo_clip_loss, PpoClip(), 0.0)):
        logprob = t64([math.log(0.6)], grad=True)
        inputs = LossInputs(logprob, t64([math.log(0.1)]), t64([1.0]), t64([1.0]))
        loss(inputs, clip, denominator=1).loss.backward()
        assert logprob.grad.item() == pytest.approx(slope)


def test_reinforce_equals_the_plain_loop():
    d = Drawn(6)
    check(
        lambda logprobs: reinforce_loss(d.inputs(logprobs), PolicyGradient(), denominator=6),
        lambda logp: sum(-w * i * a * lp for _, _, lp, _, a, w, i in d.tokens(logp)) / 6,
        d,
    )


def test_all_ratio_losses_start_as_reinforce():
    """Where the policy has not moved, every ratio is 1 and every loss has REINFORCE's gradient."""
    d = Drawn(7)
    adv = t64([[row[0]] * 8 for row in d.adv])
    weight = (t64(d.weight) != 0).double()

    segments = {"sequences": torch.tensor(d.segment), "turns": torch.tensor(d.turns)}

    def grad(loss, part):
        logprobs = t64(d.logp, grad=True)
        loss(LossInputs(logprobs, t64(d.logp), adv, weight, **segments), part, denominator=3).loss.backward()
        return logprobs.grad

    expected = grad(reinforce_loss, PolicyGradient())
    for got in (
        grad(ppo_clip_loss, PpoClip()),
        grad(cispo_loss, WeightClip()),
        grad(gspo_loss, SequenceClip()),
        grad(gspo_loss, SequenceClip(token_form=True)),
        grad(turn_ratio_loss, TurnClip()),
    ):
        torch.testing.assert_close(got, expected)


# --- experts ---


def test_expert_loss_equals_the_plain_loop():
    d = Drawn(8)

    def plain(logp):
        return sum(-w * a * math.exp(lp) / (math.exp(lp) + 0.1) for _, _, lp, _, a, w, _ in d.tokens(logp)) / 4

    check(lambda logprobs: expert_policy_loss(logprobs, t64(d.adv), t64(d.weight), denominator=4), plain, d)


def test_expert_slope_is_largest_at_gamma():
    """-gamma pi / (pi + gamma)^2: -1/4 at pi = gamma, less on either side; -pi alone would forget rare tokens."""
    logprobs = t64([math.log(0.1), math.log(0.01), math.log(0.9)], grad=True)
    expert_policy_loss(logprobs, torch.ones(3), torch.ones(3), denominator=1).loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.25, -0.001 / 0.0121, -0.09 / 1.0])


def test_expert_tokens_need_no_behaviour_logprobs():
    """There are none; a ratio made with invented ones is what this loss is instead of."""
    import inspect

    assert not [name for name in inspect.signature(expert_policy_loss).parameters if "behavior" in name]
    with pytest.raises(ValueError, match=r"gamma .*positive"):
        expert_policy_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), denominator=1, gamma=0.0)


# --- KL as a loss ---


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_loss_equals_the_plain_loop(estimator):
    d = Drawn(9)

    def plain(logp):
        deltas = [(w, lp - old) for _, _, lp, old, _, w, _ in d.tokens(logp)]
        return sum(w * (x * x / 2 if estimator == "k2" else math.exp(-x) + x - 1) for w, x in deltas) / 8

    kl = Kl(kl_coef=1.0, kl_estimator=estimator)
    check(lambda logprobs: kl_loss(logprobs, t64(d.old), t64(d.weight), kl, denominator=8), plain, d)


def test_k1_is_no_loss():
    """Its slope is 1 on every token, whatever the reference: it pulls nowhere."""
    with pytest.raises(ValueError, match="no gradient"):
        Kl(kl_estimator="k1")
    with pytest.raises(ValueError, match="must be k1, k2 or k3"):
        Kl(kl_estimator="k9")


# --- entropy ---


def test_entropy_loss_equals_the_plain_loop():
    rng = random.Random(10)
    entropy = [rng.uniform(0, 3) for _ in range(20)]
    weight = [rng.choice([0.0, 1.0, 0.5]) for _ in range(20)]
    expected = 0.0
    for h, w in zip(entropy, weight, strict=True):
        penalty = max(0.9 * 1.5 - h, 0) + max(h - 1.1 * 1.5, 0)
        expected += -0.2 * w * (h - 0.7 * penalty) / 13
    terms = entropy_loss(t64(entropy), t64(weight), Entropy(0.2, 0.7, 0.9, 1.1), denominator=13, history=1.5)
    assert float(terms.loss) == pytest.approx(expected)
    outside = sum(w != 0 and not 1.35 <= h <= 1.65 for h, w in zip(entropy, weight, strict=True))
    assert float(terms.sums["outside_fraction"]) == outside > 0


def test_the_entropy_penalty_has_a_gradient():
    """Below the band the penalty asks for more entropy, above for less; with constants it would ask for nothing."""
    entropy = t64([0.2, 1.0, 3.0], grad=True)
    ones = t64([1.0, 1.0, 1.0])
    entropy_loss(entropy, ones, Entropy(0.1, 2.0), denominator=1, history=1.0).loss.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.1 - 0.2, -0.1, -0.1 + 0.2])

    logits = t64([[[3.0, 0.0, 0.0], [0.0, 0.1, 0.0]]], grad=True)  # far below the band, and far above
    by_token = token_entropy(logits)
    weight = t64([[1.0, 1.0]])
    entropy_loss(by_token, weight, Entropy(1.0, 10.0), denominator=1, history=0.7).loss.backward()
    after = token_entropy(logits.detach() - 0.1 * logits.grad)
    assert after[0, 0] > by_token[0, 0]
    assert after[0, 1] < by_token[0, 1]


def test_without_history_there_is_a_bonus_and_no_penalty():
    terms = entropy_loss(t64([0.2, 9.0]), t64([1.0, 1.0]), Entropy(0.1, 5.0), denominator=2)
    assert float(terms.loss) == pytest.approx(-0.1 * 4.6)
    assert EntropyHistory().mean is None
    assert EntropyHistory().add(2.0).add(1.0).mean == 1.5


@pytest.mark.parametrize(
    ("change", "message"),
    [({"entropy_coef": -1.0}, "at least 0"), ({"entropy_low": 1.1}, "band"), ({"entropy_high": 0.9}, "band")],
)
def test_entropy_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        Entropy(**change)


# --- averages ---


def test_averages_by_hand():
    """Two episodes of 2 and 1 tokens with losses 1, 3 and 8, a third that trains nothing."""
    mask = torch.tensor([[True, True, False], [False, True, False], [False, False, False]])
    loss = torch.tensor([[1.0, 3.0, 99.0], [99.0, 8.0, 99.0], [99.0, 99.0, 99.0]])
    for aggregation, expected, rest in (
        ("token_mean", 12 / 3, {}),
        ("sequence_mean", (2 + 8) / 2, {}),
        ("constant", (4 + 8) / 2 / 10, {"max_tokens": 10}),
    ):
        weights, denominator = token_weights(mask, aggregation, **rest)
        assert float((weights * loss).sum()) / denominator == pytest.approx(expected)
        assert (weights[~mask] == 0).all()
    assert token_weights(torch.zeros(1, 2).bool(), "token_mean")[1] == 0.0


def test_the_constant_length_has_no_length_bias():
    """A token of a long episode pulls as hard as one of a short one, whoever else is in the batch."""
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    weights, denominator = token_weights(mask, "constant", max_tokens=8)
    assert (weights[mask] == 1).all()
    assert denominator == 16
    assert token_weights(mask[1:], "constant", max_tokens=8)[1] == 8


@pytest.mark.parametrize(
    ("aggregation", "length", "message"),
    [
        ("mean", None, "aggregation must be"),
        ("constant", None, "constant needs it"),
        ("token_mean", 9, "belongs to aggregation=constant"),
        ("constant", 1, "set max_tokens"),
    ],
)
def test_averages_refuse(aggregation, length, message):
    with pytest.raises(ValueError, match=message):
        token_weights(torch.ones(1, 2).bool(), aggregation, max_tokens=length)


# --- what every loss here refuses ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, s: gspo_loss(LossInputs(x, x, x, x[:, :1], s), SequenceClip(), 1), r"weight \(1, 1\)"),
        (lambda x, s: gspo_loss(LossInputs(x, x, x, x, s[:, :1]), SequenceClip(), 1), r"segments \(1, 1\)"),
        (lambda x, s: TurnClip(dual_clip=1.0), "dual_clip .* larger than 1"),
        (lambda x, s: TurnClip(clip_low=2.0), "clip_low must lie"),
        (lambda x, s: WeightClip(ratio_max=0.5), "1 <= ratio_max"),
        (lambda x, s: cispo_loss(LossInputs(x, x, x, x[:, :1]), WeightClip(), 1), r"weight \(1, 1\)"),
        (lambda x, s: reinforce_loss(LossInputs(x, x, x, x), PolicyGradient(), 0), "leave a loss"),
        (lambda x, s: entropy_loss(x, x[:, :1], Entropy(0.1), denominator=1), "one shape"),
    ],
)
def test_losses_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(1, 2), torch.zeros(1, 2).long())
