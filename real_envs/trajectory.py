"""What happened in an episode: the record that every other package reads and writes.

A trajectory starts with the observation of ``reset`` and goes on with turns. A turn is an action and what the world
answered: ``turns[k].observation`` is seen *after* ``turns[k].action``.

Example, one episode that was solved at its second turn::

    Trajectory(
        id="tw-7/expert/0", task_id="tw-7", group_id="tw-7/expert", source=Source.EXPERT, agent="expert", seed=0,
        start="Open the chest. -= Attic =- You see a chest. There is an exit to the east.",
        turns=(
            Turn("go east", "-= Hall =- There is a lamp. There is an exit to the west.", reward=0.0, terminated=False),
            Turn("take lamp", "You take the lamp. *** The End ***", reward=1.0, terminated=True),
        ),
        stop=StopReason.TERMINATED,
    )
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import pairwise

# Status lines and logs keep six decimals of a reward: two that differ by less are one and the same. So are two returns
# that differ by less than ten times as much, which are sums of such rewards.
REWARD_ROUNDING = 1e-5
RETURN_ROUNDING = 1e-4


def same_reward(a: float, b: float) -> bool:
    """Whether two rewards are one and the same, rounding aside: 1/3 is written, and at best predicted, as 0.333333."""
    return abs(a - b) < REWARD_ROUNDING


class Source(StrEnum):
    """Where the turns of an episode come from. ``REPLAY`` is for batches alone: an episode of an earlier update."""

    REAL = "real"
    DREAM = "dream"
    EXPERT = "expert"
    REPLAY = "replay"


class StopReason(StrEnum):
    """Why an episode ended.

    ``TERMINATED`` is the world's own end: nothing follows, so no value is bootstrapped. Truncations are ours: the world
    would have gone on. Failures are neither. Outages (of infrastructure) say nothing about the task: such an
    episode enters no loss and no mean. A malformed prediction is provoked by the action that it answers, so it costs
    that action: left out, an action that only answers well where it answers at all would look good.
    """

    TERMINATED = "terminated"
    # truncations
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"  # the policy's or the world model's context is full
    UNSURE = "unsure"  # the guard cut a dream whose next observation the world model is not sure of
    # failures
    ENV_CRASHED = "env_crashed"
    ENV_TIMEOUT = "env_timeout"
    PREDICTION_INVALID = "prediction_invalid"  # the world model's output could not be parsed
    ENGINE_FAILED = "engine_failed"  # generation broke: NaN log-probs, an endpoint that died, ...

    @property
    def is_failure(self) -> bool:
        return self in _FAILURES

    @property
    def is_outage(self) -> bool:
        """A failure that no action brought about."""
        return self.is_failure and self is not StopReason.PREDICTION_INVALID

    @property
    def is_truncation(self) -> bool:
        return self in _TRUNCATIONS


_TRUNCATIONS = frozenset({StopReason.TURN_LIMIT, StopReason.CONTEXT_LIMIT, StopReason.UNSURE})
_FAILURES = frozenset(
    {StopReason.ENV_CRASHED, StopReason.ENV_TIMEOUT, StopReason.PREDICTION_INVALID, StopReason.ENGINE_FAILED}
)


class Owner(IntEnum):
    """Who made a token. Decided where the token is made, never re-derived from text."""

    SCAFFOLD = 0  # chat template, forced end tokens, context copied from a log: trained by nobody
    AGENT = 1  # sampled by the policy: trains the policy
    ENV = 2  # the world's words: trains the world model


@dataclass(frozen=True, slots=True)
class Observation:
    """What an agent sees."""

    text: str  # all that a policy may condition on
    # what the simulator knows and a policy must not see (admissible commands, a plan, hidden state). Only scripted
    # agents read it; nothing renders it into tokens.
    privileged: Mapping[str, object] = field(default_factory=dict)
    # the turns that led here, where an episode starts in the middle of a logged one; ``text`` is then still the
    # observation of the log's ``reset``. Empty for a world that starts at its beginning.
    history: tuple[Turn, ...] = ()


NO_ANSWER = "log.left_out.answer to the last action"  # in a turn's info: what the world answered was not logged


@dataclass(frozen=True, slots=True)
class Turn:
    """An action and the world's answer."""

    action: str
    observation: str
    reward: float | None  # what the action earned; ``None`` where nobody measured it, which is not 0.0
    terminated: bool
    # what is no input of any model, such as ``{"confidence": 0.98}`` in a dream. ``"reasoning"``, a text, is what a
    # world model that reasons writes before the observation; from ``imagine reflect``, a thought before the action
    info: Mapping[str, float | str | bool] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether answer and reward were logged: no world model learns from other turns, or is judged by them."""
        return self.reward is not None and NO_ANSWER not in self.info

    @property
    def said(self) -> tuple[str, str, float | None]:
        """What happened, without the record of how it came about."""
        return self.action, self.observation, self.reward


@dataclass(frozen=True, slots=True)
class Trace:
    """The exact tokens a policy saw and made in one episode (token in, token out).

    All tuples have one entry per token. ``logprobs`` is ``None`` wherever the policy did not sample the token;
    ``turns`` is the index into ``Trajectory.turns`` for agent tokens and -1 for all others. ``temperature``, ``top_p``
    and ``top_k`` say which distribution the log-probs are of. ``versions`` has one entry per action that was sampled:
    of the weights that sampled it, counted by the engine; it is not stored.

    ``segments`` are the positions at which the policy went on in a new context, after a summary of its own; none where
    the episode fits one. The summary, an action of the next turn, ends the context before; what of it the new context
    repeats is scaffold.

    Raises:
        ValueError: the tuples differ in length, a log-prob and the agent's ownership disagree, or the segments are not
            in order.
    """

    ids: tuple[int, ...]
    owners: tuple[Owner, ...]
    logprobs: tuple[float | None, ...]
    turns: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    versions: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First position of each context, and the one after its last."""
        return list(pairwise((0, *self.segments, len(self.ids))))

    def __post_init__(self) -> None:
        n = len(self.ids)
        if self.segments and any(begin >= end for begin, end in self.spans):
            raise ValueError(f"segments of {n} tokens begin one after the other, not at {self.segments}")
        if not len(self.owners) == len(self.logprobs) == len(self.turns) == n:
            raise ValueError(
                f"a trace needs one owner, log-prob and turn per token: "
                f"{n} ids, {len(self.owners)} owners, {len(self.logprobs)} logprobs, {len(self.turns)} turns"
            )
        for i, (owner, logprob) in enumerate(zip(self.owners, self.logprobs, strict=True)):
            if (owner == Owner.AGENT) != (logprob is not None):
                raise ValueError(f"token {i} is owned by {owner.name} but its log-prob is {logprob}")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode with its provenance.

    Attributes:
        policy_version, world_model_version: which weights acted and dreamed; ``None`` where there were none.
    """

    id: str
    task_id: str  # the task (for TextWorld: the game) it was played in
    group_id: str  # episodes that share a start and are compared with each other (a GRPO group)
    source: Source
    agent: str
    seed: int  # the seed that drove the agent (and, in a dream, the world model)
    start: str  # the observation of ``reset``, goal included
    turns: tuple[Turn, ...]
    stop: StopReason
    prefix_turns: int = 0
    policy_version: str | None = None
    world_model_version: str | None = None
    trace: Trace | None = None  # the policy's tokens; ``None`` for scripted agents
    failure: str | None = None  # one sentence on what broke where ``stop`` is a failure
    # what the task says of its initial state (``Task.world_facts``), for the world model alone
    world_facts: tuple[str, ...] = ()
    # whether the task was solved, where the log states it, or a threshold other than 1 says so; ``None`` leaves it to
    # the rewards
    success: bool | None = None

    @property
    def total_reward(self) -> float:
        """Of the measured rewards."""
        return float(sum(turn.reward for turn in self.turns if turn.reward is not None))

    @property
    def solved(self) -> bool:
        """``success`` where it is known; else by the rewards, which solve a task with a total of 1. No failure solves.

        The tolerance is for dreams, whose rewards were written with six decimals: nine times 0.111111 solves a task.
        """
        if self.stop.is_failure:
            return False
        return self.earned(1.0) if self.success is None else self.success

    def earned(self, total: float) -> bool:
        """Whether the rewards reach a total, up to the rounding of dreamed ones."""
        return self.total_reward >= total - RETURN_ROUNDING

    @property
    def own_turns(self) -> tuple[Turn, ...]:
        """Without the prefix copied from a log."""
        return self.turns[self.prefix_turns :]
