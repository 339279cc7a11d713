"""What ``train`` refuses before it loads or plays anything: settings that contradict each other."""

from __future__ import annotations

from imagination.learning.algorithms import ALGORITHMS, build_algorithm
from imagination.learning.reward_shaping import check_tiers
from imagination.rollout.dream_env import JUDGEMENTS
from imagination.rollout.schedules import check_horizon, check_share, most
from imagination.settings import Config, ProgressSettings, SelfImitationSettings, UserError


def check(config: Config) -> None:
    """Raises ``UserError``: the settings cannot work together; the message says what to change."""
    train, dream = config.train, config.dream
    if min(train.epochs, train.minibatches, train.groups, train.group_size) < 1:
        raise UserError("train.epochs, .minibatches, .groups and .group_size must be 1 or more")
    algorithm = build_algorithm(config.algorithm, longest_episode(config))
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
    for name, share in (("train.expert_share", train.expert_share), ("train.real_share", train.real_share)):
        if wrong := check_share(name, share):
            raise UserError(wrong)
    if wrong := _real_share(config):
        raise UserError(wrong)
    if not 0 <= dream.branch <= 1:
        raise UserError(f"dream.branch must lie in [0, 1], got {dream.branch}")
    if not 0 < dream.min_weight <= 1:
        raise UserError(f"dream.min_weight must lie in (0, 1], got {dream.min_weight}")
    if dream.extra_groups < 0:
        raise UserError(f"dream.extra_groups must be 0 or more, got {dream.extra_groups}")
    if wrong := check_horizon(
        dream.horizon, dream.max_turns, dream.horizon_shape, dream.horizon_every, dream.horizon_growth
    ):
        raise UserError(wrong)
    if longest_episode(config) >= config.policy.context:
        raise UserError(
            f"dream.max_turns={dream.max_turns} actions of max_action_tokens={config.max_action_tokens} do not fit "
            f"policy.context={config.policy.context}, observations left aside: lower one of the first two, or raise "
            "the last"
        )
    for wrong in (
        _experts_compared(config),
        _self_imitation(config),
        check_tiers(train.reward_tiers),
        _process(config),
        _progress(config),
    ):
        if wrong:
            raise UserError(wrong)
    least = algorithm.settings.get("keep_min_return")
    if least is not None and train.reward_tiers and train.reward_tiers[-1][1] < least:
        raise UserError(
            f"no episode can earn more than {train.reward_tiers[-1][1]} by train.reward_tiers, and {algorithm.name} "
            f"imitates those of at least algorithm.keep_min_return={least}: lower the latter"
        )
    wires = config.tripwires
    if min(wires.window, wires.memory, wires.every, wires.min_groups) < 1 or wires.real_episodes < 0:
        raise UserError("tripwires.window, .memory, .every and .min_groups must be 1 or more, .real_episodes 0 or more")


def check_experts(config: Config, experts: int) -> None:
    """Raises ``UserError``: expert episodes are to be mixed in, and the log has none."""
    if most(config.train.expert_share) and not experts:
        raise UserError(
            f"train.expert_share={config.train.expert_share} mixes in solved expert episodes, and the log has none: "
            "set train.expert_share=0, or log solved episodes of an agent named expert"
        )


def _real_share(config: Config) -> str | None:
    train = config.train
    if not most(train.real_share):
        return None
    if train.world == "real":
        return "train.world=real plays nothing but real episodes: set train.real_share=0, or train.world=dream"
    if train.groups == 1:
        return "train.real_share shares the groups of an update between dreams and real games: set train.groups above 1"
    if train.process:
        return (
            f"train.process={train.process} judges dreamed turns; those of the real games carry no number: set "
            "train.real_share=0, or train.process='' and train.process_coef=0"
        )
    return None


def _experts_compared(config: Config) -> str | None:
    part, train = ALGORITHMS[config.algorithm.name].advantage, config.train
    if train.expert_form != "luffy" or not most(train.expert_share):
        return None
    if not (part.needs_groups and part.adds_up):
        able = [name for name, m in ALGORITHMS.items() if m.advantage.needs_groups and m.advantage.adds_up]
        return (
            f"train.expert_form=luffy judges experts within groups of whole episodes, and {config.algorithm.name} does "
            f"not: set algorithm.name to one of {', '.join(able)}, or train.expert_form=luffy_constant"
        )
    if train.process:
        return (
            f"train.expert_form=luffy compares experts with episodes that train.process={train.process} judges turn by "
            "turn, and theirs carry no such number: set train.expert_form=luffy_constant"
        )
    return None


def _self_imitation(config: Config) -> str | None:
    settings, experts = config.train.self_imitation, most(config.train.expert_share)
    if not settings.share:
        if settings != SelfImitationSettings():
            return "train.self_imitation.* is set and nothing is replayed: set train.self_imitation.share, such as 0.1"
        return None
    if settings.share < 0 or settings.share + experts >= 1:
        return (
            f"train.self_imitation.share={settings.share} and train.expert_share={experts} must be 0 or more and "
            "together below 1: lower one of them"
        )
    if settings.coef <= 0 or settings.clip_high <= 0:
        return "train.self_imitation.coef and .clip_high must be above 0; set train.self_imitation.share=0 for neither"
    if settings.capacity < 1 or settings.max_age < 1:
        return (
            "train.self_imitation.capacity and .max_age must be 1 or more: what is replayed was played in an earlier "
            "update"
        )
    return None


def _process(config: Config) -> str | None:
    train = config.train
    if bool(train.process) != bool(train.process_coef):
        return (
            f"train.process={train.process!r} and train.process_coef={train.process_coef} need each other: set both, "
            "or neither"
        )
    if not train.process:
        return None
    if train.world == "real":
        return (
            f"train.process={train.process} judges dreamed turns; those of the real games carry no number: set "
            "train.world=dream, or train.process='' and train.process_coef=0"
        )
    if train.process not in JUDGEMENTS:
        return f"train.process={train.process} is no number of a dreamed turn: choose one of {', '.join(JUDGEMENTS)}"
    if train.process == "disagreement" and config.worldmodel.members == 1:
        return "train.process=disagreement needs an ensemble: set worldmodel.members to 2 or more"
    return None


def _progress(config: Config) -> str | None:
    settings = config.algorithm.progress
    if not settings.enabled:
        if settings != ProgressSettings():
            return "algorithm.progress.* is set and not in use: set algorithm.progress.enabled=true"
        return None
    if settings.steps < 1 or settings.hidden < 1 or settings.lr <= 0:
        return "algorithm.progress.steps and .hidden must be 1 or more, .lr above 0"
    if ALGORITHMS[config.algorithm.name].advantage.adds_up:
        able = [name for name, member in ALGORITHMS.items() if not member.advantage.adds_up]
        return (
            f"algorithm.progress spreads an episode's return over its turns, and {config.algorithm.name} reads their "
            f"sum alone: set algorithm.progress.enabled=false, or algorithm.name to one of {', '.join(able)}"
        )
    if settings.carried_out and not config.worldmodel.refusals:
        return (
            "algorithm.progress.carried_out pays for actions that were not refused: set worldmodel.refusals to the "
            "words in which the world refuses, such as '^(You can.t|That.s not)'"
        )
    return None


def longest_episode(config: Config) -> int:
    """Agent tokens of an episode at most."""
    return config.dream.max_turns * config.max_action_tokens
