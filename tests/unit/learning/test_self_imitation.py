"""If these fail, what is replayed is learned from as if it had just been played, or a resumed run replays other things.

The oracle is the plain loop of ``tests/support/plain.py``.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from imagination.learning.algorithms import build_algorithm
from imagination.learning.experience import policy_rows, trained_rows
from imagination.learning.losses.policy import replay_loss
from imagination.learning.losses.terms import LossInputs
from imagination.learning.metrics import realised_shares
from imagination.learning.self_imitation import Replays, SelfImitationBuffer, replay_row
from imagination.rollout.schedules import added_episodes
from imagination.settings import AlgorithmSettings, SelfImitationSettings
from policy.lm.batch import SOURCES, Row, collate
from real_envs.trajectory import Source, StopReason
from tests.support.dreamed import dream
from tests.support.plain import (
    DEFAULTS,
    EXPERTS,
    Gradients,
    assert_same,
    credited,
    gradient,
    gradients_of,
    grpo_rows,
    make_model,
    plain_imitation,
    plain_rl,
    rl_row,
    scored,
    update,
)

AGAIN: dict[str, Any] = {"coef": 0.6, "clip_high": 0.15, "share": 0.2}
TRAIN = replace(DEFAULTS, self_imitation=SelfImitationSettings(**AGAIN))


def replayed(model: PreTrainedModel, temperature: float = 1.0) -> list[Row]:
    """Ratios to the recorded log-probs lie on both sides of the clip."""
    masks = (("..AAA.AA", 11), (".A..AAAA", 12))
    again = [replay_row(rl_row(model, mask, 0.0, seed, temperature=temperature)) for mask, seed in masks]
    return [
        replace(row, advantages=[gain * w for w in row.replay_weight])
        for row, gain in zip(again, (0.5, 0.9), strict=True)
    ]


def plain_replay(model: PreTrainedModel, rows: Sequence[Row], temperature: float = 1.0) -> torch.Tensor:
    """``-A min(rho, 1.15)``, mean over the replayed tokens; the ratio is to what was recorded."""
    losses = []
    for row in rows:
        scores = scored(model, row.ids, temperature)
        for t, weight in enumerate(row.replay_weight):
            if weight:
                ratio = torch.exp(scores[t] - row.behavior_logprobs[t])
                losses.append(-row.advantages[t] * ratio.clamp(max=1.15))
    return torch.stack(losses).mean()


# --- the loss ---


def test_the_clip_by_hand() -> None:
    """Ratios 2 and 0.5 with the advantage 0.5: -0.5 * 1.2 without a gradient, and -0.5 * 0.5 with one."""
    now = torch.tensor([math.log(0.6), math.log(0.2)], requires_grad=True)
    recorded, gains = torch.tensor([math.log(0.3), math.log(0.4)]), torch.tensor([0.5, 0.5])
    terms = replay_loss(LossInputs(now, recorded, gains, torch.ones(2)), 0.2, denominator=2)
    assert terms.loss.item() == pytest.approx(-(0.6 + 0.25) / 2)
    terms.loss.backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([0.0, -0.125])
    assert terms.sums["clip_fraction"] == 1
    with pytest.raises(ValueError, match="at least 0"):
        replay_loss(LossInputs(now, recorded, -gains, torch.ones(2)), 0.2, denominator=2)


# --- in the optimiser step ---


@pytest.mark.parametrize("temperature", [1.0, 1.3])
@pytest.mark.parametrize("micro_tokens", [1, 10**6])
def test_the_gradient_is_that_of_the_plain_loop(temperature: float, micro_tokens: int) -> None:
    """Dreams, experts and replays in one step: each divides by its own tokens and has its own coefficient."""
    model = make_model()
    rows, again = grpo_rows(model, temperature), replayed(model, temperature)
    loss = plain_rl(model, rows, temperature) + 0.3 * plain_imitation(model, EXPERTS)
    loss = loss + 0.6 * plain_replay(model, again, temperature)
    train = replace(TRAIN, micro_tokens=micro_tokens)
    assert_same(
        gradient(model, [*rows, again[0], *EXPERTS, again[1]], train=train),
        gradients_of(loss, model),
    )


@pytest.mark.parametrize("tis_cap", [0.0, 2.0])
def test_the_ratio_is_to_the_recorded_log_probs_in_the_first_step_too(tis_cap: float) -> None:
    """The policy before this update did not play the episode: a ratio of 1 would be on-policy by decree. The
    correction for the engine reads the tokens of this update alone."""
    model = make_model()
    again = replayed(model)
    (alone,), metrics = update(model, again, train=TRAIN, tis_cap=tis_cap)
    assert_same(alone, gradients_of(0.6 * plain_replay(model, again), model))
    assert metrics["ratio_replay"] != pytest.approx(1.0, abs=1e-2)
    assert "mismatch_ratio_max" not in metrics


def test_replays_are_kept_apart_from_what_was_just_played() -> None:
    """The metrics of this update's tokens are the same to the digit, and no gradient of theirs is diluted."""
    model = make_model()
    rows, again = grpo_rows(model), replayed(model)
    (pure,), fresh = update(model, rows, train=TRAIN)
    (mixed,), metrics = update(model, [*rows, *again], train=TRAIN)
    (alone,), own = update(model, again, train=TRAIN)
    assert_same(mixed, {name: pure[name] + alone[name] for name in pure})
    for key in ("rl_tokens", "policy_loss", "ratio", "clip_fraction", "kl_k3", "entropy", "advantage_dream"):
        assert metrics[key] == pytest.approx(fresh[key], rel=1e-5), key
    assert metrics["rl_tokens_dream"] == metrics["rl_tokens"] == 22
    assert metrics["rl_tokens_replay"] == own["rl_tokens_replay"] == 10
    assert metrics["policy_loss_replay"] == pytest.approx(plain_replay(model, again).item(), rel=1e-4)
    assert metrics["advantage_replay"] == pytest.approx((5 * 0.5 + 5 * 0.9) / 10)
    assert 0 < metrics["clip_fraction_replay"] < 1
    assert metrics["gradient_share_dream"] + metrics["gradient_share_replay"] == pytest.approx(1.0)
    assert metrics["tokens_replay"] == pytest.approx(10 / 32)


