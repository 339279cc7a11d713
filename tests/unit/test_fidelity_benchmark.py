"""`make fidelity`: what is planted, and what its tables say, from numbers worked out by hand."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import pytest

from imagination.evaluation.forecast import MEASURES
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.benchmarks.fidelity import write_log
from tests.benchmarks.fidelity_table import (
    AXES,
    PART,
    Part,
    correlation,
    draw,
    floor,
    forecast_data,
    pairs,
    read_parts,
    table,
)
from tests.benchmarks.fidelity_variants import PLANTED, VARIANTS, Variant, planted
from worldmodel.evaluation.proportions import Proportion


def episode(number: int, task: str = "t") -> Trajectory:
    """Three turns, each with words of its own, of which the last pays and ends."""
    turns = tuple(Turn(f"go {k}", f"room {number}.{k}", float(k == 2), k == 2) for k in range(3))
    name = f"{task}/{number}"
    return Trajectory(name, task, task, Source.REAL, "random", number, "start", turns, StopReason.TERMINATED)


LOG = [episode(number) for number in range(10)]  # 30 turns, of which ten are paid


def changed(log: list[Trajectory]) -> set[tuple[int, int]]:
    return {(e, k) for e, t in enumerate(log) for k, turn in enumerate(t.turns) if turn != LOG[e].turns[k]}


# of ten rewards, one or three are lost and as many gained; of 30 turns, three or nine are wrong
@pytest.mark.parametrize(("axis", "few", "many"), [("reward", 2, 6), ("observation", 3, 9), ("end", 3, 9)])
def test_as_many_errors_are_planted_as_were_asked(axis: str, few: int, many: int) -> None:
    before = copy.deepcopy(LOG)
    little, much = planted(LOG, axis, 0.1, 0), planted(LOG, axis, 0.3, 0)
    assert before == LOG
    assert (len(changed(little)), len(changed(much))) == (few, many)
    assert changed(little) < changed(much)  # worse, not elsewhere
    assert planted(LOG, axis, 0.3, 0) == much
    assert changed(planted(LOG, axis, 0.3, 1)) != changed(much)
    assert planted(LOG, axis, 0.0, 0) == LOG


def test_each_axis_has_errors_of_its_kind() -> None:
    turns = {axis: [turn for t in planted(LOG, axis, 0.3, 0) for turn in t.turns] for axis in PLANTED}
    true = [turn for t in LOG for turn in t.turns]
    assert sum(turn.reward or 0 for turn in turns["reward"]) == 10  # three lost, three gained
    assert sum(bool(turn.reward) and turn.terminated for turn in turns["reward"]) == 7
    assert [turn.observation for turn in turns["reward"]] == [turn.observation for turn in true]
    said = [turn.observation for turn in turns["observation"]]
    assert Counter(said) == Counter(turn.observation for turn in true)  # exchanged, none lost
    assert [turn.reward for turn in turns["observation"]] == [turn.reward for turn in true]
    assert sum(a.terminated != b.terminated for a, b in zip(turns["end"], true, strict=True)) == 9
    kept = planted(LOG, "log", 0.3, 0)
    assert len(kept) == 3
    assert all(t in LOG for t in kept)
    assert set(map(id, planted(LOG, "log", 0.1, 0))) < set(map(id, kept))
    with pytest.raises(ValueError, match="nothing is planted for 'size'"):
        planted(LOG, "size", 0.1, 0)


def test_every_axis_has_an_end_where_nothing_guards_it() -> None:
    assert {variant.axis for variant in VARIANTS} == {variant.axis for variant in VARIANTS if variant.free}
    assert {variant.axis for variant in VARIANTS} == set(AXES)
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


def test_what_measures_the_model_is_left_as_it_is(tmp_path: Path) -> None:
    store = TrajectoryStore.create(tmp_path / "a", {"train": ["t"], "heldout": ["h"]}, {"environment": "w"})
    store.append([*LOG, *(episode(k, "h") for k in range(5))])
    write_log(tmp_path / "a", tmp_path / "b", Variant("end-100", "end", share=1.0), 0)
    made = TrajectoryStore.open(tmp_path / "b")
    assert list(made.read("heldout")) == list(store.read("heldout"))
    assert all(turn.terminated == (k < 2) for t in made.read("train") for k, turn in enumerate(t.turns))
    assert made.meta == {"environment": "w"}


def proportion(**tasks: int) -> Proportion:
    """Tasks of one episode each."""
    return Proportion(sum(tasks.values()), len(tasks), by_task={name: (good, 1) for name, good in tasks.items()})


def part(variant: str, seed: int, trained: Proportion, arm: str = "guarded", **told: float | None) -> Part:
    cloned = proportion(a=1, b=0, c=0, d=0)
    measures = {m.key: None for m in MEASURES} | {"exact_heldout": None} | told
    stopped = "contradicted" if trained.rate == 0 else None
    return Part(
        variant,
        variant.split("-")[0],
        seed,
        arm,
        cloned,
        trained,
        stopped,
        dict.fromkeys(("clone", "trained"), measures),
    )


HALF, NONE, MOST = proportion(a=1, b=1, c=0, d=0), proportion(a=0, b=0, c=0, d=0), proportion(a=1, b=1, c=1, d=0)
# gains of 1/4, -1/4 and 1/2; without the guard -1/4
PARTS = [
    part("full", 0, HALF, gap=0.1, reward_precision=0.9, exact_heldout=0.8),
    part("full", 1, MOST, gap=0.2, reward_precision=1.0, exact_heldout=0.7),
    part("reward-30", 0, NONE, gap=0.3, reward_precision=0.4, exact_heldout=0.9),
    part("reward-30", 0, NONE, arm="free", gap=0.3, reward_precision=0.4),
]


def test_gains_are_paired_with_the_measures_of_their_own_run() -> None:
    assert [p.gain for p in PARTS] == [0.25, 0.5, -0.25, -0.25]
    assert pairs(PARTS, "guarded", "clone", "gap") == [(0.1, 0.25), (0.2, 0.5), (0.3, -0.25)]
    assert pairs(PARTS, "free", "clone", "gap") == [(0.3, -0.25)]
    assert pairs(PARTS, "guarded", "clone", "confidence") == []


def test_rank_correlations() -> None:
    # ranks 1, 2, 3 beside 2, 3, 1: squared differences 1 + 1 + 4 = 6, so 1 - 6 * 6 / (3 * 8) = -1/2
    assert correlation(pairs(PARTS, "guarded", "clone", "gap")).value == pytest.approx(-0.5)
    assert correlation(pairs(PARTS, "guarded", "clone", "reward_precision")).value == pytest.approx(1.0)
    assert correlation([]).value is None
    rising = correlation([(float(k), float(k)) for k in range(12)])
    assert rising.ci95 == pytest.approx((1.0, 1.0))
    assert rising.n == 12


def test_the_floor_is_the_least_value_from_which_on_nine_in_ten_gained() -> None:
    # losses at 0.1 and 0.2, gains at 0.3 ... 1.1: from 0.2 on nine of ten gained, from 0.1 on nine of eleven
    found = [(k / 10, -0.1 if k < 3 else 0.1) for k in range(1, 12)]
    assert floor(found) == (0.2, 10, 9)
    assert floor([(-value, gain) for value, gain in found], better=-1) == (-0.2, 10, 9)
    assert floor([(value, gain) for value, gain in found if value < 0.7]) is None  # four gains are too few
    assert floor([(value, -gain) for value, gain in found]) is None
    assert floor([(value, 0.0) for value, _ in found]) is None  # no change is no gain


def test_the_table_pools_seeds_and_leaves_what_is_not_there() -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(PARTS).splitlines()]
    head, full, reward = lines[0], lines[2], lines[3]
    row = dict(zip(head, full, strict=True))
    assert (row["variant"], row["seeds"], row["optimism gap"]) == ("full", "2", "0.15")
    # 2 of 8 before, 2 + 3 of 8 after
    assert row["cloned"].startswith("0.25 [")
    assert row["trained"].startswith("0.62 [")
    assert row["gain"].startswith("+0.38 [")
    assert (row["stopped"], row["trained, no guard"], row["gain, no guard"]) == ("0/2", "–", "–")
    row = dict(zip(head, reward, strict=True))
    assert (row["stopped"], row["mean confidence, own actions"]) == ("1/1", "–")
    assert row["gain, no guard"].startswith("-0.25 [")
    measures = {line[0]: line[1:] for line in lines[4:] if len(line) == 5}
    assert measures["optimism gap"][0].startswith("-0.50")
    assert measures["optimism gap"][-1] == "–"  # three runs are too few for a floor


def test_the_forecast_has_guarded_runs_and_the_measure_that_tells_most() -> None:
    found = forecast_data(PARTS, "w", {"id": "x"})
    assert [(run["variant"], run["seed"], run["gain"]) for run in found["runs"]] == [
        ("full", 0, 0.25), ("full", 1, 0.5), ("reward-30", 0, -0.25),
    ]  # fmt: skip
    assert found["best"]["clone"]["measure"] == "reward_precision"
    assert set(found["runs"][0]["clone"]) == {measure.key for measure in MEASURES}
    assert (found["env"], found["options"]) == ("w", {"id": "x"})


def test_parts_are_read_back_and_drawn(tmp_path: Path) -> None:
    for p in PARTS:
        folder = tmp_path / f"seed-{p.seed}" / p.variant / p.arm
        folder.mkdir(parents=True)
        kept = {name: getattr(p, name) for name in ("variant", "axis", "seed", "arm", "stopped_by", "measures")}
        kept |= {"cloned": p.cloned.to_json(), "trained": p.trained.to_json()}
        (folder / PART).write_text(json.dumps(kept))
    assert read_parts(tmp_path) == PARTS
    draw(PARTS, tmp_path / "fidelity.png")
    assert (tmp_path / "fidelity.png").read_bytes().startswith(b"\x89PNG")
