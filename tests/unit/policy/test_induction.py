"""If these fail, a planted head looks elsewhere, and models that start at random take millions of tokens to copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from policy.lm.backbone import build_model
from policy.lm.induction import plant_induction
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer([], 261)
HALF = 24


def attentions(model: Any) -> tuple[torch.Tensor, ...]:
    """Of each layer ``[rows, heads, 2 * HALF, 2 * HALF]`` while it reads random tokens twice."""
    model.set_attn_implementation("eager")
    rng = torch.Generator().manual_seed(1)
    once = torch.stack([torch.randperm(250, generator=rng)[:HALF] + 5 for _ in range(8)])
    with torch.no_grad():
        found: tuple[torch.Tensor, ...] = model(torch.cat([once, once], 1), output_attentions=True).attentions
    return found


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (2, 1), (1, 1)])
def test_one_head_looks_back_and_the_next_finds_what_followed(heads: int, kv_heads: int) -> None:
    model = build_model(ModelSettings(hidden=128, heads=heads, kv_heads=kv_heads), TOKENIZER, 0)
    before = attentions(model)
    plant_induction(model, 0)
    first, second = attentions(model)[:2]
    assert first[:, 0].diagonal(-1, 1, 2).mean() > 0.95
    rows = torch.arange(HALF, 2 * HALF - 1)
    wanted, usual = second[:, 0, rows, rows - HALF + 1].mean(), before[1][:, 0, rows, rows - HALF + 1].mean()
    assert usual < 0.05
    assert wanted > 0.2  # of 24 to 47 tokens; training makes it sure within some hundred steps


def test_a_model_without_room_for_it_stays_as_it_is() -> None:
    model = build_model(ModelSettings(hidden=16, layers=1, heads=1, kv_heads=1, mlp=8), TOKENIZER, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plant_induction(model, 0)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
