"""If these fail, what is learned depends on how tokens were laid out in memory instead of on what the agent did.

Layout is everything that must not matter: padding on either side, the order of rows and groups, packing, the split into
micro-batches, and whatever numbers lie under the mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.learning.advantages import broadcast_over_tokens, group_relative, masked_gae, place_turn_rewards
from imagination.learning.losses import (
    LossInputs,
    cross_entropy_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    ppo_clip_loss,
    token_entropy,
    token_logprobs,
    value_loss,
)
from imagination.settings.algorithm_parts import Critic, GroupRelative, PpoClip, TokenGae

quick = settings(deadline=None, max_examples=30)  # no deadline: the CPU cores are shared
VOCAB = 5
JUNK = st.sampled_from([math.nan, math.inf, -math.inf, 1e300, -1e300])
seeds = st.integers(0, 2**31 - 1)


@dataclass(frozen=True)
class Batch:
    """All [batch, time] but logits, [batch, time, vocab]. ``weight`` is 0 outside ``mask`` and positive inside."""

    logits: torch.Tensor
    ids: torch.Tensor
    behavior: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    values: torch.Tensor
    old_values: torch.Tensor
    returns: torch.Tensor
    weight: torch.Tensor
    mask: torch.Tensor

    def map(self, fn):
        return replace(self, **{name: fn(x) for name, x in vars(self).items()})


def normals(seed):
    """A sampler of standard normal tensors, and the generator behind it."""
    rng = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64), rng


def make_batch(seed, rows=4, time=6):
    normal, rng = normals(seed)
    mask = torch.rand(rows, time, generator=rng) < 0.6
    mask[0, 0] = True
    return Batch(
        logits=normal(rows, time, VOCAB),
        ids=torch.randint(VOCAB, (rows, time), generator=rng),
        behavior=normal(rows, time) - 1.5,
        reference=normal(rows, time) - 1.5,
        advantages=normal(rows, time),
        values=normal(rows, time),
        old_values=normal(rows, time),
        returns=normal(rows, time),
        weight=torch.where(mask, 0.5 + torch.rand(rows, time, generator=rng).double(), 0.0),
        mask=mask,
    )


def total_loss(batch, denominator):
    """Every loss at once: one gradient for logits and one for values."""
    b = batch
    logprobs = token_logprobs(b.logits, b.ids, 0.8, b.mask)
    ppo = ppo_clip_loss(LossInputs(logprobs, b.behavior, b.advantages, b.weight), PpoClip(), denominator)
    critic = value_loss(b.values, b.old_values, b.returns, b.mask, Critic(), denominator=denominator)
    clone = cross_entropy_loss(logprobs, b.weight, denominator=denominator)
    per_token = sum(kl(logprobs, b.reference, b.mask) for kl in (kl_k1, kl_k2, kl_k3))
    per_token = per_token - token_entropy(b.logits, 0.8, b.mask)
    return ppo.loss + critic.loss + clone.loss + per_token.sum() / denominator


def gradients(batch, parts=lambda batch: [batch]):
    """Loss and gradients of ``batch``, whose losses are computed on each of its ``parts`` with one denominator."""
    leaf = replace(batch, logits=batch.logits.clone().requires_grad_(), values=batch.values.clone().requires_grad_())
    denominator = float(batch.mask.sum())
    loss = 0.0
    for part in parts(leaf):
        piece = total_loss(part, denominator)
        piece.backward(retain_graph=True)
        loss += float(piece.detach())
    return loss, leaf.logits.grad, leaf.values.grad


def assert_same(got, expected):
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(g), torch.as_tensor(e), rtol=1e-9, atol=1e-12)


def pad(x, left, right, fill):
    """Pad dim 1 of [batch, time, ...]; a mask with False, a weight with 0, ids with an id that does not exist."""
    shape = (x.shape[0], left + right, *x.shape[2:])
    value = False if x.dtype == torch.bool else -100 if x.dtype == torch.long else fill
    padding = torch.full(shape, value, dtype=x.dtype)
    return torch.cat([padding[:, :left], x, padding[:, left:]], dim=1)


# --- losses ---


@quick
@given(seeds, JUNK)
def test_junk_under_the_mask_changes_nothing_and_gets_exactly_zero_gradient(seed, junk):
    clean = make_batch(seed)

    def fill(x):
        if x is clean.mask or x is clean.weight:
            return x
        hidden = ~clean.mask if x.ndim == 2 else ~clean.mask[..., None]
        return x.masked_fill(hidden, -100 if x.dtype == torch.long else junk)

    got, expected = gradients(clean.map(fill)), gradients(clean)
    for g, e in zip(got, expected, strict=True):
        assert torch.equal(torch.as_tensor(g), torch.as_tensor(e))
    _, logits_grad, values_grad = got
    assert (logits_grad[~clean.mask] == 0.0).all()
    assert (values_grad[~clean.mask] == 0.0).all()


@quick
@given(seeds, st.integers(0, 4), st.integers(0, 4), JUNK)
def test_padding_leaves_the_gradient_unchanged(seed, left, right, junk):
    batch = make_batch(seed)
    padded = batch.map(lambda x: pad(x, left, right, 0.0 if x is batch.weight else junk))
    loss, *grads = gradients(padded)
    inside = slice(left, left + batch.mask.shape[1])
    assert_same([loss, *(g[:, inside] for g in grads)], gradients(batch))
    for g in grads:
        assert (g[:, :left] == 0.0).all()
        assert (g[:, inside.stop :] == 0.0).all()


@quick
@given(seeds, st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_micro_batch_splits_leave_the_gradient_unchanged(seed, assignment):
    """Rows in any order in up to three micro-batches, of different token counts (one may have none)."""

    def split(batch):
        chosen = [[row for row, part in enumerate(assignment) if part == k] for k in range(3)]
        return [batch.map(lambda x, rows=rows: x[rows]) for rows in chosen]

    batch = make_batch(seed)
    assert_same(gradients(batch, split), gradients(batch))


@quick
@given(seeds)
def test_packing_leaves_the_gradient_unchanged(seed):
    """All rows one after the other in a single row; or only the trained tokens, as a list ``[n]``."""
    batch = make_batch(seed)
    assert_same(gradients(batch, lambda b: [b.map(lambda x: x.flatten(0, 1)[None])]), gradients(batch))
    assert_same(gradients(batch, lambda b: [b.map(lambda x: x[batch.mask])]), gradients(batch))


@quick
@given(seeds, st.permutations(range(4)))
def test_order_of_rows_leaves_the_gradient_unchanged(seed, order):
    batch = make_batch(seed)
    assert_same(gradients(batch, lambda b: [b.map(lambda x: x[order])]), gradients(batch))


# --- advantages ---


def make_episodes(seed, rows=3, turns=3, time=10):
    """Rewards per turn, the turn of each token, values and bootstraps; every turn has at least one token."""
    normal, rng = normals(seed)
    index = torch.full((rows, time), -1)
    for row in range(rows):
        ends = torch.randperm(time, generator=rng)[:turns].sort().values.tolist()
        for turn, end in enumerate(ends):
            index[row, end] = turn
            if end and index[row, end - 1] < 0:
                index[row, end - 1] = turn
    return normal(rows, turns), index, normal(rows, time), normal(rows)


def run_gae(turn_rewards, index, values, bootstrap):
    rewards = place_turn_rewards(turn_rewards, index)
    return masked_gae(rewards, values, index >= 0, TokenGae(0.97, 0.9), bootstrap_value=bootstrap)


@quick
@given(seeds)
def test_no_reward_is_lost(seed):
    turn_rewards, index, _, _ = make_episodes(seed)
    placed = place_turn_rewards(turn_rewards, index)
    torch.testing.assert_close(placed.sum(1), turn_rewards.sum(1))
    assert (placed[index < 0] == 0.0).all()


@quick
@given(seeds, st.integers(0, 4), st.integers(0, 4), JUNK)
def test_gae_ignores_padding_and_junk(seed, left, right, junk):
    turn_rewards, index, values, bootstrap = make_episodes(seed)
    padded_index = torch.nn.functional.pad(index, (left, right), value=-1)
    hidden = values.masked_fill(index < 0, junk)
    padded_values = pad(hidden, left, right, junk)
    inside = slice(left, left + index.shape[1])
    expected = run_gae(turn_rewards, index, values, bootstrap)
    for got, e in zip(run_gae(turn_rewards, padded_index, padded_values, bootstrap), expected, strict=True):
        assert torch.equal(got[:, inside], e)
        assert (got[padded_index < 0] == 0.0).all()


@quick
@given(seeds, st.integers(0, 10), st.integers(0, 5))
def test_gae_does_not_see_the_length_of_observations(seed, at, length):
    """More observation tokens anywhere, inside an action's turn even: agent tokens keep their numbers."""
    turn_rewards, index, values, bootstrap = make_episodes(seed)

    def grow(x, fill):
        return torch.cat([x[:, :at], torch.full((len(x), length), fill, dtype=x.dtype), x[:, at:]], dim=1)

    longer = grow(index, -1)
    expected = run_gae(turn_rewards, index, values, bootstrap)
    for got, e in zip(run_gae(turn_rewards, longer, grow(values, math.nan), bootstrap), expected, strict=True):
        assert torch.equal(got[longer >= 0], e[index >= 0])


