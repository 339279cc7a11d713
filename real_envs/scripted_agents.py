"""Scripted agents of many skills, whose episodes are the logs that world models and first policies learn from.

A world model meets, in its dreams, what a weak policy tries: the right verb with the wrong object, a step too early, a
word too few. It can only answer those truthfully if the logs hold such mistakes together with the world's answers.

Agents read ``Observation.privileged`` (see ``real_envs.worlds.generated.hints``), which no learned policy sees.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from real_envs.env import Actor, Agent
from real_envs.seeding import derive_seed
from real_envs.trajectory import Observation

_PREPOSITIONS = frozenset({"from", "on", "into", "with"})
_STRANGE_NOUNS = ("sword", "lantern", "window", "ladder", "coin", "dragon", "cabinet", "rope", "letter", "thing")
_GARBLES = ("drop", "double", "swap", "noun", "cut", "behead", "preposition", "glue", "splice", "splice", "echo")
_IDLE = re.compile(r"(examine|look|inventory)\b")


@dataclass(frozen=True, slots=True)
class CommandGrammar:
    """How a world is spoken to, for agents that make plausible mistakes in it."""

    # commands with their weights; ``{a}`` and ``{b}`` are names of things, ``{d}`` a direction. Most are what the
    # world's own commands look like; some are other ways of speaking, which it may not understand.
    forms: Mapping[str, float]
    directions: tuple[str, ...] = ("north", "south", "east", "west")
    look: str = "look"  # a command that is always understood and changes nothing

    @classmethod
    def of(cls, forms: str, **others: Any) -> CommandGrammar:
        """``5 take {a} | 0.5 look``: weights and commands."""
        parts = (part.strip().partition(" ") for part in forms.split("|"))
        return cls({command: float(weight) for weight, _, command in parts}, **others)


INFORM = CommandGrammar.of(
    "4 open {a} | 4 close {a} | 5 take {a} | 4 take {a} from {b} | 3 drop {a} | 4 put {a} on {b} | "
    "4 insert {a} into {b} | 4 unlock {a} with {b} | 2 lock {a} with {b} | 5 go {d} | 2 examine {a} | "
    "1 eat {a} | 0.5 look | 0.5 inventory | 0.5 unlock {a} | 0.3 take all | 0.3 use {a} on {b} | "
    "0.3 go to {a} | 0.3 look in {a} | 0.3 pick up {a}"
)


@dataclass(frozen=True, slots=True)
class Habits:
    """How often, in an episode, an actor does what; the rest of the time it follows the plan. They total at most 1."""

    valid: float = 0.0  # a random command that the world accepts
    near_miss: float = 0.0  # a plausible command that it does not
    garbled: float = 0.0  # a command with words too many, too few, wrong, or run together
    elsewhere: tuple[str, ...] = ()  # commands that are right in other worlds, some of which it tries here


@dataclass(frozen=True, slots=True)
class ScriptedAgent:
    """Follows the simulator's plan and errs with probability ``p``; random valid commands where there is no plan.

    With ``up_to``, each episode draws its own probability between the two, so that one agent logs many skills.
    """

    name: str
    p: float
    errors: Habits  # of which kinds its errors are; the shares total 1
    up_to: float | None = None
    language: CommandGrammar = INFORM

    def start(self, observation: Observation, seed: int) -> Actor:
        rng = random.Random(derive_seed(self.name, seed))
        p, errors = self.p if self.up_to is None else rng.uniform(self.p, self.up_to), self.errors
        habits = Habits(p * errors.valid, p * errors.near_miss, p * errors.garbled, errors.elsewhere)
        return ScriptedActor(observation, habits, rng, self.language)


def expert(language: CommandGrammar = INFORM) -> ScriptedAgent:
    """Follows the plan."""
    return ScriptedAgent("expert", 0.0, Habits(), language=language)


def explorer(language: CommandGrammar = INFORM) -> ScriptedAgent:
    """Random valid commands, rather ones not yet tried and rather not looking around once more."""
    return ScriptedAgent("random", 1.0, Habits(valid=1.0), language=language)


def noisy(p: float, up_to: float | None = None, language: CommandGrammar = INFORM) -> ScriptedAgent:
    """Half its errors are valid detours, half plausible mistakes."""
    return ScriptedAgent(_name("noisy", p, up_to), p, Habits(1 / 2, 3 / 8, 1 / 8), up_to, language)


def careless(
    p: float, up_to: float | None = None, elsewhere: Sequence[str] = (), language: CommandGrammar = INFORM
) -> ScriptedAgent:
    """Hardly any of its errors is a valid command: logs of what does not work.

    A policy that learns many tasks confuses them; ``elsewhere`` are commands of other tasks, for it to do the same.
    """
    return ScriptedAgent(_name("careless", p, up_to), p, Habits(0.1, 0.55, 0.35, tuple(elsewhere)), up_to, language)


def mixture(elsewhere: Sequence[str] = (), language: CommandGrammar = INFORM) -> tuple[tuple[Agent, float], ...]:
    """Agents and their shares (total 1) for logs that hold solved, clumsy and hopeless episodes alike.

    The middle one, ``noisy-0.2-0.6``, is the mediocre agent that a starting policy may be cloned from; those below it
    fail as such a policy will, so that a world model has seen what happens then.
    """
    return (
        (expert(language), 0.08),
        (noisy(0.2, 0.6, language), 0.35),
        (noisy(0.6, 1.0, language), 0.15),
        (careless(0.3, 0.95, elsewhere, language), 0.3),
        (explorer(language), 0.12),
    )


def deal(shares: Sequence[tuple[Agent, float]], episodes: int, seed: int) -> list[Agent]:
    """An agent for each episode, in random order; each agent has its share, exact up to one episode.

    Raises:
        ValueError: the shares do not total 1.
    """
    if abs(sum(share for _, share in shares) - 1.0) > 1e-6:
        raise ValueError(f"shares must total 1, got {[share for _, share in shares]}")
    dealt: list[Agent] = []
    total = 0.0
    for agent, share in shares:  # rounding the running total keeps the sum exact
        total += share
        dealt += [agent] * (round(total * episodes) - len(dealt))
    random.Random(seed).shuffle(dealt)
    return dealt


class ScriptedActor:
    """A function of the observations and the generator's seed.

    Raises:
        ValueError: an observation lacks what only the simulator knows.
    """

    def __init__(
        self, observation: Observation, habits: Habits, rng: random.Random, language: CommandGrammar = INFORM
    ) -> None:
        self._habits = habits
        self._rng = rng
        self._language = language
        self._tried: list[str] = []
        self._seen: list[str] = []  # names read in this episode; the others exist, but the actor has not met them
        self.observe(observation)

    def observe(self, observation: Observation) -> None:
        self._valid = _names(observation, "admissible_commands")
        self._plan = _names(observation, "policy_commands")
        self._entities = _names(observation, "entities")
        self._text = observation.text
        text = f"{observation.text} {observation.privileged.get('inventory', '')}".lower()
        self._seen += [name for name in self._entities if name not in self._seen and name.lower() in text]

    async def act(self) -> str:
        command = self._choose()
        self._tried.append(command)
        return command

    def trace(self) -> None:
        """``None``: no tokens."""
        return None

    def close(self) -> None: ...

    def _choose(self) -> str:
        draw, habits = self._rng.random(), self._habits
        if draw < habits.garbled:
            # half of them begin as what should come next: there a world model that overlooks the mistake does most harm
            other = self._rng.choice((self._random_valid(), self._near_miss()))
            command, other = (self._next(), other) if self._rng.random() < 0.5 else (other, self._next())
            return garble(command, self._rng, other, self._text)
        if draw < habits.garbled + habits.near_miss:
            return self._near_miss()
        if draw < habits.garbled + habits.near_miss + habits.valid:
            return self._random_valid()
        return self._next()

    def _next(self) -> str:
        return self._plan[0] if self._plan else self._random_valid()

    def _random_valid(self) -> str:
        weights = [(0.2 if _IDLE.match(c) else 1.0) * (0.3 if c in self._tried else 1.0) for c in self._valid]
        return self._rng.choices(self._valid, weights)[0] if self._valid else self._language.look

    def _near_miss(self) -> str:
        """A plausible command that is not admissible here, unless eight draws in a row give none."""
        command = self._language.look
        for _ in range(8):
            command = self._plausible()
            if command not in self._valid:
                break
        return command

    def _plausible(self) -> str:
        if self._habits.elsewhere and self._rng.random() < 0.2:
            return self._rng.choice(self._habits.elsewhere)
        kind = self._rng.random()
        if kind < 0.25 and len(self._plan) > 1:
            return self._rng.choice(self._plan[1:])  # too early: the key not fetched, the door not opened
        if kind < 0.35 and self._tried:
            return self._rng.choice(self._tried)  # done already: taking what is held, opening what is open
        if kind < 0.65:
            return self._with_another_thing(self._next() if self._rng.random() < 0.6 else self._random_valid())
        forms, directions = self._language.forms, self._language.directions
        form = self._rng.choices(list(forms), list(forms.values()))[0]
        thing, other = self._thing(), self._thing()
        return form.format(a=thing, b=other, d=self._rng.choice(directions) if directions else "")

    def _with_another_thing(self, command: str) -> str:
        """The right verb with the wrong object: one of the command's names or directions replaced."""
        named = [name for name in self._entities if re.search(rf"\b{re.escape(name)}\b", command)]
        if named:
            # The longest first: "box key" must not become "chest key" because there is a box.
            return command.replace(self._rng.choice(sorted(named, key=len)[-2:]), self._thing(), 1)
        verb, _, rest = command.partition(" ")
        directions = self._language.directions
        return f"{verb} {self._rng.choice(directions)}" if rest in directions else f"{verb} {self._thing()}"

    def _thing(self) -> str:
        """A name, mostly of something met in this episode."""
        if self._seen and self._rng.random() < 0.8:
            return self._rng.choice(self._seen)
        return self._rng.choice(self._entities or _STRANGE_NOUNS)


