"""Dreams and reality differ only in the environment passed in: under a perfect world model they are the same, token for
token. If this fails, something else than the world model makes dreamed training unlike real training.

The policy has random weights, but its words are whole commands of the games, so that worlds do answer it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from imagination.rollout.dream_env import DreamEnv, Start
from imagination.rollout.play import Episode, Provenance, play, play_all
from policy.agent import LanguageModelAgent
from policy.lm.backbone import build_model
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.render import ChatFormat
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.env import EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, Owner, Source, StopReason, Trajectory, Turn
from real_envs.worker_pool import PooledTasks
from real_envs.worlds.textworld import REFUSAL, TextWorldGame
from tests.support.oracle import OracleWorldModel

TURNS = 6
REAL, DREAM = Provenance(Source.REAL, "p"), Provenance(Source.DREAM, "p", OracleWorldModel.version)


@dataclass
class Worlds:
    """The games for real, and dreamed by the oracle."""

    tasks: PooledTasks
    starts: dict[str, Start]
    plans: dict[str, list[str]]
    commands: list[str]

    def oracle(self) -> OracleWorldModel:
        by_text = {self.starts[task.id].text: task for task in self.tasks.tasks("all")}
        assert len(by_text) == len(self.tasks.tasks("all"))
        return OracleWorldModel(self.tasks.make_env, by_text)


@pytest.fixture(scope="module")
def worlds(games: list[Task]) -> Iterator[Worlds]:
    starts, plans, commands = {}, {}, set()
    game = TextWorldGame(privileged=True)
    for task in games:
        observation = game.reset(task)
        plan = list(observation.privileged["policy_commands"])  # type: ignore[call-overload]
        starts[task.id] = Start(task.id, observation.text)
        plans[task.id] = plan
        for command in plan:
            commands |= {command, *observation.privileged["admissible_commands"]}  # type: ignore[misc]
            observation = game.step(command).observation
    game.close()
    tasks = PooledTasks({"all": games}, TextWorldGame, workers=2)
    yield Worlds(tasks, starts, plans, sorted(commands))
    asyncio.run(tasks.close())


def make_agent(worlds: Worlds, max_action_tokens: int = 2) -> LanguageModelAgent:
    """Random weights, and a bias towards whole commands and the end token: it says little else. Two tokens are a
    command and its end, or two commands in one; with one token the end is forced."""
    texts = [start.text for start in worlds.starts.values()]
    tokenizer = train_tokenizer(texts, 400, worlds.commands)
    settings = ModelSettings(hidden=32, layers=2, heads=4, kv_heads=2, mlp=64, context=1024)
    model = build_model(settings, tokenizer, seed=0)
    chat = ChatFormat(tokenizer)
    rng = torch.Generator().manual_seed(1)
    head = torch.nn.Linear(32, len(tokenizer))
    with torch.no_grad():
        for weight in (*model.parameters(), head.weight):
            if weight.ndim == 2:
                weight.copy_(0.15 * torch.randn(weight.shape, generator=rng))
        head.bias.zero_()
        head.bias[[chat.encode(command)[0] for command in worlds.commands]] = 7.0
        head.bias[chat.stop] = 7.0 + math.log(len(worlds.commands))
    model.lm_head = head
    return LanguageModelAgent(InProcessEngine(model, 1024), chat, max_action_tokens)


def episodes(worlds: Worlds, seeds: range) -> list[Episode]:
    """Tasks that are played for real, and whose start is the oracle's: one list serves both."""
    return [
        Episode(f"{task.id}/{seed}", Task(task.id, {**task.spec, "start": task.id}), task.id, seed)
        for task in worlds.tasks.tasks("all")
        for seed in seeds
    ]


def assert_same(dreamed: Trajectory, real: Trajectory) -> None:
    """All that happened and every token; only the provenance and the diagnostics of the two worlds may differ."""

    def told(t: Trajectory) -> Trajectory:
        turns = tuple(replace(turn, info={}) for turn in t.turns)
        trace = t.trace and replace(t.trace, versions=())  # the engine's weights were set again in between
        return replace(t, source=Source.REAL, world_model_version=None, turns=turns, trace=trace)

    assert told(dreamed) == told(real)  # trace included: ids, owners, log-probs, turns
    assert (dreamed.source, dreamed.world_model_version) == (Source.DREAM, "oracle")


@pytest.mark.parametrize("max_action_tokens", [1, 2])
def test_a_dreamed_rollout_is_the_real_one_token_for_token(worlds: Worlds, max_action_tokens: int) -> None:
    """One episode at a time, so that log-probs are the same to the last bit."""
    agent = make_agent(worlds, max_action_tokens)
    played = episodes(worlds, range(8))

    async def run() -> tuple[list[Trajectory], list[Trajectory]]:
        oracle, real_env = worlds.oracle(), worlds.tasks.make_env()
        dream_env = DreamEnv(oracle, worlds.starts)
        real = [await play(real_env, agent, episode, REAL, TURNS) for episode in played]
        agent.engine.update_weights()  # type: ignore[attr-defined]
        dreamed = [await play(dream_env, agent, episode, DREAM, TURNS) for episode in played]
        await real_env.close()
        await dream_env.close()
        await oracle.close()
        return real, dreamed

    real, dreamed = asyncio.run(run())
    for a, b in zip(dreamed, real, strict=True):
        assert_same(a, b)
    # the comparison is about something: worlds that answer, and episodes that differ
    assert not any(t.stop.is_failure for t in real)
    turns = [turn for t in real for turn in t.turns]
    assert len(turns) >= 24
    understood = [turn for turn in turns if turn.observation != REFUSAL]
    assert len({turn.observation for turn in understood}) >= 4
    assert len({tuple(turn.action for turn in t.turns) for t in real}) >= 6
    assert all(t.trace is not None and Owner.AGENT in t.trace.owners for t in real)


