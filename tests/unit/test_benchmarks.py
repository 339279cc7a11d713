"""What the benchmarks against TRL are made of; their speed is never asserted."""

from __future__ import annotations

import asyncio

import pytest
from transformers import LlamaConfig

from real_envs.check import check_env
from real_envs.env import Task
from tests.benchmarks.iteration_ours import ZooEnv
from tests.benchmarks.measure import distinct_tokens, forward_operations, ratios
from tests.benchmarks.update_data import Shape, make_rows
from tests.benchmarks.zoo import DIET, TURNS, Zoo, answer


def test_keeper_who_knows_all_earns_one_and_who_knows_nothing_earns_zero() -> None:
    for act, total in ((answer, 1.0), (lambda animal: "hay", 0.0)):
        zoo, earned, done = Zoo(), 0.0, False
        assert "zoo" in zoo.reset(3)
        while not done:
            _, reward, done = zoo.step(act(zoo.animal))
            earned += reward
        assert earned == pytest.approx(total)
    assert len(set(DIET.values())) == len(DIET) > TURNS  # one right food each


def test_zoo_keeps_the_protocol_of_environments() -> None:
    assert asyncio.run(check_env(ZooEnv(), Task("zoo/7", {"seed": "7"}), ["hay"] * TURNS)) == []


def test_rows_of_a_group_share_their_start_and_then_diverge_for_good() -> None:
    shape = Shape(groups=2, size=6)
    rows = make_rows(shape)
    for row in rows:
        first = next(other for other in rows if other["group"] == row["group"])
        assert row["ids"][: shape.start] == first["ids"][: shape.start]
        assert len(row["ids"]) == len(row["made"])
        assert row["made"][-1] == 1
        assert not any(row["made"][: row["prompt"]])
    shares = [distinct_tokens([r["ids"] for r in make_rows(Shape(spread=s))]) for s in (0.1, 0.5, 0.97)]
    assert shares == sorted(shares)  # less repetition, more distinct tokens


def test_prefixes_count_once() -> None:
    assert distinct_tokens([[1, 2, 3], [1, 2, 4], [9], [1, 2]]) == 5


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


def test_the_ratio_is_the_median_over_pairs() -> None:
    found = ratios([10.0, 30.0, 20.0], [10.0, 10.0, 8.0])
    assert found["ratio"] == 2.5
    assert found["ratio_range"] == [1.0, 3.0]