def garble(command: str, rng: random.Random, other: str = "look", seen: str = "") -> str:
    """A command as a weak language model gets it wrong, sometimes in two ways at once.

    Words dropped, doubled, swapped, replaced or run together, the end or the beginning cut off; or the beginning
    goes on as the end of itself, of ``other`` (what the agent could have meant), or of ``seen`` (what was just
    read).
    """
    garbled = _garble_once(command, rng, other, seen)
    return _garble_once(garbled, rng, other, seen) if rng.random() < 0.3 else garbled


def _garble_once(command: str, rng: random.Random, other: str, seen: str) -> str:
    words = command.split()
    at = rng.randrange(len(words))
    kind = rng.choice(_GARBLES)
    if kind == "preposition" and (places := [i for i, word in enumerate(words) if word in _PREPOSITIONS]):
        i = rng.choice(places)
        words[i : i + 1] = rng.choice(([], [rng.choice(sorted(_PREPOSITIONS))]))
    elif kind == "drop" and len(words) > 1:
        del words[at]
    elif kind == "swap" and len(words) > 1:
        at = rng.randrange(len(words) - 1)
        words[at], words[at + 1] = words[at + 1], words[at]
    elif kind == "noun" and len(words) > 1:
        words[rng.randrange(1, len(words))] = rng.choice(_STRANGE_NOUNS)
    elif kind == "cut" and len(command) > 1:
        return command[: rng.randrange(1, len(command))].strip()
    elif kind == "behead" and len(command) > 1:
        return command[rng.randrange(1, len(command)) :].strip()
    elif kind == "glue" and at:
        words[at - 1 : at + 1] = [words[at - 1] + words[at]]
    elif kind == "glue":
        words[at] += words[at]
    elif kind in ("splice", "echo"):
        source = (seen if kind == "echo" else rng.choice((other, command))).split() or ["look"]
        begin = rng.randrange(len(source))
        tail = source[begin : begin + rng.randint(1, 4)] if kind == "echo" else source[begin:]
        return rng.choice((" ", "")).join([" ".join(words[: at + 1]), " ".join(tail)])
    else:
        words.insert(at, words[at])
    return " ".join(words)


def _name(kind: str, p: float, up_to: float | None) -> str:
    return f"{kind}-{p:g}" if up_to is None else f"{kind}-{p:g}-{up_to:g}"


def _names(observation: Observation, key: str) -> list[str]:
    names = observation.privileged.get(key)
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise ValueError(f"scripted agents need privileged {key!r}: make the environment with privileged=True")
    return [str(name) for name in names]
