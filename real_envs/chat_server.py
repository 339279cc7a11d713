"""Any server that speaks OpenAI's chat completions, asked for one text at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

UNREACHABLE, REFUSED, MALFORMED = "unreachable", "refused", "malformed"


def is_local(url: str) -> bool:
    """Whether the server is on this machine, which no proxy reaches."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Reply:
    """The text, or ``None`` with the type of failure and what it was.

    ``unreachable``: nobody answered after all retries; ``refused``: the server or the model would not; ``malformed``:
    what came is no chat completion.
    """

    text: str | None
    failure: str = ""
    reason: str = ""


class ChatServer:
    """Asks at temperature 0. Threads may share it.

    Args:
        model: its name there.
        backoff: seconds before the first retry; each further one waits twice as long.
    """

    def __init__(
        self, url: str, model: str, key: str = "", *, timeout: float = 60.0, retries: int = 2, backoff: float = 0.5
    ) -> None:
        self.model = model
        self._url, self._retries, self._backoff = f"{url.rstrip('/')}/chat/completions", retries, backoff
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(timeout=timeout, headers=headers, trust_env=not is_local(url))

    def close(self) -> None:
        self._client.close()

    def question(self, system: str, user: str, max_tokens: int) -> dict[str, Any]:
        chat: Sequence[Mapping[str, str]] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return {"model": self.model, "messages": chat, "temperature": 0.0, "max_tokens": max_tokens}

    def ask(self, question: Mapping[str, Any]) -> Reply:
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
                return Reply(None, REFUSED, f"HTTP {response.status_code} {response.text[:200]}")
            return _reply(response)
        return Reply(None, UNREACHABLE, f"{self._url} did not answer after {self._retries + 1} attempts: {reason}")


def _reply(response: httpx.Response) -> Reply:
    try:
        choice = response.json()["choices"][0]
        message = choice["message"]
        words = message.get("content") or ""
        refused = message.get("refusal") or choice.get("finish_reason") == "content_filter"
        if not isinstance(words, str):
            raise TypeError
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return Reply(None, MALFORMED, f"no chat completion: {response.text[:200]!r}")
    if refused:
        return Reply(None, REFUSED, str(message.get("refusal") or "content_filter")[:200])
    return Reply(words)
