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
