"""The rules of a run: kept as JSON, asked turn by turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_envs.files import write_atomically
from real_envs.trajectory import Turn
from worldmodel.fidelity.refusals import Refusals
from worldmodel.rules.conditions import Rule
from worldmodel.rules.episode import Episode, Language
from worldmodel.rules.templates import Action, Templates

FILE = "rules.json"
VERSION = 1
_SESSIONS = 512  # episodes whose words are kept


class RulesInvalid(Exception):
    """A file of rules that cannot be read; the message names it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rule answers."""

    observation: str
    rule: Rule


class RuleSet:
    """Rules and the language that they are written in.

    Args:
        language: with the ``Refusals`` that it goes by.
        rules: of one action the first that applies answers.
    """

    def __init__(self, language: Language, rules: Sequence[Rule]) -> None:
        self.language, self.rules = language, tuple(rules)
        self._by_template: dict[str, list[Rule]] = {}
        for rule in self.rules:
            self._by_template.setdefault(rule.template, []).append(rule)
        self._episodes: dict[object, tuple[str, list[Turn], Episode]] = {}

    def answer(
        self, start: str, history: Sequence[Turn], action: str, session: object = None, refusals_only: bool = False
    ) -> Answer | None:
        """What the world answers, where a rule knows.

        Args:
            session: names the episode, so that its words are not read again at every turn.
            refusals_only: ask only the rules that refuse.
        """
        read = self.language.templates.read(action)
        asked = [r for r in self._by_template.get(read.template, ()) if r.refuses or not refusals_only]
        if not asked:
            return None
        return self.first(asked, self.episode(start, history, session), read)

    @staticmethod
    def first(rules: Sequence[Rule], episode: Episode, action: Action) -> Answer | None:
        """The answer of the first of the rules that applies."""
        for rule in rules:
            text = rule.answer(episode, action)
            if text is not None:
                return Answer(text, rule)
        return None

    def rules_of(self, action: Action) -> Sequence[Rule]:
        return self._by_template.get(action.template, ())

    def episode(self, start: str, history: Sequence[Turn], session: object = None) -> Episode:
        """The words of an episode after ``history``."""
        kept = self._episodes.get(session) if session is not None else None
        if kept is not None and kept[0] == start and list(history[: len(kept[1])]) == kept[1]:
            _, turns, episode = kept
        else:
            turns, episode = [], Episode(self.language, start)
        for turn in history[len(turns) :]:
            episode.add(self.language.templates.read(turn.action), turn.observation)
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
            "refusals": sorted(refuses.patterns),
            "rules": [rule.to_json() | {"in_words": str(rule)} for rule in self.rules],
        }
        write_atomically(folder / FILE, json.dumps(data, indent=1, ensure_ascii=False))

    @staticmethod
    def load(folder: Path) -> RuleSet | None:
        """The rules in a folder, ``None`` where there are none.

        Raises:
            RulesInvalid: the file cannot be read, or is of another version.
        """
        path = folder / FILE
        if not path.exists():
            return None
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if data["version"] != VERSION:
                raise RulesInvalid(f"{path}: version {data['version']}, and this program reads {VERSION}")
            refusals = Refusals(frozenset(data["refusals"]))
            language = Language(Templates(data["templates"]), tuple(data["kinds"]), refusals.refuses, data["inverses"])
            rules = []
            for number, rule in enumerate(data["rules"], start=1):
                try:
                    rules.append(Rule.from_json({k: v for k, v in rule.items() if k != "in_words"}))
                except (KeyError, TypeError, ValueError) as error:
                    raise RulesInvalid(f"{path}: rule {number}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise RulesInvalid(f"{path}: no rules can be read from it: {error!r}") from error
        return RuleSet(language, rules)


__all__ = ["FILE", "Answer", "RuleSet", "RulesInvalid"]
