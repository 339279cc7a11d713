"""If these fail, what is learned on a CUDA card is not what is learned on a CPU, or depends on the layout of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from imagination.learning.losses.auxiliary import cross_entropy_loss, entropy_loss, kl_loss, value_loss
from imagination.learning.losses.policy import ppo_clip_loss
from imagination.learning.losses.terms import LossInputs, token_entropy, token_logprobs
from imagination.learning.supervised import SupervisedModule, SupervisedTrainer
from imagination.runs.run_folder import RunFolder
from imagination.settings import FitSettings, TrainSettings
from imagination.settings.algorithm_parts import Critic, Entropy, Kl, PpoClip
from policy.lm.backbone import save_checkpoint
from policy.lm.batch import Row, RowBatch, collate
from policy.lm.engine import Sampling
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.forward import decoder, encode, packs
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Source
from tests.benchmarks.trl_update import Shape, add_own_logprobs, learn, make_rows, rows_to_learn_from
from tests.support import decoders
from tests.support.asking import together
from tests.support.decoders import MODELS, ROWS
from tests.support.device import DEVICE, batch_of, make_model, needs_device, some_text, trainer_logprobs
from tests.support.engines import NEVER
from tests.support.killing import Killed, kill_at, metrics_of
from tests.support.plain import fit

pytestmark = needs_device
ACCELERATOR = "gpu" if DEVICE == "cuda" else "cpu"
Weights = dict[str, Tensor]


def weights_of(model: Any) -> Weights:
    return {name: p.detach().cpu().double() for name, p in model.named_parameters()}


# --- layout ---


@pytest.mark.parametrize("kind", ["a group", "prefixes", "nothing shared"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_packed_hidden_states_are_those_of_each_row_alone(
    name: str, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Of every token; the error is relative to the size of all states."""
    model, rows = make_model(name, dtype), ROWS[kind]
    ids, real = batch_of(rows)
    assert packs(model, ids.shape[1]), "padded rows would be compared with themselves"
    with torch.no_grad():
        encoded = encode(model, ids, real)
        got = torch.cat([encoded.states[encoded.which[r, : len(row)]] for r, row in enumerate(rows)]).float()
        alone = [decoder(model)(ids[r : r + 1, : len(row)], use_cache=False) for r, row in enumerate(rows)]
        expected = torch.cat([a.last_hidden_state[0] for a in alone]).float()
    assert len(encoded.states) == len({tuple(row[: t + 1]) for row in rows for t in range(len(row))})
    assert float((got - expected).norm()) <= tolerance * float(expected.norm())


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, trained, materialize_grads=True))


@pytest.mark.parametrize("name", MODELS)
def test_packed_gradients_are_those_of_row_by_row_and_what_follows_the_last_trained_token_has_none(name: str) -> None:
    """A random part of the tokens is trained; ids behind a row's last trained one are then replaced."""
    model, rows = make_model(name), ROWS["a group"]
    ids, real = batch_of(rows)
    chance = torch.Generator().manual_seed(1)
    mask = real & (torch.rand(ids.shape, generator=chance) < 0.4).to(DEVICE)
    mask[:, 0] = mask[:, -6:] = False
    weight = torch.randn(int(mask.sum()), generator=chance).to(DEVICE)
    plain = []
    for row, trained in zip(rows, mask.tolist(), strict=True):
        table = model(torch.tensor([row], device=DEVICE), use_cache=False).logits[0].log_softmax(-1)
        plain += [table[t - 1, token] for t, token in enumerate(row) if trained[t]]
    expected = gradients(model, (torch.stack(plain) * weight).sum())
    scale = max(float(g.abs().max()) for g in expected)
    assert scale > 1e-2
    last = [max((t for t, m in enumerate(row) if m), default=0) for row in mask.tolist()]
    others = [[*row[: n + 1], *some_text(len(row) - n - 1, seed=n)] for row, n in zip(rows, last, strict=True)]
    assert others != rows
    for texts in (rows, others):
        got = gradients(model, (trainer_logprobs(model, texts, mask) * weight).sum())
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=0, atol=2e-5 * scale)


