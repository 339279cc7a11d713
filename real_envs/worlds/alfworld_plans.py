"""What an expert of ALFWorld does next, by rules, from what a player can know: it looks for what it has not seen.

The engine's own planner takes up to five seconds a step, and longer than any limit for one task in six; and it goes
straight to things that nobody has seen, which cannot be imitated. The benchmark has goals of six shapes, and each has
one way: fetch, change, bring.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field

SPOT = "at one spot"  # the fact that begins so names places that one stands before at once
CHANGES = {"isclean": "clean", "ishot": "heat", "iscool": "cool"}
APPLIANCES = {"clean": ("sinkbasintype", "sinktype"), "heat": ("microwavetype",), "cool": ("fridgetype",)}
_TYPE = re.compile(r"\((objecttype|receptacletype) \?\w+ (\w+)\)")


@dataclass(frozen=True, slots=True)
class AlfworldGoal:
    """What a game asks for; types as in its problem, in lower case."""

    thing: str  #: type of what is brought, or held in the light
    place: str = ""
    count: int = 1  #: how many, all in the same place
    change: str = ""  #: ``clean``, ``heat``, ``cool`` or nothing
    lamp: str = ""  #: type of the lamp that is switched on; empty without one


def read_goal(problem: str) -> AlfworldGoal | None:
    """The goal of a ``pddl_problem``; ``None`` for one of another shape."""
    text = problem.lower().partition("(:goal")[2]
    things = [name for kind, name in _TYPE.findall(text) if kind == "objecttype"]
    places = [name for kind, name in _TYPE.findall(text) if kind == "receptacletype"]
    if "(istoggled" in text and len(things) == 2 and not places:
        return AlfworldGoal(things[1], lamp=things[0])
    if not places or len(set(things)) != 1 or len(set(places)) != 1:
        return None
    change = next((word for fact, word in CHANGES.items() if f"({fact} " in text), "")
    return AlfworldGoal(things[0], places[0], len(things), change)


@dataclass
class Facts:
    """A state of the game, indexed.

    Args:
        known: facts as name and arguments, such as ``("inreceptacle", "mug_bar_1", "desk_bar_2")``; others are ignored.
    """

    known: Iterable[Sequence[str]]
    kinds: dict[str, list[str]] = field(default_factory=dict)  # type -> things or places
    inside: dict[str, str] = field(default_factory=dict)  # thing -> place
    at: dict[str, str] = field(default_factory=dict)  # place -> location
    here: str = ""
    held: str = ""
    true: set[tuple[str, str]] = field(default_factory=set)  # of one thing: opened, openable, istoggled, isclean, ...

    def __post_init__(self) -> None:
        for name, *arguments in self.known:
            match name.lower(), arguments:
                case (("objecttype" | "receptacletype"), [thing, kind]):
                    self.kinds.setdefault(kind.lower(), []).append(thing)
                case "inreceptacle", [thing, place]:
                    self.inside[thing] = place
                case "receptacleatlocation", [place, location]:
                    self.at[place] = location
                case "atlocation", [_, location]:
                    self.here = location
                case "holds", [_, thing]:
                    self.held = thing
                case predicate, [thing]:
                    self.true.add((predicate, thing))

    def in_sight(self) -> list[str]:
        """Places whose inside one sees from here."""
        closed = {
            name for predicate, name in self.true if predicate == "openable" and ("opened", name) not in self.true
        }
        return [place for place, location in self.at.items() if location == self.here and place not in closed]

    def of(self, *kinds: str) -> list[str]:
        return sorted(thing for kind in kinds for thing in self.kinds.get(kind, ()))


def count_places(facts: Iterable[str]) -> Counter[tuple[str, str]]:
    """How many things of a kind lie in places of a kind, of facts such as ``desk 1: mug 1, pen 2``."""
    lines = (fact.split(": ", 1) for fact in facts if not fact.endswith(": nothing") and not fact.startswith(SPOT))
    pairs = ((thing, place.removesuffix(" (closed)")) for place, things in lines for thing in things.split(", "))
    return Counter((thing.rpartition(" ")[0], place.rpartition(" ")[0]) for thing, place in pairs)


def search(goal: AlfworldGoal, state: Facts, looked: Set[str], usual: Mapping[tuple[str, str], int]) -> list[str]:
    """What a player does next, in the game's own names: what solves the game or, where the things that he has seen do
    not suffice, a look into another place; nothing where none is left.

    Args:
        looked: places whose inside he has seen.
        usual: see ``count_places``; he looks first where most things of the wanted kind lay in other games.
    """
    known = copy(state)
    known.inside = {thing: place for thing, place in state.inside.items() if place in looked}
    if way := commands(goal, known):
        return way
    others = [place for place in sorted(state.at) if place not in looked]
    if not others:
        return []
    kind_of = {name: kind.removesuffix("type") for kind, names in state.kinds.items() for name in names}
    wanted = [kind.removesuffix("type") for kind in (goal.thing, goal.lamp)]
    writer = _Writer(state)
    writer.open(max(others, key=lambda place: sum(usual.get((thing, kind_of.get(place, "")), 0) for thing in wanted)))
    return writer.said


def commands(goal: AlfworldGoal, state: Facts) -> list[str]:
    """What solves the game from here, in the game's own names; nothing where these rules find no way."""
    writer = _Writer(state)
    wanted = state.of(goal.thing)
    if goal.lamp:
        lamp = next((name for name in state.of(goal.lamp) if name in state.inside), None)
        if lamp is None or not writer.hold(wanted):
            return []
        writer.light(lamp)
        return writer.said
    # where most of them are already, so that two come together
    places = sorted(
        (place for place in state.of(goal.place) if place in state.at),
        key=lambda place: -sum(state.inside.get(thing) == place for thing in wanted),
    )
    if not places:
        return []
    place = places[0]

    def done(thing: str) -> bool:
        changed = not goal.change or (_fact_of(goal.change), thing) in state.true
        return state.inside.get(thing) == place and changed

    missing = goal.count - sum(map(done, wanted))
    left = [thing for thing in wanted if not done(thing)]
    for _ in range(missing):
        thing = writer.hold(left)
        if not thing:
            break  # one of them is brought already
        left.remove(thing)
        if goal.change and (_fact_of(goal.change), thing) not in state.true:
            used = next((name for name in state.of(*APPLIANCES[goal.change]) if name in state.at), None)
            if used is None:
                return []
            writer.go(used)
            writer.say(f"{goal.change} {thing} with {used}")
        writer.put(thing, place)
    return writer.said