def test_batches_of_dreams_are_batches_of_real_episodes(worlds: Worlds) -> None:
    """Many at once, on fewer worker processes than episodes: who shares a wave changes at most the last bits."""
    agent = make_agent(worlds)
    played = episodes(worlds, range(10, 15))

    async def run() -> tuple[list[Trajectory], list[Trajectory]]:
        oracle = worlds.oracle()
        real = await play_all(played, worlds.tasks.make_env, agent, REAL, TURNS, concurrency=2)
        agent.engine.update_weights()  # type: ignore[attr-defined]
        dreamed = await play_all(played, lambda: DreamEnv(oracle, worlds.starts), agent, DREAM, TURNS, concurrency=4)
        await oracle.close()
        return real, dreamed

    real, dreamed = asyncio.run(asyncio.wait_for(run(), timeout=60))
    for a, b in zip(dreamed, real, strict=True):
        assert a.trace is not None
        assert b.trace is not None
        mine = [x for x in a.trace.logprobs if x is not None]
        assert mine == pytest.approx([x for x in b.trace.logprobs if x is not None], abs=1e-4)
        assert_same(replace(a, trace=replace(a.trace, logprobs=b.trace.logprobs)), b)


@dataclass(frozen=True)
class Planned:
    """Says what the plan says, then looks around."""

    plan: tuple[str, ...]
    name: str = "planned"

    def start(self, observation: Observation, seed: int) -> PlannedActor:
        return PlannedActor(list(self.plan))


@dataclass
class PlannedActor:
    left: list[str]

    async def act(self) -> str:
        return self.left.pop(0) if self.left else "look"

    def observe(self, observation: Observation) -> None: ...

    def trace(self) -> None:
        return None

    def close(self) -> None: ...


def test_a_plan_that_wins_wins_in_the_dream(worlds: Worlds) -> None:
    """With the same rewards at the same turns, and the world's own end, in one environment after the other."""

    async def run() -> None:
        oracle, real_env = worlds.oracle(), worlds.tasks.make_env()
        dream_env = DreamEnv(oracle, worlds.starts)
        for episode in episodes(worlds, range(1)):
            plan = worlds.plans[episode.task.id]
            for actions in (plan, ["look", *plan], plan[:-1], [plan[0], "frobnicate", *plan[1:]]):
                agent = Planned(tuple(actions))
                real = await play(real_env, agent, episode, REAL, TURNS)
                dreamed = await play(dream_env, agent, episode, DREAM, TURNS)
                assert_same(dreamed, real)
                won = actions[-1] == plan[-1]
                assert real.solved is won
                assert real.stop is (StopReason.TERMINATED if won else StopReason.TURN_LIMIT)
        await real_env.close()
        await dream_env.close()
        await oracle.close()

    asyncio.run(run())


def test_a_branched_dream_goes_on_where_the_log_was(worlds: Worlds) -> None:
    """Its history is replayed, not its rewards: the rest of the plan wins, as it did in the log."""

    async def run() -> None:
        oracle, real_env = worlds.oracle(), worlds.tasks.make_env()
        for episode in episodes(worlds, range(1)):
            plan = worlds.plans[episode.task.id]
            logged = await play(real_env, Planned(tuple(plan)), episode, REAL, TURNS)
            for k in (1, 2):
                start = Start(episode.task.id, logged.start, logged.turns[:k])
                dream_env = DreamEnv(oracle, {"branch": start})
                branched = replace(episode, task=Task(episode.task.id, {"start": "branch"}))
                dreamed = await play(dream_env, Planned(tuple(plan[k:])), branched, DREAM, TURNS)
                assert dreamed.prefix_turns == k
                assert dreamed.stop is StopReason.TERMINATED
                told = [(t.action, t.observation, t.reward, t.terminated) for t in dreamed.own_turns]
                assert told == [(t.action, t.observation, t.reward, t.terminated) for t in logged.turns[k:]]
                await dream_env.close()
        await real_env.close()
        await oracle.close()

    asyncio.run(run())


class BreaksOnce:
    """Its second step of all breaks; like every environment it needs a reset after that."""

    def __init__(self) -> None:
        self.steps, self.resets, self.running = 0, 0, False

    async def reset(self, task: Task, seed: int) -> Observation:
        self.running, self.resets = True, self.resets + 1
        return Observation("START")

    async def step(self, action: str) -> StepResult:
        if not self.running:
            raise RuntimeError("reset first")
        self.steps += 1
        if self.steps == 2:
            self.running = False
            raise EnvFailure(StopReason.ENV_CRASHED, "gone")
        return StepResult(Observation(f"after {action}"), 0.0, False, False)

    async def close(self) -> None: ...


def test_the_oracle_replays_after_a_crash() -> None:
    """The failed dream is typed; the next one of the session does not go on in the world that broke."""
    env = BreaksOnce()

    async def run() -> None:
        oracle = OracleWorldModel(lambda: env, {"START": Task("t")})
        first = Turn("a", (await oracle.predict("START", [], "a", 0, session=1)).observation, 0.0, False)
        with pytest.raises(EnvFailure, match="gone"):
            await oracle.predict("START", [first], "b", 0, session=1)
        again = await oracle.predict("START", [first], "b", 0, session=1)
        assert (again.observation, env.resets) == ("after b", 2)
        await oracle.close()

    asyncio.run(run())
