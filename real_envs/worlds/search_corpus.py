"""A corpus of short articles on invented people, places, organisations and works, and questions of several hops.

Everything is drawn by a seed. A thing is of one fold, and so is all that is said of it: no answer and no link of a
chain is in two folds, while a search meets articles of all of them. Names share words, so that searches list others,
too. Some things have an older article beside a newer one, with a year in both titles; where they contradict, the newer
one holds.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from real_envs.seeding import derive_seed

FOLDS = ("train",) * 7 + ("dev",) + ("test",) * 2  # of ten things or answers in a row
KINDS = {"country": 0.04, "city": 0.2, "organisation": 0.16, "person": 0.36, "book": 0.12, "film": 0.12}
LEAST_WORDS = 30  # of an article
MOST_ENTITIES = 2500  # of which there are names


class Article(NamedTuple):
    title: str
    text: str


class Fact(NamedTuple):
    """``shown`` is the value as the article of that title and year writes it: its name or an alias."""

    subject: str
    relation: str
    value: str
    shown: str
    title: str
    year: int


class Hop(NamedTuple):
    """``query`` finds the article of that title, which shows what comes next."""

    query: str
    title: str
    shown: str


class Question(NamedTuple):
    text: str
    answers: tuple[str, ...]
    hops: tuple[Hop, ...] = ()


class Relation(NamedTuple):
    value: str  # its kind
    sentences: tuple[str, ...]
    phrases: tuple[str, ...]
    changes: bool = False  # older articles may have another value


def _relation(value: str, sentences: str, phrases: str, changes: bool = False) -> Relation:
    return Relation(value, tuple(sentences.split("|")), tuple(phrases.split("|")), changes)


def _listed(text: str) -> list[str]:
    return text.split()


_SET = _relation("city", "is set in {}|takes place in {}", "the city where {} is set|the city in which {} takes place")
RELATIONS: dict[str, dict[str, Relation]] = {
    "country": {
        "capital": _relation("city", "has its capital in {}|is ruled from {}", "the capital of {}|the main city of {}"),
        "head": _relation("person", "is led by {}|has {} as its head", "the head of {}|the leader of {}", True),
    },
    "city": {
        "country": _relation("country", "lies in {}|is a part of {}", "the country of {}|the country where {} lies"),
        "mayor": _relation("person", "is governed by {}|has {} as its mayor", "the mayor of {}|the ruler of {}", True),
        "founded": _relation("date", "was founded on {}|dates from {}", "the date of foundation of {}"),
    },
    "organisation": {
        "founder": _relation(
            "person", "was founded by {}|was started by {}", "the founder of {}|the person who started {}"
        ),
        "seat": _relation("city", "has its seat in {}|is based in {}", "the seat of {}|the city of {}", True),
        "opened": _relation("date", "was opened on {}|opened on {}", "the opening date of {}"),
    },
    "person": {
        "birthplace": _relation("city", "was born in {}|is a native of {}", "the birthplace of {}"),
        "born": _relation("date", "was born on {}|came into the world on {}", "the date of birth of {}"),
        "member": _relation(
            "organisation", "is a member of {}|belongs to {}", "the organisation of {}|the group that {} belongs to"
        ),
        "teacher": _relation(
            "person", "was taught by {}|is a pupil of {}", "the teacher of {}|the person who taught {}"
        ),
        "home": _relation("city", "lives in {}|has a house in {}", "the home of {}|the city where {} lives", True),
    },
    "book": {
        "author": _relation("person", "was written by {}|is a book by {}", "the author of {}|the writer of {}"),
        "set": _SET,
        "published": _relation("date", "was published on {}|appeared on {}", "the publication date of {}"),
    },
    "film": {
        "director": _relation("person", "was directed by {}|is a film by {}", "the director of {}|the maker of {}"),
        "set": _SET,
        "shown": _relation("date", "was first shown on {}|had its premiere on {}", "the premiere date of {}"),
    },
}
_WOMEN = _listed("""
Alice Anna Clara Dora Edith Emma Eva Grace Hanna Helen Ida Iris Jane Julia Kate Laura Lily Lucy Maria Mary Nina Nora
Rita Rosa Ruth Sara Sofia Stella Vera Wanda
""")
_MEN = _listed("""
Adam Arthur Ben Carl David Eric Felix Frank Fred George Henry Hugo Jack James John Karl Leo Mark Martin Max Oscar Otto
Paul Peter Robert Simon Tom Victor Walter Will
""")
_LAST = _listed("""
Archer Baker Barrow Bell Berg Bishop Blake Bond Brook Brown Carter Clay Cole Cook Cross Dale Drake Farmer Field Fisher
Ford Forest Fox Frost Gray Green Hale Hall Hart Hill Hunter King Lake Lane Marsh Mason Miller Moon Moss North Page
Park Pine Pond Porter Reed Rivers Rose Shaw Snow Stone Storm Swan Taylor Thorn Tower Walker Waters West Winter Wolf
Wood
""")
_SYLLABLES = _listed("""
Amber Ash Birch Black Bright Cedar Clear Cold Crow Deer Eagle East Elm Fair Fern Gold Hazel High Iron Ivy Long Maple
Mill Mist New Oak Old Raven Red Salt Sand Silver South Star Sun Swift Thorn Wild Willow Wolf
""")
_ENDS = _listed("""
bay bridge brook bury dale field ford gate ham haven hill mouth port stead stone ton town view wall well wick
""")
_THINGS = _listed("""
Anchor Apple Arrow Bird Boat Candle Castle Cloud Coin Crown Door Flower Garden Harbor Island Key Lamp Letter Light
Mirror Mountain Path Rain River Road Sea Ship Song Table Tree Village Wind Window
""")
_QUALITIES = _listed("""
Blue Broken Burning Dark Distant Empty Endless First Frozen Golden Green Hidden Last Lonely Lost Old Quiet Red Secret
Silent Silver Sleeping White Yellow
""")
_BODIES = _listed("Club Company Guild Institute League School Society Trust Union")
_ROLES = _listed("""
baker chemist composer doctor engineer farmer judge lawyer nurse painter poet printer sailor singer teacher
""")
_IS = {
    "country": ("a small country", "a kingdom", "a republic", "an old state"),
    "city": ("a port", "a market town", "a quiet city", "a city of mills", "an old town"),
    "organisation": ("a body of scholars", "a group of traders", "a charity", "a private body"),
    "book": ("a novel", "a book", "a long tale"),
    "film": ("a film", "a silent film", "a drama on film"),
}
_ASIDES = {
    "person": "keeps bees|walks by the sea each morning|has written many letters|never learned to swim|likes old maps",
    "place": "is known for its apples|has cold winters and short summers|sells wool and salt|has a fair in autumn|"
    "is praised for its bread",
    "organisation": "meets once a month|prints a small paper each year|owns a house with a garden|has a fine library|"
    "has kept its rules for long",
    "work": "was praised at once|is still loved by many|made little money at first|is rather long|has a sad end",
}
_GROUPS = {"country": "place", "city": "place", "book": "work", "film": "work"}
_MONTHS = _listed("January February March April May June July August September October November December")


@dataclass(slots=True)
class Corpus:
    """Articles, and the facts in them. ``names`` has all names of an entity by its first; ``members`` those of a fold
    and kind."""

    articles: list[Article] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    members: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def holds(self) -> dict[tuple[str, str], Fact]:
        """What holds of each subject and relation: the newest fact."""
        return {(fact.subject, fact.relation): fact for fact in sorted(self.facts, key=lambda fact: fact.year)}


def normalise(text: str) -> str:
    """As SQuAD compares answers (Rajpurkar et al., arXiv 1606.05250): lower case, no punctuation, no articles."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


