"""The stages with `engine=vllm` and `engine=openai`: if these fail, the engines work but no run can use them."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest

from imagination.commands.train import train
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config
from policy.lm.engines.vllm import VllmEngine
from policy.lm.settings import EngineSettings
from real_envs.store import TrajectoryStore
from tests.support.serving import serving
from tests.support.vllm_oracle import TOLERANCE
from worldmodel.evaluation.transitions import judge


def updates(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["stage"] == "train"]


def trained_in_vllm(corridors: tuple[Path, Config], settings: EngineSettings, tmp_path: Path) -> list[dict[str, float]]:
    """The metrics of two updates with both models in vLLM, of two steps each, which move the policy a lot."""
    folder = shutil.copytree(corridors[0], tmp_path / "run")
    config = deepcopy(corridors[1])
    config.engine = settings
    config.train.lr, config.train.minibatches = 3e-3, 2
    config.algorithm.name = "ppo"  # every token has an advantage, also where nobody succeeds
    train(config, folder)
    rows = updates(folder)
    assert [row["step"] for row in rows] == [0, 1]
    assert all("stop_engine_failed" not in row and row["turns"] > 0 for row in rows), rows
    assert all(row["rl_tokens"] > 0 for row in rows)
    return rows


def test_training_in_dreams_with_both_models_in_vllm(
    corridors: tuple[Path, Config], settings: EngineSettings, tmp_path: Path
) -> None:
    """Rollouts through ``play_all``, two engines in a process, a weight update between the policy updates. What samples
    is what trains, in the second update too: vLLM's log-probs of all its tokens are the trainer's. (The ratio of an
    update's first step would say nothing, as it is taken within the trainer.)"""
    rows = trained_in_vllm(corridors, settings, tmp_path)
    for row in rows:
        assert row["mismatch_ratio_max"] == pytest.approx(1, abs=4 * TOLERANCE)
        assert row["mismatch_k3"] < TOLERANCE**2
        assert row["tis_weight"] == pytest.approx(1, abs=TOLERANCE)


def test_weights_that_do_not_arrive_show(
    corridors: tuple[Path, Config], settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run, but vLLM keeps the weights that it started with: from the second update on it samples from another
    policy than the one that trains, which is seen and corrected for."""
    monkeypatch.setattr(VllmEngine, "update_weights", lambda engine: None)
    fresh, stale = trained_in_vllm(corridors, settings, tmp_path)
    assert fresh["mismatch_ratio_max"] == pytest.approx(1, abs=4 * TOLERANCE)
    assert stale["mismatch_ratio_max"] > 1.5
    assert stale["mismatch_k3"] > 0.01
    assert abs(stale["tis_weight"] - 1) > 5 * TOLERANCE


@pytest.fixture(scope="module")
def server(corridors: tuple[Path, Config], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`vllm serve` with the world model's checkpoint, on a free port of this machine."""
    with serving(corridors[0] / "models" / "worldmodel", "worldmodel", tmp_path_factory.mktemp("server")) as url:
        yield url


def test_a_served_world_model_predicts_what_it_would_here(corridors: tuple[Path, Config], server: str) -> None:
    """The same words, with the same confidence: the guard of the dream depends on it."""
    folder, config = corridors
    log = [t for t in TrajectoryStore.open(folder / "log").read("train")][:12]
    served = deepcopy(config)
    served.engine = EngineSettings(name="openai", url=server, served_model="worldmodel")
    run = RunFolder(folder, 0)
    here = asyncio.run(judge(Session(config, run).world_model((), 0.0), log))
    there = asyncio.run(judge(Session(served, run).world_model((), 0.0), log))
    assert len(here) == len(there) > 20
    assert sum(j.exact for j in here) > 5
    for a, b in zip(here, there, strict=True):
        assert (a.predicted is None) == (b.predicted is None)
        if a.predicted is not None and b.predicted is not None:
            assert a.predicted.observation == b.predicted.observation
            assert math.isclose(a.predicted.confidence, b.predicted.confidence, abs_tol=20 * TOLERANCE)


def test_training_in_the_dreams_of_a_server(corridors: tuple[Path, Config], server: str, tmp_path: Path) -> None:
    """The policy stays in this process and learns; the world is elsewhere, and the record says where."""
    folder = shutil.copytree(corridors[0], tmp_path / "run")
    config = deepcopy(corridors[1])
    config.engine = EngineSettings(name="openai", url=server, served_model="worldmodel")
    train(config, folder)
    rows = updates(folder)
    assert [row["step"] for row in rows] == [0, 1]
    assert all("stop_engine_failed" not in row and row["turns"] > 0 for row in rows), rows
    played = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert {row["world_model_version"] for row in played if row["stage"] == "train"} == {"served/worldmodel"}
