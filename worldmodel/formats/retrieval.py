"""Retrieval-grounded prediction: before each action stand the most similar transitions of the log.

DreamGym (arXiv 2511.03773) grounds its experience model in retrieved transitions. Similarity is BM25
(``real_envs/retrieval.py``) over the words of start, last observation and action.

An episode that is trained on or judged by is never shown to the model, neither under its id nor under another one with
the same content: it would learn to copy an answer that no dream has. In dreams the whole log is there, as it is for
every other episode in training.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from real_envs.retrieval import Bm25, WordNumbers, words_of
from real_envs.trajectory import Trajectory, Turn
from worldmodel.formats.full import FormatWrapper, TransitionFormat, prediction_text

_ACTION_COUNTS = 4  # times a word of the observation: an action has few words, and most depends on them
_CACHED = 1 << 16


@dataclass(frozen=True, slots=True)
class LoggedTransition:
    """What an action did, in an episode of the log."""

    start: str
    seen: str
    turn: Turn


def content(trajectory: Trajectory) -> tuple[object, ...]:
    """What makes two episodes the same whatever their ids: start, actions, answers, rewards and end."""
    turns = ((turn.action, turn.observation, turn.reward, turn.terminated) for turn in trajectory.turns)
    return (trajectory.start, *turns)


def _marked(action: str) -> list[str]:
    """The words of an action. They are marked: "open" in a description is not the command."""
    return [f">{word}" for word in words_of(action)] * _ACTION_COUNTS


class TransitionIndex:
    """The distinct transitions of a log, and who had them; without turns that are not known, as in training.

    Raises:
        ValueError: the log has no such turn.
    """

    def __init__(self, log: Sequence[Trajectory]) -> None:
        self.transitions: list[LoggedTransition] = []
        self._names: dict[tuple[object, ...], list[str]] = {}  # of the episodes with a content
        for trajectory in log:
            self._names.setdefault(content(trajectory), []).append(trajectory.id)
        owners: list[set[str]] = []
        where: dict[tuple[object, ...], int] = {}
        for trajectory in log:
            seen = trajectory.start
            for turn in trajectory.turns:
                if turn.known:
                    key = (trajectory.start, seen, turn.action, turn.observation, turn.reward, turn.terminated)
                    at = where.setdefault(key, len(owners))
                    if at == len(owners):
                        self.transitions.append(LoggedTransition(trajectory.start, seen, turn))
                        owners.append(set())
                    owners[at].add(trajectory.id)
                seen = turn.observation
        if not self.transitions:
            raise ValueError("nothing to retrieve from: no turn of the log has an answer and a reward")
        self._owners = owners
        self._owned: dict[str, list[int]] = {}
        for at, names in enumerate(owners):
            for name in names:
                self._owned.setdefault(name, []).append(at)
        numbers = WordNumbers()
        starts = {start: numbers.of(words_of(start)) for start in {t.start: None for t in self.transitions}}
        self._bm25 = Bm25(
            [
                starts[t.start] + numbers.of(words_of(t.seen)) + numbers.of(_marked(t.turn.action))
                for t in self.transitions
            ],
            numbers,
        )

    def hidden_by(self, episodes: Sequence[Trajectory]) -> frozenset[int]:
        """The transitions that only these episodes, or others of the same content, had."""
        alike = (name for episode in episodes for name in self._names.get(content(episode), ()))
        out = {*(episode.id for episode in episodes), *alike}
        return frozenset(at for name in out for at in self._owned.get(name, ()) if self._owners[at] <= out)

    def similar(self, start: str, seen: str, action: str, k: int, hidden: frozenset[int]) -> list[LoggedTransition]:
        """At most ``k`` transitions, the most similar one first; equal ones in the order of the log."""
        words = words_of(start) + words_of(seen) + _marked(action)
        return [self.transitions[at] for at in self._bm25.best(words, k, hidden)]


class RetrievalFormat(FormatWrapper):
    """Another format, with similar transitions of a log before each action.

    Args:
        top_k: how many transitions a context has at most.
        hidden: transitions of the index that must not be shown.
    """

    def __init__(
        self,
        index: TransitionIndex,
        top_k: int,
        inner: TransitionFormat | None = None,
        hidden: frozenset[int] = frozenset(),
    ) -> None:
        if top_k < 1:
            raise ValueError(f"neighbours must be at least 1, got {top_k}")
        super().__init__(inner)
        self.index, self.top_k, self.hidden = index, top_k, hidden
        self._cache: OrderedDict[tuple[str, str, str], str] = OrderedDict()

    def contexts(self, start: str, history: Sequence[Turn], action: str) -> list[str]:
        """Those of earlier turns stay, so that a prompt is the prefix of the next one."""
        seen = [start, *(turn.observation for turn in history)]
        actions = [*(turn.action for turn in history), action]
        inner = self.inner_contexts(start, history, action)
        return [
            context + self._retrieved(start, before, taken)
            for context, before, taken in zip(inner, seen, actions, strict=True)
        ]

    def _retrieved(self, start: str, seen: str, action: str) -> str:
        key = (start, seen, action)
        text = self._cache.get(key)
        if text is None:
            similar = self.index.similar(start, seen, action, self.top_k, self.hidden)
            lines = [f"[seen] {t.turn.action}: {prediction_text(t.turn)}\n" for t in similar]
            text = self._cache[key] = "".join(lines) + "[now] " if lines else ""
            if len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
        return text

    def phrases(self, log: Sequence[Trajectory]) -> list[str]:
        return ["[seen] ", "[now] ", *self.inner.phrases(log)]

    def excluding(self, episodes: Sequence[Trajectory]) -> TransitionFormat:
        hidden = self.hidden | self.index.hidden_by(episodes)
        return RetrievalFormat(self.index, self.top_k, self.inner.excluding(episodes), hidden)
