"""If these fail, the optimiser follows another gradient than the formulas say: wiring is where masks get lost.

The oracle is a plain loop over single tokens of single rows: a full forward pass a row, no batch, no mask, no padding.
The trainer is a bare one; its optimiser notes the gradients and leaves the weights alone.
"""

from __future__ import annotations

import asyncio
import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from imagination.experience import policy_row
from imagination.module import PolicyModule, SupervisedModule, Update
from imagination.rollout import Episode, Provenance, play_all
from imagination.settings import AlgorithmSettings, FitSettings, TrainSettings
from imagination.stream import StepStream
from policy.agent import LanguageModelAgent
from policy.lm.backbone import build_model
from policy.lm.batch import Row, by_length, collate
from policy.lm.inprocess import InProcessEngine
from policy.lm.render import ChatFormat
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.env import StepResult, Task
from real_envs.trajectory import Observation, Source

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
    last = max(i for i, m in enumerate(mine) if m)
    return Row(
        ids=ids,
        action_mask=mine,
        source=Source.DREAM,
        behavior_logprobs=[float(scores[i] + drift[i]) if m else math.nan for i, m in enumerate(mine)],
        advantages=[advantage if m else 0.0 for m in mine],
        rl_weight=[float(m) for m in mine],
        rewards=[reward if i == last else 0.0 for i in range(len(ids))],
        truncated=truncated,
    )


def expert_row(mask: str, seed: int) -> Row:
    mine = [c == "A" for c in mask]
    return Row(random_ids(len(mask), seed), mine, Source.EXPERT, ce_weight=[float(m) for m in mine])


def grpo_rows(model: PreTrainedModel, temperature: float = 1.0) -> list[Row]:
    """Episodes of different lengths, ends and advantages."""
    return [
        rl_row(model, ".AA..AAA", 1.5, 1, temperature=temperature),
        rl_row(model, "..A.A....AAAA.A", -0.7, 2, temperature=temperature),
        rl_row(model, ".A", 0.4, 3, temperature=temperature),
        rl_row(model, ".......AAAAA......", -2.0, 4, temperature=temperature),
        rl_row(model, ".AAAA.", 0.9, 5, temperature=temperature),
    ]


EXPERTS = [expert_row("..AA.AA", 6), expert_row(".....AAAA..AAA....A", 7)]


# --- the plain loop ---


def scored(model: PreTrainedModel, ids: Sequence[int], temperature: float) -> list[Tensor]:
    """Log-prob of each token given those before it; of the first there is none."""
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
    losses = [
        -score
        for row in rows
        for score, weight in zip(scored(model, row.ids, 1.0), row.ce_weight, strict=True)
        if weight
    ]
    return torch.stack(losses).mean()


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
    """Keeps a copy of the gradients at each step; then only the critic's bias moves, by ``nudge``."""

    def __init__(self, module: torch.nn.Module, nudge: float = 0.0) -> None:
        super().__init__(module.parameters(), {})
        self.module, self.nudge, self.seen = module, nudge, []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        self.seen.append(
            {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in self.module.named_parameters()
            }
        )
        if self.nudge:
            with torch.no_grad():
                self.module.value.linear.bias.add_(self.nudge)


class Noted(PolicyModule):
    nudge = 0.0

    def configure_optimizers(self) -> Any:
        self.notes = Notes(self, self.nudge)
        return self.notes


def fit(module: L.LightningModule, item: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, StepStream(1, lambda: 0, lambda step: item))


DEFAULTS = TrainSettings(minibatches=1, grad_clip=1e9, expert_coef=0.3, micro_tokens=40)


def update(
    model: PreTrainedModel,
    rows: Sequence[Row],
    algorithm: AlgorithmSettings | None = None,
    train: TrainSettings = DEFAULTS,
    index: int = 0,
    value: Tensor | None = None,
    nudge: float = 0.0,
    **rest: Any,
) -> tuple[list[Gradients], Mapping[str, float]]:
    """The gradient of every optimiser step of one update, by the names of ``model``, and the metrics."""
    recorded: list[tuple[int, Mapping[str, float]]] = []
    module = Noted(model, algorithm or AlgorithmSettings(), train, lambda i, m: recorded.append((i, m)), **rest)
    module.nudge = nudge
    if value is not None:
        assert module.value is not None
        with torch.no_grad():
            module.value.linear.weight.copy_(value[None, :-1])
            module.value.linear.bias.copy_(value[-1:])
    fit(module, Update(index, list(rows)))
    ((at, metrics),) = recorded
    assert at == index
    return [{name.removeprefix("model."): g for name, g in step.items()} for step in module.notes.seen], metrics


