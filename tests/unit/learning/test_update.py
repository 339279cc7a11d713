"""If these fail, an update is cut, counted, clipped or logged in another way than the settings say."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from imagination.learning.algorithms import ALGORITHMS
from imagination.learning.experience import policy_rows
from imagination.learning.policy_module import PolicyModule, Update
from imagination.rollout.play import Episode, Provenance, play_all
from imagination.settings import AlgorithmSettings, TrainSettings
from policy.agent import LanguageModelAgent
from policy.lm.batch import Row, RowBatch
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.render import ChatFormat
from real_envs.env import StepResult, Task
from real_envs.trajectory import Observation, Source
from tests.support.plain import (
    DEFAULTS,
    EXPERTS,
    TOKENIZER,
    assert_same,
    fit,
    gradient,
    gradients_of,
    grpo_rows,
    make_model,
    plain_rl,
    rl_row,
    scored,
    update,
)

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
    return [replace(row, advantages=(1.0 - 0.5 * i) * row.action_mask) for i, row in enumerate(policy_rows(played))]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_ratios_of_an_unchanged_policy_are_one(temperature: float) -> None:
    """Engine and trainer agree on every log-prob, at the sampling temperature: the first minibatch of an update is on
    policy. At any other temperature it is not, and one update cannot have several."""
    model = make_model()
    rows = rollouts(model, temperature)
    sampled = sum(int(row.action_mask.sum()) for row in rows)
    assert len(rows) == 6
    assert sampled > 60
    (got,), metrics = update(model, rows)
    assert metrics["rl_tokens"] == sampled
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["kl_k3"] < 1e-7
    assert metrics["mismatch_ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["mismatch_k3"] < 1e-7
    assert metrics["clip_fraction"] == 0.0
    # on policy, PPO's gradient is the policy gradient
    scores = [scored(model, row.ids, temperature) for row in rows]
    terms = [a * s for row, ss in zip(rows, scores, strict=True) for a, s in zip(row.advantages, ss, strict=True) if a]
    assert_same(got, gradients_of(-torch.stack(terms).sum() / sampled, model), tolerance=2e-4)

    disguised = [replace(row, temperature=temperature + 0.3) for row in rows]
    with pytest.raises(ValueError, match="at the temperatures"):
        update(model, [*rows[:3], *disguised[3:]])
    _, off = update(model, disguised)
    assert off["ratio_max"] > 1.1


# --- the update ---


class GivenAdvantages(PolicyModule):
    """Rows keep the advantages that they came with."""

    def _assign_credit(self, batch: RowBatch) -> dict[str, float]:
        return {}


def noted(model: PreTrainedModel, train: TrainSettings, recorded: list[dict[str, float]] | None = None) -> PolicyModule:
    notes = [] if recorded is None else recorded
    return GivenAdvantages(model, ALGORITHMS["grpo"], train, lambda i, m: notes.append(dict(m)))


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
    _, metrics = update(model, [*rows, *EXPERTS])
    assert metrics["entropy"] == pytest.approx(sum(found) / len(found), rel=1e-4)


def test_the_log_says_how_much_packing_saves() -> None:
    """Tokens that went through the model over tokens of the rows: a shared beginning counts once, what no loss reads
    not at all."""
    model = make_model()
    row = rl_row(model, "....AA..", 1.0, 1)
    twin = replace(row, ids=[*row.ids[:4], 9, *row.ids[5:]])
    _, metrics = update(model, [row, twin], train=replace(DEFAULTS, micro_tokens=10**6))
    assert metrics["real_tokens"] == 16
    assert metrics["packing"] == pytest.approx((4 + 1 + 1) / 16)  # the last A is predicted, not read
    _, alone = update(model, [row, twin], train=replace(DEFAULTS, micro_tokens=1))
    assert alone["packing"] == pytest.approx((5 + 5) / 16)


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
    module = noted(model, replace(DEFAULTS, lr=1e-3))
    fit(module, Update(4, [*on_policy, EXPERTS[0]], exact=True))
    after = sums()
    assert after[0] > before[0] + 0.01
    assert after[1] < before[1] - 0.01
    assert after[2] > before[2] + 0.01
    assert module.updates_done == 5


# --- how far an update goes ---


def moved(before: PreTrainedModel, after: PreTrainedModel, rows: list[Row]) -> float:
    """KL(before || after) in nats a sampled token, by k3 = r - 1 - log r (Schulman 2020), in a plain loop."""
    found: list[float] = []
    for row in rows:
        old, new = scored(before, row.ids, 1.0), scored(after, row.ids, 1.0)
        for k, mine in enumerate(row.action_mask):
            if mine:
                log_ratio = new[k].item() - old[k].item()
                found.append(math.exp(log_ratio) - 1 - log_ratio)
    return sum(found) / len(found)


def stepped(rows: list[Row], **settings: Any) -> tuple[PreTrainedModel, dict[str, float]]:
    model, recorded = make_model(), list[dict[str, float]]()
    train = replace(DEFAULTS, lr=0.02, **settings)
    fit(noted(model, train, recorded), Update(0, rows, exact=True))
    return model, recorded[0]


def test_a_step_that_goes_too_far_is_halved() -> None:
    rows = rollouts(make_model(), 1.0)
    free, without = stepped(rows)
    assert "update_kl" not in without
    far = moved(make_model(), free, rows)
    held, metrics = stepped(rows, max_kl=far / 3)
    near = moved(make_model(), held, rows)
    assert near <= far / 3
    assert metrics["update_kl"] == pytest.approx(near, rel=1e-3)
    assert metrics["halved"] >= 1
    start = dict(make_model().named_parameters())
    share = 0.5 ** metrics["halved"]
    for name, weight in held.named_parameters():
        whole = dict(free.named_parameters())[name]
        assert torch.allclose(weight, start[name] + share * (whole - start[name]), atol=1e-6)
    same, metrics = stepped(rows, max_kl=2 * far)
    assert metrics["halved"] == 0
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), free.parameters(), strict=True))


def test_the_length_of_a_step_is_no_distance_of_the_engine_from_the_trainer() -> None:
    chance, recorded = torch.Generator().manual_seed(0), list[dict[str, float]]()
    rows = [
        replace(row, behavior_logprobs=row.behavior_logprobs + 0.3 * torch.randn(len(row.ids), generator=chance))
        for row in rollouts(make_model(), 1.0)
    ]
    settings = replace(DEFAULTS, lr=1e-9, max_kl=0.03, minibatches=1, epochs=1)
    fit(noted(make_model(), settings, recorded), Update(0, rows, exact=False))
    assert recorded[0]["update_kl"] < 1e-6
    assert recorded[0]["halved"] == 0


def test_the_length_of_a_step_is_known_where_what_the_world_said_is_trained_on() -> None:
    """No engine has log-probs of that: NaN would halve every step six times."""
    recorded = list[dict[str, float]]()
    rows = [replace(row, rewards=torch.tensor([float(k)])) for k, row in enumerate(rollouts(make_model(), 1.0))]
    settings = replace(DEFAULTS, lr=1e-9, max_kl=0.03, minibatches=2)
    unmasked = replace(ALGORITHMS["grpo"], loss_mask=False)
    fit(
        PolicyModule(make_model(), unmasked, settings, lambda i, m: recorded.append(dict(m))),
        Update(0, rows, exact=True),
    )
    assert recorded[0]["update_kl"] < 1e-6
    assert recorded[0]["halved"] == 0


@pytest.mark.parametrize(
    ("index", "passed", "rate"), [(0, 0.0, 0.02), (2, 0.0, 0.011), (2, 0.3, 0.011), (2, 1.0, 0.002), (4, 0.0, 0.002)]
)
def test_the_rate_falls_in_a_straight_line(index: int, passed: float, rate: float) -> None:
    """To a tenth at the last of five updates, or at the end of the time, whichever comes first."""
    model = make_model()
    train = replace(DEFAULTS, lr=0.02, lr_end=0.1, updates=5)
    module = noted(model, train)
    module.passed = lambda: passed
    fit(module, Update(index, grpo_rows(model), exact=True))
    optimizer = module.optimizers()
    assert not isinstance(optimizer, list)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_observations_are_predicted_beside_the_policy_loss(temperature: float) -> None:
    """The gradient is that of the policy loss, plus the coefficient times the mean cross-entropy, at temperature 1, of
    the observed tokens of all rows, also of rows that RL learns nothing from."""
    model = make_model()
    rows = grpo_rows(model, temperature)
    seen = [torch.arange(len(row)) > len(row) // 2 for row in rows]
    rows = [replace(row, observed=~row.action_mask & late) for row, late in zip(rows, seen, strict=True)]
    rows[1] = replace(rows[1], rl_weight=torch.zeros(len(rows[1])))
    trained = [row for k, row in enumerate(rows) if k != 1]
    predicted = [scored(model, row.ids, 1.0)[t] for row in rows for t in row.observed.nonzero()[:, 0].tolist()]
    loss = plain_rl(model, trained, temperature) - 0.3 * torch.stack(predicted).mean()
    (got,), metrics = update(model, rows, train=replace(DEFAULTS, observation_coef=0.3))
    assert_same(got, gradients_of(loss, model))
    assert metrics["observed_tokens"] == len(predicted) > 5
    assert metrics["observation_loss"] == pytest.approx(-torch.stack(predicted).mean().item(), rel=1e-4)
    (off,), without = update(model, rows)
    assert_same(off, gradients_of(plain_rl(model, trained, temperature), model))
    assert "observed_tokens" not in without