@lru_cache(1)
def make_corpus(entities: int, seed: int) -> Corpus:
    """``entities``: at most ``MOST_ENTITIES``."""
    rng = random.Random(derive_seed("search corpus", seed))
    corpus, taken = Corpus(), set[str]()
    for kind, share in KINDS.items():
        names = (name for name in _names(kind, rng) if normalise(name) not in taken)
        for number in range(max(len(FOLDS), round(share * entities))):
            own = tuple(next(names) for _ in range(2 if rng.random() < 0.2 else 1))
            taken.update(map(normalise, own))
            corpus.names[own[0]], corpus.kinds[own[0]] = own, kind
            corpus.members.setdefault((FOLDS[number % len(FOLDS)], kind), []).append(own[0])
    dates = _names("date", rng)
    for (fold, _), members in corpus.members.items():
        for name in members:
            _write(corpus, name, fold, dates, rng)
    rng.shuffle(corpus.articles)
    return corpus


def ask(
    corpus: Corpus, holds: dict[tuple[str, str], Fact], fold: str, hops: int, rng: random.Random
) -> Question | None:
    """A question with so many hops, ``None`` where the walk that was drawn comes back to where it was."""
    place = rng.choice(corpus.members[fold, rng.choice(list(KINDS))])
    shown = phrase = rng.choice(corpus.names[place])
    chain, steps = [place], list[Hop]()
    for left in reversed(range(hops)):
        choices = RELATIONS[corpus.kinds[place]]
        names = [name for name, relation in choices.items() if not left or relation.value != "date"]
        relation, fact = choices[name := rng.choice(names)], holds[place, name]
        steps.append(Hop(shown, fact.title, fact.shown))
        phrase, place, shown = rng.choice(relation.phrases).format(phrase), fact.value, fact.shown
        if place in chain:
            return None
        chain.append(place)
    answers = corpus.names.get(place) or (place, "{1} {0}, {2}".format(*place.split()))
    text = f"{'Who' if relation.value == 'person' else 'What'} is {phrase}?"
    if any(normalise(answer) in normalise(text) for answer in answers):
        return None
    return Question(text, answers, tuple(steps))


