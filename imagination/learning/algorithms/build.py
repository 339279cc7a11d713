"""From settings to an algorithm of the registry; what contradicts itself is told in the user's words."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from imagination.learning.algorithms import ALGORITHMS, Algorithm, algorithm
from imagination.settings import AlgorithmSettings, UserError

# Settings that belong to the trainer, whatever the algorithm.
TRAINERS = ("name", "progress", "tis_cap", "loss_mask", "advantage_mask")
# On a command line there is no other word for "none" where null means the default.
_ZERO_IS_NONE = ("dual_clip", "value_clip")


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
    for key in changes:
        if key not in ALGORITHMS[settings.name].settings:
            having = [name for name, member in ALGORITHMS.items() if key in member.settings]
            raise UserError(
                f"algorithm.{key} is no setting of {settings.name}: leave it out, or set algorithm.name to one of "
                f"{', '.join(having)}"
            )
    if max_tokens is not None:
        changes.setdefault("max_tokens", max_tokens)
    try:
        found = algorithm(settings.name, **changes)
    except ValueError as error:
        raise UserError(f"algorithm: {error}") from error
    if settings.tis_cap and not settings.tis_cap >= 1:
        raise UserError(f"algorithm.tis_cap must be 1 or more, or 0 for no correction, got {settings.tis_cap}")
    if not settings.advantage_mask and found.advantage.judges_turns:
        raise UserError(
            f"algorithm.advantage_mask=false is for algorithms of tokens and of whole episodes; {settings.name} judges "
            "turns: leave it out, or set algorithm.name=ppo or grpo"
        )
    if not settings.loss_mask and found.aggregation == "constant":
        raise UserError(
            "algorithm.loss_mask=false trains more tokens than algorithm.aggregation=constant divides by: set "
            "algorithm.aggregation=token_mean"
        )
    return found


def changed(settings: AlgorithmSettings) -> dict[str, Any]:
    """What is set, by the names of the registry; ``{"dual_clip": None}`` for ``dual_clip=0``."""
    given = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in TRAINERS}
    return {k: None if v == 0 and k in _ZERO_IS_NONE else v for k, v in given.items() if v is not None}
