"""If these fail, turns are judged by what another turn did, or the estimator pulls at the policy."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.learning.algorithms import ALGORITHMS, build_algorithm
from imagination.learning.policy_module import Progress, turn_states
from imagination.settings import AlgorithmSettings, ProgressSettings
from policy.lm.batch import Row, collate
from real_envs.trajectory import Source
from tests.support.plain import DEFAULTS, EXPERTS, assert_same, credited, make_model, random_ids, rl_row, update

ON = ProgressSettings(enabled=True, hidden=8, lr=0.02, steps=30)


def rows_of(model: Any) -> list[Row]:
    """Episodes of one to three turns; the third begins with a turn of a log, which has no token."""
    rows = [
        rl_row(model, ".AA..AAA", 0.0, 1, reward=1.0),
        rl_row(model, "..A.A....AAAA.", 0.0, 2, reward=0.25),
        rl_row(model, ".A", 0.0, 3),
    ]
    rows[2] = replace(rows[2], turns=[-1, 1])
    return rows


def plain_states(model: Any, rows: list[Row]) -> dict[tuple[int, int], torch.Tensor]:
    """A forward pass a row; the state at the last of the tokens that act in a turn."""
    found = {}
    for r, row in enumerate(rows):
        with torch.no_grad():
            hidden = model.model(torch.tensor([list(row.ids)])).last_hidden_state[0]
        for position, turn in enumerate(row.turns.tolist()):
            if turn >= 0:
                found[r, turn] = hidden[position]
    return found


@pytest.mark.parametrize("max_tokens", [1, 10**6])
def test_a_turn_is_described_by_the_state_after_its_last_token(max_tokens: int) -> None:
    model = make_model()
    rows = rows_of(model)
    states, exists = turn_states(collate(rows, pad=0), model, max_tokens)
    expected = plain_states(model, rows)
    assert exists.tolist() == [[True, True, False], [True, True, True], [False, True, False]]
    for (r, turn), state in expected.items():
        torch.testing.assert_close(states[r, turn], state, atol=1e-5, rtol=1e-5)
    assert (states[~exists] == 0).all()
    assert not states.requires_grad


@settings(max_examples=10)
@given(st.integers(0, 9), st.integers(0, 2**31 - 1))
def test_what_follows_an_episodes_last_action_describes_no_turn(extra: int, seed: int) -> None:
    """The answer to the last action is not in the state that is to say what the action was worth; nor is padding."""
    model = make_model()
    rows = rows_of(model)
    first, *others = rows
    ids, turns = [*first.ids, *random_ids(extra, seed)], [*first.turns, *[-1] * extra]
    longer = [Row(ids, [*first.action_mask, *[False] * extra], Source.DREAM, turns=turns), *others]
    got, plain = (turn_states(collate(one, pad=0), model, 10**6)[0] for one in (longer, rows))
    torch.testing.assert_close(got, plain, atol=1e-5, rtol=1e-5)


def test_it_learns_to_add_up_to_what_episodes_earned() -> None:
    """The error falls, contributions add up to the returns, and absent turns get exactly nothing."""
    model = make_model()
    rows = rows_of(model)
    before, batch = copy.deepcopy(model.state_dict()), collate(rows, pad=0)
    progress = Progress(model, replace(ON, steps=300), seed=0)
    found, errors = progress.turn_rewards(batch, 10**6)
    assert errors["progress_error_fitted"] < 1e-3 < errors["progress_error"]
    assert [sum(turns) for turns in found] == pytest.approx([1.0, 0.25, 0.0], abs=0.05)
    assert found[0][2] == found[2][0] == found[2][2] == 0.0
    _, again = progress.turn_rewards(batch, 10**6)
    assert again["progress_error"] == pytest.approx(errors["progress_error_fitted"])  # measured before it learns more
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


def test_an_action_that_was_carried_out_earns_more() -> None:
    """0.5 for each, in the paper's formula, and nothing for one that the world refused or never answered."""
    model = make_model()
    rows = [replace(row, carried_out=told) for row, told in zip(
        rows_of(model), ([True, False], [False, True, True], [True, True, False]), strict=True)]  # fmt: skip
    batch = collate(rows, pad=0)
    plain, _ = Progress(model, ON, seed=0).turn_rewards(batch, 10**6)
    found, _ = Progress(model, replace(ON, carried_out=0.5), seed=0).turn_rewards(batch, 10**6)
    more = [b - a for x, y in zip(plain, found, strict=True) for a, b in zip(x, y, strict=True)]
    assert more == pytest.approx([0.5, 0, 0, 0, 0.5, 0.5, 0, 0.5, 0])


