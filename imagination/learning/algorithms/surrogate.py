"""The policy part of an algorithm: settings that, called with tokens, say what to descend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

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
from imagination.learning.losses.ratios import check_clip


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a micro-batch, all of one shape, ``[batch, time]`` or ``[n]``.

    Attributes:
        logprobs: nats, of the policy that is trained; the only part with a gradient besides ``entropy`` and ``values``.
        behavior_logprobs: of the policy that acted.
        advantages: as ``Judged`` has them.
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


class SurrogatePart(Protocol):
    """Frozen settings with one fact: whether only the first step on the same tokens is right."""

    on_policy: ClassVar[bool]

    def __call__(self, tokens: Tokens, denominator: float) -> LossTerms: ...


@dataclass(frozen=True, slots=True)
class PpoClip:
    """PPO's clip, one ratio a token.

    Attributes:
        clip_low: ratios below 1 - clip_low have no gradient.
        clip_high: ratios above 1 + clip_high have no gradient.
        dual_clip: bound of the loss where the advantage is negative, as a multiple of it; none for no bound.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    on_policy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high, self.dual_clip)

    def __call__(self, tokens: Tokens, denominator: float) -> LossTerms:
        return ppo_clip_loss(
            tokens.logprobs,
            tokens.behavior_logprobs,
            tokens.advantages,
            tokens.weight,
            denominator=denominator,
            importance=tokens.importance,
            eps_low=self.clip_low,
            eps_high=self.clip_high,
            dual_clip=self.dual_clip,
        )


@dataclass(frozen=True, slots=True)
class SequenceClip:
    """GSPO's clip, one ratio a sequence.

    Attributes:
        clip_low: ratios below 1 - clip_low have no gradient. A geometric mean over hundreds of tokens hardly leaves 1,
            so this is small; short episodes need more.
        clip_high: ratios above 1 + clip_high have no gradient.
        token_form: the gradient of each token's own ratio.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    token_form: bool = False
    on_policy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high, None)

    def __call__(self, tokens: Tokens, denominator: float) -> LossTerms:
        return gspo_loss(
            tokens.logprobs,
            tokens.behavior_logprobs,
            tokens.advantages,
            tokens.weight,
            _given(tokens.sequences, "sequences"),
            denominator=denominator,
            importance=tokens.importance,
            eps_low=self.clip_low,
            eps_high=self.clip_high,
            token_form=self.token_form,
        )


@dataclass(frozen=True, slots=True)
class TurnClip:
    """Turn-PPO's and ST-PPO's clip, one ratio a turn.

    Attributes:
        clip_low: ratios below 1 - clip_low have no gradient.
        clip_high: ratios above 1 + clip_high have no gradient.
        dual_clip: bound of the loss where the advantage is negative, as a multiple of it; none for no bound.
        correct_bias: down-weight turns far outside the clip (ST-PPO).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    correct_bias: bool = True
    on_policy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high, self.dual_clip)

    def __call__(self, tokens: Tokens, denominator: float) -> LossTerms:
        return turn_ratio_loss(
            tokens.logprobs,
            tokens.behavior_logprobs,
            tokens.advantages,
            tokens.weight,
            _given(tokens.turns, "turns"),
            denominator=denominator,
            importance=tokens.importance,
            eps_low=self.clip_low,
            eps_high=self.clip_high,
            dual_clip=self.dual_clip,
            correct_bias=self.correct_bias,
        )


@dataclass(frozen=True, slots=True)
class WeightClip:
    """CISPO: the importance weight is clipped, and no token loses its gradient.

    Attributes:
        ratio_min: lower bound of the weight; 0 for none.
        ratio_max: upper bound of the weight.
    """

    ratio_min: float = 0.0
    ratio_max: float = 5.0
    on_policy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio_min <= 1.0 <= self.ratio_max:
            raise ValueError(f"cispo: ratio_min <= 1 <= ratio_max, got {self.ratio_min} and {self.ratio_max}")

    def __call__(self, tokens: Tokens, denominator: float) -> LossTerms:
        return cispo_loss(
            tokens.logprobs,
            tokens.behavior_logprobs,
            tokens.advantages,
            tokens.weight,
            denominator=denominator,
            importance=tokens.importance,
            lowest=self.ratio_min,
            highest=self.ratio_max,
        )


@dataclass(frozen=True, slots=True)
class PolicyGradient:
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
class Imitate:
    """Cross-entropy on what was kept: no ratio and no advantage. It has no settings."""

    on_policy: ClassVar[bool] = False

    def __call__(self, tokens: Tokens, denominator: float) -> LossTerms:
        return cross_entropy_loss(tokens.logprobs, tokens.weight, denominator=denominator)


def _given(x: Tensor | None, name: str) -> Tensor:
    if x is None:
        raise ValueError(
            f"this algorithm has a ratio per segment: give Tokens.{name}, see imagination/learning/losses/ratios.py"
        )
    return x
