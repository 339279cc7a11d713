"""How much better than expected each agent token was: pure functions of tensors, one file a family.

With a critic: ``gae.py``. Without one: ``group.py`` (GRPO, Dr.GRPO, RLOO, GiGPO, iStar, filtered cloning) and
``reinforce.py`` (REINFORCE++). ``turns.py`` places rewards on tokens, ``shaping.py`` changes them before.

What arguments of one name are everywhere; a row is an episode, so call before rows are packed:

* ``mask``: ``[batch, time]`` bool, agent tokens.
* ``rewards``: ``[batch, time]``, as ``place_turn_rewards`` returns them.
* ``values``: ``[batch, time]``, the critic before each token, in units of return.
* ``bootstrap_value``: ``[batch]``, the critic's value of the state in which a truncated row stops, 0.0 for terminated
  rows, after which nothing follows; ``None``: all rows terminated.
* ``turn_rewards``: ``[batch, turns]``, 0.0 for padding and for turns copied from a log, whose reward the policy did not
  earn. An unmeasured reward (``None`` in a ``Turn``) is the caller's decision, so NaN is refused.
* ``action_turn_index``: ``[batch, time]`` integers, the turn of an agent token and -1 for all others.
* ``returns``, ``group_ids``, ``valid``: ``[n]``: a number per episode, integers that are equal within a group (neither
  sorted nor dense, groups may differ in size), and false for failed episodes.
* settings: the parts of ``imagination.settings.algorithm_parts``, which check their ranges.

All results are constants. ``ValueError`` says what is wrong with shapes, dtypes and numbers.
"""

from imagination.learning.advantages.gae import bilevel_gae, masked_gae, turn_gae
from imagination.learning.advantages.group import (
    best_of_groups,
    differ,
    gigpo,
    group_relative,
    informative,
    istar,
    leave_one_out,
    preferences,
    shared_before_branches,
    step_returns,
)
from imagination.learning.advantages.reinforce import (
    reinforce,
    reinforce_pp_baseline,
    returns_to_go,
    whiten,
    whiten_by,
)
from imagination.learning.advantages.shaping import (
    ProgressEstimator,
    attribution_error,
    implicit_step_rewards,
    overlong_penalty,
    progress_rewards,
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
    "ProgressEstimator",
    "attribution_error",
    "best_of_groups",
    "bilevel_gae",
    "broadcast_over_tokens",
    "broadcast_over_turns",
    "differ",
    "gigpo",
    "group_relative",
    "implicit_step_rewards",
    "informative",
    "istar",
    "leave_one_out",
    "masked_gae",
    "overlong_penalty",
    "place_turn_rewards",
    "preferences",
    "progress_rewards",
    "reinforce",
    "reinforce_pp_baseline",
    "returns_to_go",
    "shared_before_branches",
    "step_returns",
    "tiered_rewards",
    "turn_bounds",
    "turn_gae",
    "whiten",
    "whiten_by",
    "with_kl_penalty",
    "with_process_rewards",
]
