"""Dreamed rollouts: how the world model is sampled, when training in them stops, and who may play in them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from imagination.settings.schema import require


@dataclass
class DreamSettings:
    """Dreamed rollouts, and the guard that ends one, without reward, where the world model is uncertain.

    ``on_doubt`` says what a turn below the guard's thresholds does. ``truncate`` ends the dream there. ``downweight``
    goes on, but the turn earns no reward, and a token's weight is the calibrated probability that all dreamed turns
    before it were right (a product, at least ``min_weight``). ``branch`` truncates, and starts further groups in the
    middle of logged episodes until the truncated turns are dreamed elsewhere. The dreams of ``evaluate`` always
    truncate.
    """

    max_turns: int = 12  #: turn limit of a dreamed episode, without the logged turns before it
    #: share of groups that start in the middle of a logged episode (short branched rollouts; MBPO, Janner et al. 2019)
    branch: float = 0.5
    #: share of a group's dreams that go on from another dream of the group, from where the policy became most unsure
    #: after an answer (ARPO)
    branch_share: float = 0.0
    #: share of groups that begin as a failed episode of the log did, with a goal that it reached, or with a new
    #: question (`imagine relabel`)
    hindsight: float = 0.0
    temperature: float = 1.0  #: 1 samples from the world model, 0 takes its most likely prediction
    #: least probability of a whole predicted observation; longer ones need a lower threshold
    min_confidence: float = 0.8
    min_outcome_confidence: float = 0.9  #: the same for reward and termination alone, where a prediction has either
    #: least calibrated probability that a whole predicted turn is right, the disagreement of an ensemble included
    #: (calibration.json); 0 uses the confidences alone
    min_probability: float = 0.0
    #: in a task of which the log has rewards, only actions that were paid there are paid in dreams
    known_rewards: bool = False
    #: share of answers that are useless in training (ZeroSearch), a number or points [update, share]: answers of other
    #: tasks of the log, in place of those that pay and end nothing
    noise: float | list[list[float]] = 0.0
    noise_base: float = 4.0  #: how noise goes from point to point: by (base**x - 1) / (base - 1); 1 is a straight line
    noise_actions: str = ""  #: regular expression, found in the actions whose answers noise replaces
    max_tokens: int = 192  #: of a prediction
    on_doubt: Literal["truncate", "downweight", "branch"] = "truncate"  #: what a turn below the thresholds does
    min_weight: float = 0.05  #: least weight of a token (downweight)
    extra_groups: float = 1.0  #: at most so many further groups per group of an update (branch)
    #: schedule of the turn limit by update, such as [[0,4],[8,12]]; of train.world=real too; empty is max_turns
    #: throughout
    horizon: list[list[int]] = field(default_factory=list)
    #: steps waits for the next point, linear interpolates, multiply and add grow from one point (TTI)
    horizon_shape: Literal["steps", "linear", "multiply", "add"] = "steps"
    horizon_every: int = 1  #: updates between two increases (multiply, add)
    horizon_growth: float = 2.0  #: of each increase, a factor (multiply) or turns (add)

    def __post_init__(self) -> None:
        require(self, "in [0, 1)", "branch_share", "hindsight")
        require(self, "1 or more", "max_turns", "max_tokens")
        require(self, "above 0", "noise_base", "min_weight")
        require(self, "in [0, 1]", "branch", "min_weight")
        require(self, "in [0, 1]", "min_confidence", "min_outcome_confidence", "min_probability")
        try:
            re.compile(self.noise_actions)
        except re.error as error:
            raise ValueError(f"noise_actions={self.noise_actions} is no regular expression: {error}") from None


@dataclass
class TripwireSettings:
    """Monitors that stop training in dreams when the policy seems to exploit errors of the world model.

    Shares are of groups (start states) in the last updates; a monitor stops where the lower end of the 95 % Wilson
    interval is above its threshold. The policy is then rolled back to the last update before the evidence. Monitors
    run before each update, and once more after the last: their cost is the dreams of one update.

    For the rollback, the trained weights of the last ``max(memory, window)`` policies are kept in main memory and in
    each saved training state: 8 times 4 GB for a model of 10^9 parameters in fp32, little with LoRA. Lower ``memory``
    where that is too much.
    """

    enabled: bool = True  #: false never stops training, and the report says so
    window: int = 3  #: updates in the evidence
    memory: int = 8  #: updates in the evidence that is rare and certain: contradicted, favourite
    min_groups: int = 3  #: least number of groups that must show it
    every: int = 4  #: updates between two probes in the real environment
    real_episodes: int = 0  #: of a probe; 0 takes no real step
    gap: float = 0.2  #: largest difference of dreamed success and that of the probe
    #: share of rewarded groups that the log contradicts, among those for which it has the answer
    contradicted: float = 0.05
    #: share of rewarded groups whose reward is for one action, or a word in it, never rewarded in the log
    favourite: float = 0.08
    unseen: float = 0.2  #: share of rewarded groups whose reward is for any action that was never rewarded in the log
    short: float = 0.6  #: a solution shorter than this share of the log's shortest one is suspicious
    loops: float = 0.5  #: share of groups in which episodes repeat themselves
    silent: float = 0.5  #: share of groups in which most actions are empty, repeated or cut short
    #: least number of distinct actions, relative to solved episodes of the log; below is collapse
    diversity: float = 0.1
    rejected: float = 0.2  #: largest increase of the share of malformed or low-confidence predictions
    inconsistent: float = 0.2  #: largest increase of the share of turns that contradict their own dream
    drift: float = 1.25  #: largest distance from the log's language, relative to that of its farthest agent

    def __post_init__(self) -> None:
        require(self, "1 or more", "window", "memory", "every", "min_groups")


@dataclass
class ServeSettings:
    """The world model as an environment server: who may connect, and how much at a time."""

    host: str = "127.0.0.1"  #: address to listen on; any but this machine's own needs a token
    port: int = 8000  #: 0 takes a free one
    #: environment variable with the token that clients must send; unset or empty is none
    token: str = "IMAGINE_SERVE_TOKEN"
    branch: bool = False  #: episodes also start in the middle of logged ones, chosen by the seed
    max_turns: int = 0  #: turn limit of an episode; 0 takes dream.max_turns
    sessions: int = 64  #: open at a time
    idle_seconds: float = 600.0  #: after which an idle session is closed
    action_chars: int = 2000  #: of an action, at most
    message_bytes: int = 131072  #: of a request or message, at most
    requests: int = 256  #: concurrent HTTP requests

    def __post_init__(self) -> None:
        if not self.host or not 0 <= self.port < 2**16:
            raise ValueError(f"host must not be empty and port is 0 to 65535, got {self.host!r} and {self.port}")
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.token):  # not repeated here: it may be the token itself
            raise ValueError("token is the name of an environment variable, in capitals; the token itself stands there")
        require(self, "1 or more", "sessions", "action_chars", "message_bytes", "requests")
        require(self, "above 0", "idle_seconds")
