"""What may be added to any policy loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from imagination.learning.losses.kl import Estimator


@dataclass(frozen=True, slots=True)
class Critic:
    """The loss of the value head.

    Attributes:
        value_coef: weight of the value loss.
        value_clip: how far a value may move in an update; none for no clip.
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
class Kl:
    """Distance to the frozen starting policy.

    Attributes:
        kl_coef: weight of the KL; 0 keeps no copy of the starting policy.
        kl_estimator: k1, k2 or k3; k1 only as a reward.
        kl_in: loss adds it to the loss, reward takes it from the reward of each token.
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
class Entropy:
    """Bonus for entropy, and a penalty for leaving the band around what it has been (EPO).

    Attributes:
        entropy_coef: weight of the bonus; 0 for none.
        entropy_smoothing: weight of the penalty, within the bonus's.
        entropy_low: lower end of the band, as a share of the mean entropy of earlier updates.
        entropy_high: upper end of the band.
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
class Sampling:
    """Which episodes and how many tokens count (DAPO, Dr.GRPO).

    Attributes:
        drop_equal_groups: leave out groups whose returns are all equal, from loss and denominator; the caller plays
            others in their place.
        max_tokens: most agent tokens that an episode can have, turns times tokens of an action; needed by
            aggregation=constant and overlong_buffer.
        overlong_buffer: tokens before max_tokens in which length is punished; 0 for no punishment.
        overlong_penalty: at max_tokens, in units of reward.
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
