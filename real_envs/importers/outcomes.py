"""Whether an imported episode was solved: by a threshold of its reward, or by a language model that reads it."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from real_envs.chat_server import MALFORMED, ChatServer
from real_envs.trajectory import Trajectory

_TASK = (
    "You judge episodes of an agent in some world. Read what the world said at the start, then each action and the "
    "world's answer. Decide whether the task was solved when the episode ended. What the agent claims is no evidence; "
    'what the world answered is. Answer with one JSON object and nothing else: {"success": true} or {"success": false}.'
)
_VERDICT = re.compile(r'\{[^{}]*"success"\s*:\s*(true|false)\s*[,}]')


def with_outcome(episode: Trajectory, solved_at: float | None = None) -> Trajectory:
    """The episode with a success where its total reward decides it, and with rewards where only its success is known.

    A stated success stays. An episode without one that has rewards is solved where they reach ``solved_at``. One that
    states success and has no reward gets rewards of 0 and, at the end of a solved one, ``solved_at`` (1 without a
    threshold), so that a world model can learn what a success is. Where a total of 0 solves, as with costs, rewards
    could not tell the two apart, and it stays without.
    """
    rewarded = any(turn.reward is not None for turn in episode.turns)
    if episode.stop.is_failure or not episode.turns:
        return episode
    if episode.success is None and solved_at is not None and rewarded:
        return replace(episode, success=episode.earned(solved_at))
    success_reward = 1.0 if solved_at is None else solved_at
    if episode.success is not None and not rewarded and success_reward > 0:
        *before, last = episode.turns
        zeros = [replace(turn, reward=0.0) for turn in before]
        return replace(episode, turns=(*zeros, replace(last, reward=success_reward if episode.success else 0.0)))
    return episode


@dataclass(frozen=True, slots=True)
class Verdict:
    """``success``, or ``None`` with the type of failure and what it was."""

    success: bool | None
    failure: str = ""
    reason: str = ""


class LogJudge:
    """Asks a language model for an object ``{"success": true}``, for several episodes at a time.

    Any other answer is a failure with a type (those of ``Reply``), never a verdict. Verdicts are cached in a file by a
    hash of the question, so nothing is asked twice; failures are not cached.

    Args:
        characters: of an episode that are shown; the middle of a longer one is left out.

    Attributes:
        counts: questions ``asked``, verdicts ``known`` from the cache, and failures by type.
    """

    def __init__(self, server: ChatServer, cache: Path, *, at_once: int = 8, characters: int = 24_000) -> None:
        self.model = server.model
        self._server, self._cache, self._characters = server, cache, characters
        self._pool = ThreadPoolExecutor(at_once)
        self._known = _read(cache)
        self.counts: Counter[str] = Counter()

    def judge(self, episodes: Sequence[Trajectory]) -> list[Verdict]:
        questions = [self._server.question(_TASK, shown(episode, self._characters), 200) for episode in episodes]
        keys = [hashlib.sha256(json.dumps(question).encode()).hexdigest() for question in questions]
        new = {key: question for key, question in zip(keys, questions, strict=True) if key not in self._known}
        answers = dict(zip(new, self._pool.map(self._ask, new.values()), strict=True))
        with self._cache.open("a", encoding="utf-8") as file:
            for key, verdict in answers.items():
                self.counts.update(["asked", *([verdict.failure] if verdict.failure else [])])
                if verdict.success is not None:
                    self._known[key] = verdict.success
                    file.write(json.dumps({"asked": key, "success": verdict.success}) + "\n")
        self.counts["known"] += sum(key not in answers for key in keys)
        return [answers[key] if key in answers else Verdict(self._known[key]) for key in keys]

    def close(self) -> None:
        self._pool.shutdown()
        self._server.close()

    def _ask(self, question: Mapping[str, Any]) -> Verdict:
        reply = self._server.ask(question)
        if reply.text is None:
            return Verdict(None, reply.failure, reply.reason)
        answers = set(_VERDICT.findall(reply.text))
        if len(answers) != 1:
            return Verdict(None, MALFORMED, f'no one {{"success": ...}} in {reply.text[:200]!r}')
        return Verdict(answers == {"true"})


def shown(episode: Trajectory, characters: int) -> str:
    """The episode as the judge reads it, cut in the middle: the end says most about success."""
    turns = [f"ACTION: {turn.action}\nANSWER: {turn.observation}" for turn in episode.turns]
    text = "\n\n".join([f"START: {episode.start}", *turns, f"The episode stopped: {episode.stop.value}"])
    if len(text) <= characters:
        return text
    head = characters // 3
    return f"{text[:head]}\n[... {len(text) - characters} characters left out ...]\n{text[head - characters :]}"


def _read(path: Path) -> dict[str, bool]:
    """Verdicts of earlier imports, without a last line that a crash cut off."""
    known: dict[str, bool] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            known[str(row["asked"])] = bool(row["success"])
        except (ValueError, KeyError, TypeError):
            continue
    return known
