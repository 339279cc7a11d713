"""A format that begins with what is known of the task: facts of its world, which the policy never reads.

An unseen room cannot be predicted from the history of an episode; a world model that reads the initial state of the
world is exact where one without it guesses (Word2World, arXiv 2512.18832, table 1). Here the facts are those that the
task declares (``Task.world_facts``), and then what logged episodes of it have shown: the places that they came
through, and what paid. They stand before the first action, trained by nobody. An episode is never shown what only it
has seen, or the model would learn to copy.

A fitted model so dreams in tasks that it was not fitted to: a few logged episodes of a task are enough to know it by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from real_envs.trajectory import Trajectory, Turn
from worldmodel.formats.full import FormatWrapper, TransitionFormat, prediction_text
from worldmodel.formats.retrieval import content

KNOWN, NOW = "[known] ", "[now] "
_COMMON = 0.1  # what more than this share of the tasks has shown says nothing of any one of them


@dataclass(slots=True)
class _Fact:
    """When an episode first showed it, at the earliest, and which episodes did."""

    turn: int
    episodes: set[str] = field(default_factory=set)


class TaskMemory:
    """What a log has shown of each task. Tasks are told apart by their start, which the world model reads."""

    def __init__(self, log: Sequence[Trajectory]) -> None:
        self._episodes = {episode.id: content(episode) for episode in log}
        self._facts: dict[str, dict[str, _Fact]] = {}
        self._declared = declared_facts(log)
        for episode in log:
            for k, turn in enumerate(episode.turns):
                facts = self._facts.setdefault(episode.start, {})  # tasks that nobody played are no tasks to count
                if turn.reward is not None and turn.observation not in episode.start:
                    fact = facts.setdefault(_line(turn), _Fact(k))
                    fact.turn = min(fact.turn, k)
                    fact.episodes.add(episode.id)
        tasks = Counter(line for facts in self._facts.values() for line in facts)
        most = max(1.0, _COMMON * len(self._facts))
        self._common = {line for line, n in tasks.items() if n > most}

    def hidden_by(self, episodes: Sequence[Trajectory]) -> frozenset[str]:
        """The ids of these episodes and of others with the same content."""
        ids, contents = {e.id for e in episodes}, {content(e) for e in episodes}
        return frozenset(name for name, what in self._episodes.items() if name in ids or what in contents)

    def of(self, start: str, most: int, hidden: frozenset[str]) -> list[str]:
        """At most ``most`` facts: first the declared ones, then those of most episodes as these meet them; ``hidden``
        ones do not count.
        """
        declared = list(self._declared.get(start, ()))[:most]
        shown = [
            (-len(fact.episodes - hidden), fact.turn, line)
            for line, fact in self._facts.get(start, {}).items()
            if line not in self._common and fact.episodes - hidden
        ]
        often = sorted(shown)[: most - len(declared)]
        return [*declared, *(line for _, _, line in sorted(often, key=lambda fact: fact[1:]))]


def declared_facts(log: Sequence[Trajectory]) -> dict[str, tuple[str, ...]]:
    """What tasks declare, by their start; nothing where tasks that begin alike declare different things."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for episode in log:
        if episode.world_facts:
            found.setdefault(episode.start, set()).add(episode.world_facts)
    return {start: facts.pop() for start, facts in found.items() if len(facts) == 1}


def _line(turn: Turn) -> str:
    """What a turn has shown; what was done for it only where that paid or ended the episode."""
    return f"{turn.action}: {prediction_text(turn)}" if turn.reward or turn.terminated else turn.observation


class MemoryFormat(FormatWrapper):
    """Another format, with facts of the task before the first action.

    Args:
        memory: where they are from.
        most: how many of them; fewer where fewer are known.
        hidden: ids of episodes of the memory that must not be shown.
    """

    def __init__(
        self, memory: TaskMemory, most: int, inner: TransitionFormat | None = None, hidden: frozenset[str] = frozenset()
    ) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1, got {most}")
        super().__init__(inner)
        self.memory, self.most, self.hidden = memory, most, hidden
        self._cache: dict[str, str] = {}

    def contexts(self, start: str, history: Sequence[Turn], action: str) -> list[str]:
        """Only the first one has facts, so that a prompt is the prefix of the next one."""
        first, *others = self.inner_contexts(start, history, action)
        if start not in self._cache:
            lines = self.memory.of(start, self.most, self.hidden)
            self._cache[start] = KNOWN + "\n".join(lines) + "\n" + NOW if lines else ""
        return [self._cache[start] + first, *others]

    def phrases(self, log: Sequence[Trajectory]) -> list[str]:
        return [KNOWN, NOW, *(phrase for phrase in self.inner.phrases(log) if phrase != NOW)]

    def excluding(self, episodes: Sequence[Trajectory]) -> TransitionFormat:
        hidden = self.hidden | self.memory.hidden_by(episodes)
        return MemoryFormat(self.memory, self.most, self.inner.excluding(episodes), hidden)
