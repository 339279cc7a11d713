"""The ``Engine`` protocol: token ids in, sampled token ids and their log-probs out. Who samples them hides behind it.

``engines/inprocess/`` runs a model of this process, ``engines/vllm.py`` runs vLLM in it, ``engines/openai.py`` sends
requests to a server. Each caller is a coroutine that follows one episode and requests one completion at a time;
concurrent requests are batched.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from real_envs.errors import UserError
from real_envs.trajectory import StopReason


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample.

    Raises:
        ValueError: a number out of its range.
    """

    max_tokens: int  # the longest completion
    stop: int  # the id that ends it; it is part of the completion
    temperature: float = 1.0  # 0 takes the most likely token; its log-probs are then those at temperature 1

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")


@dataclass(frozen=True, slots=True)
class Completion:
    """What the model wrote."""

    ids: tuple[int, ...]  # the sampled ids, the stop token included where it was sampled
    logprobs: tuple[float, ...]  # of each id at the sampling temperature
    stopped: bool  # the last id is the stop token; otherwise ``max_tokens`` ran out
    version: int = 0  # of the engine's weights that wrote it: how often they were updated


class EngineFailure(Exception):
    """Generation broke, for instance with NaN logits. Carries a typed reason; the episode enters no loss."""

    reason = StopReason.ENGINE_FAILED


class UnsupportedModel(UserError):
    """The engine cannot run this architecture faithfully; the message says why."""


class EngineUnavailable(UserError):
    """The chosen engine cannot work here, such as a package or server that is missing; the message says what to do."""


class EngineCannotScore(EngineUnavailable):
    """The chosen engine samples tokens but cannot tell the log-probs of given ones; the message says what to do."""


class ContextFull(Exception):
    """Prompt and completion do not fit the model's context; the episode is truncated, its neighbours go on."""


def check_room(ids: Sequence[int], sampling: Sampling, context: int) -> None:
    """Raises ``ContextFull``: ``ids`` and the longest completion exceed ``context``."""
    if len(ids) + sampling.max_tokens > context:
        raise ContextFull(f"{len(ids)} + {sampling.max_tokens} tokens do not fit a context of {context}")


def mixed_seed(seed: int) -> int:
    """A 63-bit number with all bits of ``seed`` in its lower half, for samplers that read only 32 bits of a seed."""
    low, high = np.random.SeedSequence(seed).generate_state(2)
    return int(low) | (int(high) & 0x7FFFFFFF) << 32


@dataclass(slots=True)
class EngineCounts:
    """What an engine did so far."""

    generated: int = 0  # tokens sampled
    scored: int = 0  # given tokens whose log-probs were asked for
    fed: int = 0  # tokens run through the model, those of rejected drafts included
    reused: int = 0  # prompt tokens whose keys and values were there already
    steps: int = 0  # forward passes
    drafted: int = 0  # tokens that drafts proposed
    accepted: int = 0  # those of them that were what would have been sampled anyway


class Engine(Protocol):
    """Where tokens are sampled."""

    context: int  # the longest sequence, prompt and completion together
    version: int  # how often the weights were updated
    # log-probs are those of a trainer of the same model, up to the rounding of fp32. What is not known to be, is not:
    # other kernels, other precisions, another process
    exact: bool
    counts: EngineCounts  # what it did so far; an engine whose work cannot be seen leaves them at 0

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        """Continues ``ids``, the whole sequence so far; what is cached of it is not computed again.

        Args:
            seed: the only source of chance of this completion.
            session: the episode, as a key for the cache.

        Raises:
            ContextFull: ``len(ids) + max_tokens`` exceeds the context.
            EngineFailure: generation broke; only this completion is lost.
        """
        ...

    def release(self, session: Hashable) -> None:
        """The episode is over: what is cached of it may go."""
        ...

    def reset(self) -> None:
        """Forgets what is cached, so that what comes next depends on nothing before it. Nothing may be running."""
        ...

    def update_weights(self) -> None:
        """The weights have changed: what is cached of the old ones is forgotten, ``version`` goes up by one."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """What an engine can that also tells how likely given tokens are."""

    async def score(self, ids: Sequence[int], start: int, session: Hashable | None = None) -> tuple[float, ...]:
        """Log-probs of ``ids[start:]``, each given all ids before it, at temperature 1 over all tokens (teacher
        forcing).

        Args:
            start: the first id to score, at least 1.
            session: the same as in ``complete``.

        Raises:
            ContextFull: ``len(ids)`` exceeds the context.
            EngineFailure: a log-prob is not finite; only this request is lost.
        """
        ...


def scorer(engine: Engine) -> Scorer:
    """The engine as one that scores.

    Raises:
        EngineCannotScore: it has no ``score``.
    """
    if not isinstance(engine, Scorer):
        raise EngineCannotScore(
            f"{type(engine).__name__} cannot score given tokens, which the members of an ensemble do to each other's "
            "predictions: set engine=inprocess, or worldmodel.members=1"
        )
    return engine