def gradient(model: PreTrainedModel, rows: Sequence[Row], **rest: Any) -> Gradients:
    (only,), _ = update(model, rows, **rest)
    return only


# --- GRPO ---


@pytest.mark.parametrize("temperature", [1.0, 1.3])
def test_the_gradient_is_that_of_the_plain_loop(temperature: float) -> None:
    """RL on what was sampled, at the temperature it was sampled at; cross-entropy on the experts, at 1."""
    model = make_model()
    rows = grpo_rows(model, temperature)
    loss = plain_rl(model, rows, temperature) + 0.3 * plain_imitation(model, EXPERTS)
    assert_same(gradient(model, [*rows, *EXPERTS], temperature=temperature), gradients_of(loss, model))


@pytest.mark.parametrize("micro_tokens", [1, 36, 10**6])
def test_micro_batches_and_padding_leave_the_gradient_unchanged(micro_tokens: int) -> None:
    """Row by row without any padding, in a few padded batches, or all at once: memory is no hyperparameter."""
    model = make_model()
    rows = [*grpo_rows(model), *EXPERTS]
    loss = plain_rl(model, rows[:5], 1.0) + 0.3 * plain_imitation(model, EXPERTS)
    (got,), metrics = update(model, rows, train=replace(DEFAULTS, micro_tokens=micro_tokens))
    assert len(list(by_length(rows, micro_tokens))) == {1: 7, 36: 3, 10**6: 1}[micro_tokens]
    assert_same(got, gradients_of(loss, model))
    assert metrics["policy_loss"] == pytest.approx(plain_rl(model, rows[:5], 1.0).item(), rel=1e-4)
    assert metrics["expert_loss"] == pytest.approx(plain_imitation(model, EXPERTS).item(), rel=1e-4)
    assert (metrics["rl_tokens"], metrics["ce_tokens"]) == (22, 12)


def test_masked_tokens_have_exactly_no_gradient() -> None:
    """Junk on tokens that are not trained changes no bit; and what comes after the last trained token is not even a
    context, so its embedding stays untouched."""
    model = make_model()
    after = 7  # a token that occurs only behind everything that is trained
    rows = []
    for row in (*grpo_rows(model), *EXPERTS):
        ids = [token if token != after else after + 1 for token in row.ids]
        tail = len(ids) - max(i for i, m in enumerate(row.action_mask) if m) - 1
        rows.append(replace(row, ids=[*ids[: len(ids) - tail], *[after] * tail]))
    assert sum(after in row.ids for row in rows) >= 2
    clean = gradient(model, rows)
    assert not clean["model.embed_tokens.weight"][after].any()
    assert clean["model.embed_tokens.weight"][rows[0].ids[0]].any()  # the first token of a row is context

    def junk(row: Row, number: float) -> Row:
        hidden = [not m for m in row.action_mask]
        if not row.rl_weight:
            return row
        return replace(
            row,
            advantages=[number if h else a for h, a in zip(hidden, row.advantages, strict=True)],
            behavior_logprobs=[number if h else a for h, a in zip(hidden, row.behavior_logprobs, strict=True)],
        )

    for number in (math.inf, -1e30, 3.0):
        dirty = gradient(model, [junk(row, number) for row in rows])
        assert all(torch.equal(dirty[name], clean[name]) for name in clean)


def test_tokens_after_the_last_trained_one_change_nothing() -> None:
    """A truncated episode keeps its last observation for the critic; GRPO must not see that it is there."""
    model = make_model()
    rows = grpo_rows(model)
    longer = [
        replace(
            row,
            ids=[*row.ids, *random_ids(9, 50)],
            action_mask=[*row.action_mask, *[False] * 9],
            behavior_logprobs=[*row.behavior_logprobs, *[math.nan] * 9],
            advantages=[*row.advantages, *[0.0] * 9],
            rl_weight=[*row.rl_weight, *[0.0] * 9],
            rewards=[*row.rewards, *[0.0] * 9],
        )
        for row in rows
    ]
    assert_same(gradient(model, longer), gradient(model, rows))


# --- experts ---


