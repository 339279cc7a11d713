"""The settings of each part of an algorithm, which losses and advantages take as they are.

Nothing here loads torch, as a command line must answer before that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
Estimator = Literal["k1", "k2", "k3"]


class Part:
    """Frozen settings; a value that is out of range is a ``ValueError``."""

    __slots__ = ()


def _check_unit(where: str, **numbers: float) -> None:
    if not all(0.0 <= x <= 1.0 for x in numbers.values()):
        names, values = " and ".join(numbers), " and ".join(str(x) for x in numbers.values())
        raise ValueError(f"{where}: {names} must lie in [0, 1], got {values}")


def _check_std(where: str, std_eps: float) -> None:
    if not (std_eps > 0.0 and math.isfinite(std_eps)):
        raise ValueError(f"{where}: std_eps must be positive, got {std_eps}")


# --- the loss of the policy ---


class LossPart(Part):
    """Which ratio is clipped how.

    Attributes:
        on_policy: only the first optimiser step on the same tokens is right.
    """

    __slots__ = ()
    on_policy: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class PpoClip(LossPart):
    """PPO's clip, one ratio a token.

    Attributes:
        clip_low: ratios below 1 - clip_low have no gradient; 0.2, gspo 0.0003.
        clip_high: ratios above 1 + clip_high have no gradient; 0.2, dapo 0.28, gspo 0.0004.
        dual_clip: where the advantage is negative, the loss is at most so many times it; 3, dapo none; 0 is none.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not 1.0 < self.dual_clip < math.inf:
            raise ValueError(f"dual_clip must be larger than 1 or none, got {self.dual_clip}")


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise ValueError(f"clip_low must lie in [0, 1] and clip_high be at least 0, got {clip_low} and {clip_high}")


@dataclass(frozen=True, slots=True)
class WeightClip(LossPart):
    """CISPO: the importance weight is clipped, and no token loses its gradient.

    Attributes:
        ratio_min: least weight of a token (cispo); 0.
        ratio_max: largest weight of a token (cispo); 5.
    """

    ratio_min: float = 0.0
    ratio_max: float = 5.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio_min <= 1.0 <= self.ratio_max:
            raise ValueError(f"cispo: ratio_min <= 1 <= ratio_max, got {self.ratio_min} and {self.ratio_max}")


@dataclass(frozen=True, slots=True)
class SequenceClip(LossPart):
    """GSPO's clip, one ratio a sequence.

    Attributes:
        token_form: the gradient of each token's own ratio (gspo).
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    token_form: bool = False

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)


@dataclass(frozen=True, slots=True)
class TurnClip(PpoClip):
    """Turn-PPO's and ST-PPO's clip, one ratio a turn.

    Attributes:
        correct_bias: weigh turns down that are far outside the clip (st_ppo true, turn_ppo false).
    """

    correct_bias: bool = True


@dataclass(frozen=True, slots=True)
class PolicyGradient(LossPart):
    """REINFORCE: no ratio, so one step an update."""

    on_policy: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Imitate(LossPart):
    """Cross-entropy on what was kept: no ratio and no advantage."""


# --- advantages ---


class AdvantagePart(Part):
    """How episodes are judged.

    Attributes:
        needs_critic, needs_groups: values, and several episodes of one start.
        judges_turns: turns are judged, for which no mask is read.
        adds_up: only the sum of an episode's rewards is read, so how they are spread over its turns changes nothing.
    """

    __slots__ = ()
    needs_critic: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = False
    judges_turns: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class GroupRelative(AdvantagePart):
    """GRPO's comparison within a group; Dr.GRPO's without the deviation.

    Attributes:
        normalise_std: divide by the spread of the group (grpo and its kin, gigpo).
        std_eps: added to that spread, in units of reward; 0.0001.
    """

    normalise_std: bool = True
    std_eps: float = 1e-4
    needs_groups: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_std("grpo", self.std_eps)


@dataclass(frozen=True, slots=True)
class LeaveOneOut(AdvantagePart):
    """RLOO: against the mean of the other episodes of the group."""

    needs_groups: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class GroupBaseline(AdvantagePart):
    """REINFORCE++ with baseline: less the group's mean, whitened over the update."""

    needs_groups: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class TokenGae(AdvantagePart):
    """GAE over agent tokens.

    Attributes:
        gamma: discount per agent token, 1; per turn for turn_ppo, 1, and gigpo, 0.95.
        lam: of GAE (ppo, st_ppo, turn_ppo); 0.95.
        whiten: advantages of the update to mean 0 and deviation 1 (with a critic; reinforce false, reinforce_pp true).
    """

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    needs_critic: ClassVar[bool] = True
    name: ClassVar[str] = "GAE"

    def __post_init__(self) -> None:
        _check_unit(self.name, gamma=self.gamma, lam=self.lam)