def test_a_replay_is_not_judged_again() -> None:
    """It enters no mean of a group, and has no log-probs of the policy before the update."""
    model = make_model()
    rows = [replace(row, group=k % 2) for k, row in enumerate(grpo_rows(model))]
    rows = [replace(row, rewards=torch.full_like(row.rewards, float(k == 0))) for k, row in enumerate(rows)]
    grpo = build_algorithm(AlgorithmSettings())
    again = replayed(model)
    alone, mixed, batch = credited(rows, grpo), credited([*again, *rows], grpo), collate(again, pad=0)
    assert trained_rows(mixed)[:2] == [0, 1]
    for name in ("advantages", "rl_weight", "returns", "learned"):
        column, width = getattr(mixed, name), batch.ids.shape[1]
        torch.testing.assert_close(column[2:], getattr(alone, name), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(column[:2, :width], getattr(batch, name), rtol=0, atol=0, equal_nan=True)
    assert not batch.rl_weight.any()
    assert not batch.ce_weight.any()
    assert batch.trained_mask.sum() == 10
    assert realised_shares(batch) == {"tokens_replay": 1.0}


def test_a_second_step_goes_on_from_the_recorded_log_probs() -> None:
    """After a step of this update the ratio is still to the policy of then."""
    model = make_model()
    again = replayed(model)
    steps, _ = update(model, again, train=replace(TRAIN, epochs=2), nudge=0.05)
    moved = make_model()
    with torch.no_grad():
        moved.lm_head.weight.mul_(1.05)
    expected: Gradients = gradients_of(0.6 * plain_replay(moved, again), moved)
    assert_same(steps[1], expected)


# --- the buffer ---


def drawn(buffer, step, count=100):
    return dict(buffer.draw(count, step, random.Random(0)))


def test_only_what_is_above_the_median_is_kept():
    buffer: SelfImitationBuffer[str] = SelfImitationBuffer()
    assert buffer.baseline is None
    assert drawn(buffer, 0) == {}
    buffer.add(["a", "b", "c", "d", "e"], [0.0, 0.2, 0.4, 0.6, 1.0], step=0)
    assert buffer.baseline == 0.4
    assert drawn(buffer, 0) == {"d": pytest.approx(0.2), "e": pytest.approx(0.6)}


def test_advantages_are_re_estimated_when_the_policy_improves():
    """0.6 was good; once everything earns 0.8 or more, it is no example any more, and 1.0 is worth less."""
    buffer: SelfImitationBuffer[str] = SelfImitationBuffer()
    buffer.add(["a", "b", "c"], [0.0, 0.6, 1.0], step=0)
    buffer.add(["d"] * 5, [0.8] * 5, step=1)
    assert drawn(buffer, 1)["c"] == pytest.approx(0.2)
    assert "b" not in drawn(buffer, 1)


def test_episodes_older_than_five_steps_are_forgotten():
    buffer: SelfImitationBuffer[str] = SelfImitationBuffer(max_age=5)
    buffer.add(["old", "x"], [1.0, 0.0], step=10)
    assert set(drawn(buffer, 15)) == {"old"}
    assert drawn(buffer, 16) == {}
    assert len(buffer) == 0


def test_capacity_bounds_episodes_and_the_median():
    buffer: SelfImitationBuffer[int] = SelfImitationBuffer(capacity=4, max_age=100)
    totals = [random.Random(1).random() for _ in range(50)]
    for step, total in enumerate(totals):
        buffer.add([step], [total], step)
        assert buffer.baseline == median(totals[max(0, step - 3) : step + 1])
        assert len(buffer) <= 4
    assert all(advantage > 0 for advantage in drawn(buffer, 50).values())


def test_a_draw_repeats_nothing_and_is_reproducible():
    buffer: SelfImitationBuffer[int] = SelfImitationBuffer()
    buffer.add(list(range(40)), [float(i >= 20) for i in range(40)], step=0)
    one, two = (buffer.draw(8, 1, random.Random(3)) for _ in range(2))
    assert one == two
    assert len({episode for episode, _ in one}) == 8


def test_nothing_is_imitated_where_all_is_equal():
    buffer: SelfImitationBuffer[int] = SelfImitationBuffer()
    buffer.add([1, 2, 3], [0.5, 0.5, 0.5], step=0)
    assert drawn(buffer, 0) == {}


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="capacity"):
        SelfImitationBuffer(capacity=0)


