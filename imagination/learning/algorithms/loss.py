"""What an algorithm reads of tokens, and what each loss part minimises.

Settings are explained once, in ``settings/algorithm_parts.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import singledispatch
from typing import Any

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
from imagination.settings.algorithm_parts import (
    Imitate,
    LossPart,
    PolicyGradient,
    PpoClip,
    SequenceClip,
    TurnClip,
    WeightClip,
)


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
        """A column that the settings call for. The error where it is missing says what to choose ``instead``."""
        column: Tensor | None = getattr(self, name)
        if column is None:
            raise ValueError(f"give Tokens.{name}, or choose {instead}")
        return column

    def ratios(self) -> dict[str, Any]:
        """What every loss with an importance ratio reads."""
        names = ("logprobs", "behavior_logprobs", "advantages", "weight", "importance")
        return {name: getattr(self, name) for name in names}

    def where(self, mask: Tensor) -> Tokens:
        """Some of the tokens, ``[n]``, without gradient."""
        columns: dict[str, Any] = {}
        for f in fields(self):
            column: Tensor | None = getattr(self, f.name)
            columns[f.name] = None if column is None else column.detach()[mask]
        return Tokens(**columns)


_SEGMENTS = "an algorithm whose ratio is of tokens: this one's is of a segment, see row_segments and turn_segments"


@singledispatch
def policy_loss(part: LossPart, tokens: Tokens, denominator: float) -> LossTerms:
    """The terms of the policy's loss, by the settings of a part.

    Raises:
        ValueError: tokens lack what the part reads, or shapes disagree.
    """
    raise NotImplementedError(f"nobody has registered what {type(part).__name__} minimises")


@policy_loss.register
def _(part: PpoClip, tokens: Tokens, denominator: float) -> LossTerms:
    return ppo_clip_loss(**tokens.ratios(), denominator=denominator, **_clip(part), dual_clip=part.dual_clip)


@policy_loss.register
def _(part: SequenceClip, tokens: Tokens, denominator: float) -> LossTerms:
    read = {**tokens.ratios(), "sequences": tokens.given("sequences", _SEGMENTS)}
    return gspo_loss(**read, denominator=denominator, **_clip(part), token_form=part.token_form)


@policy_loss.register
def _(part: TurnClip, tokens: Tokens, denominator: float) -> LossTerms:
    read = {**tokens.ratios(), "turns": tokens.given("turns", _SEGMENTS)}
    clip = {**_clip(part), "dual_clip": part.dual_clip}
    return turn_ratio_loss(**read, denominator=denominator, **clip, correct_bias=part.correct_bias)


def _clip(part: PpoClip | SequenceClip) -> dict[str, Any]:
    return {"eps_low": part.clip_low, "eps_high": part.clip_high}


@policy_loss.register
def _(part: WeightClip, tokens: Tokens, denominator: float) -> LossTerms:
    return cispo_loss(**tokens.ratios(), denominator=denominator, lowest=part.ratio_min, highest=part.ratio_max)


@policy_loss.register
def _(part: PolicyGradient, tokens: Tokens, denominator: float) -> LossTerms:
    read = tokens.logprobs, tokens.advantages, tokens.weight
    return reinforce_loss(*read, denominator=denominator, importance=tokens.importance)


@policy_loss.register
def _(part: Imitate, tokens: Tokens, denominator: float) -> LossTerms:
    return cross_entropy_loss(tokens.logprobs, tokens.weight, denominator=denominator)
