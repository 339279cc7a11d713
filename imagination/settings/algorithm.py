"""How a policy learns from what it played: the keys under ``algorithm.``, most of which are those of its parts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from inspect import cleandoc
from typing import Any, Literal, get_type_hints

from imagination.settings.algorithm_parts import PARTS, Aggregation
from imagination.settings.schema import require

AlgorithmName = Literal[
    "grpo",
    "ppo",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gigpo",
    "istar",
    "dapo",
    "gspo",
    "gspo_token",
    "cispo",
    "st_ppo",
    "epo",
    "turn_ppo",
    "bilevel_ppo",
    "filtered_bc",
]


@dataclass
class ProgressSettings:
    """Stepwise progress attribution (SPA-RL): an estimator spreads an episode's return over its turns.

    Attributes:
        enabled: turns are judged by what the estimator says they contributed.
        carried_out: reward of an action that the world carried out, by worldmodel.refusals; the paper adds 0.5.
        lr: of its AdamW.
        steps: its optimiser steps per update.
        hidden: its width.
    """

    enabled: bool = False
    # Not the paper's 0.5: where a solved task is worth 1, a dozen executable actions would be worth six.
    carried_out: float = 0.0
    lr: float = 3e-3
    steps: int = 100
    hidden: int = 64

    def __post_init__(self) -> None:
        require(self, "1 or more", "steps", "hidden")
        require(self, "above 0", "lr")


def _with_settings_of_parts(section: type) -> type:
    """Adds the settings of all parts to the class, with their explanations; each may be null."""
    own, parts, texts = dict(section.__annotations__), dict[str, Any](), list[str]()
    part: Any
    for part in PARTS:
        types, known = get_type_hints(part), set(parts)
        parts |= {f.name: types[f.name] | None for f in fields(part) if f.name not in parts}
        for name, text in re.findall(r"^    (\w+): (.*)$", cleandoc(part.__doc__ or ""), flags=re.MULTILINE):
            if name in parts and name not in known:
                texts.append(f"        {name}: {text}\n")
    for name in parts:
        setattr(section, name, None)
    section.__annotations__ = {"name": own.pop("name"), **parts, **own}
    section.__doc__ = f"{(section.__doc__ or '').rstrip()}\n{''.join(texts)}    "
    return section


@dataclass
@_with_settings_of_parts
class AlgorithmSettings:
    """How the policy learns from episodes.

    Without a critic, against the other episodes of a group:
      grpo        deviations from the group, PPO's clip; the default
      dr_grpo     the same without the deviation in the denominator and without a bias for length
      rloo        against the mean of the others of the group
      dapo        grpo with more room upwards and without groups whose episodes are all alike
      gspo        one ratio a sequence; gspo_token gives each token a gradient of its own
      cispo       clips the weight of a token, never its gradient
      epo         grpo with an entropy bonus and a band around the entropy so far
      gigpo       also compares turns that answered the same observation
      istar       also compares turns by a process reward model that learns which episodes are better (iStar, OPRL)
      reinforce_pp_baseline    the group's mean, then whitened over the update
    Without groups: reinforce (one step an update), reinforce_pp (whitened returns to go).
    With a critic: ppo (tokens), turn_ppo (turns), bilevel_ppo (both), st_ppo (clips turns).
    By imitation: filtered_bc imitates the best episodes of each group.

    null is the algorithm's own default; a key that it does not have is refused, with the names of those that have it.

    Attributes:
        name: of the algorithm; algorithm=ppo is short for it.
        aggregation: token_mean counts all tokens alike, sequence_mean all episodes, constant divides by max_tokens.
        progress: spreads the outcome over turns, for algorithms that credit turns or tokens.
        tis_cap: largest weight of a token that the trainer finds likelier than the engine that sampled it; 0 is off.
        loss_mask: for ablation only: false also trains on what the world said.
        advantage_mask: for ablation only: false also estimates advantages on what the world said.
    """

    name: AlgorithmName = "grpo"
    aggregation: Aggregation | None = None
    progress: ProgressSettings = field(default_factory=ProgressSettings)
    tis_cap: float = 2.0
    loss_mask: bool = True
    advantage_mask: bool = True