def test_dreams_do_not_dilute_the_experts() -> None:
    """Cross-entropy divides by its own tokens. Divided by all, the more is dreamed the less is learned from experts,
    whatever ``expert_coef`` says."""
    model = make_model()
    dreams = grpo_rows(model)
    alone = gradient(model, EXPERTS)
    assert_same(alone, gradients_of(0.3 * plain_imitation(model, EXPERTS), model))
    for few in (dreams[:1], dreams):
        mixed, pure = gradient(model, [*few, *EXPERTS]), gradient(model, few)
        assert_same({name: mixed[name] - pure[name] for name in mixed}, alone)


def test_experts_do_not_dilute_the_dreams() -> None:
    model = make_model()
    dreams = grpo_rows(model)
    mixed, _ = update(model, [*dreams, *EXPERTS], train=replace(DEFAULTS, expert_coef=0.0))
    assert_same(mixed[0], gradient(model, dreams))


# --- ratios ---


@dataclass
class Echo:
    """Answers what it was told; three turns."""

    turns: int = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        self.turns = 0
        return Observation(f"HALL {seed}")

    async def step(self, action: str) -> StepResult:
        self.turns += 1
        return StepResult(Observation(f"You said {action!r}."), 0.0, self.turns == 3, False)

    async def close(self) -> None: ...


def rollouts(model: PreTrainedModel, temperature: float) -> list[Row]:
    """Rows of episodes that the engine really sampled."""
    chat = ChatFormat(TOKENIZER)
    agent = LanguageModelAgent(InProcessEngine(model, 256), chat, max_action_tokens=6, temperature=temperature)
    episodes = [Episode(str(seed), Task("t"), "g", seed) for seed in range(6)]
    played = asyncio.run(play_all(episodes, Echo, agent, Provenance(Source.DREAM), 5))
    rows = [policy_row(episode, 1.0 - 0.5 * i) for i, episode in enumerate(played)]
    return [row for row in rows if row is not None]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_ratios_of_an_unchanged_policy_are_one(temperature: float) -> None:
    """Engine and trainer agree on every log-prob, at the sampling temperature: the first minibatch of an update is on
    policy. At any other temperature it is not, which is what the module's argument is for."""
    model = make_model()
    rows = rollouts(model, temperature)
    sampled = sum(sum(row.action_mask) for row in rows)
    assert len(rows) == 6
    assert sampled > 60
    (got,), metrics = update(model, rows, temperature=temperature)
    assert metrics["rl_tokens"] == sampled
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["kl_k3"] < 1e-7
    assert metrics["clip_fraction"] == 0.0
    # on policy, PPO's gradient is the policy gradient
    scores = [scored(model, row.ids, temperature) for row in rows]
    terms = [a * s for row, ss in zip(rows, scores, strict=True) for a, s in zip(row.advantages, ss, strict=True) if a]
    assert_same(got, gradients_of(-torch.stack(terms).sum() / sampled, model), tolerance=2e-4)

    _, off = update(model, rows, temperature=temperature + 0.3)
    assert off["ratio_max"] > 1.1


# --- KL to the reference ---


def test_the_kl_term_holds_the_policy_to_its_reference() -> None:
    """Its gradient is that of the plain loop, over the trained tokens only, at the sampling temperature."""
    model, reference = make_model(), make_model(seed=1).requires_grad_(False)
    rows = grpo_rows(model, 1.3)
    algorithm = AlgorithmSettings(kl_coef=0.4)
    (got,), metrics = update(model, [*rows, *EXPERTS], algorithm, temperature=1.3, reference=reference)
    kl = plain_kl(model, reference, rows, 1.3)
    loss = plain_rl(model, rows, 1.3) + 0.4 * kl + 0.3 * plain_imitation(model, EXPERTS)
    assert_same(got, gradients_of(loss, model))
    assert metrics["kl_reference"] == pytest.approx(kl.item(), rel=1e-4)
    assert metrics["kl_reference"] > 0.1


def test_a_policy_that_is_its_reference_feels_no_kl() -> None:
    model = make_model()
    rows = grpo_rows(model)
    (got,), metrics = update(model, rows, AlgorithmSettings(kl_coef=10.0), reference=copy.deepcopy(model))
    assert_same(got, gradient(model, rows))
    assert metrics["kl_reference"] == pytest.approx(0.0, abs=1e-6)


