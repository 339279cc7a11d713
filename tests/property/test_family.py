"""If these fail, what an algorithm learns depends on how episodes were laid out instead of on what the agent did.

Layout is everything that must not matter: padding on either side, the order of rows and groups, packing, the split into
micro-batches, and whatever numbers lie under the mask. From episodes to the gradient of all terms of every algorithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.learning.advantages.gae import masked_gae
from imagination.learning.advantages.group import best_of_groups, gigpo, group_relative, informative, leave_one_out
from imagination.learning.advantages.turns import place_turn_rewards, turn_bounds
from imagination.learning.algorithms import ALGORITHMS, Episodes, total
from imagination.learning.losses.auxiliary import cross_entropy_loss, expert_policy_loss, kl_k1, kl_k3
from imagination.learning.losses.policy import replay_loss, row_segments, turn_segments
from imagination.learning.losses.terms import LossInputs, token_entropy, token_logprobs
from imagination.settings.algorithm_parts import BestOfGroups, GroupRelative, TokenGae

quick = settings(max_examples=5)  # times 18 algorithms
few = settings(max_examples=40)
JUNK = st.sampled_from([math.nan, math.inf, -math.inf, 1e300])
seeds = st.integers(0, 2**31 - 1)
names = pytest.mark.parametrize("name", list(ALGORITHMS))
ROWS, TURNS, TIME, VOCAB = 6, 3, 12, 4


def chosen(name):
    """Every term in use, clips wide enough for gradients and narrow enough to bind."""
    wanted = {
        "kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k2", "entropy_coef": 0.1, "entropy_smoothing": 0.5,
        "clip_low": 0.2, "clip_high": 0.3, "max_tokens": TIME + 8, "keep_min_return": -9.0,
    }  # fmt: skip
    member = ALGORITHMS[name]
    return member.with_settings(**{key: x for key, x in wanted.items() if key in member.settings})


@dataclass(frozen=True)
class Data:
    """What an update reads. All but the episodes' own fields are [rows, time, ...]."""

    episodes: Episodes
    logits: torch.Tensor
    ids: torch.Tensor
    behavior: torch.Tensor
    reference: torch.Tensor
    worth: torch.Tensor

    def rows(self, order):
        mine = {f.name: getattr(self, f.name)[order] for f in fields(self) if f.name != "episodes"}
        found = {f.name: getattr(self.episodes, f.name) for f in fields(Episodes)}
        return Data(Episodes(**{k: x if x is None else x[order] for k, x in found.items()}), **mine)


def make(seed):
    rng = torch.Generator().manual_seed(seed)
    index = torch.full((ROWS, TIME), -1)
    for row in range(ROWS):
        place = 0
        for turn in range(int(torch.randint(1, TURNS + 1, (1,), generator=rng))):
            place += int(torch.randint(1, 3, (1,), generator=rng))
            length = int(torch.randint(1, 3, (1,), generator=rng))
            index[row, place : place + length] = turn
            place += length
    played = turn_bounds(index, TURNS)[0] >= 0
    rewards = torch.randint(0, 3, (ROWS, TURNS), generator=rng).double() / 2
    valid = torch.rand(ROWS, generator=rng) < 0.8
    valid[:2] = True

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    groups = torch.randint(0, 2, (ROWS,), generator=rng)
    groups[:2] = 0  # one group at least has two valid episodes
    return Data(
        Episodes(
            turn_rewards=rewards * played,
            action_turn_index=index,
            group_ids=groups,
            valid=valid,
            anchors=torch.where(played, torch.randint(0, 3, (ROWS, TURNS), generator=rng), -1),
            step_rewards=normal(ROWS, TURNS).masked_fill(~played, math.nan),
            values=normal(ROWS, TIME),
            bootstrap_value=normal(ROWS),
        ),
        logits=normal(ROWS, TIME, VOCAB),
        ids=torch.randint(VOCAB, (ROWS, TIME), generator=rng),
        behavior=normal(ROWS, TIME) * 0.5 - 1.4,
        reference=normal(ROWS, TIME) * 0.5 - 1.4,
        worth=normal(ROWS, TIME),
    )


def gradient(name, data, split=lambda rows: [slice(0, rows)], shape=lambda x, trained: x):
    """Loss and gradients by logits and critic, over micro-batches of rows, each reshaped by ``shape``."""
    member = chosen(name)
    judged = member.judge(data.episodes)
    weight, denominator = member.weigh(judged.trained)
    logits, worth = data.logits.clone().requires_grad_(), data.worth.clone().requires_grad_()
    learned = judged.learned if judged.learned is not None else torch.zeros_like(judged.trained)
    returns = judged.returns if judged.returns is not None else torch.zeros_like(worth)
    if not denominator:
        return torch.zeros(()), torch.zeros_like(logits), torch.zeros_like(worth)
    read = judged.trained | learned
    segments = row_segments(read), turn_segments(data.episodes.action_turn_index)
    loss = torch.zeros((), dtype=torch.float64)
    for rows in split(len(read)):

        def part(x, rows=rows):
            return shape(x[rows], read[rows])

        scores, ids, trained = part(logits), part(data.ids), part(judged.trained)
        terms = member.losses(
            LossInputs(
                logprobs=token_logprobs(scores, ids, mask=trained),
                behavior_logprobs=part(data.behavior),
                advantages=part(judged.advantages),
                weight=part(weight),
                sequences=part(segments[0]),
                turns=part(segments[1]),
                ref_logprobs=part(data.reference),
                entropy=token_entropy(scores, mask=trained),
                values=part(worth),
                old_values=part(data.episodes.values),
                returns=part(returns),
                learned=part(learned),
            ),
            denominator,
            critic_denominator=float(learned.sum()) or 1.0,
            entropy_history=0.9,
        )
        piece = total(terms)
        piece.backward(retain_graph=True)
        loss = loss + piece.detach()
    return loss, *(x.grad if x.grad is not None else torch.zeros_like(x) for x in (logits, worth))


