"""A language model that reads an episode and says whether its task was solved, for logs that say nothing of it.

Any server that speaks OpenAI's chat completions is asked, at temperature 0, for an object ``{"success": true}``. What
comes back instead is a failure with a type, and never a verdict: ``unreachable`` (nobody answered after all retries),
``refused`` (the server or the model would not), ``malformed`` (no such object in the answer). Verdicts are kept in a
file by a hash of what was asked, so that nothing is asked twice; failures are not.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from real_envs.trajectory import Trajectory

UNREACHABLE, REFUSED, MALFORMED = "unreachable", "refused", "malformed"
_TASK = (
    "You judge episodes of an agent in some world. Read what the world said at the start, then each action and the "
    "world's answer. Decide whether the task was solved when the episode ended. What the agent claims is no evidence; "
    'what the world answered is. Answer with one JSON object and nothing else: {"success": true} or {"success": false}.'
)
_VERDICT = re.compile(r'\{[^{}]*"success"\s*:\s*(true|false)\s*[,}]')
_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Verdict:
    """``success``, or ``None`` with the type of failure and what it was."""

    success: bool | None
    failure: str = ""
    reason: str = ""


class LogJudge:
    """Asks for verdicts, several at a time.

    Args:
        url: of the server's API, such as ``http://localhost:8000/v1``.
        model: its name there.
        key: sent as a bearer token; "" is none.
        kept: the file of verdicts.
        timeout: seconds for one answer.
        retries: further attempts where nobody answers.
        at_once: questions at the same time.
        characters: of an episode that are shown; what is longer loses its middle.
        backoff: seconds before the first retry; each further one waits twice as long.

    Attributes:
        model: see above.
        counts: questions ``asked``, verdicts ``known`` from earlier, and failures by type.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str,
        kept: Path,
        *,
        timeout: float = 60.0,
        retries: int = 2,
        at_once: int = 8,
        characters: int = 24_000,
        backoff: float = 0.5,
    ) -> None:
        self.model = model
        self._url, self._kept = f"{url.rstrip('/')}/chat/completions", kept
        self._retries, self._backoff, self._characters = retries, backoff, characters
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(timeout=timeout, headers=headers, trust_env=urlsplit(url).hostname not in _HERE)
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
        self._client.close()

    def _question(self, episode: Trajectory) -> dict[str, Any]:
        said = [{"role": "system", "content": _TASK}, {"role": "user", "content": shown(episode, self._characters)}]
        return {"model": self.model, "messages": said, "temperature": 0.0, "max_tokens": 200}

    def _ask(self, question: Mapping[str, Any]) -> Verdict:
        reason = ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(self._backoff * 2 ** (attempt - 1))
            try:
                response = self._client.post(self._url, json=question)
            except (httpx.TransportError, httpx.InvalidURL) as error:
                reason = f"{type(error).__name__} {error}".strip()
                continue
            if response.status_code == 429 or response.status_code >= 500:
                reason = f"HTTP {response.status_code}"
                continue
            if response.status_code != 200:
                return Verdict(None, REFUSED, f"HTTP {response.status_code} {response.text[:200]}")
            return _verdict(response)
        return Verdict(None, UNREACHABLE, f"{self._url} did not answer after {self._retries + 1} attempts: {reason}")


def _verdict(response: httpx.Response) -> Verdict:
    try:
        choice = response.json()["choices"][0]
        message = choice["message"]
        said = message.get("content") or ""
        refused = message.get("refusal") or choice.get("finish_reason") == "content_filter"
        found = _VERDICT.findall(said)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return Verdict(None, MALFORMED, f"no chat completion: {response.text[:200]!r}")
    if refused:
        return Verdict(None, REFUSED, str(message.get("refusal") or "content_filter")[:200])
    if len(set(found)) != 1:
        return Verdict(None, MALFORMED, f'no one {{"success": ...}} in {said[:200]!r}')
    return Verdict(found[0] == "true")


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
