"""New tasks drawn from those of BFCL: other names and numbers in state, requests and true calls alike.

What is drawn is kept only where the APIs answer the true calls as they answer the original's, but for those names and
for numbers, and where the new names of a call were shown to the agent before it.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from real_envs.calls import parse_call
from real_envs.seeding import derive_seed
from real_envs.worlds.bfcl_tasks import NAMES, BfclTask, Package, names_below, texts_below

_NUMBER = r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])"
_TOKEN = re.compile(rf"{_NUMBER}|[A-Za-z0-9]+")
_WHOLE = re.compile(_NUMBER)
_LEAST = 32.0  # smaller numbers count, rank and say on or off
_KEPT = 0.8  # share of the names of a task that are replaced
_MOST = 36  # spellings replaced in a task
_COMMON = 0.06  # words of more requests than that are the language's own
WORDS = (  # noqa: SIM905
    "amber anchor arbor aspen autumn badge bamboo barley basil beacon birch breeze bridge bronze cactus canvas canyon "
    "carbon castle cedar cherry citrus clover cobalt comet copper coral cotton crane crystal cypress dahlia delta "
    "denim dune ebony echo elm ember falcon fern fjord flint forest fossil frost garnet ginger glacier granite grove "
    "harbor hazel heron hickory indigo iris island ivory jade jasmine juniper kelp lagoon lantern laurel lemon lilac "
    "linden lotus magnet mango maple marble meadow mesa mint mirror moss nectar nickel nutmeg oasis olive onyx opal "
    "orbit orchid osprey otter pebble pepper pine planet plume poplar prairie prism quartz quill raven reed ridge "
    "river robin saffron sage salmon sierra silver sorrel spruce summit sycamore tango teal thistle timber topaz "
    "tulip tundra umber valley velvet violet walnut willow winter zephyr zinc "
).split()


HELD_OUT = WORDS[::3]  #: names that only held-out states are drawn with


class DrawnTasks:
    """Draws tasks from those of a package."""

    def __init__(self, package: Package) -> None:
        self._package = package

    @cached_property
    def reserved(self) -> frozenset[str]:
        """Words that mean something to the APIs, or stand in many requests, in lower case."""
        words = {"true", "false", "none"}
        for schemas in self._package.schemas.values():
            for tool, schema in schemas.items():
                named = [tool, *schema["properties"]]
                named += [str(value) for s in schema["properties"].values() for value in s.get("enum", ())]
                words.update(word for name in named for word in _TOKEN.findall(name.lower()))
        tasks = self._package.originals("base")
        for task in tasks:
            words.update(key.lower() for value in task.config.values() for key in _fields(value))
            words.update(str(v).lower() for v in texts_below(task.config.get("VehicleControlAPI", {})))
        requests = Counter(
            word for t in tasks for word in {w.lower() for turn in t.turns for w in _TOKEN.findall(turn.request)}
        )
        return frozenset(words | {word for word, n in requests.items() if n > _COMMON * len(tasks) and word.islower()})

    @cached_property
    def of_training(self) -> list[str]:
        """Names for states to learn from where others are held out: the words of all requests, and what is left of
        ours. From a hundred names, which ours are, a model learns the names and not to copy them.
        """
        requests = (turn.request for task in self._package.originals("base") for turn in task.turns)
        words = {word for text in requests for word in re.findall(r"\b[a-z]{4,10}\b", text)}
        return sorted((words - self.reserved).union(WORDS) - set(HELD_OUT))

    def draw(self, task: BfclTask, seed: int, words: Sequence[str] = WORDS) -> BfclTask | None:
        """Another task in place of an original one; ``None`` where nothing of it could be replaced."""
        rng = random.Random(derive_seed("BFCL state", seed))
        answers = self._package.replay(task).answers
        candidates = [name for name in _candidates(task, self.reserved) if rng.random() < _KEPT]
        if not all(_shown(task, answers, lambda token: _value(token) >= _LEAST)):
            candidates = [name for name in candidates if not _WHOLE.fullmatch(name)]  # a call's number is worked out
        rng.shuffle(candidates)
        written = set(_TOKEN.findall(task.write().lower()))
        free = [word for word in words if word not in written]
        names: dict[str, str] = {}
        drawn = None
        for candidate in candidates:
            if len(names) >= _MOST:
                break
            trial = {**names, **_renamed(candidate, rng, free)}
            made = self._holds(task, answers, trial)
            if made is not None:
                names, drawn = trial, made
                free = [word for word in free if word not in names.values()]
        return drawn

    def _holds(self, task: BfclTask, answers: list[list[str]], names: Mapping[str, str]) -> BfclTask | None:
        """The task with these names, where the APIs answer as before and each new name of a call was shown."""
        made = _written(task, names)
        apis = self._package.load(made)
        values: dict[float, str] = {}  # numbers of the original's answers, as they are here
        turns, given = [], []
        for turn, before in zip(made.turns, answers, strict=True):
            calls, new_answers = [], []
            for text, answer in zip(turn.calls, before, strict=True):
                call = _TOKEN.sub(lambda match: values.get(_value(match[0]), match[0]), text)
                calls.append(call)
                new_answers.append(apis.answer(parse_call(call)))
                expected = _sub(answer, names)
                if _WHOLE.sub("0", new_answers[-1]) != _WHOLE.sub("0", expected):
                    return None
                pairs = zip(_WHOLE.findall(answer), _WHOLE.findall(new_answers[-1]), strict=True)
                values.update({_value(old): new for old, new in pairs if old != new and _sub(old, names) == old})
            turns.append(replace(turn, calls=tuple(calls)))
            given.append(new_answers)
        made = replace(made, turns=tuple(turns))
        new = {name.lower() for name in names.values()} | set(values.values())
        return made if all(_shown(made, given, lambda token: token.lower() in new)) else None


def _fields(value: Any, names: bool = False) -> Iterator[str]:
    """Keys of a state that are no names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not names and not key.isdigit():
                yield key
            yield from _fields(inner, key in NAMES)


