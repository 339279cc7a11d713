"""A toy world for ``trl_iteration``: animals come by one after the other, and each eats one thing only.

Plain Python, so that either side wraps it in its own way. Which food is right has to be learned, one fact per animal.
What is seen next tells what happened, so episodes of a group differ from their first different answer on.
"""

from __future__ import annotations

import random

TURNS = 5
MAX_ACTION_TOKENS = 12
DIET = {
    "otter": "river trout",
    "panda": "bamboo leaf",
    "camel": "thorn bush",
    "heron": "green frog",
    "koala": "gum branch",
    "lemur": "ripe mango",
    "moose": "pond weed",
    "tapir": "palm shoot",
    "walrus": "grey clam",
    "badger": "earth worm",
    "gibbon": "wild fig",
    "ibex": "alpine herb",
}
FOODS = sorted(DIET.values())
_WEATHER = ("It is warm and dry.", "A light rain falls.", "Fog lies on the paths.", "The wind comes from the sea.")


class Zoo:
    """One episode: five different animals, a fifth of the reward for each that gets what it eats."""

    def __init__(self) -> None:
        self._animals: list[str] = []
        self._weather: list[str] = []
        self._turn = 0

    def reset(self, seed: int) -> str:
        """The first observation; the seed draws animals and weather."""
        chance = random.Random(f"zoo/{seed}")
        self._animals = chance.sample(sorted(DIET), TURNS)
        self._weather = [chance.choice(_WEATHER) for _ in range(TURNS)]
        self._turn = 0
        return f"You are the keeper of a small zoo and have a cart of food. {self._scene()}"

    def step(self, action: str) -> tuple[str, float, bool]:
        """Observation, reward and whether the day is over."""
        animal = self._animals[self._turn]
        right = action.strip() == answer(animal)
        after = f"The {animal} eats it all and is glad." if right else f"The {animal} turns away and stays hungry."
        self._turn += 1
        done = self._turn == TURNS
        scene = "The day is over." if done else self._scene()
        return f"{after} {scene}", (1.0 / TURNS if right else 0.0), done

    def _scene(self) -> str:
        return f"{self._weather[self._turn]} Here comes the {self._animals[self._turn]}. What do you give?"

    @property
    def animal(self) -> str:
        """Who waits for food; only the teacher of the clone looks."""
        return self._animals[self._turn]


def answer(animal: str) -> str:
    """The action that is right for an animal."""
    return DIET[animal]


def task_seed(seed: int, update: int, group: int) -> int:
    """The world that a group plays in: the same for both sides."""
    return (seed * 10_007 + update) * 1009 + group
