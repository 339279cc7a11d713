"""The table of `make worlds`, from numbers worked out by hand. If this fails, it says what nobody measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import worlds
from tests.benchmarks.worlds import ARMS, DASH, HEAD, KINDS_HEAD, Part, by_kind, kind_of, read_part, table
from worldmodel.evaluation.proportions import Proportion


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("alfworld/valid_seen/pick_and_place_simple-Mug-None-Desk-308/trial_T2019_062", "pick_and_place_simple"),
        ("sw-find-animal-12", "find-animal"),
        ("sw-lifespan-longest-lived-then-shortest-lived-3", "lifespan-longest-lived-then-shortest-lived"),
        ("sw-identify-life-stages-1-4", "identify-life-stages-1"),
        ("BabyAI-GoToObj-v0-s123", "BabyAI-GoToObj-v0"),
        ("tw-r3-o5-q5-s20001", "tw-r3-o5-q5"),
        ("miniwob/click-test-2/17", "click-test-2"),
        ("miniwob/click-test/s17", "click-test"),
        ("tbot", "tbot"),
    ],
)
def test_the_kind_of_a_task_is_read_from_its_id(task: str, kind: str) -> None:
    assert kind_of(task) == kind


def proportion(**tasks: tuple[int, int]) -> Proportion:
    named = {name.replace("_", "-"): counts for name, counts in tasks.items()}
    return Proportion(sum(g for g, _ in named.values()), sum(n for _, n in named.values()), by_task=named)


def test_success_is_taken_apart_by_kind_and_nothing_is_lost() -> None:
    whole = proportion(sw_boil_1=(2, 2), sw_find_animal_7=(1, 2), sw_boil_2=(0, 2))
    found = by_kind(whole)
    assert [(kind, p.successes, p.n, len(p.by_task)) for kind, p in found.items()] == [
        ("boil", 2, 4, 2),
        ("find-animal", 1, 2, 1),
    ]
    assert (sum(p.n for p in found.values()), sum(p.successes for p in found.values())) == (whole.n, whole.successes)


def part(seed: int, cloned: Proportion, trained: Proportion) -> Part:
    """Real 4 steps/s and dreams 100 turns/s, so 25 times as fast."""
    share = {"value": 0.75, "n": 40, "ci95": [0.5, 0.9]}
    return Part(
        "scienceworld",
        seed,
        {
            "policy": {"before": {"heldout_tasks": cloned.to_json()}, "after": {"heldout_tasks": trained.to_json()}},
            "optimism_gap": {"before": 0.4, "after": 0.125},
            "optimism_gap_ci95": {"before": None, "after": [-0.05, 0.3]},
        },
        {"agreement": {"plain": {"spearman": {"value": 0.5, "n": 9, "ci95": None}}}},
        {
            "random": proportion(sw_boil_1=(0, 1), sw_freeze_1=(0, 1)).to_json(),
            "expert": proportion(sw_boil_1=(1, 1), sw_freeze_1=(1, 1)).to_json(),
            "world_model": {"exact": share, "reward_precision": share, "reward_recall": {"value": None, "n": 0}},
            "speed": {"real_steps_per_second": 4.0, "dreamed_turns_per_second": 100.0},
        },
    )


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_line_a_part_and_one_with_all_seeds() -> None:
    nothing, half, all_ = ((0, 2), (1, 2), (2, 2))
    parts = [
        part(0, proportion(sw_boil_1=nothing, sw_freeze_1=half), proportion(sw_boil_1=half, sw_freeze_1=all_)),
        part(1, proportion(sw_boil_1=nothing, sw_freeze_2=nothing), proportion(sw_boil_1=all_, sw_freeze_2=half)),
    ]
    first, second = table(parts).split("\n\n")
    lines = first.splitlines()
    assert cells(lines[0]) == list(HEAD)
    columns, row, both = (cells(lines[k]) for k in (0, 2, 4))
    found = dict(zip(columns, row, strict=True))
    assert (found["real steps/s"], found["dreamed turns/s"], found["ratio"]) == ("4.0", "100", "25.0")
    assert found["world model exact"] == "0.75 [0.50, 0.90]"
    assert found["reward recall"] == DASH  # nothing was to be recalled: that is not 0
    assert found["cloned"].startswith("0.25 [")
    assert found["dream-trained"].startswith("0.75 [")
    assert found["rise"].startswith("+0.50 [")
    assert (found["n"], found["optimism gap"]) == ("4", "+0.12 [-0.05, +0.30]")
    assert found["Spearman (checkpoints)"] == "0.50 (9)"
    together = dict(zip(columns, both, strict=True))
    # of 8 episodes 1 and 6; the task that both seeds drew counts once for each: four tasks
    assert together["cloned"] == Proportion(1, 8, by_task={k: (0, 2) for k in "abcd"}).cell
    assert together["dream-trained"] == Proportion(6, 8, by_task={k: (0, 2) for k in "abcd"}).cell
    assert (together["n"], together["optimism gap"], together["ratio"]) == ("8", "+0.12", "25.0")

    kinds = second.splitlines()
    assert cells(kinds[0]) == list(KINDS_HEAD)
    boil, freeze = (cells(line) for line in kinds[2:])
    assert (boil[:3], freeze[:3]) == (["scienceworld", "boil", "2"], ["scienceworld", "freeze", "2"])
    assert [cell.split(" ")[0] for cell in boil[3:]] == ["0.00", "0.00", "0.75", "1.00"]  # 0, 0 of 4, 3 of 4, 2 of 2
    assert [cell.split(" ")[0] for cell in freeze[3:]] == ["0.00", "0.25", "0.75", "1.00"]


def test_what_is_not_measured_is_a_dash_and_one_kind_has_no_second_table(tmp_path: Path) -> None:
    part_of_nothing = read_part("alfworld", 2, tmp_path)
    assert all(part_of_nothing.arm(name) is None for name in ARMS)
    found = table([part_of_nothing])
    assert found.splitlines()[2:] == [f"| alfworld | 2 |{f' {DASH} |' * 14}"]
    measured: dict[str, Any] = {
        "random": proportion(BabyAI_GoToObj_v0_s1=(1, 1)).to_json(),
        "expert": proportion(BabyAI_GoToObj_v0_s1=(1, 1)).to_json(),
    }
    (tmp_path / "world.json").write_text(json.dumps(measured))
    half_done = cells(table([read_part("gymnasium", 0, tmp_path)]).splitlines()[2])
    assert half_done[8].startswith("1.00 [")
    assert half_done[9:12] == [DASH] * 3
    assert "kind of task" not in table([read_part("gymnasium", 0, tmp_path)])


def test_settings_of_one_world_are_not_those_of_another() -> None:
    words = ["train.updates=3", "alfworld:env.options.kind=pick_and_place_simple", "gymnasium:evaluate.tasks=7"]
    grid, house = (worlds.part_config(world, 5, words) for world in ("gymnasium", "alfworld"))
    assert (grid.seed, grid.train.updates, grid.evaluate.tasks) == (5, 3, 7)
    assert (house.env.options["kind"], house.train.updates) == ("pick_and_place_simple", 3)
    assert "kind" not in grid.env.options
    for config in (grid, house):  # enough checkpoints to rank: at least eight with the clone and the last policy
        kept = config.clone.steps // config.clone.keep_every + config.train.updates // config.train.keep_every
        assert kept + 2 >= 8 or config.train.updates == 3


def test_a_table_of_nothing_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["worlds", "--table", "--out", str(tmp_path), "--worlds", "gymnasium", "--seeds", "4", "train.updates=3"]
    monkeypatch.setattr("sys.argv", words)  # a setting may follow a list of numbers
    assert worlds.main() == 0
    assert (tmp_path / "table.md").read_text().splitlines()[2].startswith(f"| gymnasium | 4 | {DASH} |")
    (tmp_path / "textworld" / "seed-12").mkdir(parents=True)
    assert worlds.main() == 0
    lines = (tmp_path / "table.md").read_text().splitlines()[2:]
    assert [cells(line)[:2] for line in lines] == [["textworld", "12"], ["gymnasium", "4"]]  # what is there stays
    monkeypatch.setattr("sys.argv", ["worlds", "--out", str(tmp_path), "--worlds", "moon"])
    assert worlds.main() == 2
    assert "there is no preset=moon" in capsys.readouterr().err
