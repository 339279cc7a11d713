"""A language model that reads an episode and says whether its task was solved, for logs that say nothing of it.

A server is asked for an object ``{"success": true}``. What comes back instead is a failure with a type, and never a
verdict: those of ``Reply``, ``malformed`` also where no such object is in the answer. Verdicts are kept in a file by a
hash of what was asked, so that nothing is asked twice; failures are not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """``success``, or ``None`` with the type of failure and what it was."""

    success: bool | None
    failure: str = ""
    reason: str = ""


class LogJudge:
    """Asks for verdicts, several at a time.

    Args:
        server: what is asked.
        kept: the file of verdicts.
        at_once: questions at the same time.
        characters: of an episode that are shown; what is longer loses its middle.

    Attributes:
        model: its name.
        counts: questions ``asked``, verdicts ``known`` from earlier, and failures by type.
    """

    def __init__(self, server: ChatServer, kept: Path, *, at_once: int = 8, characters: int = 24_000) -> None:
        self.model = server.model
        self._server, self._kept, self._characters = server, kept, characters
        self._pool = ThreadPoolExecutor(at_once)
        self._known = _read(kept)
        self.counts: Counter[str] = Counter()

    def judge(self, episodes: Sequence[Trajectory]) -> list[Verdict]:
        """A verdict for each episode, in their order."""
        questions = [self._question(episode) for episode in episodes]
        keys = [hashlib.sha256(json.dumps(question).encode()).hexdigest() for question in questions]
        new = {key: question for key, question in zip(keys, questions, strict=True) if key not in self._known}
        answers = dict(zip(new, self._pool.map(self._ask, new.values()), strict=True))
        with self._kept.open("a", encoding="utf-8") as file:
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

    def _question(self, episode: Trajectory) -> dict[str, Any]:
        return self._server.question(_TASK, shown(episode, self._characters), 200)

    def _ask(self, question: Mapping[str, Any]) -> Verdict:
        reply = self._server.ask(question)
        if reply.text is None:
            return Verdict(None, reply.failure, reply.reason)
        found = set(_VERDICT.findall(reply.text))
        if len(found) != 1:
            return Verdict(None, MALFORMED, f'no one {{"success": ...}} in {reply.text[:200]!r}')
        return Verdict(found == {"true"})


def shown(episode: Trajectory, characters: int) -> str:
    """The episode as the judge reads it. What is longer loses its middle: the end tells most of success."""
    turns = [f"ACTION: {turn.action}\nANSWER: {turn.observation}" for turn in episode.turns]
    text = "\n\n".join([f"START: {episode.start}", *turns, f"The episode stopped: {episode.stop.value}"])
    if len(text) <= characters:
        return text
    head = characters // 3
    return f"{text[:head]}\n[... {len(text) - characters} characters left out ...]\n{text[head - characters :]}"


def _read(path: Path) -> dict[str, bool]:
    """Verdicts of earlier imports. A last line that was cut off by a crash is asked again."""
    known: dict[str, bool] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            known[str(row["asked"])] = bool(row["success"])
        except (ValueError, KeyError, TypeError):
            continue
    return known