def _fact_of(change: str) -> str:
    return next(fact for fact, word in CHANGES.items() if word == change)


class _Writer:
    """Commands one after the other, and where they lead."""

    def __init__(self, state: Facts) -> None:
        self.said: list[str] = []
        self._state, self._here, self._held = state, state.here, state.held
        self._opened = {thing for predicate, thing in state.true if predicate == "opened"}

    def say(self, command: str) -> None:
        self.said.append(command)

    def go(self, place: str) -> None:
        if self._state.at[place] != self._here:
            self._here = self._state.at[place]
            self.say(f"go to {place}")

    def open(self, place: str) -> None:
        self.go(place)
        if ("openable", place) in self._state.true and place not in self._opened:
            self._opened.add(place)
            self.say(f"open {place}")

    def hold(self, wanted: Sequence[str]) -> str:
        """One of these in the hand, what is easiest to have first; nothing where none can be had."""
        if self._held in wanted:
            return self._held
        inside: Mapping[str, str] = self._state.inside
        there = [thing for thing in wanted if inside.get(thing) in self._state.at]
        if not there:
            return ""
        if self._held:
            self._drop()
        thing = min(there, key=lambda name: (("openable", inside[name]) in self._state.true, name))
        self.open(inside[thing])
        self.say(f"take {thing} from {inside[thing]}")
        self._held = thing
        return thing

    def put(self, thing: str, place: str) -> None:
        self.open(place)
        self.say(f"put {thing} in/on {place}")
        self._held = ""

    def light(self, lamp: str) -> None:
        self.go(self._state.inside[lamp])
        self.say(f"use {lamp}")

    def _drop(self) -> None:
        """What is held and not wanted goes back to some place that takes it: one with a thing of its kind or, failing
        that, here."""
        kind_of = {thing: kind for kind, things in self._state.kinds.items() for thing in things}
        held_kind, inside = kind_of.get(self._held), self._state.inside
        like = [place for thing, place in inside.items() if kind_of.get(thing) == held_kind and place in self._state.at]
        here = [place for place, location in self._state.at.items() if location == self._here]
        if places := [*like, *here]:
            self.put(self._held, places[0])
