"""What published tables of speed and success are computed by; speed itself is never asserted."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from tests.benchmarks import loop_table, rollouts, worlds
from tests.benchmarks.dreaming import Shape as DreamShape
from tests.benchmarks.loop_table import Curve
from tests.benchmarks.measure import forward_operations
from tests.benchmarks.study import DASH
from tests.benchmarks.table import Limit, table_row
from tests.benchmarks.worlds import HEAD, KINDS_HEAD, Part
from worldmodel.evaluation.proportions import Proportion


def test_forward_operations_of_a_model_that_can_be_counted_by_hand() -> None:
    config = LlamaConfig(
        vocab_size=10,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=8,
    )
    # weights of the layer: 4 * 4 * 4 + 3 * 4 * 8 = 160; tokens 1 2 | 3; each attends to 1, 2, 2 places
    by_hand = 2 * 160 * 3 + 4 * 4 * (1 + 2 + 2) + 2 * 1 * 4 * 10
    assert forward_operations(config, [[1, 2], [1, 3]], predicted=1) == by_hand


def test_the_ratio_is_the_median_over_pairs_and_held_against_a_limit() -> None:
    found = table_row("speed", ">= 2", "turns/s", [8.0, 6.0, 7.0], [2.0, 2.0, 2.0], limit=Limit(28.0, "physics"))
    assert (found["ratio"], found["ratio_range"], found["of_limit"]) == (3.5, [3.0, 4.0], 0.25)


def test_limits_of_dreams_that_can_be_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "copy_rate", lambda *_: 1e6)
    monkeypatch.setattr(rollouts, "products_seconds", lambda shapes, n, *_: n * (2.0 if len(shapes) == 1 else 1.0))
    shape = DreamShape(layers=1, turns=2, start=10, action=3, observation=5, episodes=4, context=64)
    found = rollouts.dream_limits(shape, torch.float32)
    # 8 tokens a turn pass two models at 1 s, and 8 logits are made at 2 s
    assert found["limit"].rate == pytest.approx(1 / (8 * (2 * 1.0 + 2.0)))
    # 6 steps of 4 rows, with keys and values of 1 head of 64 in 4 bytes for 10 + 8 tokens; 10 tokens, 2 logits at once
    step = 4 * 1.0 + 2 * 64 * 4 * 4 * 18 / 1e6
    assert found["decode_limit"].rate == pytest.approx(4 / (6 * step + 4 * (10 * 1.0 + 2 * 2.0)))


def test_operations_of_a_turn_counted_by_hand() -> None:
    shape = DreamShape(layers=1, hidden=64, heads=1, mlp=10, vocab=7, start=10, action=3, observation=5, context=64)
    # two models read 8 tokens: queries, keys, values and outputs, three products of the MLP; and 8 rows of logits
    linear = 2 * 2 * 8 * (4 * 64 * 64 + 3 * 64 * 10) + 2 * 8 * 64 * 7
    # the third turn's tokens see 27 to 34, with two products of 64 each in each model
    assert rollouts.turn_operations(shape, 3) == linear + 2 * 2 * 2 * 64 * sum(range(27, 35))


def ten(successes: int) -> Proportion:
    """Of ten episodes of two tasks."""
    half = min(successes, 5)
    return Proportion(successes, 10, by_task={"a": (half, 5), "b": (successes - half, 5)})


def curve(arm: str, seed: int, *points: tuple[int, int]) -> Curve:
    return Curve(arm, seed, tuple((steps, ten(successes)) for steps, successes in points), 60.0)


CURVES = [
    curve("real-only", 0, (0, 2), (3000, 4), (6000, 7)),
    curve("real-only", 1, (0, 2), (3000, 4), (6000, 5)),
    curve("real-only-small", 0, (0, 2), (2000, 6), (4000, 9)),
    curve("loop", 0, (0, 2), (0, 4), (400, 6), (800, 5)),
    curve("loop", 1, (0, 2), (0, 3), (500, 7), (900, 8)),
]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_steps_to_a_level_are_those_of_the_first_policy_that_has_it() -> None:
    assert [one.steps_to(0.6) for one in CURVES] == [6000, None, 2000, 400, 500]
    assert CURVES[3].steps_to(0.4) == 0


def test_the_table_compares_with_the_better_real_only_arm_seed_by_seed() -> None:
    head, _, *rows = map(cells, loop_table.table(CURVES, [0.6]).splitlines())
    assert head[:7] == ["arm", "seeds", "n", "real steps", "success", "seconds", "real steps to 0.6"]
    assert "0.6" in head[7]
    assert len(head) == 8
    by_arm = {row[0]: row[1:] for row in rows}
    titles = {arm.name: arm.title for arm in loop_table.ARMS}
    assert by_arm[titles["real-only"]][0:3] == ["2", "20", "6,000"]
    assert by_arm[titles["real-only"]][5:] == ["6,000, > 6,000", "–"]
    assert loop_table.table(CURVES, [0.3]).splitlines()[-1].count("without any") == 2
    # seed 0: 2,000 against 400; of seed 1 no real-only policy came so far
    assert by_arm[titles["loop"]][0:3] == ["2", "20", "850"]
    assert by_arm[titles["loop"]][3].startswith("0.65 [")  # 5 and 8 of 10
    assert by_arm[titles["loop"]][5:] == ["400, 500", "5.0x, –"]


def proportion(**tasks: tuple[int, int]) -> Proportion:
    named = {name.replace("_", "-"): counts for name, counts in tasks.items()}
    return Proportion(sum(g for g, _ in named.values()), sum(n for _, n in named.values()), by_task=named)


def part(seed: int, cloned: Proportion, trained: Proportion) -> Part:
    """Real 4 steps/s and dreams 100 turns/s, so 25 times as fast."""
    share = {"value": 0.75, "n": 40, "ci95": [0.5, 0.9]}
    rates = {"before": {"heldout_tasks": cloned.to_json()}, "after": {"heldout_tasks": trained.to_json()}}
    gap = {"before": 0.4, "after": 0.125}
    summary = {"policy": rates, "optimism_gap": gap, "optimism_gap_ci95": {"before": None, "after": [-0.05, 0.3]}}
    audit = {"agreement": {"plain": {"spearman": {"value": 0.5, "n": 9, "ci95": None}}}}
    world = {
        "random": proportion(sw_boil_1=(0, 1), sw_freeze_1=(0, 1)).to_json(),
        "expert": proportion(sw_boil_1=(1, 1), sw_freeze_1=(1, 1)).to_json(),
        "world_model": {"exact": share, "reward_precision": share, "reward_recall": {"value": None, "n": 0}},
        "speed": {"real_steps_per_second": 4.0, "dreamed_turns_per_second": 100.0},
    }
    return Part("scienceworld", seed, summary, audit, world)


def test_a_line_a_part_and_one_with_all_seeds() -> None:
    nothing, half, all_ = ((0, 2), (1, 2), (2, 2))
    parts = [
        part(0, proportion(sw_boil_1=nothing, sw_freeze_1=half), proportion(sw_boil_1=half, sw_freeze_1=all_)),
        part(1, proportion(sw_boil_1=nothing, sw_freeze_2=nothing), proportion(sw_boil_1=all_, sw_freeze_2=half)),
    ]
    first, second = worlds.table(parts).split("\n\n")
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