def drawn(seed: int) -> dict[str, Tensor]:
    """Random inputs of losses, ``[4, 6]`` but for the logits; each mask leaves something out and something in."""
    chance = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 6, generator=chance) < 0.6
    mask[0, 0], mask[1, 1] = True, False
    inputs = {
        "mask": mask,
        "weight": torch.where(mask, 0.5 + torch.rand(4, 6, generator=chance), 0.0),
        "ids": torch.randint(5, (4, 6), generator=chance),
        "logits": torch.randn(4, 6, 5, generator=chance),
    }
    for name in ("behaviour", "reference", "advantages", "values", "old_values", "returns"):
        inputs[name] = torch.randn(4, 6, generator=chance)
    return {name: x.to(DEVICE) for name, x in inputs.items()}


def losses_and_gradients(x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """All losses at once, and their gradients by logits and by values."""
    logits, values, weight = x["logits"].clone().requires_grad_(), x["values"].clone().requires_grad_(), x["weight"]
    count = float(x["mask"].sum())
    logprobs = token_logprobs(logits, x["ids"], 0.8, x["mask"])
    entropy = token_entropy(logits, 0.8, x["mask"])
    terms = (
        ppo_clip_loss(LossInputs(logprobs, x["behaviour"], x["advantages"], weight), PpoClip(), count),
        cross_entropy_loss(logprobs, weight, denominator=count),
        kl_loss(logprobs, x["reference"], weight, Kl(kl_coef=1.0), denominator=count),
        entropy_loss(entropy, weight, Entropy(entropy_coef=0.1), denominator=count),
        value_loss(values, x["old_values"], x["returns"], x["mask"], Critic(value_coef=1.0), denominator=count),
    )
    loss = torch.stack([t.loss for t in terms]).sum()
    to_logits, to_values = torch.autograd.grad(loss, (logits, values))
    return loss.detach(), to_logits, to_values


@pytest.mark.parametrize("junk", [math.nan, math.inf, -1e30])
def test_tokens_of_weight_zero_get_a_gradient_of_exactly_zero(junk: float) -> None:
    """And change nothing for the others, whatever numbers lie under them."""
    for seed in range(20):
        clean = drawn(seed)
        mask = clean["mask"]
        hidden = {name: ~mask[..., None] if name == "logits" else ~mask for name in clean}
        dirty = {n: x if n in ("mask", "weight", "ids") else x.masked_fill(hidden[n], junk) for n, x in clean.items()}
        got, expected = losses_and_gradients(dirty), losses_and_gradients(clean)
        for g, e in zip(got, expected, strict=True):
            assert torch.equal(g, e)
        _, to_logits, to_values = got
        assert bool((to_logits[~mask] == 0.0).all())
        assert bool((to_values[~mask] == 0.0).all())
        assert bool((to_logits[mask] != 0.0).any(-1).all())


# --- steps ---

SHAPE = Shape(2, 4, turns=(2, 3), action=(3, 5), observation=(4, 8), start=8, vocabulary=64)


def experience(model: Any) -> list[Row]:
    data: list[dict[str, Any]] = make_rows(SHAPE)
    add_own_logprobs(model, data)
    return rows_to_learn_from(data)


def experts(seed: int) -> RowBatch:
    """Rows of which a random part of the tokens is to be imitated, with weights of their own."""
    rows = []
    for k in range(6):
        n = 12 + 5 * k
        weight = torch.rand(n, generator=torch.Generator().manual_seed(10 * seed + k)) - 0.4
        rows.append(Row(some_text(n, seed=10 * seed + k), [True] * n, Source.EXPERT))
        rows[-1].ce_weight = [0.0, *weight.clamp(min=0.0).tolist()[1:]]
    return collate(rows, pad=0)


def distance(a: Weights, b: Weights) -> float:
    assert a.keys() == b.keys()
    return math.sqrt(sum(float((a[name] - b[name]).square().sum()) for name in a))


def policy_updates(model: Any, rows: Sequence[Row]) -> None:
    learn(model, list(rows), TrainSettings(epochs=2, minibatches=2, lr=1e-3, micro_tokens=100), updates=5)


def supervised_steps(model: Any, accelerator: str) -> None:
    settings = FitSettings(steps=5, warmup=2, lr=1e-3, optimizer="adamw", precision="fp32", micro_tokens=100)
    fit(SupervisedModule(model, settings, lambda step, metrics: None), experts(1), 5, accelerator=accelerator)


@pytest.mark.parametrize("what", ["policy updates", "supervised steps"])
def test_five_steps_give_the_weights_that_they_give_on_a_cpu(what: str, record_property: Any) -> None:
    """There in fp64, nearer to the truth than fp32 on either. Relative to the way that the weights went in these steps:
    a thousandth of the weights themselves would forgive most of that way."""
    there, here = decoders.make_model("llama-wide", torch.float64), make_model("llama-wide")
    start = weights_of(here)
    rows = experience(there)
    if what == "policy updates":
        policy_updates(there, rows)
        policy_updates(here, rows)
    else:
        supervised_steps(there, "cpu")
        supervised_steps(here, ACCELERATOR)
    got, expected = weights_of(here), weights_of(there)
    assert all(not torch.equal(expected[name], start[name]) for name in start)
    off = distance(got, expected) / distance(expected, start)
    record_property("off by", f"{off:.1e} of the way")
    assert off <= 1e-3


def test_updates_of_adapters_leave_the_rest_alone_and_a_merged_checkpoint_says_the_same(tmp_path: Path) -> None:
    """LoRA: all adapters move, nothing else does, and the engine plays what the trainer trains."""
    model = make_model("llama-lora")
    with torch.no_grad():  # adapters as new ones are: their second factor is zero
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.zero_()
    ids = torch.tensor([some_text(40, seed=3)], device=DEVICE)
    with torch.no_grad():
        untrained = model(ids).logits
    before = weights_of(model)
    policy_updates(model, experience(model))
    model = model.to(DEVICE)  # Lightning leaves it on the CPU
    after = weights_of(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "lora_" in name}
    with torch.no_grad():
        expected = model(ids).logits
    assert float((expected - untrained).abs().max()) > 1e-2

    save_checkpoint(model, train_tokenizer(["a"], 264), tmp_path)
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    plain.to(DEVICE)
    assert not any("lora_" in name for name, _ in plain.named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, expected, rtol=1e-5, atol=1e-4)

    text = some_text(9, seed=4)
    (completion,) = together(InProcessEngine(model, 64).complete(text, Sampling(20, NEVER), 0))
    row = [*text, *completion.ids]
    mask = batch_of([row])[1]
    mask[:, : len(text)] = False
    with torch.no_grad():
        trained = trainer_logprobs(model, [row], mask)
    by_engine = torch.tensor(completion.logprobs, device=DEVICE)
    torch.testing.assert_close(by_engine, trained, rtol=0, atol=1e-4, check_dtype=False)


# --- resuming ---


@pytest.fixture
def repeatable() -> Iterator[None]:
    """Sums in one order: else no two trainings on a card are the same to the last bit."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(before, warn_only=warned)


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_killed_training_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: Literal["adamw", "muon"]
) -> None:
    """Weights, their average and the optimiser's state come back to the card, bit for bit."""
    settings = FitSettings(24, optimizer=optimizer, warmup=4, lr=1e-3, average=0.9, precision="fp32", micro_tokens=100)
    tokenizer = train_tokenizer(["a"], 264)

    def train(folder: Path, ask: Callable[[int, str], None] = lambda step, device: None) -> Weights:
        model = decoders.make_model("llama-wide")

        def batches(step: int) -> RowBatch:
            ask(step, next(model.parameters()).device.type)
            return experts(step)

        trainer = SupervisedTrainer(RunFolder(folder, 0), "fit", settings, seed=0, save_every=8)
        assert trainer.train(model, tokenizer, batches) == 24
        return weights_of(model)

    seen: list[tuple[int, str]] = []
    start = weights_of(decoders.make_model("llama-wide"))
    whole = train(tmp_path / "whole")
    with monkeypatch.context() as patch:
        kill_at(patch, "fit", 20)
        with pytest.raises(Killed):
            train(tmp_path / "killed")
    resumed = train(tmp_path / "killed", lambda step, device: seen.append((step, device)))
    assert seen[-8:] == [(step, DEVICE) for step in range(16, 24)]
    assert (0, DEVICE) not in seen
    assert metrics_of(tmp_path / "killed", "fit") == metrics_of(tmp_path / "whole", "fit")
    for name in start:
        assert not torch.equal(whole[name], start[name])
        assert torch.equal(whole[name], resumed[name]), name