# --- the buffer between updates ---


def played(returns: Sequence[float], stop: StopReason = StopReason.TERMINATED) -> list[Row]:
    return policy_rows([dream([0.0, total], stop=stop) for total in returns])


def test_what_is_replayed_by_hand() -> None:
    """Above the median of the returns so far, from earlier updates, at most ``max_age`` old."""
    replays = Replays(SelfImitationSettings(share=0.5, max_age=2), seed=0)
    assert replays.draw(0, 9) == []
    assert replays.add(0, played([0.0, 0.25, 1.0])) == {"replays_kept": 1, "replay_baseline": 0.25}
    (row,) = replays.draw(1, 9)
    assert row.source == SOURCES.index(Source.REPLAY)
    assert list(row.replay_weight) == [0, 1, 0, 1]
    assert list(row.advantages) == [0, 0.75, 0, 0.75]
    assert list(row.behavior_logprobs) == pytest.approx([math.nan, -0.5, math.nan, -0.5], nan_ok=True)
    assert not row.rl_weight.any()
    assert replays.add(1, played([0.5, 0.5, 0.5])) == {"replays_kept": 1, "replay_baseline": 0.5}
    assert [max(row.advantages) for row in replays.draw(2, 9)] == [0.5]  # against the median of now
    assert replays.draw(3, 9) == []


def test_a_failed_episode_is_never_replayed() -> None:
    replays = Replays(SelfImitationSettings(share=0.5), seed=0)
    replays.add(0, [*played([0.0, 0.0, 0.5]), *played([1.0, 1.0], stop=StopReason.ENGINE_FAILED)])
    assert [max(row.advantages) for row in replays.draw(1, 9)] == [0.5]


def test_doubt_weighs_a_replay_as_it_weighed_the_dream() -> None:
    (row,) = policy_rows([dream([0.0, 1.0], [{"probability": 0.4}] * 2)], min_weight=0.05)
    assert list(replay_row(row).replay_weight) == pytest.approx([0, 1.0, 0, 0.4])


def test_a_saved_buffer_goes_on_as_if_it_had_not_been_saved() -> None:
    """Through the file that training states are: plain lists and numbers, read without running code."""
    rng = torch.Generator().manual_seed(0)
    returns = torch.rand(6, 8, generator=rng).tolist()
    straight, stopped = (Replays(SelfImitationSettings(share=0.5, capacity=11, max_age=3), seed=3) for _ in range(2))
    for step in range(3):
        for buffer in (straight, stopped):
            buffer.add(step, played(returns[step]))
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    file.seek(0)
    resumed = Replays(SelfImitationSettings(share=0.5, capacity=11, max_age=3), seed=3)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for step in range(3, 6):
        assert str(resumed.draw(step, 4)) == str(straight.draw(step, 4)) != "[]"
        assert resumed.add(step, played(returns[step])) == straight.add(step, played(returns[step]))


def test_shares_of_what_is_added() -> None:
    """Of 100 episodes 10 experts and 20 replays, beside the 70 that were played."""
    assert added_episodes(70, 0.1, 0.2) == 10
    assert added_episodes(70, 0.2, 0.1) == 20
    with pytest.raises(ValueError, match="together"):
        added_episodes(70, 0.6, 0.4)
