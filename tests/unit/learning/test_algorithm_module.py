"""If these fail, the module trains another gradient than the registry's algorithm has on the same episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from imagination.learning.algorithms import ALGORITHMS, Algorithm, Episodes, build_algorithm, total
from imagination.learning.losses.policy import row_segments, turn_segments
from imagination.learning.losses.terms import LossInputs, token_entropy, token_logprobs
from imagination.learning.process_reward_model import ProcessRewardModel
from imagination.settings import AlgorithmSettings
from imagination.settings.algorithm_parts import ImplicitSteps
from policy.lm.batch import Row, collate, padded
from tests.support.plain import (
    DEFAULTS,
    EXPERTS,
    Gradients,
    assert_same,
    gradients_of,
    make_model,
    rl_row,
    scored,
    update,
)

WORTH = 0.3 * torch.randn(17, generator=torch.Generator().manual_seed(9))  # weights of the critic, and its bias
MOST = 9  # agent tokens of an episode


def rows_of(model: PreTrainedModel) -> list[Row]:
    """Two groups, in which some episodes answer the same observation and none earn the same; one was cut."""
    shapes = [
        (".AA..AAA", 1.0, 0, [1, 2], False),
        ("..A.A....AAAA.A...", -0.5, 0, [1, 2, 2, 4], True),
        (".A", 0.0, 0, [1], False),
        (".......AAAAA......", 0.25, 1, [5], True),
        (".AAAA.", 1.0, 1, [5], False),
    ]
    return [
        replace(rl_row(model, mask, 99.0, seed, reward, cut), group=group, anchors=anchors)
        for seed, (mask, reward, group, anchors, cut) in enumerate(shapes, start=1)
    ]


def plain_gradient(
    model: PreTrainedModel, rows: Sequence[Row], algorithm: Algorithm, reference: PreTrainedModel
) -> Gradients:
    """One padded batch of whole rows: all tokens judged and learned from at once, a forward pass a row."""
    index = padded([row.turns for row in rows], -1, torch.long)
    worth = WORTH.clone().requires_grad_()
    width = index.shape[1]
    now, entropy, before, values = (torch.zeros(len(rows), width) for _ in range(4))
    paid = torch.zeros(len(rows), int(index.max()) + 1)
    follows = torch.zeros(len(rows))
    for r, row in enumerate(rows):
        ids = torch.tensor([list(row.ids)])
        hidden = model.model(ids).last_hidden_state
        logits = model.lm_head(hidden)[:, :-1]
        n = len(row.ids)
        now = now.index_put((torch.tensor(r), torch.arange(1, n)), token_logprobs(logits, ids[:, 1:])[0])
        entropy = entropy.index_put((torch.tensor(r), torch.arange(1, n)), token_entropy(logits)[0])
        value = hidden[0] @ worth[:-1] + worth[-1]
        values = values.index_put((torch.tensor(r), torch.arange(1, n)), value[:-1])
        with torch.no_grad():
            before[r, :n] = torch.stack(scored(reference, row.ids, 1.0))
            follows[r] = value[-1] if row.truncated else 0.0
        paid[r, : len(row.rewards)] = row.rewards
    engine = padded([row.behavior_logprobs for row in rows], 0.0, torch.float32)
    critic = algorithm.critic is not None
    steps = None
    if isinstance(algorithm.advantage, ImplicitSteps):
        batch = replace(collate(rows, pad=0), old_logprobs=now.detach())
        steps, _ = ProcessRewardModel(model, algorithm.advantage, DEFAULTS).step_rewards(batch, 1.0)
    judged = algorithm.judge(
        Episodes(
            turn_rewards=paid,
            action_turn_index=index,
            group_ids=torch.tensor([row.group for row in rows]),
            valid=torch.ones(len(rows), dtype=torch.bool),
            anchors=padded([row.anchors for row in rows], -1, torch.long, paid.shape[1]),
            step_rewards=steps,
            values=values.detach() if critic else None,
            bootstrap_value=follows if critic else None,
            kl=(engine - before) * (index >= 0),
        )
    )
    weight, denominator = algorithm.weigh(judged.trained)
    terms = algorithm.losses(
        LossInputs(
            logprobs=now,
            behavior_logprobs=engine,
            advantages=judged.advantages,
            weight=weight,
            sequences=row_segments(judged.trained),
            turns=turn_segments(index),
            ref_logprobs=before,
            entropy=entropy,
            values=values if critic else None,
            old_values=values.detach() if critic else None,
            returns=judged.returns,
            learned=judged.learned,
        ),
        denominator,
        critic_denominator=float(judged.learned.sum()) if judged.learned is not None else None,
    )
    loss = total(terms)
    found = gradients_of(loss, model) if not critic else None
    if found is None:
        of_worth = torch.autograd.grad(loss, worth, retain_graph=True)[0]
        found = gradients_of(loss, model)
        found |= {"value.linear.weight": of_worth[None, :-1], "value.linear.bias": of_worth[-1:]}
    return found


CHANGES: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.3, "normalise_std": False},
    "ppo": {"gamma": 0.9, "lam": 0.8, "value_coef": 0.7},
    "dr_grpo": {"overlong_buffer": 6},
    "reinforce_pp": {"kl_coef": 0.2},
    "reinforce_pp_baseline": {"kl_coef": 0.2},
    "gigpo": {"normalise_std": False, "step_weight": 0.5},
    "dapo": {"entropy_coef": 0.01, "dual_clip": 2.0},
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    "epo": {"entropy_coef": 0.05},
    "filtered_bc": {"keep_min_return": 0.2},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_is_the_registrys_however_the_rows_are_split(name: Any) -> None:
    """Micro-batches of a row each, or of all: every component divides by its own count over the whole minibatch."""
    model, reference = make_model(), make_model(seed=7).requires_grad_(False)
    rows = rows_of(model)
    settings = AlgorithmSettings(name=name, **CHANGES.get(name, {}))
    algorithm = build_algorithm(settings, MOST)
    expected = plain_gradient(model, rows, algorithm, reference)
    for micro_tokens in (1, 10**6):
        train = replace(DEFAULTS, micro_tokens=micro_tokens, expert_coef=0.0)
        (got,), metrics = update(
            model, [EXPERTS[0], *rows], settings, train,
            value=WORTH if algorithm.critic is not None else None, reference=reference, max_tokens=MOST, judge=True,
        )  # fmt: skip
        assert_same(got, expected)
        assert metrics["expert_loss"] > 0


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not ALGORITHMS[name].advantage.judges_turns])
def test_without_masks_the_gradient_does_not_depend_on_the_split_either(name: Any) -> None:
    """What the world said between two turns is a segment of its episode: not one with that of other episodes."""
    model, reference = make_model(), make_model(seed=7).requires_grad_(False)
    rows = rows_of(model)
    drift = torch.Generator().manual_seed(3)
    for i, row in enumerate(rows):  # observations have ratios, too, and not all the same one
        with torch.no_grad():
            now = torch.stack(scored(model, row.ids, 1.0))
        rows[i] = replace(row, behavior_logprobs=(now - torch.rand(now.shape, generator=drift)).tolist())
    changes = {"aggregation": "token_mean"} if ALGORITHMS[name].aggregation == "constant" else {}
    settings = AlgorithmSettings(name=name, loss_mask=False, advantage_mask=False, **changes)
    found = []
    for micro_tokens in (1, 10**6):
        train = replace(DEFAULTS, micro_tokens=micro_tokens, expert_coef=0.0)
        critic = WORTH if ALGORITHMS[name].critic is not None else None
        (got,), _ = update(
            model, rows, settings, train, value=critic, reference=reference, max_tokens=MOST, judge=True
        )  # fmt: skip
        found.append(got)
    assert_same(*found)