def _candidates(task: BfclTask, reserved: frozenset[str]) -> list[str]:
    """Words of the names and true calls of a task, and numbers of these and of its state, that may be replaced."""
    texts = [text for value in task.config.values() for text in [*names_below(value), *texts_below(value)]]
    texts = [text for text in texts if len(text) <= 40]
    texts += [call.partition("(")[2] for turn in task.turns for call in turn.calls]
    words = [match[0] for text in texts for match in _TOKEN.finditer(text) if text[match.start() - 1] != "."]
    numbers = _WHOLE.findall(json.dumps(task.config))
    return [token for token in dict.fromkeys([*words, *numbers]) if _replaceable(token, reserved)]


def _replaceable(token: str, reserved: frozenset[str]) -> bool:
    if _WHOLE.fullmatch(token):
        return _value(token) >= _LEAST and not _is_year(_value(token))
    ticker = token.isupper() and 2 < len(token) < 6
    return token.lower() not in reserved and len(token) >= (3 if ticker or not token.isalpha() else 4)


def _is_year(value: float) -> bool:
    return 1900 <= value <= 2100


def _renamed(token: str, rng: random.Random, words: list[str]) -> dict[str, str]:
    """Another name of the same shape, with its spellings."""
    if _WHOLE.fullmatch(token):
        return {token: _number(token, rng)}
    if token.isalpha() and not token.isupper():
        word = rng.choice(words)
    else:
        letters = {"a": "bcdfghjklmnpqrstvwxz", "A": "BCDFGHJKLMNPQRSTVWXZ", "0": "123456789"}
        kinds = ("A" if c.isupper() else "a" if c.isalpha() else "0" for c in token)
        drawn = "".join(rng.choice(letters[kind]) for kind in kinds)
        if not token.isalpha():
            return {token: drawn}
        word = drawn.lower()
    spellings = {token.lower(): word, token.capitalize(): word.capitalize(), token.upper(): word.upper()}
    return {**spellings, token: spellings.get(token, word)}


def _number(token: str, rng: random.Random) -> str:
    """Another number of about the same size, with as many decimals and zeros at its end."""
    plain = token.replace(",", "")
    whole, _, decimals = plain.partition(".")
    if int(decimals or 0):
        return f"{float(plain) * rng.uniform(0.7, 1.3):.{len(decimals)}f}"
    step = 10 ** max(0, len(whole) - len(whole.rstrip("0")) - 1)
    drawn = max(int(_LEAST), round(int(whole) * rng.uniform(0.7, 1.3) / step) * step)
    return str(drawn + 300 if _is_year(drawn) else drawn)


def _value(token: str) -> float:
    """The number that a token is; -1 for a word."""
    return float(token.replace(",", "")) if _WHOLE.fullmatch(token) else -1.0


def _sub(text: str, names: Mapping[str, str]) -> str:
    """With the new names; numbers are recognised by their value and keep their way of being written."""
    values = {_value(old): new for old, new in names.items() if _value(old) >= 0}

    def written(match: re.Match[str]) -> str:
        token = match[0]
        new = values.get(_value(token)) if _WHOLE.fullmatch(token) else names.get(token)
        if new is None:
            return token
        if "," in token:
            new = f"{float(new):,.0f}" if float(new).is_integer() else f"{float(new):,}"
        return f"{new}{'.' + '0' * len(token.partition('.')[2]) if '.' in token and '.' not in new else ''}"

    return _TOKEN.sub(written, text)


def _written(task: BfclTask, names: Mapping[str, str]) -> BfclTask:
    turns = [
        replace(t, request=_sub(t.request, names), calls=tuple(_in_call(call, names) for call in t.calls))
        for t in task.turns
    ]
    return replace(task, config=json.loads(_sub(json.dumps(task.config), names)), turns=tuple(turns))


def _in_call(call: str, names: Mapping[str, str]) -> str:
    tool, bracket, arguments = call.partition("(")
    return tool + bracket + _sub(arguments, names)


def _shown(task: BfclTask, answers: list[list[str]], asked: Callable[[str], bool]) -> Iterator[bool]:
    """Whether each token of a call that is asked for stands in a request or an answer before it."""
    seen: set[str] = set()
    values: set[float] = set()

    def see(text: str) -> None:
        for token in _TOKEN.findall(text):
            seen.add(token.lower())
            values.add(_value(token))

    for turn, of_turn in zip(task.turns, answers, strict=True):
        see(turn.request)
        for call, answer in zip(turn.calls, of_turn, strict=True):
            for token in filter(asked, _TOKEN.findall(call.partition("(")[2])):
                yield _value(token) in values if _value(token) >= 0 else token.lower() in seen
            see(answer)
