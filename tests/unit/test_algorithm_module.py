"""If these fail, an algorithm of the registry trains another gradient than the module trains under the same name."""

from __future__ import annotations

import pytest
import torch

from imagination.algorithms import Episodes, Tokens, algorithm, total
from imagination.critic import with_critic
from imagination.losses import run_segments
from imagination.settings import AlgorithmSettings
from policy.value import ValueHead
from tests.plain import assert_same, gradient, gradients_of, grpo_rows, make_model, rl_row, scored


def tokens_of(model, rows, reference=None):
    """All trained tokens as one list ``[n]``, a forward pass a row."""
    found = {"logprobs": [], "behavior_logprobs": [], "advantages": [], "ref_logprobs": []}
    for row in rows:
        scores = scored(model, row.ids, 1.0)
        before = scored(reference or model, row.ids, 1.0)
        for t, weight in enumerate(row.rl_weight):
            if weight:
                found["logprobs"].append(scores[t])
                found["behavior_logprobs"].append(torch.tensor(row.behavior_logprobs[t]))
                found["advantages"].append(torch.tensor(row.advantages[t]))
                found["ref_logprobs"].append(before[t].detach())
    stacked = {name: torch.stack(values) for name, values in found.items()}
    return Tokens(**stacked, weight=torch.ones(len(found["logprobs"])))


@pytest.mark.parametrize("settings", [{}, {"clip_low": 0.1, "clip_high": 0.4}, {"kl_coef": 0.3}])
def test_grpo_has_the_gradient_of_the_module(settings):
    model, reference = make_model(), make_model(seed=7)
    rows = grpo_rows(model)
    got = gradient(model, rows, algorithm=AlgorithmSettings(**settings), reference=reference)
    tokens = tokens_of(model, rows, reference)
    terms = algorithm("grpo", **settings).losses(tokens, float(len(tokens.weight)))
    assert_same(got, gradients_of(total(terms), model))


def test_ppo_judges_as_the_module():
    """Rows of several turns, the last of which is paid: the module's advantages and targets, whitened."""
    model = make_model()
    torch.manual_seed(0)
    value = ValueHead(model.config.hidden_size)
    torch.nn.init.normal_(value.linear.weight, std=0.5)
    rows = [rl_row(model, ".AA..AAA", 0.0, 1, reward=1.0), rl_row(model, "..A.A....AA", 0.0, 2, reward=-0.5)]
    expected = with_critic(rows, model, value, 0.98, 0.9, 1000)
    width = max(len(row.ids) for row in rows)

    def table(name):
        return torch.tensor([list(getattr(row, name)) + [0.0] * (width - len(row.ids)) for row in expected])

    index = run_segments(table("rl_weight") != 0)
    index = torch.where(index >= 0, index - torch.tensor([[0], [2]]), -1)  # the first row has two turns
    judged = algorithm("ppo", gamma=0.98, lam=0.9).judge(
        Episodes(
            turn_rewards=torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, -0.5]]),
            action_turn_index=index,
            group_ids=torch.zeros(2, dtype=torch.long),
            valid=torch.ones(2, dtype=torch.bool),
            values=table("values"),
        )
    )
    mine = index >= 0  # elsewhere the module's rows hold numbers that nothing reads
    torch.testing.assert_close(judged.advantages[mine], table("advantages")[mine], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(judged.returns, table("returns"), atol=1e-6, rtol=1e-5)
