"""The Python interface: typed results, no trace in the process; it works beside an event loop, as in a notebook."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import imagination
from imagination import ConfigError, Run, UserError, load_log
from imagination.api import call
from imagination.cli import main
from imagination.settings import Config
from imagination.settings.schema import flatten
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Source
from tests.support.tiny import TASKS, logged_episode, tiny_settings


def overrides() -> dict[str, object]:
    """The settings of the tests in this folder, as a user of the interface writes them."""
    default = flatten(asdict(Config()))
    mine = flatten(asdict(tiny_settings()))
    changed = {key: value for key, value in mine.items() if value != default[key] and key != "run"}
    return {**changed, "audit.pairs": 4, "train.expert_share": 0.2}


FEW = {"fit.steps": 5, "clone.steps": 5, "dream.max_tokens": 24}  # where it does not matter what is learned


def corridors(tmp_path: Path, **more: object) -> Run:
    run = Run(tmp_path / "mine", overrides={**overrides(), **more})
    run.use_log(logged_episode(task, number) for task in TASKS for number in range(30))
    return run


def process() -> list[object]:
    """What a program shares with what it calls."""
    log = logging.getLogger("lightning.pytorch")
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    arrays = np.random.get_state(legacy=True)[1]
    return [dict(os.environ), random.getstate(), arrays.tolist(), torch.get_rng_state().tolist(), log.level, handlers,
            torch.get_num_threads(), torch.is_grad_enabled()]  # fmt: skip


def test_a_log_becomes_a_policy_step_by_step(tmp_path: Path) -> None:
    run = corridors(tmp_path)
    before = process()
    fitted = run.fit_world_model()
    assert process() == before
    assert (fitted.folder / "config.json").exists()
    assert fitted.exact_match == fitted.measured["exact_match"]
    assert fitted.seconds > 0
    assert (run.clone() / "config.json").exists()
    trained = run.train()
    assert [update["step"] for update in trained.updates] == [0, 1, 2, 3]
    assert all(0 <= rate <= 1 for rate in trained.success)
    assert (trained.real_steps, trained.stopped_by) == (0, None)
    dreams = run.dream(3)
    assert [dream.task_id for dream in dreams] == ["corridor-a", "corridor-b", "corridor-a"]
    assert {dream.source for dream in dreams} == {Source.DREAM}
    assert dreams == run.dream(3), "the same seed dreams the same"
    audited = run.audit()
    assert audited.trust in ("yes", "partly", "no", "unknown")
    assert audited.page.exists()
    assert process() == before
    with pytest.raises(UserError, match="of a world"):
        run.evaluate()


def test_it_works_inside_a_running_event_loop(tmp_path: Path) -> None:
    run = corridors(tmp_path, **FEW)

    async def cell() -> int:
        run.fit_world_model()
        run.clone()
        return len(run.dream(2, policy="policy-clone"))

    assert asyncio.run(cell()) == 2


def test_the_command_goes_on_with_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = corridors(tmp_path, **FEW)
    assert sorted(path.name for path in run.folder.iterdir()) == ["log"], "settings are written with the first stage"
    run.fit_world_model()
    assert main(["list", f"output={tmp_path}", "listing.format=json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["run"], listed["stages"]) == ("mine", {"fit_world_model": "done"})
    assert "where the world cannot be played" in run.report().read_text(), "no control is asked for"
    again = Run(tmp_path / "mine", overrides={"seed": 5})
    assert (again.config.vocab_size, again.config.seed) == (512, 5)


def test_mistakes_raise_and_do_not_exit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'train\.update'.* 'train\.updates'"):
        Run(tmp_path / "mine", overrides={"train.update": 5})
    with pytest.raises(UserError, match="collect"):
        Run(tmp_path / "mine").fit_world_model()
    run = corridors(tmp_path)
    with pytest.raises(UserError, match="another folder"):
        run.use_log([])
    with pytest.raises(UserError, match=r"no episode is of task 'corridor-c'; did you mean 'corridor-"):
        Run(tmp_path / "held").use_log([logged_episode(task, 0) for task in TASKS], heldout=["corridor-c"])


def test_values_are_python_values(tmp_path: Path) -> None:
    chosen = {"algorithm": "ppo", "train.real_share": [[0, 0.5], [12, 0]], "tripwires.enabled": False}
    config = Run(tmp_path / "its", preset="tiny", overrides=chosen).config
    assert (config.run, config.output, config.vocab_size) == ("its", str(tmp_path), 640)
    assert (config.algorithm.name, config.train.real_share) == ("ppo", [[0, 0.5], [12, 0]])
    assert config.tripwires.enabled is False
    goals = [["You (open|close) the (.+?)[.,]", r"\1 the \2."]]
    arms = {"open": "dream.min_confidence=0 tripwires.enabled=false"}
    for said in ("'You win'", "[Yy]es", "{a}", "${seed}", "null", "7"):
        texts = {"worldmodel.goal.observation": said, "hindsight.goals": goals, "ablation.arms": arms}
        config = Run(tmp_path / "its", overrides=texts).config
        assert (config.worldmodel.goal.observation, config.hindsight.goals, config.ablation.arms) == (said, goals, arms)


def test_a_success_without_rewards_becomes_the_reward_of_the_last_turn(tmp_path: Path) -> None:
    turns = [{"action": "a", "observation": "b"}] * 2
    lines = [{"task_id": "t", "start": "s", "success": solved, "turns": turns} for solved in (True, False)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    store = Run(tmp_path / "mine").use_log(load_log(tmp_path / "log.jsonl"))
    assert [[turn.reward for turn in t.turns] for t in store.read()] == [[0.0, 1.0], [0.0, 0.0]]


def test_a_log_is_loaded_from_a_run_a_store_and_json_lines(tmp_path: Path) -> None:
    run = corridors(tmp_path)
    assert len(load_log(run.folder)) == 60
    assert load_log(run.folder / "log") == load_log(run.folder)
    turn = {"action": "a", "observation": "b", "reward": 1, "terminated": True}
    line = {"task_id": "t", "start": "s", "turns": [turn]}
    (tmp_path / "log.jsonl").write_text(json.dumps(line) + "\n")
    (episode,) = load_log(tmp_path / "log.jsonl")
    assert (episode.task_id, episode.solved) == ("t", True)
    other = Run(tmp_path / "held")
    other.use_log(load_log(run.folder), heldout=["corridor-b"])
    assert dict(TrajectoryStore.open(other.folder / "log").splits) == {
        "train": ("corridor-a",),
        "heldout": ("corridor-b",),
    }


def test_ctrl_c_stops_what_runs_beside_an_event_loop() -> None:
    started, stopped = threading.Event(), threading.Event()

    def work() -> None:
        try:
            started.set()
            while True:
                time.sleep(0.01)
        finally:
            stopped.set()

    def press() -> None:
        started.wait()
        while True:
            os.kill(os.getpid(), signal.SIGINT)
            if stopped.wait(5):  # what Python raises in a finaliser is lost: whoever sees nothing happen presses again
                break

    async def cell() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a notebook
        threading.Thread(target=press).start()
        call(work)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    assert stopped.is_set()


def test_every_name_is_there_and_importing_the_package_is_quick() -> None:
    assert all(getattr(imagination, name) is not None for name in imagination.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = imagination.nothing
    script = "import sys, imagination; print([m for m in ('torch', 'numpy', 'hydra', 'lightning') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