@dataclass(frozen=True, slots=True)
class TurnGae(TokenGae):
    """GAE over turns, one advantage for all tokens of a turn; ``gamma`` and ``lam`` are per turn."""

    judges_turns: ClassVar[bool] = True
    name: ClassVar[str] = "turn_ppo"


@dataclass(frozen=True, slots=True)
class BilevelGae(AdvantagePart):
    """GAE over turns, then over the tokens of each; RAGEN's 0.95 discounts turns.

    Attributes:
        turn_gamma: discount per turn (bilevel_ppo); 0.95.
        turn_lam: of GAE over turns (bilevel_ppo); 0.95.
        token_gamma: discount per token of a turn (bilevel_ppo); 1.
        token_lam: of GAE over the tokens of a turn (bilevel_ppo); 1.
    """

    turn_gamma: float = 0.95
    turn_lam: float = 0.95
    token_gamma: float = 1.0
    token_lam: float = 1.0
    whiten: bool = True
    needs_critic: ClassVar[bool] = True
    judges_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_unit("bilevel_ppo", turn_gamma=self.turn_gamma, turn_lam=self.turn_lam)
        _check_unit("bilevel_ppo", token_gamma=self.token_gamma, token_lam=self.token_lam)


@dataclass(frozen=True, slots=True)
class ReturnsToGo(AdvantagePart):
    """REINFORCE and, whitened, REINFORCE++: what is still to be earned; ``gamma`` is per agent token."""

    gamma: float = 1.0
    whiten: bool = False

    def __post_init__(self) -> None:
        _check_unit("reinforce", gamma=self.gamma)


@dataclass(frozen=True, slots=True)
class GiGpo(AdvantagePart):
    """Episodes compared within the group, and turns that answered the same observation; ``gamma`` is per turn.

    Attributes:
        step_weight: of the advantages of turns beside those of episodes (gigpo, istar); 1.
    """

    gamma: float = 0.95
    step_weight: float = 1.0
    normalise_std: bool = True
    std_eps: float = 1e-4
    needs_groups: ClassVar[bool] = True
    judges_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_unit("gigpo", gamma=self.gamma)
        _check_std("gigpo", self.std_eps)
        if self.step_weight < 0.0:
            raise ValueError(f"gigpo: step_weight must be at least 0, got {self.step_weight}")


@dataclass(frozen=True, slots=True)
class ImplicitSteps(GroupRelative):
    """iStar: GRPO's comparison of episodes, and one of their turns by the rewards of an implicit process reward model.

    Attributes:
        prm_beta: scale of the implicit rewards of turns (istar); 0.05.
        prm_lr: learning rate of the process reward model, relative to train.lr (istar); 1.
    """

    step_weight: float = 1.0
    prm_beta: float = 0.05
    prm_lr: float = 1.0
    judges_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_std("istar", self.std_eps)
        if self.step_weight < 0.0 or not (self.prm_beta > 0.0 and self.prm_lr > 0.0):
            raise ValueError("istar: step_weight must be at least 0, prm_beta and prm_lr above 0")


@dataclass(frozen=True, slots=True)
class BestOfGroups(AdvantagePart):
    """Filtered behaviour cloning: keep the best episodes, with advantage 1, and drop the others.

    Attributes:
        keep_fraction: of each group that is imitated (filtered_bc); 0.25.
        keep_min_return: least return of an imitated episode (filtered_bc); 0.99.
    """

    keep_fraction: float = 0.25
    keep_min_return: float = 0.99
    adds_up: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 < self.keep_fraction <= 1.0:
            raise ValueError(f"filtered_bc: keep_fraction must lie in (0, 1], got {self.keep_fraction}")


# --- what may be added to any of them ---


