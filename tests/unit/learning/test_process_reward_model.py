"""If these fail, iStar's process reward model learns something else than which episodes did better."""

from __future__ import annotations

import copy
import io
import itertools
import math
from dataclasses import replace

import pytest
import torch

from imagination.learning.process_reward_model import ProcessRewardModel
from imagination.settings.algorithm_parts import ImplicitSteps
from policy.lm.backbone import with_lora
from policy.lm.batch import collate
from policy.lm.settings import LoraSettings
from tests.support.plain import DEFAULTS, assert_same, gradients_of, make_model, rl_row, scored

PART, TRAIN = ImplicitSteps(prm_beta=0.5, prm_lr=2.0), replace(DEFAULTS, lr=1e-3)


def rows_of(model):
    """Two groups; in the second nothing is to be compared."""
    masks = {".AA..AAA": (1.0, 0), "..A.A....AAAA.A": (0.0, 0), ".A": (0.5, 0), "...AA": (1.0, 1), ".AA": (1.0, 1)}
    return [
        replace(rl_row(model, mask, 0.0, seed, reward, temperature=1.3), group=torch.tensor(group))
        for seed, (mask, (reward, group)) in enumerate(masks.items(), start=1)
    ]


def batch_of(policy, rows):
    """Rows with the log-probs of the policy before the update."""
    batch = collate(rows, pad=0)
    with torch.no_grad():
        for r, row in enumerate(rows):
            batch.old_logprobs[r, : len(row.ids)] = torch.stack(scored(policy, row.ids, 1.3))
    batch.old_logprobs[batch.rl_weight == 0] = math.nan
    return batch


def plain_rewards(prm, policy, rows):
    """{turn: sum over its tokens of 0.5 log(prm / policy)} of each row; a forward pass a row."""
    found = []
    for row in rows:
        now, before = scored(prm, row.ids, 1.3), scored(policy, row.ids, 1.3)
        turns = {}
        for t, turn in enumerate(row.turns.tolist()):
            if turn >= 0:
                turns[turn] = turns.get(turn, 0.0) + 0.5 * (now[t] - before[t].detach())
        found.append(turns)
    return found


@pytest.mark.parametrize("micro_tokens", [1, 10**6])
def test_two_updates_are_those_of_a_plain_loop(micro_tokens):
    """The gradient over all pairs, then the rewards under the weights after the step. The policy moves in between."""
    policy = make_model()
    rows = rows_of(policy)
    model = ProcessRewardModel(policy, PART, replace(TRAIN, micro_tokens=micro_tokens))
    for _ in range(2):
        plain = copy.deepcopy(model.model)
        found, metrics = model.step_rewards(batch_of(policy, rows), 1.3)
        scores = [sum(turns.values()) for turns in plain_rewards(plain, policy, rows)]
        loss = sum(torch.log1p(torch.exp(scores[j] - scores[i])) for i, j in ((0, 1), (0, 2), (2, 1))) / 3
        assert metrics["prm_loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics["prm_pairs"] == 3
        assert_same({name: p.grad for name, p in model.model.named_parameters()}, gradients_of(loss, plain))
        with torch.no_grad():
            expected = plain_rewards(model.model, policy, rows)
            moved = max(
                float((p - q).abs().max()) for p, q in zip(plain.parameters(), model.model.parameters(), strict=True)
            )
            policy.lm_head.weight.mul_(1.1)
        assert moved == pytest.approx(2e-3, rel=0.2), "a step of Adam at twice the policy's rate"
        for got, turns in zip(found.tolist(), expected, strict=True):
            assert got == pytest.approx([float(turns.get(k, math.nan)) for k in range(4)], abs=1e-5, nan_ok=True)
    assert metrics["prm_loss"] < math.log(2)


def test_episodes_that_earned_the_same_teach_nothing():
    policy = make_model()
    model = ProcessRewardModel(policy, PART, TRAIN)
    rewards, metrics = model.step_rewards(batch_of(policy, rows_of(policy)[3:]), 1.3)
    assert not metrics
    assert rewards[~rewards.isnan()].abs().max() < 1e-5


def test_with_lora_it_is_a_second_adapter():
    policy = with_lora(make_model(), LoraSettings(rank=2))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    model = ProcessRewardModel(policy, PART, TRAIN)
    model.step_rewards(batch_of(policy, rows_of(make_model())), 1.3)
    for (name, p), q in zip(policy.named_parameters(), model.model.parameters(), strict=True):
        assert torch.equal(p, before[name]), "the policy is left alone"
        assert (p is q) is not p.requires_grad
    assert len(model.state_dict()["weights"]) == sum(p.requires_grad for p in policy.parameters())


def test_what_is_saved_is_all_that_it_has_learned():
    policy = make_model()
    rows = rows_of(policy)
    straight, stopped = (ProcessRewardModel(policy, PART, TRAIN) for _ in range(2))
    found = [straight.step_rewards(batch_of(policy, rows), 1.3)[0] for _ in range(3)]
    for _ in range(2):
        stopped.step_rewards(batch_of(policy, rows), 1.3)
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    file.seek(0)
    resumed = ProcessRewardModel(policy, PART, TRAIN)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    again = resumed.step_rewards(batch_of(policy, rows), 1.3)[0]
    assert torch.equal(again.nan_to_num(), found[2].nan_to_num())
    assert all(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in itertools.pairwise(found))
