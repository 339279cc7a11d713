"""If these fail, a dream that ranks policies wrongly may be called right, or the reverse. Worked out by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from imagination.evaluation.audit import _solved
from real_envs.trajectory import Source, StopReason, Trajectory
from worldmodel.evaluation.agreement import Triple, agreement_metrics, kendall_tau_b, ranks, spearman, success_metrics


def test_ranks() -> None:
    assert ranks([0.3, 0.1, 0.3, 0.9, 0.3]) == [3.0, 1.0, 3.0, 5.0, 3.0]


@pytest.mark.parametrize(
    ("x", "y", "rho", "tau"),
    [
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8, 0.6),  # squared differences total 4: 1 - 24/120; 8 against 2 pairs
        ([1, 2, 3], [30, 20, 10], -1.0, -1.0),
        ([1, 2, 3], [1, 10, 100], 1.0, 1.0),  # only the order counts
        # ranks 1 2.5 2.5 4 against 1 3 2 4: 4.5 / sqrt(4.5 * 5); five concordant pairs of 5 and 6 untied
        ([1, 2, 2, 3], [1, 3, 2, 4], 4.5 / 22.5**0.5, 5 / 30**0.5),
        ([1, 1, 2, 2], [1, 2, 1, 2], 0.0, 0.0),
        ([1, 1, 1], [1, 2, 3], None, None),  # who believes the same of all ranks nobody
    ],
)
def test_rank_correlations(x: list[float], y: list[float], rho: float | None, tau: float | None) -> None:
    assert spearman(x, y) == pytest.approx(rho)
    assert kendall_tau_b(x, y) == pytest.approx(tau)
    assert spearman(y, x) == pytest.approx(rho)


def test_rank_correlations_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    chance = random.Random(0)
    for _ in range(50):
        x = [chance.randrange(6) for _ in range(9)]
        y = [chance.randrange(6) for _ in range(9)]
        assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
        assert kendall_tau_b(x, y) == pytest.approx(stats.kendalltau(x, y).statistic)


def triple(policy: str, seed: int, dreamed: int | None, replayed: int | None, real: int | None) -> Triple:
    d, w, r = (None if v is None else bool(v) for v in (dreamed, replayed, real))
    return Triple(policy, "t", seed, d, w, r, guarded=None if d is None else False)


def test_a_malformed_dream_is_no_loss_guarded_or_not() -> None:
    broken = Trajectory("d", "t", "g", Source.DREAM, "p", 0, "S", (), StopReason.PREDICTION_INVALID)
    assert _solved(broken) is None
    assert _solved(replace(broken, stop=StopReason.TURN_LIMIT)) is False


def test_bounds_are_those_of_what_is_measured() -> None:
    """A share and a mean of absolute gaps are never below 0, however few tasks are drawn."""
    chance = random.Random(0)
    metrics = []
    for seed in range(20):
        played = []
        for policy, task in itertools.product("pqr", range(5)):
            real = chance.random() < 0.3
            dreamed, replayed = real ^ (chance.random() < 0.1), real and chance.random() < 0.3
            played.append(replace(triple(policy, task, dreamed, replayed, real), task_id=str(task)))
        measured = agreement_metrics(played, seed)
        metrics += [measured[key]["ci95"] for key in ("mean_absolute_gap", "cr_pairwise")]
    assert all(0 <= low <= high <= 1 for low, high in filter(None, metrics))


def test_success_by_hand() -> None:
    """Four whole triples. Solved: dreamed 3, replayed 1, real 2, of which the dreamed actions solve one."""
    found = success_metrics(
        [
            triple("p", 0, 1, 1, 1),
            triple("p", 1, 1, 0, 1),
            triple("p", 2, 1, 0, 0),
            triple("p", 3, 0, 0, 0),
            triple("p", 4, None, None, 1),  # the dream broke: no loss, and no pair
        ],
        seed=0,
    )
    values = {k: found[k]["value"] for k in ("dream", "replay", "real", "guarded", "gap", "cr", "cr_pairwise")}
    assert values == {
        "dream": 0.75,
        "replay": 0.25,
        "real": 0.5,
        "guarded": 0.0,
        "gap": 0.25,
        "cr": 0.5,
        "cr_pairwise": 0.5,
    }
    assert (found["n"], found["failures"], found["cr_pairwise"]["n"]) == (4, 1, 2)
    low, high = found["gap"]["ci95"]
    assert -1 <= low < 0.25 < high <= 1  # a share less a share
    nothing = success_metrics([triple("p", 0, 1, 0, 0)], seed=0)
    assert (nothing["cr"]["value"], nothing["cr_pairwise"]["value"]) == (None, None)  # not 0, and no division


def test_cr_may_hide_what_the_pairs_show() -> None:
    """The dreamed actions solve as many, but others: CR 1, pairwise 0."""
    found = success_metrics([triple("p", 0, 1, 1, 0), triple("p", 1, 0, 0, 1)], seed=0)
    assert (found["cr"]["value"], found["cr_pairwise"]["value"]) == (1.0, 0.0)


def test_agreement_by_hand() -> None:
    """Real 0, 1/2, 1; dreamed 1/2, 1/2, 1: gaps 1/2, 0, 0. Ranks 1 2 3 against 1.5 1.5 3."""
    rows = [
        *(triple("weak", s, d, 0, 0) for s, d in ((0, 1), (1, 0))),
        *(triple("middle", s, d, d, d) for s, d in ((0, 1), (1, 0))),
        *(triple("strong", s, 1, 1, 1) for s in (0, 1)),
    ]
    found = agreement_metrics(rows, seed=0)
    assert found["mean_absolute_gap"]["value"] == pytest.approx(0.5 / 3)
    assert found["spearman"]["value"] == pytest.approx(1.5 / (2 * 1.5) ** 0.5)
    assert found["kendall"]["value"] == pytest.approx(2 / (3 * 2) ** 0.5)
    assert (found["policies"], found["episodes_each"], found["spearman"]["n"]) == (3, 2, 3)
    assert (found["cr_pairwise"]["value"], found["cr_pairwise"]["n"]) == (1.0, 3)
    guarded = agreement_metrics(rows, seed=0, guarded=True)  # believes nothing of anybody
    assert guarded["spearman"]["value"] is None
    assert guarded["mean_absolute_gap"]["value"] == pytest.approx(0.5)


def test_a_broken_dream_of_one_policy_is_left_out_for_all() -> None:
    """Otherwise the others would have played harder or easier games than it did."""
    rows = [triple("a", 0, 1, 1, 1), triple("b", 0, 0, 0, 0), triple("a", 1, None, None, 1), triple("b", 1, 1, 1, 1)]
    found = agreement_metrics(rows, seed=0)
    assert found["episodes_each"] == 1
    assert found["spearman"]["value"] == pytest.approx(1.0)
    assert agreement_metrics([triple("a", 0, None, None, 1)], seed=0)["spearman"]["value"] is None