@dataclass(frozen=True, slots=True)
class Critic(Part):
    """The loss of the value head.

    Attributes:
        value_coef: weight of the value loss (with a critic); 0.5.
        value_clip: how far a value may move in an update (with a critic); 0.2; 0 is without bound.
    """

    value_coef: float = 0.5
    value_clip: float | None = 0.2

    def __post_init__(self) -> None:
        if not self.value_coef > 0.0:
            raise ValueError(
                f"value_coef must be positive, got {self.value_coef}: an untrained critic judges at random"
            )
        if self.value_clip is not None and not self.value_clip > 0.0:
            raise ValueError(f"value_clip must be positive, or none for no clip, got {self.value_clip}")


@dataclass(frozen=True, slots=True)
class Kl(Part):
    """Distance to the frozen starting policy.

    Attributes:
        kl_coef: weight of the KL to the cloned policy; 0, which keeps no copy of it.
        kl_estimator: k3, reinforce_pp_baseline k2; k1 (reinforce_pp) only as a reward.
        kl_in: loss, or reward (reinforce_pp), which takes the KL from the reward of each token.
    """

    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"

    def __post_init__(self) -> None:
        if self.kl_coef < 0.0:
            raise ValueError(f"kl_coef must be at least 0, got {self.kl_coef}")
        if self.kl_estimator not in ("k1", "k2", "k3") or self.kl_in not in ("loss", "reward"):
            raise ValueError(
                f"kl_estimator must be k1, k2 or k3 and kl_in loss or reward, got {self.kl_estimator} and {self.kl_in}"
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "k1 has no gradient in expectation as a loss: set kl_estimator to k2 or k3, or kl_in=reward"
            )


@dataclass(frozen=True, slots=True)
class Entropy(Part):
    """Bonus for entropy, and a penalty for leaving the band around what it has been (EPO).

    Attributes:
        entropy_coef: weight of an entropy bonus; 0, epo 0.001.
        entropy_smoothing: weight of the penalty for leaving the band, within the bonus's; 0, epo 1.
        entropy_low: lower end of the band, as a share of the mean entropy of earlier updates; 0.8.
        entropy_high: upper end of the band; 1.2.
    """

    entropy_coef: float = 0.0
    entropy_smoothing: float = 0.0
    entropy_low: float = 0.8
    entropy_high: float = 1.2

    def __post_init__(self) -> None:
        if self.entropy_coef < 0.0 or self.entropy_smoothing < 0.0:
            raise ValueError("entropy_coef and entropy_smoothing must be at least 0")
        if not 0.0 <= self.entropy_low <= 1.0 <= self.entropy_high:
            raise ValueError(
                "the band of entropies must contain 1: set entropy_low <= 1 <= entropy_high, "
                f"got {self.entropy_low} and {self.entropy_high}"
            )
        if self.entropy_smoothing and not self.entropy_coef:
            raise ValueError("entropy_smoothing is multiplied by entropy_coef, which is 0: set it too")


@dataclass(frozen=True, slots=True)
class DynamicSampling(Part):
    """Which episodes and how many tokens count (DAPO, Dr.GRPO).

    Groups that ``drop_equal_groups`` leaves out are in neither loss nor denominator; the caller plays others instead.

    Attributes:
        drop_equal_groups: leave out groups whose episodes earned the same; true for grpo and dapo.
        max_tokens: most agent tokens of an episode; dream.max_turns times max_action_tokens.
        overlong_buffer: the last so many tokens before max_tokens in which length is punished; 0 punishes none.
        overlong_penalty: at max_tokens, in units of reward; 1.
    """

    drop_equal_groups: bool = False
    max_tokens: int | None = None
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.overlong_buffer < 0 or not self.overlong_penalty > 0.0:
            raise ValueError("overlong_buffer must be at least 0 and overlong_penalty positive")
        if self.overlong_buffer and self.max_tokens is not None and self.overlong_buffer > self.max_tokens:
            raise ValueError(f"overlong_buffer must be at most max_tokens = {self.max_tokens}")


PARTS: tuple[type[Part], ...] = (
    *(PpoClip, WeightClip, SequenceClip, TurnClip, PolicyGradient, Imitate),
    *(GroupRelative, LeaveOneOut, GroupBaseline, TokenGae, TurnGae, BilevelGae, ReturnsToGo, GiGpo, ImplicitSteps),
    *(BestOfGroups, Critic, Kl, Entropy, DynamicSampling),
)
