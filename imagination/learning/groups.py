"""The groups of an update: which tasks come again, which episodes are kept, and where dreams branch."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, TypeVar

from lightning.pytorch.callbacks import Callback

from imagination.rollout.dream_env import Start
from imagination.rollout.play import Episode
from real_envs.grouping import grouped
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source, StopReason, Trajectory

PENALTY_FLOOR = 0.1  # added to each penalty, so that an episode without a fault has a finite weight

E = TypeVar("E", Episode, Trajectory)


def by_group(episodes: Iterable[E]) -> dict[str, list[E]]:
    """The episodes of each group, in order of first appearance."""
    return grouped(episodes, lambda episode: episode.group_id)


def chosen_starts(
    starts: Mapping[str, Start], groups: range, rng: random.Random, branch: float, source: Source, again: Sequence[str]
) -> list[str]:
    """The name of the start state of each group: tasks in turn, and of a task its beginning or, in dreams at the chance
    ``branch``, a state in the middle of a logged episode. The first groups begin in the tasks ``again``.
    """
    by_task = grouped(starts, lambda name: starts[name].task_id)
    tasks = sorted(by_task)
    rng.shuffle(tasks)
    chosen: list[str] = []
    for g in groups:
        names = by_task[again[g] if g < len(again) else tasks[g % len(tasks)]]
        whole, branched = ([n for n in names if bool(starts[n].history) is middle] for middle in (False, True))
        use_branch = source is Source.DREAM and rng.random() < branch and g >= len(again)
        chosen.append(rng.choice(branched if use_branch and branched else whole))
    return chosen


class ReachedGoals:
    """Tasks to dream that no task of the log is: a failed episode's beginning, with a goal that it reached later on.

    As in NNetNav (arXiv 2410.02907) the goal is named after the fact, so that it can be reached; as in CuES, states
    that the log hardly has are preferred: a task is drawn with probability inverse to how many episodes of the log
    show what it ends with.

    Args:
        episodes: failed ones with such goals, as ``imagine relabel`` writes them.
        log: the episodes that they are of, and others.
    """

    def __init__(self, episodes: Sequence[Trajectory], log: Sequence[Trajectory]) -> None:
        shown = Counter(text for episode in log for text in {turn.observation for turn in episode.turns})
        self.starts = {episode.id: Start(episode.task_id, episode.start) for episode in episodes}
        self._weights = [1 / max(1, shown[episode.turns[-1].observation]) for episode in episodes]

    def draw(self, count: int, rng: random.Random) -> list[str]:
        """Names of ``count`` of ``starts``."""
        return rng.choices(list(self.starts), self._weights, k=count) if count else []


# --- oversampling: Resample on Correct ---


def quality_penalty(episode: Trajectory, refusals: str, stop: int) -> float:
    """How clean an episode is, in [0, 2]: the share of its actions that the world refused, plus the share of those that
    are malformed: empty, or cut by the token limit.

    rStar2-Agent (Shang et al. 2025, arXiv 2508.20722, section on GRPO-RoC) adds the share of tool calls that failed and
    a penalty for repeated answer tags. We have neither: ``refusals`` says which answers are errors, and malformed
    actions take the place of its format. As there, length is no part of it.

    Args:
        refusals: regular expression for observations; empty: nothing counts as refused.
        stop: the token that ends an action which was not cut.
    """
    trace, turns = episode.trace, episode.own_turns
    if not turns:
        return 0.0
    ends = {} if trace is None else {t: i for i, t in zip(trace.ids, trace.turns, strict=True)}  # the last of each turn
    refused = fmean(bool(refusals and re.search(refusals, turn.observation)) for turn in turns)
    malformed = fmean(
        not turn.action or ends.get(k, stop) != stop for k, turn in enumerate(turns, start=episode.prefix_turns)
    )
    return refused + malformed


def resample_on_correct(
    group: Sequence[Trajectory], keep: int, penalties: Sequence[float], rng: random.Random
) -> list[Trajectory]:
    """GRPO-RoC: which ``keep`` of the episodes of an oversampled group are learned from, in their order.

    Solved and unsolved episodes keep their proportion (rStar2-Agent, arXiv 2508.20722: half of each of 2G rollouts),
    rounded so that a kind that is there does not vanish. Unsolved ones are drawn uniformly: all ways to fail are worth
    knowing. Solved ones are drawn one after the other with probability proportional to ``1 / (penalty + 0.1)``; the
    paper's is ``1 / penalty``, which is infinite without a fault, and its code takes the cleanest instead of drawing.

    Outages are kept only where there is nothing else. A malformed prediction is an unsolved episode like others: left
    out, an action that breaks the world model would look better than it is.
    """
    usable = [k for k, episode in enumerate(group) if not episode.stop.is_outage]
    right = [k for k in usable if group[k].solved]
    wrong = [k for k in usable if not group[k].solved]
    count = min(keep, len(usable))
    if count == 1:  # one kind has to vanish
        good = int(rng.random() * len(usable) < len(right))
    else:
        good = round(count * len(right) / max(1, len(usable)))
        good = min(max(good, bool(right)), count - bool(wrong and count))
    # the largest u ** (1 / weight) are such draws without replacement (Efraimidis and Spirakis 2006)
    keys = {k: rng.random() ** (penalties[k] + PENALTY_FLOOR) for k in right}
    kept = [*rng.sample(wrong, count - good), *sorted(right, key=keys.__getitem__, reverse=True)[:good]]
    broken = [k for k, episode in enumerate(group) if episode.stop.is_outage]
    return [group[k] for k in sorted([*kept, *broken[: keep - count]])]


def resampled(played: Sequence[Trajectory], keep: int, refusals: str, stop: int) -> list[Trajectory]:
    """``keep`` episodes of each group, see ``resample_on_correct``: a function of the episodes and their seeds."""
    kept: list[Trajectory] = []
    for group in by_group(played).values():
        penalties = [quality_penalty(t, refusals, stop) for t in group]
        kept += resample_on_correct(group, keep, penalties, random.Random(derive_seed("resample", group[0].seed)))
    return kept


# --- replay of failed tasks ---


class FailedTasks(Callback):
    """Tasks that no episode of a group solved, until one does: further groups begin in them (DeepTravel, Ning et al.
    2025, arXiv 2509.21842, replay from a buffer of failures). What comes again is the task, not its old episodes.

    Groups that begin in the middle of a logged episode decide nothing, nor do outages and dreams that the guard ended.

    Args:
        seed: of the run; which tasks are drawn depends on it, on the update and on the buffer alone.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.tasks: list[str] = []  # the oldest first

    def draw(self, update: int, count: int) -> list[str]:
        """At most ``count`` different tasks."""
        rng = random.Random(derive_seed("failures", self._seed, update))
        return rng.sample(self.tasks, min(count, len(self.tasks)))

    def add(self, played: Sequence[Trajectory]) -> dict[str, float]:
        """Takes in the groups of an update; returns what is to be logged."""
        whole = (t for t in played if not t.prefix_turns and not t.stop.is_outage and t.stop is not StopReason.UNSURE)
        for group in by_group(whole).values():
            task, solved = group[0].task_id, any(t.solved for t in group)
            if solved and task in self.tasks:
                self.tasks.remove(task)
            elif not solved and task not in self.tasks:
                self.tasks.append(task)
        return {"failed_tasks": len(self.tasks)}

    def state_dict(self) -> dict[str, Any]:
        return {"tasks": list(self.tasks)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tasks = list(state_dict["tasks"])


# --- branches of dreams ---


def turn_surprisals(episode: Trajectory) -> dict[int, float]:
    """Mean ``-logprob`` of the tokens of each action that was sampled, in nats a token: an estimate of the policy's
    entropy there.
    """
    by_turn: dict[int, list[float]] = {}
    if episode.trace is not None and not episode.stop.is_outage:
        for turn, logprob in zip(episode.trace.turns, episode.trace.logprobs, strict=True):
            if logprob is not None:
                by_turn.setdefault(turn, []).append(-logprob)
    return {turn: fmean(values) for turn, values in by_turn.items()}


def branch_points(surprisals: Sequence[Mapping[int, float]], count: int) -> list[tuple[int, int]]:
    """Where ``count`` more episodes begin: ``(episode, turn)``, before whose action the policy became unsure.

    ARPO (Dong et al. 2025, arXiv 2507.19849, section on the entropy-based adaptive rollout) branches after a tool's
    answer where the entropy rose above that of the first action, by chance. Here the largest rises are taken, without
    chance; as there, without a rise nothing branches. In place of AEPO's penalty (arXiv 2510.14545) for branches in a
    row, a rise is divided by one plus the branches that its episode has already.

    Args:
        surprisals: of each episode, by turn, in nats; see ``turn_surprisals``.

    Example::

        branch_points([{0: 0.5, 1: 2.0, 2: 1.5}, {0: 1.0, 1: 1.75}], 2)  # [(0, 1), (1, 1)]: rises 1.5 and 0.75
    """
    rises = {
        (k, turn): value - turns[min(turns)]
        for k, turns in enumerate(surprisals)
        for turn, value in turns.items()
        if value > turns[min(turns)]
    }
    chosen: list[tuple[int, int]] = []
    taken = [1] * len(surprisals)
    while rises and len(chosen) < count:
        best = max(rises, key=lambda point: rises[point] / taken[point[0]])
        taken[best[0]] += 1
        chosen.append(best)
        del rises[best]
    return chosen


def split_for_branches(episodes: Sequence[Episode], share: float) -> tuple[list[Episode], list[Episode]]:
    """The episodes of each group that are played first, and the last ``share`` of it, rounded, that may branch off."""
    groups = by_group(episodes)
    cut = {name: len(group) - min(round(share * len(group)), len(group) - 1) for name, group in groups.items()}
    first = [e for name, group in groups.items() for e in group[: cut[name]]]
    return first, [e for name, group in groups.items() for e in group[cut[name] :]]


def branch_off(episodes: Sequence[Episode], played: Sequence[Trajectory]) -> list[Episode]:
    """The same episodes, each from a branch point of its group as far as there are any, else from the group's start."""
    begun: list[Episode] = []
    for name, group in by_group(played).items():
        waiting = [e for e in episodes if e.group_id == name]
        points = branch_points([turn_surprisals(t) for t in group], len(waiting))
        for episode, (k, turn) in zip(waiting, points, strict=False):
            dreamed = group[k].turns[group[k].prefix_turns : turn]
            begun.append(replace(episode, task=replace(episode.task, dreamed=dreamed)))
        begun += waiting[len(points) :]
    return begun
