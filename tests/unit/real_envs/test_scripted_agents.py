from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from real_envs.env import Agent, Task
from real_envs.scripted_agents import careless, deal, expert, explorer, garble, mixture, noisy
from real_envs.trajectory import Observation
from real_envs.worlds.textworld import REFUSAL, TextWorldGame
from tests.support.refusal import refused

AGENTS: list[Agent] = [expert(), noisy(0.3), noisy(0.1, 0.6), careless(0.6), explorer()]


def episode(
    agent: Agent, game: TextWorldGame, task: Task, seed: int, turns: int = 25
) -> tuple[list[str], list[str], float]:
    """Commands, what the world answered, and the total reward."""

    async def run() -> tuple[list[str], list[str], float]:
        observation = game.reset(task)
        actor = agent.start(observation, seed)
        commands, answers, total = [], [], 0.0
        for _ in range(turns):
            commands.append(await actor.act())
            result = game.step(commands[-1])
            actor.observe(result.observation)
            answers.append(result.observation.text)
            total += result.reward or 0.0
            if result.terminated:
                break
        assert actor.trace() is None
        return commands, answers, total

    return asyncio.run(run())


@pytest.fixture(scope="module")
def game() -> TextWorldGame:
    return TextWorldGame(privileged=True)


def test_expert_solves_every_game_by_the_shortest_way(games: list[Task], game: TextWorldGame) -> None:
    for task in games:
        commands, _, total = episode(expert(), game, task, 0)
        assert len(commands) == 3
        assert total == 1.0


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_episode_is_a_function_of_the_seed(agent: Agent, games: list[Task], game: TextWorldGame) -> None:
    assert episode(agent, game, games[0], 3) == episode(agent, game, games[0], 3)
    if agent.name != "expert":
        assert len({tuple(episode(agent, game, games[0], seed)[0]) for seed in range(4)}) > 1


def test_careless_agents_log_many_kinds_of_refusal_and_sometimes_win(games: list[Task], game: TextWorldGame) -> None:
    """A world model can only learn the answers to mistakes that the logs hold."""
    wins, answers = 0.0, Counter[str]()
    invalid = steps = 0
    for seed in range(30):
        task = games[seed % 2]
        observation = game.reset(task)
        actor = careless(0.7).start(observation, seed)
        for _ in range(15):
            admissible = observation.privileged["admissible_commands"]
            assert isinstance(admissible, list)
            command = asyncio.run(actor.act())
            steps += 1
            invalid += command not in admissible
            result = game.step(command)
            observation = result.observation
            actor.observe(observation)
            if command not in admissible:
                answers[observation.text] += 1
            wins += result.reward or 0.0
            if result.terminated:
                break
    assert 0.45 < invalid / steps < 0.75  # 0.9 of 0.7, less the garbled ones that happen to be valid
    assert len(answers) > 20
    assert answers[REFUSAL] < 0.25 * invalid  # most mistakes are plausible, not gibberish
    assert 5 <= wins < 30


def test_skill_is_drawn_per_episode(games: list[Task], game: TextWorldGame) -> None:
    lengths = [len(episode(noisy(0.0, 0.9), game, games[0], seed)[0]) for seed in range(12)]
    assert min(lengths) == 3
    assert max(lengths) > 6


def test_deal_gives_each_agent_its_share() -> None:
    dealt = Counter(agent.name for agent in deal(mixture(), 40, seed=1))
    assert sorted(dealt.values()) == [3, 5, 6, 12, 14]  # 8, 12, 15, 30 and 35 % of 40, running total rounded
    assert sum(Counter(agent.name for agent in deal(mixture(), 7, seed=1)).values()) == 7
    names = [[agent.name for agent in deal(mixture(), 40, seed=seed)] for seed in (1, 1, 2)]
    assert names[0] == names[1] != names[2]
    refused(lambda: deal([(expert(), 0.5)], 4, 0), "total 1", error=ValueError)


def test_garbled_commands_are_never_empty_and_mostly_differ() -> None:
    rng = random.Random(0)
    garbled = [garble("unlock red box with red key", rng) for _ in range(200)]
    assert all(garbled)
    assert sum(command != "unlock red box with red key" for command in garbled) > 180
    assert all(garble("look", rng) for _ in range(50))


@pytest.mark.parametrize(
    "mistake",
    [
        "unlock red boxwith red key",  # words run together
        "unlock red box withwith red key",  # goes on as the end of itself
        "unlock red box from table",  # as another command
        "unlock red box lies a lamp",  # as what was read
        "red box with red key",  # without its beginning
    ],
)
def test_garbled_commands_hold_what_language_models_get_wrong(mistake: str) -> None:
    rng = random.Random(0)
    garbled = {
        garble("unlock red box with red key", rng, "take red key from table", "Here lies a lamp") for _ in range(5000)
    }
    assert mistake in garbled


def test_careless_agents_confuse_worlds_only_where_they_know_others(games: list[Task], game: TextWorldGame) -> None:
    foreign = "pour tea into the samovar"
    agents = [careless(0.9, elsewhere=(foreign,)), careless(0.9), noisy(0.9)]
    tried = [Counter(c for seed in range(10) for c in episode(agent, game, games[0], seed)[0]) for agent in agents]
    assert tried[0][foreign] > 5
    assert tried[1][foreign] == tried[2][foreign] == 0
    assert {agent.name for agent, _ in mixture((foreign,))} == {agent.name for agent, _ in mixture()}


def test_agents_say_what_they_lack() -> None:
    refused(lambda: explorer().start(Observation("a room"), 0), "privileged=True", error=ValueError)
