"""How much better than expected each agent token was: pure functions of tensors, one file a family.

With a critic: ``gae.py``. Without one: ``group.py`` (GRPO, Dr.GRPO, RLOO), ``reinforce.py`` (REINFORCE++) and
``gigpo.py``. What is judged: ``turns.py`` places rewards, ``shaping.py`` and ``progress.py`` change them. What is
imitated instead: ``selection.py``, ``self_imitation.py``.
"""

from imagination.learning.advantages.attribution import ProgressEstimator, attribution_error, progress_rewards
from imagination.learning.advantages.gae import bilevel_gae, masked_gae, turn_gae
from imagination.learning.advantages.gigpo import gigpo, step_returns
from imagination.learning.advantages.group import group_relative, informative, leave_one_out
from imagination.learning.advantages.groups import differ
from imagination.learning.advantages.reinforce import (
    reinforce_pp,
    reinforce_pp_baseline,
    returns_to_go,
    whiten,
    whiten_by,
)
from imagination.learning.advantages.selection import best_of_groups
from imagination.learning.advantages.self_imitation import Kept, SelfImitationBuffer
from imagination.learning.advantages.shaping import (
    overlong_penalty,
    tiered_rewards,
    with_kl_penalty,
    with_process_rewards,
)
from imagination.learning.advantages.turns import (
    broadcast_over_tokens,
    broadcast_over_turns,
    place_turn_rewards,
    turn_bounds,
)

__all__ = [
    "Kept",
    "ProgressEstimator",
    "SelfImitationBuffer",
    "attribution_error",
    "best_of_groups",
    "bilevel_gae",
    "broadcast_over_tokens",
    "broadcast_over_turns",
    "differ",
    "gigpo",
    "group_relative",
    "informative",
    "leave_one_out",
    "masked_gae",
    "overlong_penalty",
    "place_turn_rewards",
    "progress_rewards",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "returns_to_go",
    "step_returns",
    "tiered_rewards",
    "turn_bounds",
    "turn_gae",
    "whiten",
    "whiten_by",
    "with_kl_penalty",
    "with_process_rewards",
]
