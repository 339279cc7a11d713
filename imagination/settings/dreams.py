"""How dreams are played, and what stops them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class DreamSettings:
    """How the world model is dreamed in, and the guard that ends a dream, unpaid, where the model is unsure.

    What a turn below the guard's thresholds does is ``on_doubt``. ``truncate`` ends the dream there. ``downweight``
    goes on, but a doubted turn pays nothing; a token then counts by the calibrated probability that all dreamed turns
    before it were right (a product, at least ``min_weight``). ``branch`` truncates, and
    plays further groups from the middle of logged episodes, until the turns that were cut off are dreamed elsewhere.
    The dreams of ``evaluate`` always truncate.

    Attributes:
        max_turns: of a dreamed episode, those of the log before it not counted.
        branch: share of groups that start in the middle of a logged episode (short branched rollouts; MBPO, Janner et
            al. 2019).
        temperature: 1 samples from the world model, 0 dreams the most likely world.
        min_confidence: least probability of a whole predicted answer; longer answers need a lower one.
        min_outcome_confidence: the same for reward and end alone, where a prediction pays or ends the episode.
        min_probability: least calibrated probability that a whole predicted turn is right, which the disagreement of an
            ensemble is part of (calibration.json); 0 goes by the confidences alone.
        max_tokens: of a predicted answer.
        on_doubt: what a turn below the thresholds does.
        min_weight: least weight of a token (downweight).
        extra_groups: most further groups for each of an update's own (branch).
        horizon: turns by update, such as [[0,4],[8,12]]; of train.world=real too; empty is max_turns throughout.
        horizon_shape: steps waits for the next point, linear goes straight to it, multiply and add grow from one (TTI).
        horizon_every: updates of a stage (multiply, add).
        horizon_growth: from stage to stage, a factor (multiply) or turns (add).
    """

    max_turns: int = 12
    branch: float = 0.5
    temperature: float = 1.0
    min_confidence: float = 0.8
    min_outcome_confidence: float = 0.9
    min_probability: float = 0.0
    max_tokens: int = 192
    on_doubt: Literal["truncate", "downweight", "branch"] = "truncate"
    min_weight: float = 0.05
    extra_groups: float = 1.0
    horizon: list[list[int]] = field(default_factory=list)
    horizon_shape: Literal["steps", "linear", "multiply", "add"] = "steps"
    horizon_every: int = 1
    horizon_growth: float = 2.0


@dataclass
class TripwireSettings:
    """Wires that stop training in dreams when the policy seems to learn the world model's mistakes.

    Shares are of groups (start states) in the last updates; a wire trips where the lower end of the 95 % Wilson
    interval is above the bound. The policy then goes back to what it was before it learned from the first update that
    is part of the evidence. The wires look before each update learns, and once more after the last: its cost is the
    dreams of one update.

    To go back, the trained weights of the last ``max(memory, window)`` policies are kept in main memory and in each
    saved training state: 8 times 4 GB for a model of 10^9 parameters in fp32, little with LoRA. Lower ``memory`` where
    that is too much.

    Attributes:
        enabled: false trains on whatever happens, and the report says so.
        window: updates that are looked at together.
        memory: the same for evidence that is rare and sure: contradicted, favourite.
        min_groups: least number of groups that must show it.
        every: updates between two probes in the real games.
        real_episodes: of a probe, a real budget that you declare; 0 takes no real step.
        gap: how far dreamed success may exceed that of the probe.
        contradicted: share of paid groups that the log contradicts, among those where the log knows the answer.
        favourite: share of paid groups that are paid for one action, or a word in it, that never paid in the log.
        unseen: share of paid groups that are paid for any action that never paid in the log.
        short: a solution below so many times the turns of the log's shortest one is suspicious.
        loops: share of groups in which episodes repeat themselves.
        silent: share of groups in which most actions are empty, repeated or cut short.
        diversity: distinct actions over those of the log's solutions, below which the policy hardly acts any more.
        rejected: by how much the share of malformed or doubted predictions may rise.
        inconsistent: by how much the share of turns that contradict their own dream may rise.
        drift: how many times farther from the log's words than the farthest agent of the log.
    """

    enabled: bool = True
    window: int = 3
    memory: int = 8
    min_groups: int = 3
    every: int = 4
    real_episodes: int = 0
    gap: float = 0.2
    contradicted: float = 0.05
    favourite: float = 0.08
    unseen: float = 0.2
    short: float = 0.6
    loops: float = 0.5
    silent: float = 0.5
    diversity: float = 0.1
    rejected: float = 0.2
    inconsistent: float = 0.2
    drift: float = 1.25
