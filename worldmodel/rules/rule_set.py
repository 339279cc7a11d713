"""The rules of a run: kept as JSON, asked turn by turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from real_envs.files import read_json, write_json
from real_envs.grouping import grouped
from real_envs.trajectory import Trajectory, Turn
from worldmodel.rules.conditions import Rule
from worldmodel.rules.episode import EpisodeText, Language
from worldmodel.rules.invariants import Invariant, mend, opening_of
from worldmodel.rules.refusals import Refusals
from worldmodel.rules.templates import ANY, Action, Templates

FILE = "rules.json"
VERSION = 1
_SESSIONS = 512  # episodes whose words are kept


class RulesInvalid(Exception):
    """The message names the file."""


@dataclass(frozen=True, slots=True)
class RulePrediction:
    """What a rule answers; one whose reward is ``None`` knows the words alone."""

    observation: str
    rule: Rule


class RuleSet:
    """Rules and the language that they are written in; of one action the first that applies answers.

    In all methods ``session`` names the episode, so that its words are not read again at every turn.
    """

    def __init__(self, language: Language, rules: Sequence[Rule], invariants: Sequence[Invariant] = ()) -> None:
        self.language, self.rules, self.invariants = language, tuple(rules), tuple(invariants)
        self._invariants = grouped(self.invariants, lambda invariant: invariant.template)
        self._episodes: dict[object, tuple[str, list[Turn], EpisodeText]] = {}

    def answer(
        self, start: str, history: Sequence[Turn], action: str, session: object = None, refusals_only: bool = False
    ) -> RulePrediction | None:
        """What the world answers, where a rule knows words and outcome."""
        answering = (r for r in self._of(action) if r.reward is not None and (r.refuses or not refusals_only))
        return self._first(list(answering), start, history, action, session)

    def words(self, start: str, history: Sequence[Turn], action: str, session: object = None) -> RulePrediction | None:
        """What the world says, where a rule knows the words and not the reward."""
        return self._first([r for r in self._of(action) if r.reward is None], start, history, action, session)

    def _of(self, action: str) -> Sequence[Rule]:
        """The rules of its template, and of any action that names something, in their order: a later one was perhaps
        judged only where no earlier one answers."""
        read = self.language.templates.read(action)
        names = (read.template, ANY) if read.fillers else (read.template,)
        return [rule for rule in self.rules if rule.template in names]

    def _first(
        self, rules: Sequence[Rule], start: str, history: Sequence[Turn], action: str, session: object
    ) -> RulePrediction | None:
        if not rules:
            return None
        episode, read = self.episode(start, history, session), self.language.templates.read(action)
        made = ((rule.answer(episode, read), rule) for rule in rules)
        return next((RulePrediction(text, rule) for text, rule in made if text is not None), None)

    def broken(self, start: str, history: Sequence[Turn], answer: Turn, session: object = None) -> list[Invariant]:
        """The invariants that the answer of the last turn breaks."""
        return self._checks(start, history, answer, session)[2](answer.observation)

    def mended(
        self, start: str, history: Sequence[Turn], answer: Turn, session: object = None
    ) -> tuple[str, Sequence[Invariant]]:
        """The observation of the last turn with as few words changed as mend it, and what it still breaks."""
        episode, read, check = self._checks(start, history, answer, session)
        return mend(answer.observation, check, episode, read)

    def _checks(
        self, start: str, history: Sequence[Turn], answer: Turn, session: object
    ) -> tuple[EpisodeText, Action, Callable[[str], list[Invariant]]]:
        """Episode and action before an answer, and what gives the invariants that a text breaks in its place."""
        read, episode = self.language.templates.read(answer.action), self.episode(start, history, session)
        invariants = _of(self._invariants, read)

        def check(text: str) -> list[Invariant]:
            turn = replace(answer, observation=text)
            return [invariant for invariant in invariants if invariant.broken(episode, read, turn)]

        return episode, read, check

    def opening(self, start: str, history: Sequence[Turn], action: str, session: object = None) -> str:
        """The words that the answer surely begins with; empty where none are known."""
        read = self.language.templates.read(action)
        invariants = _of(self._invariants, read)
        return opening_of(invariants, self.episode(start, history, session), read) if invariants else ""

    def episode(self, start: str, history: Sequence[Turn], session: object = None) -> EpisodeText:
        cached = self._episodes.get(session) if session is not None else None
        if cached is not None and cached[0] == start and list(history[: len(cached[1])]) == cached[1]:
            _, turns, episode = cached
        else:
            turns, episode = [], EpisodeText(self.language, start)
        for turn in history[len(turns) :]:
            episode.add(self.language.templates.read(turn.action), turn.observation, turn.reward)
            turns.append(turn)
        if session is not None:
            if len(self._episodes) >= _SESSIONS:
                self._episodes.clear()
            self._episodes[session] = start, turns, episode
        return episode

    def release(self, session: object) -> None:
        self._episodes.pop(session, None)

    def save(self, folder: Path) -> None:
        refuses = self.language.refuses.__self__  # type: ignore[attr-defined]
        data = {
            "version": VERSION,
            "templates": self.language.templates.texts,
            "kinds": self.language.kinds,
            "inverses": dict(self.language.inverses),
            "mentions": self.language.mentions,
            "notices": self.language.notices,
            "refusals": sorted(refuses.patterns),
            "rules": [rule.to_json() | {"in_words": str(rule)} for rule in self.rules],
            "invariants": [i.to_json() | {"in_words": str(i)} for i in self.invariants],
        }
        write_json(folder / FILE, data, ensure_ascii=False)

    @staticmethod
    def load(folder: Path) -> RuleSet | None:
        """``None`` where there are none.

        Raises:
            RulesInvalid: the file cannot be read, or is of another version.
        """
        path = folder / FILE
        if not path.exists():
            return None
        try:
            data = read_json(path)
            if data["version"] != VERSION:
                raise RulesInvalid(f"{path}: version {data['version']}, and this program reads {VERSION}")
            refusals = Refusals(frozenset(data["refusals"]))
            language = Language(
                Templates(data["templates"]),
                tuple(data["kinds"]),
                refusals.refuses,
                data["inverses"],
                tuple(data["mentions"]),
                None if data.get("notices") is None else tuple(data["notices"]),
            )
            rules = [Rule.from_json(_without_words(rule)) for rule in data["rules"]]
            for rule in rules:
                rule.check(language)
            invariants = [Invariant.from_json(_without_words(i)) for i in data["invariants"]]
        except (ValueError, KeyError, TypeError) as error:
            raise RulesInvalid(f"{path}: no rules can be read from it: {error!r}") from error
        return RuleSet(language, rules, invariants)


def _of(by_template: Mapping[str, list[Invariant]], action: Action) -> Sequence[Invariant]:
    """What is known of actions of its template, and then of any action that names something."""
    return [*by_template.get(action.template, ()), *(by_template.get(ANY, ()) if action.fillers else ())]


def _without_words(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != "in_words"}


def check_rules(rules: RuleSet, episodes: Sequence[Trajectory]) -> dict[str, Any]:
    """How rules do on real episodes that they were not mined from.

    Returns:
        ``turns`` with a known reward, ``answered`` of them by a rule, ``wrong`` of those (text, reward or end);
        ``worded`` further ones whose words a rule knows and not the outcome, ``misworded`` of those; ``refused``
        turns and ``refused_by_rule``; ``rejected``: turns that no rule answers and an invariant rejects, wrongly;
        ``by_rule``: turns and errors of each that answered.
    """
    turns = answered = wrong = refused = refused_by_rule = worded = misworded = rejected = 0
    used, errors = Counter[str](), Counter[str]()
    for trajectory in episodes:
        for k, turn in enumerate(trajectory.turns):
            if not turn.known:
                continue
            turns += 1
            refuses = rules.language.refuses(turn.action, turn.observation)
            refused += refuses
            before = (trajectory.start, trajectory.turns[:k], turn.action, trajectory.id)
            answer = rules.answer(*before)
            if answer is None:
                rejected += bool(rules.broken(trajectory.start, trajectory.turns[:k], turn, trajectory.id))
                if (wording := rules.words(*before)) is not None:
                    worded += 1
                    misworded += not wording.rule.is_right(wording.observation, turn)
                continue
            answered += 1
            rule = answer.rule
            used[str(rule)] += 1
            right = rule.is_right(answer.observation, turn)
            wrong += not right
            errors[str(rule)] += not right
            refused_by_rule += refuses and rule.refuses
        rules.release(trajectory.id)
    return {
        "rules": len(rules.rules),
        "refusing": sum(rule.refuses for rule in rules.rules),
        "turns": turns,
        "answered": answered,
        "wrong": wrong,
        "worded": worded,
        "misworded": misworded,
        "refused": refused,
        "refused_by_rule": refused_by_rule,
        "invariants": len(rules.invariants),
        "rejected": rejected,
        "by_rule": {text: {"turns": n, "wrong": errors[text]} for text, n in used.most_common()},
    }