def assert_same(got, expected):
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-7)  # weights are fp32


def hide(data, junk):
    """Junk wherever nobody may look: other tokens, absent turns, all of failed episodes."""
    e = data.episodes
    acted = e.acted
    played = (turn_bounds(e.action_turn_index, TURNS)[0] >= 0) & e.valid[:, None]
    absent = ~e.valid[:, None].expand_as(played)
    hidden = replace(
        e,
        turn_rewards=e.turn_rewards.masked_fill(absent, junk),
        anchors=e.anchors.masked_fill(~played, 0),
        step_rewards=e.step_rewards.masked_fill(~played, junk),
        values=e.values.masked_fill(~acted, junk),
        bootstrap_value=e.bootstrap_value.masked_fill(~e.valid, junk),
    )
    return replace(
        data,
        episodes=hidden,
        logits=data.logits.masked_fill(~acted[..., None], junk),
        ids=data.ids.masked_fill(~acted, -100),
        behavior=data.behavior.masked_fill(~acted, junk),
        reference=data.reference.masked_fill(~acted, junk),
        worth=data.worth.masked_fill(~acted, junk),
    )


def widen(data, left, right, junk):
    """More columns on both sides, holding junk."""

    def pad(x, fill):
        shape = (len(x), left + right, *x.shape[2:])
        extra = torch.full(shape, fill, dtype=x.dtype)
        return torch.cat([extra[:, :left], x, extra[:, left:]], dim=1)

    e = data.episodes
    wide = replace(e, action_turn_index=pad(e.action_turn_index, -1), values=pad(e.values, junk))
    more = {key: pad(getattr(data, key), junk) for key in ("logits", "behavior", "reference", "worth")}
    return replace(data, episodes=wide, ids=pad(data.ids, -100), **more)


# --- every algorithm, from episodes to the gradient ---


@names
@quick
@given(seeds, JUNK)
def test_junk_changes_nothing_and_masked_tokens_get_exactly_zero_gradient(name, seed, junk):
    data = make(seed)
    got, expected = gradient(name, hide(data, junk)), gradient(name, data)
    for g, e in zip(got, expected, strict=True):
        assert torch.equal(g, e)
    acted = data.episodes.acted
    assert (got[1][~acted] == 0).all()
    assert (got[2][~acted] == 0).all()


@names
@quick
@given(seeds, st.integers(0, 3), st.integers(0, 3), JUNK)
def test_padding_leaves_the_gradient_unchanged(name, seed, left, right, junk):
    data = make(seed)
    loss, *grads = gradient(name, widen(data, left, right, junk))
    assert_same([loss, *(g[:, left : left + TIME] for g in grads)], gradient(name, data))
    assert all((g[:, :left] == 0).all() and (g[:, left + TIME :] == 0).all() for g in grads)


