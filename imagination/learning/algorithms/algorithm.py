"""An algorithm is a choice of parts: how episodes are judged, ratios clipped and tokens averaged, and what is added.

Pure: tensors and numbers in, tensors and numbers out. The caller plays, computes log-probs, steps the optimiser, logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from imagination.learning.advantages import informative
from imagination.learning.algorithms.advantage import AdvantagePart
from imagination.learning.algorithms.episodes import Episodes, Judged, rewards_of
from imagination.learning.algorithms.surrogate import SurrogatePart, Tokens
from imagination.learning.algorithms.terms import Critic, Entropy, Kl, Sampling
from imagination.learning.losses import Aggregation, LossTerms, entropy_loss, kl_loss, token_weights, value_loss


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One member of the family.

    Attributes:
        name: in the registry.
        advantage: settings of the advantage part.
        surrogate: settings of the ratio and its clip.
        aggregation: how tokens are averaged, see ``token_weights``.
        critic: ``None`` for algorithms without one.
        kl, entropy, sampling: what is added; by default nothing.

    Raises:
        ValueError: parts contradict each other.
    """

    name: str
    advantage: AdvantagePart
    surrogate: SurrogatePart
    aggregation: Aggregation = "token_mean"
    critic: Critic | None = None
    kl: Kl = field(default_factory=Kl)
    entropy: Entropy = field(default_factory=Entropy)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if self.advantage.needs_critic and self.critic is None:
            raise ValueError(f"{self.name}: {type(self.advantage).__name__} reads values, so give it a Critic")
        if self.critic is not None and not self.advantage.needs_critic:
            raise ValueError(f"{self.name}: {type(self.advantage).__name__} reads no values, so take its Critic away")
        if self.sampling.drop_equal_groups and not self.advantage.needs_groups:
            raise ValueError(f"{self.name} compares no groups: set drop_equal_groups=false")
        if self.aggregation not in ("token_mean", "sequence_mean", "constant"):
            raise ValueError(f"aggregation must be token_mean, sequence_mean or constant, got {self.aggregation!r}")

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by name, those of all parts together: what ``with_settings`` takes."""
        found: dict[str, Any] = {"aggregation": self.aggregation}
        for part in self._parts().values():
            found |= {f.name: getattr(part, f.name) for f in fields(part)}
        return found

    def with_settings(self, **changes: Any) -> Algorithm:
        """The same algorithm with other settings.

        Raises:
            ValueError: it has no such setting, a value is out of range, or settings contradict each other.

        Example::

            ALGORITHMS["grpo"].with_settings(clip_high=0.28, kl_coef=0.01)
        """
        for name in changes:
            if name not in self.settings:
                hint = "; it has no critic" if name in _CRITIC and self.critic is None else ""
                raise ValueError(
                    f"{self.name} has no setting {name!r}{hint}: remove it, or choose another algorithm; "
                    f"its settings are {', '.join(sorted(self.settings))}"
                )
        parts = {
            name: replace(part, **{f.name: changes[f.name] for f in fields(part) if f.name in changes})
            for name, part in self._parts().items()
        }
        return replace(self, aggregation=changes.get("aggregation", self.aggregation), **parts)

    def check_run(self, *, group_size: int, steps_per_update: int = 1) -> None:
        """Whether a run can use the algorithm.

        Args:
            group_size: episodes per start state.
            steps_per_update: optimiser steps on the same episodes, epochs times minibatches.

        Raises:
            ValueError: it cannot; the message says what to change.
        """
        if self.advantage.needs_groups and group_size < 2:
            raise ValueError(
                f"{self.name} compares the episodes of a group, and a group of {group_size} has none to compare: "
                "set train.group_size to 2 or more, or choose ppo or reinforce_pp"
            )
        if self.surrogate.on_policy and steps_per_update > 1:
            raise ValueError(
                f"{self.name} has no importance ratio, so only the first of {steps_per_update} steps an update would "
                "be right: set train.epochs=1 and train.minibatches=1, or choose reinforce_pp"
            )
        needs = [key for key, wanted in (
            ("aggregation=constant", self.aggregation == "constant"),
            ("overlong_buffer", self.sampling.overlong_buffer > 0),
        ) if wanted]  # fmt: skip
        if needs and self.sampling.max_tokens is None:
            raise ValueError(
                f"{self.name} with {' and '.join(needs)} needs max_tokens, the most agent tokens an episode can have: "
                "set it to the turns of an episode times the tokens of an action"
            )

    def judge(self, episodes: Episodes) -> Judged:
        """Advantages of all episodes of an update, before they are packed or split.

        Raises:
            ValueError: episodes lack what the algorithm reads, or shapes disagree.
        """
        sampling = self.sampling
        rewards = rewards_of(
            episodes,
            kl_coef=self.kl.kl_coef if self.kl.kl_in == "reward" else 0.0,
            max_tokens=sampling.max_tokens,
            buffer=sampling.overlong_buffer,
            penalty=sampling.overlong_penalty,
        )
        judged = self.advantage(episodes, rewards)
        trained = judged.trained
        if episodes.loss_mask is not None:
            # The observations of an episode that counts may be trained on too, if that is what is ablated.
            trained = episodes.loss_mask & judged.trained.any(1, keepdim=True)
        if sampling.drop_equal_groups:
            # by what the environment paid: a length penalty must not make a solved group look informative
            trained = trained & informative(rewards.earned, episodes.group_ids, episodes.valid)[:, None]
        return replace(judged, trained=trained)

    def weigh(self, trained: Tensor) -> tuple[Tensor, float]:
        """Weights ``[batch, time]`` and denominator of an optimiser step, from ``Judged.trained`` of all its rows.

        Raises:
            ValueError: as ``token_weights``.
        """
        constant = self.sampling.max_tokens if self.aggregation == "constant" else None
        if self.aggregation == "constant" and constant is None:
            raise ValueError(f"{self.name} with aggregation=constant needs max_tokens: see check_run")
        return token_weights(trained, self.aggregation, max_tokens=constant)

    def losses(
        self,
        tokens: Tokens,
        denominator: float,
        *,
        critic_denominator: float | None = None,
        entropy_history: float | None = None,
    ) -> dict[str, LossTerms]:
        """The terms of a micro-batch, each already times its coefficient: their ``loss`` add up to what to descend.

        Args:
            tokens: of the micro-batch; of the optional ones those that the settings call for.
            denominator: from ``weigh``, of the whole optimiser step.
            critic_denominator: number of ``learned`` tokens of the whole optimiser step; needed with a critic.
            entropy_history: mean entropy of earlier updates, see ``EntropyHistory``.

        Returns:
            ``policy``, and ``kl``, ``entropy`` and ``critic`` where they are in use.

        Raises:
            ValueError: tokens lack what the algorithm reads, or shapes disagree.
        """
        found = {"policy": self.surrogate(tokens, denominator)}
        if self.kl.kl_coef and self.kl.kl_in == "loss":
            reference = _given(tokens.ref_logprobs, "ref_logprobs", "kl_coef=0")
            terms = kl_loss(
                tokens.logprobs, reference, tokens.weight, denominator=denominator, estimator=self.kl.kl_estimator
            )
            found["kl"] = replace(terms, loss=self.kl.kl_coef * terms.loss)
        if self.entropy.entropy_coef:
            found["entropy"] = entropy_loss(
                _given(tokens.entropy, "entropy", "entropy_coef=0"),
                tokens.weight,
                denominator=denominator,
                coef=self.entropy.entropy_coef,
                history=entropy_history,
                smoothing=self.entropy.entropy_smoothing,
                low=self.entropy.entropy_low,
                high=self.entropy.entropy_high,
            )
        if self.critic is not None:
            instead = "an algorithm without a critic"
            if critic_denominator is None:
                raise ValueError(f"{self.name} has a critic: give critic_denominator, or choose {instead}")
            terms = value_loss(
                _given(tokens.values, "values", instead),
                _given(tokens.old_values, "old_values", instead),
                _given(tokens.returns, "returns", instead),
                _given(tokens.learned, "learned", instead),
                denominator=critic_denominator,
                clip=self.critic.value_clip,
            )
            found["critic"] = replace(terms, loss=self.critic.value_coef * terms.loss)
        return found

    def _parts(self) -> dict[str, Any]:
        parts: Mapping[str, Any] = {
            name: getattr(self, name) for name in ("advantage", "surrogate", "critic", "kl", "entropy", "sampling")
        }
        return {name: part for name, part in parts.items() if part is not None}


_CRITIC = tuple(f.name for f in fields(Critic))


def total(terms: Mapping[str, LossTerms]) -> Tensor:
    """The scalar to descend."""
    return torch.stack([part.loss for part in terms.values()]).sum()


def _given(x: Tensor | None, name: str, instead: str) -> Tensor:
    if x is None:
        raise ValueError(f"give Tokens.{name}, or choose {instead}")
    return x
