"""A small world of rooms whose laws are known: what a miner of rules should find, and how often a dream breaks them.

Rooms stand in a row on a grid of two columns. Every text is a function of the state, so whoever knows the words of an
episode knows whether a move is possible and what a room that was seen before looks like.
"""

from __future__ import annotations

import random

from real_envs.trajectory import Source, StopReason, Trajectory, Turn

ROOMS = ("hall", "attic", "cellar", "study", "pantry", "porch", "larder", "den")
THINGS = ("lamp", "key", "rope")
WAYS = {"east": (1, 0), "west": (-1, 0), "north": (0, 1), "south": (0, -1)}
BACK = {"east": "west", "west": "east", "north": "south", "south": "north"}
NO = "You cannot do that."


class RoomsWorld:
    """One task: four rooms on a square grid, a thing in one of them."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        names = rng.sample(ROOMS, 4)
        places = [(0, 0), (1, 0), (0, 1), (1, 1)]
        rng.shuffle(places)
        self.rooms = dict(zip(places[: rng.choice((3, 4))], names, strict=False))
        self.here = next(iter(self.rooms))
        self.thing = rng.choice(THINGS)
        self.lies: tuple[int, int] | None = rng.choice(list(self.rooms))
        self.start = f"Fetch the {self.thing}.\n{self.text()}"

    def exits(self) -> list[str]:
        x, y = self.here
        return [way for way, (dx, dy) in WAYS.items() if (x + dx, y + dy) in self.rooms]

    def text(self) -> str:
        thing = f" There is a {self.thing}." * (self.lies == self.here)
        exits = " ".join(f"To the {way} lies the {self._beside(way)}." for way in self.exits())
        return f"You stand in the {self.rooms[self.here]}.{thing}\n{exits}"

    def _beside(self, way: str) -> str:
        return self.rooms[self.here[0] + WAYS[way][0], self.here[1] + WAYS[way][1]]

    def step(self, action: str) -> tuple[str, float, bool]:
        verb, _, rest = action.partition(" ")
        if action == "look":
            return self.text(), 0.0, False
        if verb == "go" and rest in self.exits():
            self.here = (self.here[0] + WAYS[rest][0], self.here[1] + WAYS[rest][1])
            return self.text(), 0.0, False
        if verb == "take" and rest == self.thing and self.lies == self.here:
            self.lies = None
            return f"Taken: the {rest}.", 1.0, False
        if verb == "drop" and rest == self.thing and self.lies is None:
            self.lies = self.here
            return f"Dropped: the {rest}.", 0.0, False
        return NO, 0.0, False


def rooms_log(tasks: int, episodes: int = 6, turns: int = 14, first: int = 0) -> list[Trajectory]:
    """Random agents in ``tasks`` tasks, from task number ``first`` on."""
    log: list[Trajectory] = []
    for task in range(first, first + tasks):
        for k in range(episodes):
            world, rng = RoomsWorld(task), random.Random(task * 1000 + k)
            played: list[Turn] = []
            start = world.start
            for _ in range(turns):
                action = _random_action(rng, world)
                observation, reward, end = world.step(action)
                played.append(Turn(action, observation, reward, end))
            facts = (f"rooms-{task}/{k}", f"rooms-{task}", f"rooms-{task}", Source.REAL, "random", k, start)
            log.append(Trajectory(*facts, tuple(played), StopReason.TURN_LIMIT))
    return log


def _random_action(rng: random.Random, world: RoomsWorld) -> str:
    kind = rng.random()
    if kind < 0.5:
        return f"go {rng.choice(list(WAYS))}"
    if kind < 0.6:
        return "look"
    if kind < 0.8:
        return f"take {rng.choice(THINGS) if rng.random() < 0.4 else world.thing}"
    if kind < 0.92:
        return f"drop {rng.choice(THINGS) if rng.random() < 0.4 else world.thing}"
    return rng.choice(("sing", "sing loudly", "jump"))