@names
@quick
@given(seeds, st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
def test_micro_batch_splits_leave_the_gradient_unchanged(name, seed, assignment):
    data = make(seed)
    parts = [[row for row, part in enumerate(assignment) if part == k] for k in range(3)]
    assert_same(gradient(name, data, split=lambda _: parts), gradient(name, data))


@names
@quick
@given(seeds)
def test_packing_leaves_the_gradient_unchanged(name, seed):
    """All rows one after the other in a single row; or only the tokens that are read, as a list ``[n]``."""
    data = make(seed)
    expected = gradient(name, data)
    assert_same(gradient(name, data, shape=lambda x, _: x.flatten(0, 1)[None]), expected)
    assert_same(gradient(name, data, shape=lambda x, read: x[read]), expected)


@names
@quick
@given(seeds, st.permutations(range(ROWS)), st.permutations([-7, 10**12]))
def test_order_of_episodes_and_names_of_groups_do_not_matter(name, seed, order, labels):
    data = make(seed)
    renamed = replace(data.episodes, group_ids=torch.tensor(labels)[data.episodes.group_ids])
    loss, *grads = gradient(name, replace(data, episodes=renamed).rows(order))
    expected = gradient(name, data)
    assert_same([loss, *grads], [expected[0], *(g[order] for g in expected[1:])])


@names
@quick
@given(seeds)
def test_a_failed_episode_might_as_well_not_have_been_started(name, seed):
    """Its group still normalises, and no count includes it."""
    data = make(seed)
    valid = data.episodes.valid
    loss, *grads = gradient(name, data.rows(valid.nonzero()[:, 0]))
    expected = gradient(name, data)
    assert_same([loss, *grads], [expected[0], *(g[valid] for g in expected[1:])])


@names
@quick
@given(seeds, JUNK)
def test_shaped_rewards_of_failed_episodes_change_nothing(name, seed, junk):
    """Process rewards and progress: read where an episode is valid, on its own turns."""
    data = make(seed)
    e = data.episodes
    rng = torch.Generator().manual_seed(seed)
    played = turn_bounds(e.action_turn_index, TURNS)[0] >= 0
    shaped = torch.randn(ROWS, TURNS, generator=rng, dtype=torch.float64) * played
    clean = replace(data, episodes=replace(e, shaped=shaped))
    failed = ~e.valid[:, None]
    dirty = replace(
        hide(data, junk), episodes=replace(hide(data, junk).episodes, shaped=shaped.masked_fill(failed, junk))
    )
    for got, expected in zip(gradient(name, dirty), gradient(name, clean), strict=True):
        assert torch.equal(got, expected)


# --- what the registry does not hold ---


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y, weight: expert_policy_loss(x, y, weight, denominator=9).loss,
        lambda x, y, weight: replay_loss(LossInputs(x, y, y.abs(), weight), 0.2, denominator=9).loss,
        lambda x, y, weight: cross_entropy_loss(x, weight, denominator=9).loss,
        lambda x, y, weight: kl_k1(x, y, weight > 0).sum(),
        lambda x, y, weight: kl_k3(x, y, weight > 0).sum(),
    ],
    ids=["expert", "replay", "cross entropy", "k1", "k3"],
)
@few
@given(seeds, JUNK, st.permutations(range(4)))
def test_other_losses_under_junk_in_any_order_and_as_a_list(loss, seed, junk, order):
    rng = torch.Generator().manual_seed(seed)
    weight = (torch.rand(4, 6, generator=rng) < 0.6).double()
    logprobs, other = (-torch.rand(4, 6, generator=rng, dtype=torch.float64) for _ in range(2))

    def run(*inputs):
        leaf = inputs[0].clone().requires_grad_()
        result = loss(leaf, *inputs[1:])
        result.backward()
        return result.detach(), leaf.grad

    clean, trained = run(logprobs, other, weight), weight != 0
    dirty = run(logprobs.masked_fill(~trained, junk), other.masked_fill(~trained, junk), weight)
    assert torch.equal(dirty[1], clean[1])
    assert (clean[1][~trained] == 0).all()
    assert_same(run(logprobs[order], other[order], weight[order]), [clean[0], clean[1][order]])
    assert_same(run(logprobs[trained], other[trained], weight[trained]), [clean[0], clean[1][trained]])


@few
@given(seeds, st.integers(0, 10), st.integers(0, 5))
def test_no_reward_is_lost_and_gae_does_not_see_the_length_of_observations(seed, at, length):
    """More observation tokens anywhere, inside an action's turn even: agent tokens keep their numbers."""
    e = make(seed).episodes

    def run(index, values):
        rewards = place_turn_rewards(e.turn_rewards, index)
        torch.testing.assert_close(rewards.sum(1), e.turn_rewards.sum(1))
        assert (rewards[index < 0] == 0).all()
        return masked_gae(rewards, values, index >= 0, TokenGae(0.97, 0.9), e.bootstrap_value)

    def grow(x, fill):
        return torch.cat([x[:, :at], torch.full((len(x), length), fill, dtype=x.dtype), x[:, at:]], dim=1)

    index = e.action_turn_index
    longer = grow(index, -1)
    for got, expected in zip(run(longer, grow(e.values, math.nan)), run(index, e.values), strict=True):
        assert torch.equal(got[longer >= 0], expected[index >= 0])


@few
@given(seeds)
def test_group_functions_keep_their_sums_and_bounds(seed):
    data = make(seed)
    e = data.episodes
    returns = e.turn_rewards.sum(1)
    rloo, counts = leave_one_out(returns, e.group_ids, e.valid)
    grpo = [group_relative(returns, e.group_ids, e.valid, GroupRelative(std))[0] for std in (False, True)]
    useful = informative(returns, e.group_ids, e.valid)
    kept = best_of_groups(returns, e.group_ids, e.valid, BestOfGroups(0.5, 0.0))
    assert not (useful & ~counts).any()
    assert not (kept & ~e.valid).any()
    for group in (0, 1):
        members = counts & (e.group_ids == group)
        for advantages in (rloo, *grpo):
            assert abs(float(advantages[members].sum())) < 1e-8
            assert (useful & members).any() or (advantages[members] == 0).all()
            assert (advantages[~counts] == 0).all()
        if (e.valid & (e.group_ids == group)).any():
            assert (kept & (e.group_ids == group)).any()
    tokens, _ = gigpo(e.turn_rewards, e.action_turn_index, e.anchors, e.group_ids, e.valid)
    assert (tokens[e.action_turn_index < 0] == 0).all()
    assert (tokens[~counts] == 0).all()
