"""Algorithms by name. Each is a choice of parts: how episodes are judged, which ratio is clipped, what is averaged how,
and what is added. Pure: tensors and numbers in, tensors and numbers out. The caller plays, computes log-probs, steps
the optimiser, logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from imagination.learning.advantages.group import informative
from imagination.learning.algorithms.advantage import Advantages, Episodes, estimate, with_penalties
from imagination.learning.losses.auxiliary import entropy_loss, kl_loss, value_loss
from imagination.learning.losses.policy import policy_loss
from imagination.learning.losses.terms import LossInputs, LossTerms, token_weights
from imagination.settings import AlgorithmSettings, ProgressSettings, UserError
from imagination.settings.algorithm_parts import (
    AdvantagePart,
    Aggregation,
    BestOfGroups,
    BilevelGae,
    Critic,
    DynamicSampling,
    Entropy,
    GiGpo,
    GroupBaseline,
    GroupRelative,
    Imitate,
    ImplicitSteps,
    Kl,
    LeaveOneOut,
    LossPart,
    Part,
    PolicyGradient,
    PpoClip,
    ReturnsToGo,
    SequenceClip,
    TokenGae,
    TurnClip,
    TurnGae,
    WeightClip,
)

# Settings that belong to the trainer, whatever the algorithm.
TRAINERS = ("name", "progress", "tis_cap", "loss_mask", "advantage_mask")
# On a command line there is no other word for "none" where null means the default.
_ZERO_IS_NONE = ("dual_clip", "value_clip")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One member of the family.

    Attributes:
        aggregation: how tokens are averaged, see ``token_weights``.
        critic: ``None`` for algorithms without one.
        progress, tis_cap, loss_mask, advantage_mask: what the trainer does whatever the algorithm; see
            ``AlgorithmSettings``.

    Raises:
        ValueError: parts contradict each other.
    """

    name: str
    advantage: AdvantagePart
    surrogate: LossPart
    aggregation: Aggregation = "token_mean"
    critic: Critic | None = None
    kl: Kl = field(default_factory=Kl)
    entropy: Entropy = field(default_factory=Entropy)
    sampling: DynamicSampling = field(default_factory=DynamicSampling)
    progress: ProgressSettings = field(default_factory=ProgressSettings)
    tis_cap: float = 2.0
    loss_mask: bool = True
    advantage_mask: bool = True

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
        settings: dict[str, Any] = {"aggregation": self.aggregation}
        for part in self._parts().values():
            settings |= {f.name: getattr(part, f.name) for f in fields(part)}
        return settings

    def with_settings(self, **changes: Any) -> Algorithm:
        """The same algorithm with other settings, such as ``with_settings(clip_high=0.28, kl_coef=0.01)``.

        Raises:
            ValueError: it has no such setting, a value is out of range, or settings contradict each other.
        """
        for key in changes:
            if key not in self.settings:
                having = [name for name, member in ALGORITHMS.items() if key in member.settings]
                raise ValueError(
                    f"{key} is no setting of {self.name}: leave it out, or set algorithm.name to one of "
                    f"{', '.join(having) or 'none: no algorithm has it'}"
                )
        parts = {
            name: replace(part, **{f.name: changes[f.name] for f in fields(part) if f.name in changes})
            for name, part in self._parts().items()
        }
        return replace(self, aggregation=changes.get("aggregation", self.aggregation), **parts)

    def check_run(self, *, group_size: int, steps_per_update: int = 1) -> None:
        """Refuses a run that cannot use the algorithm, with what to change: ``ValueError``.

        ``group_size`` counts episodes per start state, ``steps_per_update`` optimiser steps on the same episodes.
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
        needs = ["aggregation=constant"] * (self.aggregation == "constant")
        needs += ["overlong_buffer"] * (self.sampling.overlong_buffer > 0)
        if needs and self.sampling.max_tokens is None:
            raise ValueError(
                f"{self.name} with {' and '.join(needs)} needs max_tokens, the most agent tokens an episode can have: "
                "set it to the turns of an episode times the tokens of an action"
            )

    def judge(self, episodes: Episodes) -> Advantages:
        """Advantages of all episodes of an update, before they are packed or split.

        Raises:
            ValueError: episodes lack what the algorithm reads, or shapes disagree.
        """
        judged = estimate(with_penalties(episodes, self.kl, self.sampling), self.advantage)
        trained = judged.trained
        if episodes.loss_mask is not None:
            # The observations of an episode that counts may be trained on too, if that is what is ablated.
            trained = episodes.loss_mask & judged.trained.any(1, keepdim=True)
        if self.sampling.drop_equal_groups:
            # by what the environment paid: a length penalty must not make a solved group look informative
            trained = trained & informative(episodes.earned.sum(1), episodes.group_ids, episodes.valid)[:, None]
        return replace(judged, trained=trained)

    def weigh(self, trained: Tensor) -> tuple[Tensor, float]:
        """Weights ``[batch, time]`` and denominator of an optimiser step: ``Advantages.trained`` of all its rows."""
        constant = self.sampling.max_tokens if self.aggregation == "constant" else None
        if self.aggregation == "constant" and constant is None:
            raise ValueError(f"{self.name} with aggregation=constant needs max_tokens: see check_run")
        return token_weights(trained, self.aggregation, max_tokens=constant)

    def losses(
        self,
        inputs: LossInputs,
        denominator: float,
        *,
        critic_denominator: float | None = None,
        entropy_history: float | None = None,
    ) -> dict[str, LossTerms]:
        """The terms of a micro-batch, each already times its coefficient: their ``loss`` add up to what to descend.

        Args:
            inputs: of the optional ones those that the settings call for.
            denominator: from ``weigh``, of the whole optimiser step.
            critic_denominator: number of ``learned`` tokens of the whole optimiser step; needed with a critic.
            entropy_history: mean entropy of earlier updates, see ``EntropyHistory``.

        Returns:
            ``policy``, and ``kl``, ``entropy`` and ``critic`` where they are in use.

        Raises:
            ValueError: inputs lack what the algorithm reads, or shapes disagree.
        """
        terms = {"policy": policy_loss(inputs, self.surrogate, denominator)}
        if self.kl.kl_coef and self.kl.kl_in == "loss":
            reference = inputs.given("ref_logprobs", "kl_coef=0")
            terms["kl"] = kl_loss(inputs.logprobs, reference, inputs.weight, self.kl, denominator=denominator)
        if self.entropy.entropy_coef:
            entropy, history = inputs.given("entropy", "entropy_coef=0"), entropy_history
            terms["entropy"] = entropy_loss(
                entropy, inputs.weight, self.entropy, denominator=denominator, history=history
            )
        if self.critic is not None:
            instead = "an algorithm without a critic"
            if critic_denominator is None:
                raise ValueError(f"{self.name} has a critic: give critic_denominator, or choose {instead}")
            names = ("values", "old_values", "returns", "learned")
            values, old, returns, learned = (inputs.given(name, instead) for name in names)
            terms["critic"] = value_loss(values, old, returns, learned, self.critic, denominator=critic_denominator)
        return terms

    def _parts(self) -> dict[str, Any]:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: part for name, part in parts.items() if isinstance(part, Part)}


# Defaults are those of the papers; where this project chose otherwise, a comment says so.
_FAMILY = (
    Algorithm("ppo", TokenGae(), PpoClip(), critic=Critic()),
    # The paper averages by sequence and counts groups without a gradient too; our results were measured with this.
    Algorithm("grpo", GroupRelative(), PpoClip(), sampling=DynamicSampling(drop_equal_groups=True)),
    Algorithm("dr_grpo", GroupRelative(normalise_std=False), PpoClip(), aggregation="constant"),
    # The paper takes REINFORCE's loss; the clip has the same gradient in the first step and allows further ones.
    Algorithm("rloo", LeaveOneOut(), PpoClip()),
    Algorithm("reinforce", ReturnsToGo(), PolicyGradient()),
    Algorithm("reinforce_pp", ReturnsToGo(whiten=True), PpoClip(), kl=Kl(kl_estimator="k1", kl_in="reward")),
    Algorithm("reinforce_pp_baseline", GroupBaseline(), PpoClip(), kl=Kl(kl_estimator="k2")),
    Algorithm("gigpo", GiGpo(), PpoClip()),
    Algorithm("istar", ImplicitSteps(), PpoClip()),
    Algorithm(
        "dapo",
        GroupRelative(),
        PpoClip(clip_low=0.2, clip_high=0.28, dual_clip=None),
        sampling=DynamicSampling(drop_equal_groups=True),
    ),
    Algorithm("gspo", GroupRelative(), SequenceClip(), aggregation="sequence_mean"),
    Algorithm("gspo_token", GroupRelative(), SequenceClip(token_form=True), aggregation="sequence_mean"),
    Algorithm("cispo", GroupRelative(), WeightClip()),
    Algorithm("st_ppo", TokenGae(), TurnClip(), critic=Critic()),
    # The coefficients are this project's.
    Algorithm("epo", GroupRelative(), PpoClip(), entropy=Entropy(entropy_coef=1e-3, entropy_smoothing=1.0)),
    # A turn is the action: one value, one advantage, one ratio.
    Algorithm("turn_ppo", TurnGae(), TurnClip(correct_bias=False), critic=Critic()),
    Algorithm("bilevel_ppo", BilevelGae(), PpoClip(), critic=Critic()),
    Algorithm("filtered_bc", BestOfGroups(), Imitate()),
)

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({member.name: member for member in _FAMILY})


def build_algorithm(settings: AlgorithmSettings, max_tokens: int | None = None) -> Algorithm:
    """The algorithm that the settings name, with what they change.

    Args:
        max_tokens: most agent tokens of an episode, where the settings leave it open.

    Raises:
        UserError: the algorithm has no such setting, a value is out of range, or settings contradict each other.

    Example::

        build_algorithm(AlgorithmSettings("ppo", gamma=0.99, value_clip=0.0))  # without a bound for values
    """
    changes = changed(settings)
    if max_tokens is not None:
        changes.setdefault("max_tokens", max_tokens)
    try:
        chosen = ALGORITHMS[settings.name].with_settings(**changes)
    except ValueError as error:
        raise UserError(f"algorithm: {error}") from error
    if settings.tis_cap and not settings.tis_cap >= 1:
        raise UserError(f"algorithm.tis_cap must be 1 or more, or 0 for no correction, got {settings.tis_cap}")
    if not settings.advantage_mask and chosen.advantage.judges_turns:
        raise UserError(
            f"algorithm.advantage_mask=false is for algorithms of tokens and of whole episodes; {settings.name} judges "
            "turns: leave it out, or set algorithm.name=ppo or grpo"
        )
    if not settings.loss_mask and chosen.aggregation == "constant":
        raise UserError(
            "algorithm.loss_mask=false trains more tokens than algorithm.aggregation=constant divides by: set "
            "algorithm.aggregation=token_mean"
        )
    return replace(chosen, **{name: getattr(settings, name) for name in TRAINERS})


def changed(settings: AlgorithmSettings) -> dict[str, Any]:
    """What is set, by the names of the registry; ``{"dual_clip": None}`` for ``dual_clip=0``."""
    given = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in TRAINERS}
    return {k: None if v == 0 and k in _ZERO_IS_NONE else v for k, v in given.items() if v is not None}


def total(terms: Mapping[str, LossTerms]) -> Tensor:
    """The scalar to descend."""
    return torch.stack([part.loss for part in terms.values()]).sum()
