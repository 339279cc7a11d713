"""The family by name. Defaults are those of the papers; where this project chose otherwise, a comment says so."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from imagination.learning.algorithms.algorithm import Algorithm
from imagination.learning.algorithms.surrogate import (
    Imitate,
    PolicyGradient,
    PpoClip,
    SequenceClip,
    TurnClip,
    WeightClip,
)
from imagination.learning.algorithms.terms import Critic, Entropy, Kl, Sampling
from imagination.learning.algorithms.with_critic import BilevelGae, TokenGae, TurnGae
from imagination.learning.algorithms.without_critic import (
    BestOfGroups,
    GiGpo,
    GroupBaseline,
    GroupRelative,
    LeaveOneOut,
    ReturnsToGo,
)

_FAMILY = (
    Algorithm("ppo", TokenGae(), PpoClip(), critic=Critic()),
    # The paper averages by sequence and counts groups without a gradient too; our results were measured with this.
    Algorithm("grpo", GroupRelative(), PpoClip(), sampling=Sampling(drop_equal_groups=True)),
    Algorithm("dr_grpo", GroupRelative(normalise_std=False), PpoClip(), aggregation="constant"),
    # The paper takes REINFORCE's loss; the clip has the same gradient in the first step and allows further ones.
    Algorithm("rloo", LeaveOneOut(), PpoClip()),
    Algorithm("reinforce", ReturnsToGo(), PolicyGradient()),
    Algorithm("reinforce_pp", ReturnsToGo(whiten=True), PpoClip(), kl=Kl(kl_estimator="k1", kl_in="reward")),
    Algorithm("reinforce_pp_baseline", GroupBaseline(), PpoClip(), kl=Kl(kl_estimator="k2")),
    Algorithm("gigpo", GiGpo(), PpoClip()),
    Algorithm(
        "dapo",
        GroupRelative(),
        PpoClip(clip_low=0.2, clip_high=0.28, dual_clip=None),
        sampling=Sampling(drop_equal_groups=True),
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


def algorithm(name: str, **settings: Any) -> Algorithm:
    """The named algorithm, with settings other than its defaults.

    Raises:
        ValueError: there is no such algorithm or setting, or settings contradict each other.

    Example::

        algorithm("dapo", clip_high=0.3)
    """
    if name not in ALGORITHMS:
        raise ValueError(f"there is no algorithm {name!r}: choose one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name].with_settings(**settings)