@quick
@given(seeds, st.permutations(range(3)))
def test_gae_rows_do_not_see_each_other(seed, order):
    episodes = make_episodes(seed)
    for got, e in zip(run_gae(*(x[order] for x in episodes)), run_gae(*episodes), strict=True):
        assert torch.equal(got, e[order])
    for row in range(3):
        alone = run_gae(*(x[row : row + 1] for x in episodes))
        assert torch.equal(alone[0][0], run_gae(*episodes)[0][row])


episode = st.tuples(
    st.sampled_from([0.0, 0.1, 1.0, -0.5, 1 / 3]) | st.floats(-10, 10), st.integers(0, 3), st.booleans()
)


@quick
@given(
    st.lists(episode, min_size=1, max_size=12).flatmap(lambda x: st.tuples(st.just(x), st.permutations(range(len(x))))),
    st.permutations([-7, 0, 3, 10**12]),
    JUNK,
    st.booleans(),
)
def test_order_and_names_of_groups_and_junk_of_failures_do_not_matter(drawn, names, junk, normalise_std):
    episodes, order = drawn
    returns = torch.tensor([r for r, _, _ in episodes], dtype=torch.float64)
    groups = torch.tensor([g for _, g, _ in episodes])
    valid = torch.tensor([ok for _, _, ok in episodes])
    part = GroupRelative(normalise_std)
    advantages, counts = group_relative(returns, groups, valid, part)
    shuffled, shuffled_counts = group_relative(
        returns.masked_fill(~valid, junk)[order],
        torch.tensor(names)[groups][order],
        valid[order],
        part,
    )
    torch.testing.assert_close(shuffled, advantages[order], rtol=1e-7, atol=1e-9)
    assert torch.equal(shuffled_counts, counts[order])
    assert (advantages[~counts] == 0.0).all()
    for group in range(4):
        members = counts & (groups == group)
        assert abs(float(advantages[members].sum())) < 1e-8  # the rest of a group still normalises
        if members.any() and len(set(returns[members].tolist())) == 1:
            assert (advantages[members] == 0.0).all()


@quick
@given(seeds, JUNK)
def test_broadcast_reaches_agent_tokens_only(seed, junk):
    batch = make_batch(seed)
    per_row = batch.returns[:, 0].clone()
    empty = ~batch.mask.any(1)
    tokens = broadcast_over_tokens(per_row.masked_fill(empty, junk), batch.mask)
    for row in range(len(per_row)):
        assert (tokens[row][batch.mask[row]] == per_row[row]).all()
    assert (tokens[~batch.mask] == 0.0).all()
