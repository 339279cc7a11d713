"""What ``train`` refuses before it loads or plays anything: settings that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from imagination.learning.algorithms import ALGORITHMS, Algorithm, build_algorithm
from imagination.learning.reward_shaping import check_tiers
from imagination.rollout.dream_env import JUDGEMENTS
from imagination.rollout.schedules import check_horizon, check_share, max_value
from imagination.settings import Config, ProgressSettings, SelfImitationSettings, UserError
from imagination.settings.algorithm_parts import ImplicitSteps


def check(config: Config) -> Algorithm:
    """The algorithm that the settings name. Raises ``UserError``: the settings cannot work together; the message says
    what to change.
    """
    algorithm = build_algorithm(config.algorithm, longest_episode(config))
    for wrong in _contradictions(config, algorithm):
        raise UserError(wrong)
    return algorithm


def _contradictions(config: Config, algorithm: Algorithm) -> Iterator[str]:
    train, dream = config.train, config.dream
    try:
        algorithm.check_run(group_size=train.group_size, steps_per_update=train.epochs * train.minibatches)
    except ValueError as error:
        yield str(error)
    most = algorithm.sampling.max_tokens
    if algorithm.aggregation == "constant" and most is not None and most < longest_episode(config):
        yield (
            f"algorithm.max_tokens={most} is less than the {longest_episode(config)} tokens that an episode of "
            "dream.max_turns actions of max_action_tokens can have: leave it out, or lower one of these"
        )
    if train.extra_groups and not algorithm.sampling.drop_equal_groups:
        yield (
            f"train.extra_groups plays on for groups that are left out, and {algorithm.name} leaves none out: set it "
            "to 0, or choose dapo or grpo, or set algorithm.drop_equal_groups=true where the algorithm compares groups"
        )
    shares = {f"train.{name}": getattr(train, name) for name in ("expert_share", "real_share", "failure_share")}
    for name, share in {**shares, "dream.noise": dream.noise}.items():
        if wrong := check_share(name, share):
            yield wrong
    if max_value(dream.noise) and not dream.noise_actions:
        yield "dream.noise makes answers useless, and dream.noise_actions names none: set it to a pattern of actions"
    if train.world == "real" and (dream.hindsight or max_value(dream.noise)):
        yield "dream.hindsight and dream.noise are of dreams, and train.world=real has none: set both to 0"
    yield from _real_share(config)
    yield from _ahead(config)
    yield from _branches(config, algorithm)
    if train.observation_coef and train.world != "real" and not max_value(train.real_share):
        yield (
            "train.observation_coef learns from what the real world says, and no episode is played there: set "
            "train.world=real or train.real_share, or train.observation_coef=0"
        )
    if train.oversample > 1 and train.played_per_group == train.group_size:
        yield (
            f"train.oversample={train.oversample} of train.group_size={train.group_size} is no episode more: raise one "
            "of them, or set train.oversample=1"
        )
    if wrong := check_horizon(
        dream.horizon, dream.max_turns, dream.horizon_shape, dream.horizon_every, dream.horizon_growth
    ):
        yield wrong
    if longest_episode(config) >= config.policy.context and not config.summary_tokens:
        yield (
            f"dream.max_turns={dream.max_turns} actions of max_action_tokens={config.max_action_tokens} do not fit "
            f"policy.context={config.policy.context}, observations left aside: lower one of the first two, or raise "
            "the last"
        )
    one_context = train.self_imitation.share or config.algorithm.progress.enabled or dream.branch_share
    if config.summary_tokens and (one_context or algorithm.name == "istar"):
        yield (
            "train.self_imitation, dream.branch_share, algorithm.progress and algorithm=istar read an episode in one "
            "context, and with summaries it has several: switch them off, or set summary_tokens=0"
        )
    if config.summary_tokens and config.summary_tokens + 2 * config.max_action_tokens >= config.policy.context:
        yield (
            f"summary_tokens={config.summary_tokens} and actions of max_action_tokens={config.max_action_tokens} leave "
            f"no room for observations in policy.context={config.policy.context}: lower one of them, or raise the last"
        )
    yield from _experts_compared(config)
    yield from _self_imitation(config)
    if wrong := check_tiers(train.reward_tiers):
        yield wrong
    if isinstance(algorithm.advantage, ImplicitSteps) and config.strategy == "fsdp2":
        yield f"{algorithm.name} copies the policy, and with strategy=fsdp2 no process has all of it: set strategy=ddp"
    yield from _process(config)
    yield from _progress(config)
    least = algorithm.settings.get("keep_min_return")
    if least is not None and train.reward_tiers and train.reward_tiers[-1][1] < least:
        yield (
            f"no episode can earn more than {train.reward_tiers[-1][1]} by train.reward_tiers, and {algorithm.name} "
            f"imitates those of at least algorithm.keep_min_return={least}: lower the latter"
        )


def check_experts(config: Config, experts: int) -> None:
    """Raises ``UserError``: expert episodes are to be mixed in, and the log has none."""
    if max_value(config.train.expert_share) and not experts:
        raise UserError(
            f"train.expert_share={config.train.expert_share} mixes in solved expert episodes, and the log has none of "
            "the tasks that are learned from: set train.expert_share=0, or log solved episodes of an agent named expert"
        )


def _real_share(config: Config) -> Iterator[str]:
    train = config.train
    if not max_value(train.real_share):
        return
    if train.world == "real":
        yield "train.world=real plays nothing but real episodes: set train.real_share=0, or train.world=dream"
    if train.groups == 1:
        yield "train.real_share shares the groups of an update between dreams and real games: set train.groups above 1"
    if train.process:
        yield (
            f"train.process={train.process} judges dreamed turns; those of the real games carry no number: set "
            "train.real_share=0, or train.process='' and train.process_coef=0"
        )


def _ahead(config: Config) -> Iterator[str]:
    train, dream = config.train, config.dream
    if not train.max_staleness:
        return
    if config.scale.name == "none":
        yield (
            f"train.max_staleness={train.max_staleness} lets players go on while the policy learns, and there are "
            "none: set scale=ray, or train.max_staleness=0"
        )
    if train.extra_groups or (dream.on_doubt == "branch" and dream.extra_groups):
        yield (
            f"train.max_staleness={train.max_staleness} plays the groups of an update before it is known which are "
            "missing: set train.extra_groups=0 and dream.on_doubt other than branch, or train.max_staleness=0"
        )
    if dream.branch_share or max_value(train.failure_share):
        yield (
            f"train.max_staleness={train.max_staleness} plays groups before it is known how others went: set "
            "dream.branch_share=0 and train.failure_share=0, or train.max_staleness=0"
        )


def _branches(config: Config, algorithm: Algorithm) -> Iterator[str]:
    part, train = algorithm.advantage, config.train
    if not config.dream.branch_share:
        return
    if not (part.needs_groups and part.adds_up) or part.judges_turns:
        able = [name for name in _whole_episodes() if not ALGORITHMS[name].advantage.judges_turns]
        yield (
            f"dream.branch_share shares advantages of whole episodes, and {config.algorithm.name} has others: set it "
            f"to 0, or algorithm.name to one of {', '.join(able)}"
        )
    if train.world == "real" or train.process or train.played_per_group != train.group_size:
        yield (
            "dream.branch_share is for dreams that are judged by their rewards and all learned from: set it to 0, or "
            "train.world=dream, train.process='', train.process_coef=0 and train.oversample=1"
        )
    if not round(config.dream.branch_share * train.group_size):
        yield (
            f"dream.branch_share={config.dream.branch_share} of train.group_size={train.group_size} is no episode: "
            "raise one of them, or set dream.branch_share=0"
        )
    if algorithm.sampling.overlong_buffer or (algorithm.kl.kl_coef and algorithm.kl.kl_in == "reward"):
        yield (
            "dream.branch_share trains tokens that several dreams begin with in one of them, and the others would not "
            "pay for them: set it to 0, or algorithm.overlong_buffer=0 and algorithm.kl_in=loss"
        )


def _whole_episodes() -> list[str]:
    """Algorithms that compare whole episodes of a group."""
    return [name for name, m in ALGORITHMS.items() if m.advantage.needs_groups and m.advantage.adds_up]


def _experts_compared(config: Config) -> Iterator[str]:
    part, train = ALGORITHMS[config.algorithm.name].advantage, config.train
    if train.expert_form != "luffy" or not max_value(train.expert_share):
        return
    if not (part.needs_groups and part.adds_up):
        yield (
            f"train.expert_form=luffy judges experts within groups of whole episodes, and {config.algorithm.name} does "
            f"not: set algorithm.name to one of {', '.join(_whole_episodes())}, or train.expert_form=luffy_constant"
        )
    if train.process:
        yield (
            f"train.expert_form=luffy compares experts with episodes that train.process={train.process} judges turn by "
            "turn, and theirs carry no such number: set train.expert_form=luffy_constant"
        )


def _self_imitation(config: Config) -> Iterator[str]:
    settings, experts = config.train.self_imitation, max_value(config.train.expert_share)
    if not settings.share:
        if settings != SelfImitationSettings():
            yield "train.self_imitation.* is set and nothing is replayed: set train.self_imitation.share, such as 0.1"
        return
    if settings.share + experts >= 1:
        yield (
            f"train.self_imitation.share={settings.share} and train.expert_share={experts} must be together below 1: "
            "lower one of them"
        )


def _process(config: Config) -> Iterator[str]:
    train = config.train
    if bool(train.process) != bool(train.process_coef):
        yield (
            f"train.process={train.process!r} and train.process_coef={train.process_coef} need each other: set both, "
            "or neither"
        )
    if not train.process:
        return
    if train.world == "real":
        yield (
            f"train.process={train.process} judges dreamed turns; those of the real games carry no number: set "
            "train.world=dream, or train.process='' and train.process_coef=0"
        )
    if train.process not in JUDGEMENTS:
        yield f"train.process={train.process} is no number of a dreamed turn: choose one of {', '.join(JUDGEMENTS)}"
    if train.process == "disagreement" and config.worldmodel.members == 1:
        yield "train.process=disagreement needs an ensemble: set worldmodel.members to 2 or more"


def _progress(config: Config) -> Iterator[str]:
    settings = config.algorithm.progress
    if not settings.enabled:
        if settings != ProgressSettings():
            yield "algorithm.progress.* is set and not in use: set algorithm.progress.enabled=true"
        return
    if ALGORITHMS[config.algorithm.name].advantage.adds_up:
        able = [name for name, member in ALGORITHMS.items() if not member.advantage.adds_up]
        yield (
            f"algorithm.progress spreads an episode's return over its turns, and {config.algorithm.name} reads their "
            f"sum alone: set algorithm.progress.enabled=false, or algorithm.name to one of {', '.join(able)}"
        )
    if settings.carried_out and not config.worldmodel.refusals:
        yield (
            "algorithm.progress.carried_out pays for actions that were not refused: set worldmodel.refusals to the "
            "words in which the world refuses, such as '^(You can.t|That.s not)'"
        )


def longest_episode(config: Config) -> int:
    """Agent tokens of an episode at most; a summary stands before an action at most."""
    return config.dream.max_turns * (config.max_action_tokens + config.summary_tokens)
