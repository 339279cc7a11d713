"""What ``train`` refuses before it loads or plays anything: settings that contradict each other."""

from __future__ import annotations

from imagination.choice import chosen
from imagination.curriculum import check_horizon
from imagination.settings import Config, UserError


def check(config: Config) -> None:
    """
    Raises:
        UserError: the settings cannot work together; the message says what to change.
    """
    train, dream = config.train, config.dream
    if min(train.epochs, train.minibatches, train.groups, train.group_size) < 1:
        raise UserError("train.epochs, .minibatches, .groups and .group_size must be 1 or more")
    algorithm = chosen(config.algorithm, longest_episode(config))
    try:
        algorithm.check_run(group_size=train.group_size, steps_per_update=train.epochs * train.minibatches)
    except ValueError as error:
        raise UserError(str(error)) from error
    if train.extra_groups < 0:
        raise UserError(f"train.extra_groups must be 0 or more, got {train.extra_groups}")
    if train.extra_groups and not algorithm.sampling.drop_equal_groups:
        raise UserError(
            f"train.extra_groups plays on for groups that are left out, and {algorithm.name} leaves none out: set it "
            "to 0, or choose dapo or grpo, or set algorithm.drop_equal_groups=true where the algorithm compares groups"
        )
    if not 0 <= train.expert_share < 1:
        raise UserError(f"train.expert_share must lie in [0, 1), got {train.expert_share}")
    if not 0 <= dream.branch <= 1:
        raise UserError(f"dream.branch must lie in [0, 1], got {dream.branch}")
    if not 0 < dream.min_weight <= 1:
        raise UserError(f"dream.min_weight must lie in (0, 1], got {dream.min_weight}")
    if dream.extra_groups < 0:
        raise UserError(f"dream.extra_groups must be 0 or more, got {dream.extra_groups}")
    if wrong := check_horizon(dream.horizon, dream.max_turns):
        raise UserError(wrong)
    if longest_episode(config) >= config.policy.context:
        raise UserError(
            f"dream.max_turns={dream.max_turns} actions of max_action_tokens={config.max_action_tokens} do not fit "
            f"policy.context={config.policy.context}, observations left aside: lower one of the first two, or raise "
            "the last"
        )
    wires = config.tripwires
    if wires.window < 1 or wires.every < 1 or wires.min_groups < 1 or wires.real_episodes < 0:
        raise UserError("tripwires.window, .every and .min_groups must be 1 or more, .real_episodes 0 or more")


def check_experts(config: Config, experts: int) -> None:
    """
    Raises:
        UserError: expert episodes are to be mixed in, and the log has none.
    """
    if config.train.expert_share and not experts:
        raise UserError(
            f"train.expert_share={config.train.expert_share} mixes in solved expert episodes, and the log has none: "
            "set train.expert_share=0, or log solved episodes of an agent named expert"
        )


def longest_episode(config: Config) -> int:
    """Agent tokens of an episode at most."""
    return config.dream.max_turns * config.max_action_tokens