def test_the_reference_is_neither_trained_nor_saved() -> None:
    """As a submodule it would be in the optimiser and in every checkpoint."""
    model, reference = make_model(), make_model(seed=1)
    module = PolicyModule(model, AlgorithmSettings(kl_coef=1.0), DEFAULTS, lambda i, m: None, reference=reference)
    mine = {id(p) for p in module.parameters()}
    assert mine == {id(p) for p in model.parameters()}
    assert set(module.state_dict()) == {f"model.{name}" for name in model.state_dict()}


# --- PPO ---


def plain_critic(
    model: PreTrainedModel, value: Tensor, rows: Sequence[Row], gamma: float, lam: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Whitened advantages and returns per row and token: values one token earlier, GAE over the agent's tokens as a
    sum over the future, mean and unbiased deviation over all of them."""
    advantages, returns, flat = [], [], []
    for row in rows:
        with torch.no_grad():
            hidden = model.model(torch.tensor([list(row.ids)])).last_hidden_state[0]
        after = (hidden @ value[:-1] + value[-1]).tolist()
        own = [t for t, m in enumerate(row.action_mask) if m]
        v = [after[t - 1] for t in own] + [after[-1] if row.truncated else 0.0]
        delta = [row.rewards[t] + gamma * v[i + 1] - v[i] for i, t in enumerate(own)]
        a = [sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:])) for i in range(len(own))]
        advantages.append(dict(zip(own, a, strict=True)))
        returns.append({t: a[i] + v[i] for i, t in enumerate(own)})
        flat += a
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((x - mean) ** 2 for x in flat) / (len(flat) - 1))
    whitened = [{t: (x - mean) / (std + 1e-8) for t, x in row.items()} for row in advantages]
    n = [range(len(row.ids)) for row in rows]
    return (
        [[row.get(t, 0.0) for t in ts] for row, ts in zip(whitened, n, strict=True)],
        [[row.get(t, 0.0) for t in ts] for row, ts in zip(returns, n, strict=True)],
    )


def plain_value_loss(
    model: PreTrainedModel, value: Tensor, old: Tensor, rows: Sequence[Row], returns: Sequence[Sequence[float]]
) -> Tensor:
    """Mean over the agent's tokens of half the squared error, pessimistic about steps of more than 0.2."""
    losses = []
    for row, row_returns in zip(rows, returns, strict=True):
        hidden = model.model(torch.tensor([list(row.ids)])).last_hidden_state[0]
        for t, mine in enumerate(row.action_mask):
            if mine:
                now = hidden[t - 1] @ value[:-1] + value[-1]
                before = (hidden[t - 1] @ old[:-1] + old[-1]).detach()
                bounded = before + (now - before).clamp(-0.2, 0.2)
                losses.append(0.5 * torch.maximum((now - row_returns[t]) ** 2, (bounded - row_returns[t]) ** 2))
    return torch.stack(losses).mean()


def ppo_rows(model: PreTrainedModel) -> list[Row]:
    """Two that ended, two that were cut (and bootstrap from the state after their last token); the advantages in the
    rows are nonsense, because the critic's are to be used."""
    return [
        rl_row(model, ".AA..AAA", 99.0, 1, reward=1.0),
        rl_row(model, "..A.A....AAAA.A...", 99.0, 2, reward=0.5, truncated=True),
        rl_row(model, ".A..", 99.0, 3, truncated=True),
        rl_row(model, ".......AAAAA", 99.0, 4, reward=-0.25),
    ]


def random_value(seed: int = 9) -> Tensor:
    return 0.3 * torch.randn(17, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("micro_tokens", [1, 10**6])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_ppo_is_that_of_the_plain_loop(gamma: float, micro_tokens: int) -> None:
    """Values before each token, GAE across observations, bootstrap only where we cut, advantages whitened over the
    update, the critic's squared error on the agent's tokens alone, experts without a critic."""
    model, value = make_model(), random_value()
    rows = ppo_rows(model)
    advantages, returns = plain_critic(model, value, rows, gamma, 0.8)
    weight = value.clone().requires_grad_()
    critic = plain_value_loss(model, weight, value, rows, returns)
    loss = plain_rl(model, rows, 1.0, advantages) + 0.7 * critic + 0.3 * plain_imitation(model, EXPERTS)
    of_weight = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    expected = gradients_of(loss, model) | {
        "value.linear.weight": of_weight[None, :-1],
        "value.linear.bias": of_weight[-1:],
    }

    algorithm = AlgorithmSettings(name="ppo", gamma=gamma, lam=0.8, value_coef=0.7)
    train = replace(DEFAULTS, micro_tokens=micro_tokens)
    (got,), metrics = update(model, [EXPERTS[0], *rows, EXPERTS[1]], algorithm, train, value=value)
    assert_same(got, expected)
    assert metrics["value_loss"] == pytest.approx(critic.item(), rel=1e-4)


def test_the_critic_starts_at_zero() -> None:
    """Then the first advantages are whitened returns, and a cut episode bootstraps nothing."""
    model = make_model()
    rows = ppo_rows(model)
    advantages, _ = plain_critic(model, torch.zeros(17), rows, 1.0, 1.0)
    algorithm = AlgorithmSettings(name="ppo", gamma=1.0, lam=1.0, value_coef=0.0)
    (got,), _ = update(model, rows, algorithm)
    assert advantages[0][1] == advantages[0][7]  # undiscounted: one return for all tokens of an episode
    del got["value.linear.weight"], got["value.linear.bias"]
    assert_same(got, gradients_of(plain_rl(model, rows, 1.0, advantages), model))


def test_the_critic_of_an_update_is_the_one_from_before_it() -> None:
    """Advantages and returns belong to the policy that acted: with several optimiser steps they are computed once."""
    model, value = make_model(), random_value()
    rows = ppo_rows(model)
    algorithm = AlgorithmSettings(name="ppo", lam=0.8)
    steps, _ = update(model, rows, algorithm, replace(DEFAULTS, epochs=3), value=value)
    assert len(steps) == 3
    for later in steps[1:]:  # the weights were left alone, so nothing may have changed
        assert_same(later, steps[0])


def test_the_critic_is_held_to_its_values_from_before_the_update() -> None:
    """Between the two steps its bias jumps by half: tokens on which that was a step too far stop pulling."""
    model, value = make_model(), random_value()
    rows = ppo_rows(model)
    _, returns = plain_critic(model, value, rows, 1.0, 0.8)
    moved = torch.cat([value[:-1], value[-1:] + 0.5]).requires_grad_()
    critic = plain_value_loss(model, moved, value, rows, returns)
    expected = torch.autograd.grad(critic, moved)[0]
    algorithm = AlgorithmSettings(name="ppo", lam=0.8, value_coef=1.0)
    (_, second), _ = update(model, rows, algorithm, replace(DEFAULTS, epochs=2), value=value, nudge=0.5)
    got = {name: second[name] for name in ("value.linear.weight", "value.linear.bias")}
    assert_same(got, {"value.linear.weight": expected[None, :-1], "value.linear.bias": expected[-1:]})
    # the clip does bite: without it the gradient would be another one
    unclipped = torch.autograd.grad(plain_value_loss(model, moved, moved.detach(), rows, returns), moved)[0]
    assert float((unclipped - expected).abs().max()) > 1e-2


def test_one_trained_token_is_no_reason_for_nan() -> None:
    """A deviation of one number does not exist; whitened by it, the weights of the run would be NaN from then on."""
    model = make_model()
    (got,), metrics = update(model, [rl_row(model, "..A.", 0.0, 1, reward=1.0)], AlgorithmSettings(name="ppo"))
    assert all(g.isfinite().all() for g in got.values())
    assert metrics["value_loss"] == pytest.approx(0.5)  # the critic says 0 and still learns; there is no advantage
    assert metrics["policy_loss"] == 0.0


def test_equal_returns_are_no_advantage() -> None:
    """Every episode earned a tenth, and the critic still says 0: nobody did better than anybody. In fp32 the mean of
    many tenths is not a tenth, and whitening made most of an advantage out of the difference."""
    model = make_model()
    rows = [rl_row(model, "." + "A" * n, 0.0, n, reward=0.1) for n in (3, 7, 20, 70)]
    (got,), _ = update(model, rows, AlgorithmSettings(name="ppo", gamma=1.0, lam=1.0, value_coef=0.0))
    assert max(float(g.abs().max()) for g in got.values()) < 1e-6


# --- the update ---


def test_an_update_is_cut_into_epochs_and_minibatches() -> None:
    """Every row once an epoch, in an order that is a function of seed and index; each minibatch has its own count."""
    model = make_model()
    rows = grpo_rows(model)
    single = {i: gradients_of(plain_rl(model, [row], 1.0), model) for i, row in enumerate(rows)}
    train = replace(DEFAULTS, epochs=2, minibatches=5)

    def order(**rest: Any) -> list[int]:
        steps, _ = update(model, rows, train=train, **rest)
        return [
            min(single, key=lambda i: float((single[i]["lm_head.weight"] - step["lm_head.weight"]).abs().max()))
            for step in steps
        ]

    first = order(seed=1, index=3)
    assert sorted(first[:5]) == sorted(first[5:]) == list(range(5))
    assert order(seed=1, index=3) == first
    assert order(seed=1, index=4) != first or order(seed=2, index=3) != first
    steps, _ = update(model, rows, train=replace(DEFAULTS, minibatches=2))
    assert len(steps) == 2  # three rows and two


def test_the_gradient_is_clipped_after_it_is_measured() -> None:
    model = make_model()
    rows = grpo_rows(model)
    free = gradient(model, rows)
    norm = math.sqrt(sum(float(g.square().sum()) for g in free.values()))
    (got,), metrics = update(model, rows, train=replace(DEFAULTS, grad_clip=norm / 4))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert_same({name: 4 * g for name, g in got.items()}, free, tolerance=1e-4)


def test_the_entropy_in_the_log_is_that_of_the_sampled_tokens() -> None:
    model = make_model()
    rows = grpo_rows(model, 1.3)
    found = []
    with torch.no_grad():
        for row in rows:
            p = (model(torch.tensor([list(row.ids)])).logits[0] / 1.3).softmax(-1)
            found += [float(-(p[t - 1] * p[t - 1].log()).sum()) for t, m in enumerate(row.action_mask) if m]
    _, metrics = update(model, [*rows, *EXPERTS], temperature=1.3)
    assert metrics["entropy"] == pytest.approx(sum(found) / len(found), rel=1e-4)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_an_update_without_rows_makes_no_step(name: Any) -> None:
    """All groups were solved alike, or all episodes failed: that is a log line, not a crash and not a step."""
    steps, metrics = update(make_model(), [], AlgorithmSettings(name=name))
    assert steps == []
    assert metrics == {}


def test_good_actions_become_likelier_and_bad_ones_rarer() -> None:
    """The sign of it all, with the real optimiser."""
    model = make_model()
    good, bad = rl_row(model, "..AAA.", 1.0, 1), rl_row(model, ".AA.AA", -1.0, 2)
    on_policy = []
    with torch.no_grad():
        for row in (good, bad):
            on_policy.append(replace(row, behavior_logprobs=[float(s) for s in scored(model, row.ids, 1.0)]))

    def sums() -> list[float]:
        with torch.no_grad():
            return [
                float(sum(s for s, m in zip(scored(model, row.ids, 1.0), row.action_mask, strict=True) if m))
                for row in (good, bad, EXPERTS[0])
            ]

    before = sums()
    module = PolicyModule(model, AlgorithmSettings(), replace(DEFAULTS, lr=1e-3), lambda i, m: None)
    fit(module, Update(4, [*on_policy, EXPERTS[0]]))
    after = sums()
    assert after[0] > before[0] + 0.01
    assert after[1] < before[1] - 0.01
    assert after[2] > before[2] + 0.01
    assert module.updates_done == 5


# --- supervised training ---


class NotedSupervised(SupervisedModule):
    def configure_optimizers(self) -> Any:
        self.notes = Notes(self)
        return self.notes


def test_supervised_training_is_a_weighted_mean_over_the_tokens_of_the_batch() -> None:
    """Weights of turns scale their tokens and not the step: doubled throughout, they change nothing."""
    model = make_model()
    rows = [replace(row, ce_weight=[(1 + i) * w for w in row.ce_weight]) for i, row in enumerate(EXPERTS)]
    scores = [scored(model, row.ids, 1.0) for row in rows]
    nll = -sum(w * s for row, ss in zip(rows, scores, strict=True) for w, s in zip(row.ce_weight, ss, strict=True))
    total = sum(sum(row.ce_weight) for row in rows)
    expected = gradients_of(nll / total, model)
    for factor in (1.0, 2.0):
        scaled = [replace(row, ce_weight=[factor * w for w in row.ce_weight]) for row in rows]
        module = NotedSupervised(model, FitSettings(precision="fp32"), lambda i, m: None)
        fit(module, collate(scaled, pad=0))
        (got,) = module.notes.seen
        assert_same({name.removeprefix("model."): g for name, g in got.items()}, expected)
