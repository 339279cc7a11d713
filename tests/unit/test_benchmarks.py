"""What the benchmarks are made of; their speed is never asserted."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from real_envs.check import check_env
from real_envs.env import Task
from tests.benchmarks import base_table, dreaming, gpu, machine
from tests.benchmarks.dreaming import Shape as DreamShape
from tests.benchmarks.iteration_ours import ZooEnv
from tests.benchmarks.measure import Stopwatch, distinct_tokens, forward_operations
from tests.benchmarks.race import Race, Side
from tests.benchmarks.study import options_and_settings, study_options
from tests.benchmarks.table import Limit, ratios, table, table_row
from tests.benchmarks.update_ours import Shape, make_rows
from tests.benchmarks.zoo import DIET, TURNS, Zoo, answer


def test_models_of_the_base_table_are_not_taken_for_settings() -> None:
    words = ["--models", "scratch", "base", "mine:there/base", "--seeds", "0", "fit.steps=3"]
    parser = study_options("", "out", [0])
    parser.add_argument("--models", nargs="+")
    options, settings = options_and_settings(parser, "all", words)
    assert base_table.checkpoints(options.models) == {"scratch": "", "base": "base", "mine": "there/base"}
    assert settings == ["fit.steps=3"]


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


def test_a_row_is_held_against_its_limits() -> None:
    found = table_row("speed", ">= 2", "turns/s", [8.0, 6.0, 7.0], [2.0, 2.0, 2.0], limit=Limit(28.0, "physics"))
    assert (found["ratio"], found["ratio_range"], found["of_limit"]) == (3.5, [3.0, 4.0], 0.25)


def test_the_table_has_a_line_for_what_was_not_measured() -> None:
    rows = [
        table_row("a", ">= 2", "turns/s", [300.0], [100.0], limit=Limit(1000.0, "physics")),
        table_row("b", "report", "turns/s", [300.0], not_measured="no vLLM here"),
    ]
    result = {"rows": rows, "hardware": "abacus", "threads": 2, "torch": "3", "date": "today", "quick": False}
    text = table([result])
    assert "| a | >= 2 | 3.00 [3.00, 3.00] | 300 | 100 | turns/s | 1,000 | 30.0% |" in text
    assert "| b | report | not measured: no vLLM here | 300 | - | turns/s | - | - |" in text
    assert text.index("abacus; 2 threads; torch 3; today") < text.index("| a |")
    assert "- physics" in text


def test_time_that_others_took_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two cores for 10 s, of which others had 5 s."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 2 3 4 5 6 7 250 9 10\ncpu0 0 0 0 0 0 0 0 99 0 0\n")
    ticks = os.sysconf("SC_CLK_TCK")
    assert machine._stolen_seconds(stat) == 250 / ticks
    assert machine._stolen_seconds(tmp_path / "none") == 0.0
    clock = iter([(100.0, 7.0), (110.0, 12.0)])
    now = next(clock)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine, "_stolen_seconds", lambda: now[1])
    stolen = machine.StolenTime()
    now = next(clock)
    assert stolen.share() == pytest.approx(0.25)
    result = {"rows": [], "hardware": "abacus", "threads": 2, "torch": "3", "date": "today", "quick": False}
    assert "25%" in table([result | {"stolen": 0.25}, result | {"stolen": 0.0}])
    assert "Other virtual machines" not in table([result | {"stolen": 0.01}])


def test_the_fastest_of_each_work_counts_and_they_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order, costs = [0.0], [], {"a": iter([9.0, 9, 9, 3, 2, 4, 5, 6]), "b": iter([9.0, 9, 9, 70, 80, 60, 90, 75])}
    monkeypatch.setattr(machine.time, "perf_counter", lambda: now[0])

    def work(name: str) -> None:
        order.append(name)
        now[0] += next(costs[name])

    # three rounds to warm up, then five at least, although the time is over after the first
    assert machine.best_in_turns([lambda: work("a"), lambda: work("b")], 50.0) == [2.0, 60.0]
    assert order == ["a", "b"] * 8


def test_two_workers_take_their_laps_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has fewer laps; then the first goes on alone."""
    ends, log = socket.socketpair(), []
    ends[1].send(b"x")
    clocks = []
    for end in ends:
        monkeypatch.setenv("BENCHMARK_TURN", str(end.detach()))
        clocks.append(Stopwatch())

    def work(name: str, clock: Stopwatch, laps: int, seconds: float) -> None:
        clock.start()
        for lap in range(laps):
            log.append(f"{name}{lap} begins")
            time.sleep(seconds)
            log.append(f"{name}{lap} ends")
            clock.lap()
        assert clock._other is not None
        clock._other.close()  # as where a process ends

    slow = threading.Thread(target=work, args=("a", clocks[0], 4, 0.02))
    slow.start()
    work("b", clocks[1], 2, 0.0)
    slow.join(timeout=60)
    assert [x.removesuffix(" begins") for x in log if x.endswith("begins")] == ["a0", "b0", "a1", "b1", "a2", "a3"]
    assert all(begin.split()[0] == end.split()[0] for begin, end in zip(log[::2], log[1::2], strict=True))
    assert [len(clock.seconds) for clock in clocks] == [4, 2]
    assert min(clocks[0].seconds) >= 0.02  # the time of a lap, not of the other's
    monkeypatch.delenv("BENCHMARK_TURN")
    alone = Stopwatch()
    alone.start()
    alone.lap()
    assert len(alone.seconds) == 1


def test_limits_of_dreams_that_can_be_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dreaming, "copy_rate", lambda *_: 1e6)
    monkeypatch.setattr(dreaming, "products_seconds", lambda shapes, n, *_: n * (2.0 if len(shapes) == 1 else 1.0))
    shape = DreamShape(layers=1, turns=2, start=10, action=3, observation=5, episodes=4, context=64)
    found = dreaming.dream_limits(shape, torch.float32)
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
    assert dreaming.turn_operations(shape, 3) == linear + 2 * 2 * 2 * 64 * sum(range(27, 35))


def test_every_way_is_tried_and_the_fastest_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def play(self: Race, side: Side, *_: Any) -> dict[str, Any]:
        if side.dtype == "float16":
            raise RuntimeError("a trace\nValueError: no compiler\n[rank0] bye")
        return {"turns/s": [1.0 if side.eager else 3.0]}

    monkeypatch.setattr(Race, "_play", play)
    race = Race(gpu.TINY, tmp_path, threads=1)
    eager = Side("vllm")
    race.enter("vLLM", eager, replace(eager, eager=False))
    race.enter("half", replace(eager, dtype="float16"), replace(eager, dtype="float16", eager=False))
    assert not race.sides["vLLM"].eager
    assert race.tried["vLLM"] == {"eager": 1.0, "compiled": 3.0}
    assert race.missing == {"half": "ValueError: no compiler"}
    race.enter("slow", replace(eager, dtype="float16"))
    race.run(rounds=2)
    assert race.rates == {"vLLM": [3.0, 3.0]}
    assert race.missing["slow"] == "ValueError: no compiler"
