"""If this fails, a model is trained by another optimiser than its settings say, or a stopped fit goes on otherwise."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from imagination.learning.optimizers import MuonAdamW, orthogonalize, split_matrices
from imagination.learning.supervised import SupervisedModule
from imagination.settings import FitSettings
from policy.lm.backbone import build_model
from tests.support.plain import SIZES, TOKENIZER, make_model

BETAS = (0.9, 0.98)


def names(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    chosen = {id(p) for p in parameters}
    return {name for name, p in model.named_parameters() if id(p) in chosen}


def test_only_maps_between_hidden_states_are_matrices() -> None:
    for model in (make_model(), build_model(SIZES, TOKENIZER, 0)):  # an output layer of its own, and a tied one
        model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
        matrices, rest = split_matrices(model)
        layer = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
        layer |= {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
        expected = {f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in layer}
        assert names(model, matrices) == expected - {"model.layers.0.self_attn.k_proj.weight"}
        others = {n for n, p in model.named_parameters() if p.requires_grad} - expected
        assert names(model, rest) == others
        assert "model.embed_tokens.weight" in others


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=rng)
        optimizer.step()


def test_it_is_both_optimisers_side_by_side() -> None:
    ours, theirs = make_model(), make_model()
    train(ours, MuonAdamW(ours, 0.01, 0.1, BETAS), range(3))
    matrices, rest = split_matrices(theirs)
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1, betas=BETAS)
    for step in range(3):
        train(theirs, muon, range(step, step + 1))
        adamw.step()
    by_muon = {id(p) for p in matrices}
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if id(b) in by_muon:  # torch multiplies in bf16; its step differs by a few parts in a thousand
            assert torch.allclose(a, b, atol=3 * 0.01 * 0.2 * math.sqrt(max(a.shape)) * 0.02), name
        else:
            assert torch.equal(a, b), name


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (8, 8)])
def test_matrices_are_made_orthogonal_all_at_once_as_one_by_one(shape: tuple[int, int]) -> None:
    """By the singular values: each goes through the same polynomial, and the vectors stay."""
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b, c = 3.4445, -4.775, 2.0315
    together = orthogonalize(matrices, (a, b, c), 5, 1e-7)
    for matrix, made in zip(matrices, together, strict=True):
        u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
        for _ in range(5):
            s = a * s + b * s**3 + c * s**5
        assert torch.allclose(made, u @ torch.diag(s) @ v, atol=1e-9)


def test_a_step_of_a_matrix_is_orthogonal_and_as_large_as_one_of_adamw() -> None:
    """arXiv 2502.16982, eq. 4: an orthogonal matrix times 0.2 sqrt(max(rows, columns)), of root mean square 0.2."""
    model = nn.Sequential(nn.Linear(24, 16, bias=False))
    before = model[0].weight.detach().clone()
    train(model, MuonAdamW(model, 0.5, 0.0, BETAS), range(1))
    scale = 0.5 * 0.2 * math.sqrt(24)
    values = torch.linalg.svdvals((model[0].weight.detach() - before) / scale)
    assert values.min() > 0.6  # five Newton-Schulz steps come this close to 1
    assert values.max() < 1.25


def test_a_stopped_training_goes_on_bit_for_bit_and_with_its_schedule() -> None:
    def make() -> tuple[Any, MuonAdamW, Any]:
        model = make_model()
        optimizer = MuonAdamW(model, 0.01, 0.1, BETAS)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    whole, optimizer, schedule = make()
    for step in range(4):
        train(whole, optimizer, range(step, step + 1))
        schedule.step()
    model, optimizer, schedule = make()
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        schedule.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    model, optimizer, schedule = make()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    schedule.load_state_dict(saved[2])
    for step in range(2, 4):
        train(model, optimizer, range(step, step + 1))
        schedule.step()
    for a, b in zip(whole.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01 / 5}


def test_the_state_of_another_optimiser_is_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="MuonAdamW"):
        MuonAdamW(model, 0.01, 0.1, BETAS).load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())


@pytest.mark.parametrize(
    ("chosen", "from_scratch", "expected"),
    [
        ("auto", True, MuonAdamW),
        ("auto", False, torch.optim.AdamW),
        ("muon", False, MuonAdamW),
        ("adamw", True, torch.optim.AdamW),
    ],
)
def test_auto_is_muon_for_random_weights_only(chosen: Any, from_scratch: bool, expected: type) -> None:
    settings = FitSettings(optimizer=chosen).decided(from_scratch)
    module = SupervisedModule(make_model(), settings, lambda step, metrics: None)
    assert type(module.configure_optimizers()["optimizer"]) is expected
