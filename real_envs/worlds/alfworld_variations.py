"""More training games of ALFWorld out of those that are there: the same room, things elsewhere, another thing to fetch.

Who meets a room in one game learns by heart where its things lie, and knows nothing of the next room. The benchmark has
3,553 training games for that; somebody who has a few hundred makes the rest of them (as domain randomisation does).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from real_envs.seeding import derive_seed
from real_envs.worlds.alfworld_plans import AlfworldGoal, read_goal

_FACT = re.compile(r"\((\w+) ([\w?]+)(?: (\w+))?\s*\)")
_TASK = re.compile(r'Your task is to: [^"\\]*')
_ABLE = {"clean": "cleanable", "heat": "heatable", "cool": "coolable"}


class NoVariation(Exception):
    """Its goal is of no known shape, or nothing else in the room can be asked for."""


def vary(game: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The content of a ``game.tw-pddl`` with each thing in another place that may hold it, half of them in one of the
    same kind, and with a goal of the same shape about other kinds of things; the same each time for the same number.

    Raises:
        NoVariation: there is none.
    """
    init, mark, asked = str(game["pddl_problem"]).partition("(:goal")
    goal = read_goal(mark + asked)
    if goal is None:
        raise NoVariation
    rng, room = random.Random(derive_seed(init, number)), _Room(init)
    for thing in sorted(room.inside.keys() & room.of["pickupable"] - room.of["isReceptacleObject"]):
        there = room.places_for(thing)
        alike = [place for place in there if room.kind[place] == room.kind[room.inside[thing]]]
        if places := alike if rng.random() < 0.5 else there:
            room.inside[thing] = rng.choice(places)

    def placed(fact: re.Match[str]) -> str:
        name, thing, _ = fact.groups()
        if name not in ("inReceptacle", "objectAtLocation") or thing not in room.inside:
            return fact[0]
        place = room.inside[thing]
        return f"({name} {thing} {place if name == 'inReceptacle' else room.at[place]})"

    goals = room.goals(goal)
    if not goals:
        raise NoVariation
    other = dict(zip((goal.thing, goal.place), rng.choice(goals), strict=True))
    words = {old.removesuffix("type"): new.lower().removesuffix("type") for old, new in other.items()}
    asked = re.sub(r"\w+Type\b", lambda kind: other.get(kind[0].lower(), kind[0]), asked)
    grammar = _TASK.sub(lambda task: re.sub(r"\w+", lambda word: words.get(word[0], word[0]), task[0]), game["grammar"])
    return {**game, "pddl_problem": _FACT.sub(placed, init) + mark + asked, "grammar": grammar}


class _Room:
    """Where things are, and what may be where. Kinds are as in the problem, such as ``MugType``."""

    def __init__(self, init: str) -> None:
        self.kind: dict[str, str] = {}
        self.inside: dict[str, str] = {}  # thing -> place
        self.at: dict[str, str] = {}  # place -> location
        self.may: set[tuple[str, str]] = set()  # kind of place, kind of thing
        self.of: dict[str, set[str]] = {name: set() for name in ("pickupable", "isReceptacleObject", *_ABLE.values())}
        for name, first, second in _FACT.findall(init):
            match name:
                case "objectType" | "receptacleType":
                    self.kind[first] = second
                case "inReceptacle":
                    self.inside[first] = second
                case "receptacleAtLocation":
                    self.at[first] = second
                case "canContain":
                    self.may.add((first, second))
                case _ if name in self.of:
                    self.of[name].add(first)

    def places_for(self, thing: str) -> list[str]:
        return sorted(place for place in self.at if (self.kind.get(place), self.kind[thing]) in self.may)

    def goals(self, goal: AlfworldGoal) -> list[tuple[str, str]]:
        """Kinds of things and of places that a goal of this shape could name, and that nothing fulfils yet."""
        able = self.of["pickupable"] & self.of[_ABLE[goal.change]] if goal.change else self.of["pickupable"]
        things = sorted(thing for thing in self.inside if thing in able)
        kinds = sorted({self.kind[thing] for thing in things if self.kind[thing].lower() != goal.lamp})
        kinds = [kind for kind in kinds if sum(self.kind[thing] == kind for thing in things) >= goal.count]
        if goal.lamp:
            return [(kind, "") for kind in kinds]
        there = {(self.kind[thing], self.kind.get(place, "")) for thing, place in self.inside.items()}
        places = sorted({self.kind[place] for place in self.at if place in self.kind})
        pairs = [(kind, place) for kind in kinds for place in places if (place, kind) in self.may]
        return [pair for pair in pairs if pair not in there]
