"""Useless answers in dreams. If these fail, noise pays or ends, comes where nobody asked for it, or differs by run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagination.commands.check_train import check
from imagination.learning.collector import CollectionPlan, ExperienceCollector, RolloutEnvironment
from imagination.rollout.dream_env import DreamEnv, Start
from imagination.rollout.noise import UselessAnswers
from imagination.rollout.schedules import noise_spec
from imagination.runs.run_folder import RunFolder
from imagination.session import Log, Session
from imagination.settings import Config, DreamSettings, ProgressSettings, TrainSettings
from imagination.settings.compose import load_config
from real_envs.env import StepResult, Task
from real_envs.trajectory import NO_ANSWER, Source, StopReason, Trajectory, Turn
from tests.support.refusal import refused
from worldmodel.world_model import Prediction

STARTS = {"s": Start("t0", "Q0")}
ACTIONS = [f"search: {k}" for k in range(40)] + ["open: 1", "answer: a"]


def log() -> list[Trajectory]:
    turns = [
        (Turn(f"search: {k}", f"found {k}", 0.0, False), Turn("open: x", f"page {k}", 0.0, False)) for k in range(6)
    ]
    paid = Turn("search: end", "No searches are left.", 0.0, True)
    cut = Turn("search: z", "", 0.0, False, {NO_ANSWER: 1.0})  # what it found was not logged
    return [
        Trajectory(f"e{k}", f"t{k}", "g", Source.REAL, "a", 0, f"Q{k}", (*some, end), StopReason.TERMINATED)
        for k, some in enumerate(turns)
        for end in (paid, cut)
    ]


class Model:
    """Pays for search 3, and ends with search 4."""

    version = "w"

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        return Prediction(f"true {action}", float(action == "search: 3"), action == "search: 4", 0.9, 0.8)

    def release(self, session: object) -> None: ...


def dreamed(noise: UselessAnswers | None, share: str | None, seed: int = 0) -> list[StepResult]:
    """Each action as the first of a dream."""
    env = DreamEnv(Model(), STARTS, noise=noise)

    async def run() -> list[StepResult]:
        results = []
        for action in ACTIONS:
            await env.reset(Task("t0", {"start": "s", **({"noise": share} if share else {})}), seed)
            results.append(await env.step(action))
        return results

    return asyncio.run(run())


NOISE = UselessAnswers(log(), "^search:")


def test_without_a_share_nothing_changes() -> None:
    plain = dreamed(None, None)
    assert dreamed(NOISE, None) == dreamed(NOISE, "0.0") == dreamed(None, "0.5") == plain
    assert noise_spec(DreamSettings(), 7) == noise_spec(DreamSettings(noise=[[0, 0.0], [8, 0.5]]), 0) == {}


@pytest.mark.parametrize("share", ["0.5", "0.99"])
def test_noise_changes_words_alone_of_the_share_that_it_names(share: str) -> None:
    plain, noisy = dreamed(None, None), dreamed(NOISE, share)
    changed = [k for k, (a, b) in enumerate(zip(plain, noisy, strict=True)) if a != b]
    for a, b in zip(plain, noisy, strict=True):
        assert (a.reward, a.terminated, a.truncated, a.stop) == (b.reward, b.terminated, b.truncated, b.stop)
        assert dict(a.info) == {key: value for key, value in b.info.items() if key != "noise"}
    assert not {3, 4, 40, 41} & set(changed)  # what pays, what ends, and what is no search
    assert abs(len(changed) / 38 - float(share)) < 0.2
    texts = {noisy[k].observation.text for k in changed}
    assert texts <= {f"found {k}" for k in range(1, 6)}  # never the task's own, and no answer that ends
    assert len(texts) > 3
    assert all(noisy[k].info["noise"] is True for k in changed)


@pytest.mark.parametrize("reward", [0.0, None])
def test_an_answer_that_meets_the_declared_goal_is_no_noise(tmp_path: Path, reward: float | None) -> None:
    """The log pays for none, and perhaps measured nothing. In a dream that has shown the goal, nothing meets it."""
    config = load_config(
        [
            "dream.noise=0.9",
            "dream.noise_actions=^search",
            "dream.min_confidence=0",
            "worldmodel.goal.observation='found 1'",
        ],
        Config,
    )
    session = Session(config, RunFolder(tmp_path, 0))
    played = [
        replace(t, turns=tuple(replace(turn, reward=reward, terminated=False) for turn in t.turns)) for t in log()
    ]
    session.log = Log(played, [])
    env = session.dreams(Model(), STARTS)()  # type: ignore[arg-type]

    async def texts() -> set[str]:
        answers = set()
        for seed in range(50):
            await env.reset(Task("t0", {"start": "s", "noise": "0.9"}), seed)
            answers.add((await env.step("search: 0")).observation.text)
        return answers

    assert asyncio.run(texts()) == {"true search: 0", *(f"found {k}" for k in range(2, 6)), "No searches are left."}


def test_noise_is_of_the_episode_seed_and_the_action() -> None:
    assert dreamed(NOISE, "0.5") == dreamed(UselessAnswers(log(), "^search:"), "0.5")
    assert dreamed(NOISE, "0.5", seed=1) != dreamed(NOISE, "0.5")
    env = DreamEnv(Model(), STARTS, noise=NOISE)

    async def repeated() -> list[str]:
        await env.reset(Task("t0", {"start": "s", "noise": "0.5"}), 0)
        return [(await env.step(f"search: {k}")).observation.text for k in (1, 2, 5, 6, 1, 2, 5, 6)]

    texts = asyncio.run(repeated())
    assert texts[:4] == texts[4:]


def test_the_share_of_an_update_reaches_its_dreams_and_no_real_episode() -> None:
    dream = DreamSettings(noise=[[0, 0.0], [8, 0.6]], noise_actions="^search:")
    plan = CollectionPlan(0, TrainSettings(groups=2, group_size=2), dream, ProgressSettings())
    missing: Any = None
    worlds = [RolloutEnvironment(missing, source, None, 1) for source in (Source.DREAM, Source.REAL)]
    collector = ExperienceCollector(missing, plan, worlds, missing, missing, missing, STARTS, [], lambda: None)

    def specs(update: int, world: RolloutEnvironment) -> list[dict[str, str]]:
        return [dict(e.task.spec) for e in collector._episodes(update, random.Random(0), 0, 2, 0.0, world)]

    assert specs(0, worlds[0]) == specs(4, worlds[1]) == [{"start": "s"}] * 4
    noisy = specs(4, worlds[0])
    assert [float(spec.pop("noise")) for spec in noisy] == pytest.approx([0.2] * 4)
    assert noisy == [{"start": "s"}] * 4


def test_noise_that_cannot_be_is_refused_in_a_line() -> None:
    refused(lambda: UselessAnswers(log(), "^find"), "dream.noise_actions", "^find")
    refused(lambda: check(load_config(["dream.noise=0.5"], Config)), "dream.noise_actions")
    refused(lambda: check(load_config(["dream.noise=1.5", "dream.noise_actions=x"], Config)), "dream.noise")
    refused(lambda: load_config(["dream.noise_actions='('"], Config), "noise_actions")
    refused(lambda: load_config(["dream.noise_base=0"], Config), "noise_base")
    check(load_config(["preset=search", "dream.noise=[[0,0],[16,0.5]]"], Config))
