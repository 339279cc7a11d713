"""Dreams of which one part is true: which answers come from the real environment."""

import asyncio

import pytest

from real_envs.env import StepResult, Task
from real_envs.trajectory import Observation, Turn
from tests.benchmarks.partly_true import PartlyTrue, Truth
from worldmodel.rules.refusals import Refusals
from worldmodel.world_model import Prediction

REAL = {"go north": ("Attic", 0.0, False), "look": ("Hall", 0.0, False), "win": ("Won", 1.0, True)}
REAL["jump"] = ("No.", 0.0, False)


class Env:
    opened = 0

    async def reset(self, task, seed):
        return Observation(task.spec["start"])

    async def step(self, action):
        text, reward, end = REAL[action]
        return StepResult(Observation(text), reward, end, False)

    async def close(self):
        Env.opened -= 1


class Tasks:
    def make_env(self):
        Env.opened += 1
        return Env()


class Model:
    version, engines, temperature = "dream", (), 1.0

    def __init__(self, text, reward=0.5):
        self.text, self.reward = text, reward

    async def predict(self, start, history, action, seed, session=None):
        return Prediction(self.text, self.reward, False, 0.3, 0.4)


def predicted(part, text, action):
    truth = Truth(Tasks(), {"Hall": Task("t", {"start": "Hall"})})
    world = PartlyTrue(Model(text), part, truth, Refusals(frozenset({"No."})))
    history = [Turn("go north", "Cellar", 0.0, False)]  # dreamed; the real game shows the attic there
    answer = asyncio.run(world.predict("Hall", history, action, 0))
    assert Env.opened == 0
    return answer.observation, answer.reward, answer.terminated


@pytest.mark.parametrize(
    ("part", "text", "action", "expected"),
    [
        ("outcomes", "Lost", "win", ("Lost", 1.0, True)),
        ("refusals", "Lost", "win", ("Lost", 0.5, False)),
        ("refusals", "No.", "win", ("Won", 1.0, True)),  # refused in the dream alone
        ("refusals", "Yes", "jump", ("No.", 0.0, False)),  # refused in the real game alone
        ("seen", "Cellar", "win", ("Won", 1.0, True)),  # the dream has shown it
        ("seen", "Garden", "look", ("Hall", 0.0, False)),  # the real game has shown it
        ("seen", "Garden", "win", ("Garden", 0.5, False)),
        ("new", "Garden", "win", ("Won", 1.0, True)),
        ("new", "No.", "jump", ("No.", 0.5, False)),
    ],
)
def test_one_part_of_the_answers_is_the_real_environments(part, text, action, expected):
    assert predicted(part, text, action) == expected
