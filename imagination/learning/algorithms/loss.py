"""The loss part of an algorithm: which ratio is clipped how, and what is added to the loss of the policy.

Settings are explained once, in ``AlgorithmSettings``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from imagination.learning.losses import (
    LossTerms,
    cispo_loss,
    cross_entropy_loss,
    gspo_loss,
    ppo_clip_loss,
    reinforce_loss,
    turn_ratio_loss,
)
from imagination.learning.losses.auxiliary import Estimator
from imagination.learning.losses.policy import check_clip


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a micro-batch, all of one shape, ``[batch, time]`` or ``[n]``.

    Attributes:
        logprobs: nats, of the policy that is trained; the only part with a gradient besides ``entropy`` and ``values``.
        behavior_logprobs: of the policy that acted.
        advantages: as ``Advantages`` has them.
        weight: as ``token_weights`` gives it; 0 on every token that is not trained.
        sequences: integers, equal within an episode; for ratios of sequences. A micro-batch holds whole episodes.
        turns: integers, equal within a turn; for ratios of turns.
        importance: constant factors against a mismatch of engine and trainer.
        ref_logprobs: of the frozen reference; for the KL as a loss.
        entropy: for the entropy terms.
        values, old_values, returns, learned: of the critic; ``learned`` is bool.
    """

    logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    weight: Tensor
    sequences: Tensor | None = None
    turns: Tensor | None = None
    importance: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    learned: Tensor | None = None

    def given(self, name: str, instead: str) -> Tensor:
        """A column that the settings call for.

        Raises:
            ValueError: it is missing; the message names it and what to choose ``instead``.
        """
        column: Tensor | None = getattr(self, name)
        if column is None:
            raise ValueError(f"give Tokens.{name}, or choose {instead}")
        return column

    def ratios(self) -> dict[str, Any]:
        """What every loss with an importance ratio reads."""
        names = ("logprobs", "behavior_logprobs", "advantages", "weight", "importance")
        return {name: getattr(self, name) for name in names}


class LossPart:
    """Frozen settings that, called with tokens, give the terms of the policy's loss.

    Attributes:
        on_policy: only the first optimiser step on the same tokens is right.
    """

    __slots__ = ()
    on_policy: ClassVar[bool] = False

    def __call__(self, tokens: Tokens, denominator: float) -> LossTerms:
        raise NotImplementedError


_SEGMENTS = "an algorithm whose ratio is of tokens: this one's is of a segment, see row_segments and turn_segments"


@dataclass(frozen=True, slots=True)
class PpoClip(LossPart):
    """PPO's clip, one ratio a token."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high, self.dual_clip)

    def __call__(self, tokens: Tokens, denominator: float) -> LossTerms:
        return ppo_clip_loss(
            **tokens.ratios(),
            denominator=denominator,
            eps_low=self.clip_low,
            eps_high=self.clip_high,
            dual_clip=self.dual_clip,
        )


@dataclass(frozen=True, slots=True)
class SequenceClip(LossPart):
    """GSPO's clip, one ratio a sequence.

    A geometric mean over hundreds of tokens hardly leaves 1, so the clip is small; short episodes need more.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    token_form: bool = False

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high, None)

    def __call__(self, tokens: Tokens, denominator: float) -> LossTerms:
        return gspo_loss(
            **tokens.ratios(),
            sequences=tokens.given("sequences", _SEGMENTS),
            denominator=denominator,
            eps_low=self.clip_low,
            eps_high=self.clip_high,
            token_form=self.token_form,
        )


@dataclass(frozen=True, slots=True)
class TurnClip(LossPart):
    """Turn-PPO's and ST-PPO's clip, one ratio a turn; ``correct_bias`` is ST-PPO's."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    correct_bias: bool = True

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high, self.dual_clip)

    def __call__(self, tokens: Tokens, denominator: float) -> LossTerms:
        return turn_ratio_loss(
            **tokens.ratios(),
            turns=tokens.given("turns", _SEGMENTS),
            denominator=denominator,
            eps_low=self.clip_low,
            eps_high=self.clip_high,
            dual_clip=self.dual_clip,
            correct_bias=self.correct_bias,
        )


@dataclass(frozen=True, slots=True)
class WeightClip(LossPart):
    """CISPO: the importance weight is clipped, and no token loses its gradient; ``ratio_min=0`` is no lower bound."""

    ratio_min: float = 0.0
    ratio_max: float = 5.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio_min <= 1.0 <= self.ratio_max:
            raise ValueError(f"cispo: ratio_min <= 1 <= ratio_max, got {self.ratio_min} and {self.ratio_max}")

    def __call__(self, tokens: Tokens, denominator: float) -> LossTerms:
        return cispo_loss(**tokens.ratios(), denominator=denominator, lowest=self.ratio_min, highest=self.ratio_max)


@dataclass(frozen=True, slots=True)
class PolicyGradient(LossPart):
    """REINFORCE: no ratio, so one step an update. It has no settings."""

    on_policy: ClassVar[bool] = True

    def __call__(self, tokens: Tokens, denominator: float) -> LossTerms:
        return reinforce_loss(
            tokens.logprobs,
            tokens.advantages,
            tokens.weight,
            denominator=denominator,
            importance=tokens.importance,
        )


@dataclass(frozen=True, slots=True)
class Imitate(LossPart):
    """Cross-entropy on what was kept: no ratio and no advantage. It has no settings."""

    def __call__(self, tokens: Tokens, denominator: float) -> LossTerms:
        return cross_entropy_loss(tokens.logprobs, tokens.weight, denominator=denominator)


# --- what may be added to the loss of any policy ---


@dataclass(frozen=True, slots=True)
class Critic:
    """The loss of the value head."""

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
class Kl:
    """Distance to the frozen starting policy, in the loss or taken from the reward of each token."""

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
class Entropy:
    """Bonus for entropy, and a penalty for leaving the band around what it has been (EPO)."""

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
class Sampling:
    """Which episodes and how many tokens count (DAPO, Dr.GRPO).

    Groups that ``drop_equal_groups`` leaves out are in neither loss nor denominator; the caller plays others instead.
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
