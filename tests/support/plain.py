"""The oracle of the tests of updates, and a module under a bare trainer that notes its gradients.

The oracle is a plain loop over single tokens of single rows: a full forward pass a row, no batch, no mask, no padding.
The trainer's optimiser notes the gradients and leaves the weights alone.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedModel

from imagination.learning.algorithms import Algorithm, build_algorithm
from imagination.learning.experience import assign_credit
from imagination.learning.policy_module import PolicyModule, Update
from imagination.learning.sharding import whole
from imagination.learning.trainer import step_loader
from imagination.settings import AlgorithmSettings, TrainSettings
from policy.lm.backbone import build_model
from policy.lm.batch import Row, RowBatch, collate
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Source

TOKENIZER = train_tokenizer(["HALL"], 264)
VOCAB = len(TOKENIZER)
SIZES = ModelSettings(hidden=16, layers=2, heads=2, kv_heads=1, mlp=32, context=256)
Gradients = dict[str, Tensor]


def make_model(seed: int = 0) -> PreTrainedModel:
    """Weights large enough for every token of the past to matter; input and output embeddings are not tied."""
    model = build_model(SIZES, TOKENIZER, seed)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=rng))
    return model


# --- rows ---


def random_ids(n: int, seed: int) -> list[int]:
    return torch.randint(5, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def rl_row(
    model: PreTrainedModel,
    mask: str,
    advantage: float,
    seed: int,
    reward: float = 0.0,
    truncated: bool = False,
    temperature: float = 1.0,
) -> Row:
    """``mask`` marks trained tokens with ``A``. Ratios spread around 1, some of them beyond the clip."""
    ids, mine = random_ids(len(mask), seed), [c == "A" for c in mask]
    with torch.no_grad():
        scores = scored(model, ids, temperature)
    drift = torch.rand(len(ids), generator=torch.Generator().manual_seed(seed)) - 0.5
    turns = [len(re.findall("A+", mask[: i + 1])) - 1 if m else -1 for i, m in enumerate(mine)]
    return Row(
        ids=ids, action_mask=mine, source=Source.DREAM, advantages=[advantage if m else 0.0 for m in mine],
        behavior_logprobs=[float(scores[i] + drift[i]) if m else math.nan for i, m in enumerate(mine)],
        rl_weight=[float(m) for m in mine], rewards=[*[0.0] * max(turns), reward], truncated=truncated,
        temperature=temperature, turns=turns,
    )  # fmt: skip


def expert_row(mask: str, seed: int) -> Row:
    mine = [c == "A" for c in mask]
    return Row(random_ids(len(mask), seed), mine, Source.EXPERT, ce_weight=[float(m) for m in mine])


def grpo_rows(model: PreTrainedModel, temperature: float = 1.0) -> list[Row]:
    """Episodes of different lengths, ends and advantages."""
    masks = {".AA..AAA": 1.5, "..A.A....AAAA.A": -0.7, ".A": 0.4, ".......AAAAA......": -2.0, ".AAAA.": 0.9}
    return [rl_row(model, *row, seed, temperature=temperature) for seed, row in enumerate(masks.items(), start=1)]


EXPERTS = [expert_row("..AA.AA", 6), expert_row(".....AAAA..AAA....A", 7)]


def credited(rows: Sequence[Row], algorithm: Algorithm, value: float | None = None, **rest: Any) -> RowBatch:
    """The rows of an update with their credit; a critic says ``value`` of every state of an episode that goes on."""
    batch = collate(rows, pad=0)
    if value is not None:
        batch.values = torch.full_like(batch.values, value)
        batch.bootstrap = value * batch.truncated.float()
    assign_credit(batch, algorithm, **rest)
    return batch


# --- the plain loop ---


def scored(model: PreTrainedModel, ids: Sequence[int] | Tensor, temperature: float) -> list[Tensor]:
    """Log-prob of each token given those before it; of the first there is none."""
    ids = list(map(int, ids))
    logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    table = (logits / temperature).log_softmax(-1)
    return [torch.tensor(0.0), *(table[t - 1, token] for t, token in enumerate(ids) if t > 0)]


def plain_surrogate(ratio: Tensor, advantage: float) -> Tensor:
    """PPO's loss of one token: pessimistic clip at 0.2, dual clip at 3."""
    clipped = ratio.clamp(0.8, 1.2)
    if advantage >= 0:
        return -advantage * torch.minimum(ratio, clipped)
    return -advantage * torch.minimum(torch.maximum(ratio, clipped), torch.tensor(3.0))


def plain_rl(model: PreTrainedModel, rows: Sequence[Row], temperature: float, advantages: Any = None) -> Tensor:
    """Mean over all trained tokens of all rows."""
    losses = []
    for r, row in enumerate(rows):
        scores = scored(model, row.ids, temperature)
        for t, weight in enumerate(row.rl_weight):
            if weight:
                advantage = row.advantages[t] if advantages is None else advantages[r][t]
                ratio = torch.exp(scores[t] - row.behavior_logprobs[t])
                losses.append(plain_surrogate(ratio, advantage))
    return torch.stack(losses).mean()