def test_a_saved_estimator_goes_on_as_if_it_had_not_been_saved() -> None:
    """Moments of its optimiser included."""
    model = make_model()
    rows = rows_of(model)

    def said(progress: Progress) -> tuple[Any, dict[str, float]]:
        turns, errors = progress.turn_rewards(collate(rows, pad=0), 40)
        return turns.tolist(), errors

    straight, stopped, resumed = (Progress(model, ON, seed) for seed in (0, 0, 5))
    assert said(straight) == said(stopped) != said(resumed)
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert said(resumed) == said(straight)


def test_the_first_weights_do_not_touch_the_runs_chance() -> None:
    model = make_model()
    torch.manual_seed(1)
    Progress(model, ON, seed=0)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("name", ["reinforce", "gigpo", "ppo"])
def test_the_module_learns_from_the_contributions(name: Any) -> None:
    """The gradient is that of rows whose turns are judged by what the estimator says; it has none of its own."""
    model = make_model()
    rows = [replace(row, anchors=[7, 7, 8]) for row in rows_of(model)]
    plain = AlgorithmSettings(name)
    value = {"value": torch.zeros(17)} if build_algorithm(plain).critic is not None else {}
    contributions, errors = Progress(model, ON, seed=0).turn_rewards(collate(rows, pad=0), DEFAULTS.micro_tokens)
    (got,), metrics = update(model, [*rows, EXPERTS[0]], replace(plain, progress=ON), judge=True, **value)
    assert metrics["progress_error"] == pytest.approx(errors["progress_error"])
    assert metrics["progress_error_fitted"] == pytest.approx(errors["progress_error_fitted"])
    (other,), _ = update(model, [*rows, EXPERTS[0]], plain, judge=True, **value)
    scale = max(float(g.abs().max()) for g in got.values())
    assert any(float((got[n] - other[n]).abs().max()) > 0.01 * scale for n in got)
    if not value:
        expected = credited(rows, build_algorithm(plain), shaped=contributions)
        judged = [
            replace(row, advantages=gains[: len(row.ids)], rl_weight=weights[: len(row.ids)])
            for row, gains, weights in zip(rows, expected.advantages.tolist(), expected.rl_weight.tolist(), strict=True)
        ]
        (mine,), _ = update(model, [*judged, EXPERTS[0]], plain)
        assert_same(got, mine)


def test_algorithms_that_only_add_up_are_marked() -> None:
    """Moving a reward to another turn changes no advantage of theirs, and changes those of all others."""
    model = make_model()
    rows = [replace(row, anchors=[k, k + 1, 9], group=0, truncated=False) for k, row in enumerate(rows_of(model)[:2])]
    for name, member in ALGORITHMS.items():
        steps = torch.zeros(2, 3) if name == "istar" else None  # of its process reward model
        early, late = (
            credited(rows, member, value=0.1, shaped=torch.tensor(turns), step_rewards=steps).advantages
            for turns in ([[1.0, 0.0, 0.0], [0.0, 0.25, 0.0]], [[0.0, 1.0, 0.0], [0.0, 0.0, 0.25]])
        )
        assert torch.equal(early, late) is member.advantage.adds_up, name
