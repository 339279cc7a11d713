"""Any OpenAI-compatible server that returns token ids and log-probs as an ``Engine``, such as ``vllm serve``.

For a world model that is served elsewhere: its weights are the server's own, so the policy, whose weights change, stays
in this process. What the server must say of each token is fixed here and not left to its defaults.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import httpx

from policy.lm.engine import (
    Completion,
    EngineCounts,
    EngineFailure,
    EngineUnavailable,
    Sampling,
    check_room,
    mixed_seed,
)
from policy.lm.settings import EngineSettings

NOT_FINITE = -9999.0  # what vLLM's server writes for a log-prob that JSON cannot hold


class OpenAIEngine:
    """Asks a server for completions of token ids.

    The server must sample from what it reports: start vLLM with ``--logprobs-mode processed_logprobs`` where the
    temperature is neither 0 nor 1.

    Args:
        context: the longest sequence, prompt and completion together; the server may have a smaller one.
        backoff: seconds before the first retry; each further one waits twice as long.

    Raises:
        EngineUnavailable: no server answers there, or it has not this model.
    """

    def __init__(self, context: int, settings: EngineSettings, backoff: float = 0.5) -> None:
        self.url, self.model = settings.url.rstrip("/"), settings.served_model
        self.version, self.exact, self.counts = 0, False, EngineCounts()
        self._timeout, self._retries, self._backoff = settings.timeout, settings.retries, backoff
        self._slots = settings.slots
        self._client: httpx.AsyncClient | None = None
        self._gate: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.context = min(context, self._served_context() or context)

    def _served_context(self) -> int | None:
        """The longest sequence of the served model, where the server tells it."""
        try:
            answer = httpx.get(f"{self.url}/models", timeout=10)
            answer.raise_for_status()
            models = {str(model["id"]): model for model in answer.json()["data"]}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise EngineUnavailable(
                f"engine.url={self.url}: no OpenAI-compatible server answers there ({error}); start one, such as "
                f"`vllm serve <folder> --served-model-name {self.model}`"
            ) from error
        if self.model not in models:
            raise EngineUnavailable(
                f"engine.served_model={self.model}: the server has {', '.join(models) or 'no model'}"
            )
        length = models[self.model].get("max_model_len")
        return int(length) if length else None

    def reset(self) -> None:
        """What is cached here changes nothing that is sampled."""

    def update_weights(self) -> None:
        """Raises ``EngineUnavailable``: always; the server's weights are its own."""
        raise EngineUnavailable("the weights of a served model are the server's own: train with engine=vllm instead")

    def release(self, session: Hashable) -> None:
        """Nothing to do: the server looks after its own cache."""

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        """See ``Engine``; it fails where the server refuses, does not answer, or gives no usable answer."""
        check_room(ids, sampling, self.context)
        request = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": mixed_seed(seed),
            "stop": [],
            "stop_token_ids": [sampling.stop] if sampling.stop >= 0 else [],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
        }
        client, gate = self._connection()
        async with gate:
            answer = await self._ask(client, request)
        return _completion(answer, sampling)

    def _connection(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        """The client of the running event loop: connections of one that was closed are of no use."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._gate is None or self._loop is not loop:
            limits = httpx.Limits(max_connections=self._slots)
            self._client = httpx.AsyncClient(timeout=self._timeout, limits=limits)
            self._gate, self._loop = asyncio.Semaphore(self._slots), loop
        return self._client, self._gate

    async def _ask(self, client: httpx.AsyncClient, request: Mapping[str, Any]) -> Any:
        reason = ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(self._backoff * 2 ** (attempt - 1))
            try:
                response = await client.post(f"{self.url}/completions", json=request)
            except httpx.TransportError as error:  # refused, reset, timed out
                reason = f"{type(error).__name__} {error}".strip()
                continue
            if response.status_code == 429 or response.status_code >= 500:
                reason = f"HTTP {response.status_code}"
                continue
            if response.status_code != 200:
                raise EngineFailure(f"{self.url} refused: HTTP {response.status_code} {response.text[:300]}")
            try:
                return response.json()
            except ValueError as error:
                raise EngineFailure(f"{self.url} did not answer in JSON: {response.text[:100]!r}") from error
        raise EngineFailure(f"{self.url} did not answer after {self._retries + 1} attempts: {reason}")


def _completion(answer: Any, sampling: Sampling) -> Completion:
    """Raises ``EngineFailure``: token ids or log-probs are missing, not finite or too few, or the end is not one we
    asked for.
    """
    try:
        choice = answer["choices"][0]
        ids = tuple(int(token) for token in choice["token_ids"])
        logprobs = tuple(float(logprob) for logprob in choice["logprobs"]["token_logprobs"])
        reason, stop = choice["finish_reason"], choice.get("stop_reason")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineFailure(
            f"the answer lacks token ids or log-probs ({type(error).__name__} {error}); the server must know "
            "return_token_ids and logprobs"
        ) from error
    if not ids or len(logprobs) != len(ids):
        raise EngineFailure(f"the server returned {len(ids)} token ids and {len(logprobs)} log-probs")
    if not all(math.isfinite(logprob) and logprob > NOT_FINITE for logprob in logprobs):
        raise EngineFailure("the model's log-probs are not finite")
    if reason == "stop" and ids[-1] == sampling.stop:
        return Completion(ids, logprobs, stopped=True)
    if reason == "length" and len(ids) == sampling.max_tokens:
        return Completion(ids, logprobs, stopped=False)
    raise EngineFailure(f"the server ended after {len(ids)} tokens for a reason of its own: {reason} {stop}".strip())
