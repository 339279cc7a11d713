"""What the texts of a log are made of, found by counting: kinds of texts, what leads back, what removes what."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from real_envs.trajectory import Trajectory
from worldmodel.rules.episode import Episode, Language, name_after
from worldmodel.rules.templates import OTHER, Templates, flat, words

LEAST = 30  # turns that a rule must answer in the half that it is found in
_KINDS = 6
_MENTIONS = 3
_FEW_TASKS = 10


def fold_refused(templates: Templates, log: Sequence[Trajectory]) -> Templates:
    """Without those that always get the same answer, where actions of no template get it too, or most of those do.

    All of them are then one case: what the world has no words for.
    """
    answers: dict[str, Counter[str]] = {}
    for trajectory in log:
        for turn in trajectory.turns:
            answers.setdefault(templates.read(turn.action).template, Counter())[turn.observation.strip()] += 1
    usual = Counter(answers.get(OTHER, ()))
    for name, counts in answers.items():
        if len(counts) == 1 and name != OTHER:
            usual.update(counts)
    if not usual:
        return templates
    answer, _ = usual.most_common(1)[0]
    shared = sum(answer in counts for counts in answers.values())
    if shared < 2:
        return templates
    return Templates([text for text in templates.texts if set(answers.get(text, ())) - {answer}])


def judging_half(log: Sequence[Trajectory]) -> set[str]:
    """Ids of the episodes that rules are judged by: those of half of the tasks, of half of all where tasks are few."""
    few = len({t.task_id for t in log}) < _FEW_TASKS

    def side(name: str) -> bool:
        return hashlib.sha256(name.encode()).digest()[0] % 2 == 1

    return {t.id for t in log if side(t.id if few else t.task_id)}


def find_kinds(log: Sequence[Trajectory]) -> tuple[str, ...]:
    """Openings of three words, or fewer, that many observations share, which differ in what follows."""
    texts: Counter[str] = Counter(turn.observation.strip() for t in log for turn in t.turns)
    total, taken, kinds = sum(texts.values()), set[str](), dict[str, int]()
    for length in (3, 2, 1):
        openings: dict[str, list[str]] = {}
        for text in texts:
            if text not in taken and len(words(text)) > length:
                openings.setdefault(" ".join(words(text)[:length]), []).append(text)
        for opening, of in openings.items():
            times = sum(texts[text] for text in of)
            if times >= max(20, total / 200) and len(of) >= 10:
                kinds[opening] = sum(texts[text] * len(words(text)) for text in of)
                taken.update(of)
    return tuple(sorted(kinds, key=lambda kind: -kinds[kind])[:_KINDS])


def find_mentions(log: Sequence[Trajectory], language: Language) -> tuple[str, ...]:
    """Two words after which most first texts name what a later text of a kind is about; where there are none, after
    which they name something else that differs from task to task and that later texts speak of, such as a goal."""
    said: Counter[str] = Counter()
    spoken_of: dict[str, list[str]] = {}  # by two words, the names after them that texts of the task speak of
    names: set[str] = set()
    later: dict[str, str] = {}
    for trajectory in log:
        texts = [turn.observation for turn in trajectory.turns]
        names |= {s.name for text in texts for s in language.segments(text, 1).values() if s.name}
        later[trajectory.start] = later.get(trajectory.start, "") + "".join(map(flat, texts))
    heads = list(dict.fromkeys((t.task_id, t.start) for t in log))
    for _, start in heads:
        head = language.head(start)
        for two in dict.fromkeys(map(" ".join, pairwise(head.split()))):
            name = name_after(head, two)
            said[two] += name in names
            if name and f" {name} " in later[start]:
                spoken_of.setdefault(two, []).append(name)
    often = [two for two, n in said.most_common() if n >= 0.9 * len(heads)]
    if not often:
        most = 0.9 * len(heads)
        differ = {two: all_ for two, all_ in spoken_of.items() if len(all_) >= most and len(set(all_)) >= 5}
        often = sorted(differ, key=lambda two: (-sum(len(name.split()) for name in differ[two]), two))[:1]
    return tuple(often[:_MENTIONS])


def find_removing(log: Sequence[Trajectory], language: Language) -> list[str]:
    """Templates of actions after which the text of the same name no longer has a sentence on what they were done to."""
    gone: Counter[str] = Counter()
    for trajectory in log:
        episode = Episode(language, trajectory.start)
        waiting: dict[tuple[str, str], list[tuple[str, str]]] = {}  # of a text by kind and name: template, filler
        for turn in trajectory.turns:
            action, before = language.templates.read(turn.action), episode.segments
            here = {kind: seen[-1] for kind, seen in before.items()}
            episode.add(action, turn.observation, turn.reward)
            if episode.accepted_at(action.template) != episode.time:
                continue
            for kind, seen in episode.segments.items():
                if seen[-1].time == episode.time:
                    for name, filler in waiting.pop((kind, seen[-1].name), ()):
                        gone[name] += f" {filler} " not in seen[-1].flat
            for kind, segment in here.items():
                for filler in action.fillers:
                    if f" {filler} " in segment.flat:
                        waiting.setdefault((kind, segment.name), []).append((action.template, filler))
    return [name for name, n in gone.most_common(2) if n >= LEAST]


def find_inverses(log: Sequence[Trajectory], language: Language) -> dict[str, str]:
    """Actions that lead back: after the one, the other brings the text of a kind that was seen before the first."""
    tried: Counter[tuple[str, str]] = Counter()
    back: Counter[tuple[str, str]] = Counter()
    for trajectory in log:
        names: list[tuple[str, str, str]] = []  # before, action, after
        here: dict[str, str] = {}
        for time, text in enumerate([trajectory.start, *(turn.observation for turn in trajectory.turns)]):
            found = language.segments(text, time)
            if time and found:
                kind, segment = next(iter(found.items()))
                action = trajectory.turns[time - 1].action
                if kind in here and here[kind] != segment.name:
                    if names and names[-1][2] == here[kind]:
                        pair = names[-1][1], action
                        tried[pair] += 1
                        back[pair] += names[-1][0] == segment.name
                    names.append((here[kind], action, segment.name))
            here |= {kind: segment.name for kind, segment in found.items()}
    best: dict[str, str] = {}
    for (one, other), times in tried.most_common():
        if times >= LEAST and back[one, other] >= 0.95 * times:
            best.setdefault(one, other)
    return best


__all__ = ["LEAST", "find_inverses", "find_kinds", "find_mentions", "find_removing", "fold_refused", "judging_half"]
