"""A tiny world without a simulator: two corridors with a lamp at the end, written down by hand as a log.

The settings are those of models so small that every stage takes about a second.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from imagination.settings import Config
from real_envs.trajectory import Source, StopReason, Trajectory, Turn

# Another number gives every tiny run another seed: what a test asserts must hold there too (tests/stability.py).
SEED = int(os.environ.get("IMAGINATION_TEST_SEED", "0"))

TASKS = {"corridor-a": ("east", "lamp"), "corridor-b": ("west", "book")}


def start(task: str) -> str:
    way, thing = TASKS[task]
    return f"You stand in a corridor. There is a way {way}. Find the {thing}."


def logged_episode(task: str, number: int) -> Trajectory:
    """One of a few behaviours in a corridor of two rooms: go the right way, then take the thing."""
    way, thing = TASKS[task]
    chance = random.Random(f"{task}/{number}")
    inside = False
    turns: list[Turn] = []
    expert = number % 3 == 0
    for _ in range(5):
        right = f"take {thing}" if inside else f"go {way}"
        action = right if expert else chance.choice([f"go {way}", f"take {thing}", "look", right])
        if action == f"go {way}" and not inside:
            inside = True
            turns.append(Turn(action, f"You walk {way}. Here is a {thing}.", 0.0, False))
        elif action == f"take {thing}" and inside:
            turns.append(Turn(action, f"You take the {thing}.", 1.0, True))
            break
        else:
            turns.append(Turn(action, "Nothing new.", 0.0, False))
    agent = "expert" if expert else "noisy"
    return Trajectory(
        id=f"{task}/{agent}/{number}", task_id=task, group_id=f"{task}/{agent}",
        source=Source.EXPERT if expert else Source.REAL, agent=agent, seed=number, start=start(task),
        turns=tuple(turns), stop=StopReason.TERMINATED if turns[-1].terminated else StopReason.TURN_LIMIT,
    )  # fmt: skip


def tiny_settings() -> Config:
    """Settings under which every stage takes about a second."""
    config = Config(run="tiny", seed=SEED, vocab_size=512)
    for model in (config.worldmodel, config.policy):
        model.hidden, model.layers, model.heads, model.kv_heads, model.mlp, model.context = 32, 2, 2, 2, 64, 256
    config.collect.max_turns = config.dream.max_turns = config.evaluate.max_turns = 5
    config.dream.max_tokens = 96
    for fit in (config.fit, config.clone):
        fit.steps, fit.batch_tokens, fit.warmup, fit.precision, fit.copying_steps = 20, 1024, 2, "fp32", 0
    config.fit.steps, config.fit.lr, config.dream.min_confidence, config.dream.min_outcome_confidence = 150, 1e-2, 0, 0
    config.fit.average = 0.0  # these tests want models that are as good or bad as their few steps make them
    config.fit.optimizer = "adamw"  # Muon learns these corridors so well that whole updates of dreams are alike
    config.clone.agents = ["noisy"]
    config.train.updates, config.train.groups, config.train.group_size = 4, 2, 3
    config.train.checkpoint_every = 2
    config.audit.pairs = 20
    config.tripwires.enabled = False  # honest dreams of models this small look odd
    return config


def write_log(folder: Path, change: Callable[[Trajectory], Trajectory] = lambda episode: episode) -> None:
    """Thirty episodes of each corridor in ``folder``/log, ``change`` applied to each."""
    from real_envs.store import TrajectoryStore  # slow to import, and this module is imported by worker processes

    store = TrajectoryStore.create(folder / "log", {"train": list(TASKS)}, meta={"environment": "corridors"})
    store.append(change(logged_episode(task, number)) for task in TASKS for number in range(30))