def plain_imitation(model: PreTrainedModel, rows: Sequence[Row]) -> Tensor:
    """Mean negative log-likelihood, at temperature 1, over the experts' own tokens."""
    tokens = [(s, w) for row in rows for s, w in zip(scored(model, row.ids, 1.0), row.ce_weight, strict=True)]
    return torch.stack([-score for score, weight in tokens if weight]).mean()


def plain_kl(model: PreTrainedModel, reference: PreTrainedModel, rows: Sequence[Row], temperature: float) -> Tensor:
    """k3 of formulas.md: exp(-d) + d - 1 with d = log pi - log pi_reference, mean over the trained tokens."""
    losses = []
    for row in rows:
        with torch.no_grad():
            before = scored(reference, row.ids, temperature)
        now = scored(model, row.ids, temperature)
        for t, weight in enumerate(row.rl_weight):
            if weight:
                d = now[t] - before[t]
                losses.append(torch.exp(-d) + d - 1)
    return torch.stack(losses).mean()


def gradients_of(loss: Tensor, module: torch.nn.Module) -> Gradients:
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for name, p, g in zip(names, parameters, found, strict=True)}


def assert_same(got: Gradients, expected: Gradients, tolerance: float = 2e-5) -> None:
    """Equal up to rounding, relative to the largest entry of all: and that is not zero."""
    assert got.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    assert scale > 1e-3
    for name in expected:
        torch.testing.assert_close(
            got[name], expected[name], rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


# --- the module under a bare trainer ---


class Notes(torch.optim.Optimizer):
    """Keeps a copy of the gradients at each step and makes another move: by ``nudge``, the critic's bias goes up or,
    without a critic, the logits grow."""

    def __init__(self, module: torch.nn.Module, nudge: float = 0.0) -> None:
        super().__init__(module.parameters(), {"lr": 1.0})
        self.module, self.nudge, self.seen = module, nudge, []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        named = list(self.module.named_parameters())
        self.seen.append({name: whole(torch.zeros_like(p) if p.grad is None else p.grad.clone()) for name, p in named})
        if self.nudge:
            with torch.no_grad():
                if self.module.value is not None:
                    self.module.value.linear.bias.add_(self.nudge)
                else:
                    self.module.model.lm_head.weight.mul_(1 + self.nudge)


class Noted(PolicyModule):
    nudge = 0.0
    judges = True  # otherwise rows bring the advantages that they are to be learned from

    def _assign_credit(self, batch: RowBatch) -> dict[str, float]:
        return super()._assign_credit(batch) if self.judges else {}

    def configure_optimizers(self) -> Any:
        self.notes = Notes(self, self.nudge)
        return self.notes


def fit(
    module: L.LightningModule, item: Any, steps: int = 1, callbacks: Sequence[L.Callback] = (), accelerator: str = "cpu"
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_epochs=1, accelerator=accelerator, devices=1, logger=False, enable_checkpointing=False,
            callbacks=list(callbacks), enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, step_loader(steps, lambda: 0, lambda step: item))


DEFAULTS = TrainSettings(minibatches=1, grad_clip=1e9, expert_coef=0.3, micro_tokens=40)


def update(
    model: PreTrainedModel,
    rows: Sequence[Row],
    algorithm: AlgorithmSettings | None = None,
    train: TrainSettings = DEFAULTS,
    index: int = 0,
    value: Tensor | None = None,
    nudge: float = 0.0,
    tis_cap: float = 0.0,
    judge: bool = False,
    exact: bool = True,
    max_tokens: int | None = None,
    **rest: Any,
) -> tuple[list[Gradients], Mapping[str, float]]:
    """The gradient of every optimiser step of one update, by the names of ``model``, and the metrics.

    Rows bring the advantages that they are to be learned from, unless a critic judges them, or ``judge`` is set.
    Without correction for the engine by default: ``rl_row`` makes log-probs that are off on purpose, for the ratios.
    """
    recorded: list[tuple[int, Mapping[str, float]]] = []
    chosen = build_algorithm(replace(algorithm or AlgorithmSettings(), tis_cap=tis_cap), max_tokens)
    module = Noted(model, chosen, train, lambda i, m: recorded.append((i, m)), **rest)
    module.nudge, module.judges = nudge, judge or chosen.critic is not None
    if value is not None:
        assert module.value is not None
        with torch.no_grad():
            module.value.linear.weight.copy_(value[None, :-1])
            module.value.linear.bias.copy_(value[-1:])
    fit(module, Update(index, list(rows), exact=exact))
    ((at, metrics),) = recorded
    assert at == index
    return [{name.removeprefix("model."): g for name, g in step.items()} for step in module.notes.seen], metrics


def gradient(model: PreTrainedModel, rows: Sequence[Row], **rest: Any) -> Gradients:
    (only,), _ = update(model, rows, **rest)
    return only