def _names(kind: str, rng: random.Random) -> Iterator[str]:
    """Names of a kind, each once, in random order."""
    parts: dict[str, Iterable[tuple[object, ...]]] = {
        "country": product(_SYLLABLES, ("land", "mark", "ria", "via", "nia", "gard")),
        "city": product(_SYLLABLES, _ENDS),
        "organisation": ((f"{a} ", f"{b} ", c) for a, b, c in product(_QUALITIES, _THINGS, _BODIES)),
        "person": ((f"{a} ", b) for a, b in product(_WOMEN + _MEN, _LAST)),
        "date": ((f"{d} ", f"{m} ", y) for d, m, y in product(range(1, 29), _MONTHS, range(1840, 2000))),
    }
    works = ((f"The {a} ", b) for a, b in product(_QUALITIES, _THINGS))
    names = ["".join(map(str, words)) for words in parts.get(kind, works)]
    rng.shuffle(names)
    return iter(names)


def _write(corpus: Corpus, name: str, fold: str, dates: Iterator[str], rng: random.Random) -> None:
    """The facts and the articles of an entity."""
    kind = corpus.kinds[name]
    relations, values = RELATIONS[kind], dict[str, str]()
    for key, relation in relations.items():
        if relation.value == "date":
            values[key] = next(dates)
        else:
            values[key] = rng.choice([other for other in corpus.members[fold, relation.value] if other != name])
    years = [rng.randrange(2000, 2025)]
    if rng.random() < 0.3 and any(relation.changes for relation in relations.values()):
        years.insert(0, rng.randrange(1950, 2000))
    for year in years:
        title = f"{name} ({year})" if len(years) > 1 else name
        stated = dict(values)
        if year != years[-1]:
            stated = {key: value for key, value in stated.items() if relations[key].changes or rng.random() < 0.3}
            for key in filter(lambda key: relations[key].changes, stated):
                others = corpus.members[fold, relations[key].value]
                stated[key] = rng.choice([other for other in others if other not in (name, values[key])])
        facts = [
            Fact(name, key, value, rng.choice(corpus.names.get(value, (value,))), title, year)
            for key, value in stated.items()
        ]
        corpus.facts += facts
        corpus.articles.append(Article(title, _article(corpus, name, facts, rng)))


def _article(corpus: Corpus, name: str, facts: list[Fact], rng: random.Random) -> str:
    kind = corpus.kinds[name]
    says = [rng.choice(RELATIONS[kind][fact.relation].sentences).format(fact.shown) for fact in facts]
    rng.shuffle(says)
    who = "It" if kind != "person" else "She" if name.split()[0] in _WOMEN else "He"
    role = rng.choice(_ROLES) if kind == "person" else ""
    what = (f"an {role}" if role[0] in "aeiou" else f"a {role}") if role else rng.choice(_IS[kind])
    also = f", also called {corpus.names[name][1]}," if len(corpus.names[name]) > 1 else ""
    text = f"{name}{also} is {what} {'who' if role else 'that'} {says[0]}."
    asides = rng.sample(group := _ASIDES[_GROUPS.get(kind, kind)].split("|"), len(group))
    says = says[1:]
    while len(text.split()) + sum(len(say.split()) + 1 for say in says) < LEAST_WORDS:
        says.append(asides.pop())
    while says:
        text += f" {who} {says.pop(0)}"
        text += f" and {says.pop(0)}." if says and rng.random() < 0.4 else "."
    return text
