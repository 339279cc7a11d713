"""What a log covers, and what it lacks for dreams: counts, and the sentences that follow from them.

A turn is kept as four hashes of eight bytes (Python's own, keyed anew in each process), so a log may be larger than
memory. Two of a million texts collide with a probability of 3e-8. A state is the last observation, without the history
before it: a world with hidden state may answer the same pair of state and action differently.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from real_envs.importers.drafts import LEFT_OUT, LOG
from real_envs.importers.splits import TRAIN, SimilarTasks, heldout_tasks, leaks
from real_envs.trajectory import Trajectory

# How worlds refuse an action, at the beginning of their answer.
INVALID = re.compile(
    r"(?:invalid action|nothing happens|this is no action|there is no (?:action|element)|unknown (?:command|action)|"
    r"i don't understand|no known action|error\b|.{0,60}command not found)",
    re.I,
)
_OUTCOME = re.compile(rf"{re.escape(LOG)}(is_)?(success(ful)?|pass(ed)?|solved|resolved|correct)")
_FEW_EPISODES, _FEW_TASKS, _FEW_PAIRS = 50, 5, 20
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RepeatedPairs:
    """Pairs of state and action that occur more than once: how many, their turns, and those with the usual answer."""

    pairs: int
    turns: int
    usual: int


class TurnHashes:
    """Hashes of turns, to count how often they repeat each other."""

    def __init__(self) -> None:
        self._tasks = array("i")
        self._actions, self._answers, self._pairs, self._turns = (array("q") for _ in range(4))

    def add(self, task: int, state: str, action: str, answer: str) -> None:
        self._tasks.append(task)
        self._actions.append(hash(action))
        self._answers.append(hash(answer))
        self._pairs.append(hash((state, action)))
        self._turns.append(hash((state, action, answer)))

    @property
    def distinct_actions(self) -> int:
        return len(np.unique(_hashes(self._actions)))

    @property
    def distinct_answers(self) -> int:
        return len(np.unique(_hashes(self._answers)))

    def of_tasks(self, tasks: Collection[int]) -> Flags:
        """Which turns belong to the tasks: ``[turns]``."""
        return np.isin(np.asarray(self._tasks), list(tasks))

    def duplicates(self, among: Flags) -> int:
        """Turns among these that equal an earlier one of them, state included."""
        turns = _hashes(self._turns)[among]
        return len(turns) - len(np.unique(turns))

    def shared(self, among: Flags, others: Flags) -> int:
        """Turns among these that equal one of the others, state included."""
        turns = _hashes(self._turns)
        return int(np.isin(turns[among], turns[others]).sum())

    def repeated(self) -> RepeatedPairs:
        pairs, answers = _hashes(self._pairs), _hashes(self._answers)
        if not len(pairs):
            return RepeatedPairs(0, 0, 0)
        order = np.lexsort((answers, pairs))
        pairs, answers = pairs[order], answers[order]
        new_pair = np.append(True, pairs[1:] != pairs[:-1])
        new_answer = new_pair | np.append(True, answers[1:] != answers[:-1])
        sizes = np.diff(np.append(np.flatnonzero(new_answer), len(pairs)))  # turns of each pair and answer
        first = np.flatnonzero(new_pair[new_answer])  # of these, the first one of each pair
        turns, usual = np.add.reduceat(sizes, first), np.maximum.reduceat(sizes, first)
        more = turns > 1
        return RepeatedPairs(int(more.sum()), int(turns[more].sum()), int(usual[more].sum()))


def _hashes(values: array[int]) -> NDArray[np.int64]:
    return np.asarray(values)


@dataclass(slots=True)
class Coverage:
    """Counts over the episodes of a log; ``count`` adds one.

    Attributes:
        action_sizes, observation_sizes, episode_sizes: how many have so many characters.
    """

    episodes: int = 0
    turns: int = 0
    empty: int = 0
    tasks: Counter[str] = field(default_factory=Counter)
    agents: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    rewarded_turns: int = 0
    # turns with a reward other than 0; ``nonzero_final_rewards`` are the last of their episode
    nonzero_rewards: int = 0
    nonzero_final_rewards: int = 0
    terminated: int = 0
    failed: int = 0
    empty_starts: int = 0  # episodes with an empty start
    invalid: int = 0  # turns whose answer begins like a refusal of the action (``INVALID``)
    # episodes of three turns and more whose rewards never fall and rise twice: perhaps scores so far
    cumulative: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # parts of turns that the log does not hold, by kind
    outcomes: Counter[str] = field(default_factory=Counter)  # fields that may be the success where it is unknown
    stated_success: int = 0
    rewarded_episodes: int = 0  # those with a measured reward; ``only_rewarded`` do not state success beside it
    solved: int = 0
    total_reward: float = 0.0
    best_reward: float = -math.inf
    reaching_one: int = 0
    only_rewarded: int = 0
    contradictions: int = 0  # episodes whose stated success is not what their total reward says
    action_sizes: Counter[int] = field(default_factory=Counter)
    observation_sizes: Counter[int] = field(default_factory=Counter)
    episode_sizes: Counter[int] = field(default_factory=Counter)
    # by task, the characters before and after each action: the start counts once a turn
    read_sizes: Counter[str] = field(default_factory=Counter)
    solved_at: float = 1.0  # total reward from which dreams count as solved
    starts: SimilarTasks = field(default_factory=SimilarTasks)
    split_of: dict[str, str] = field(default_factory=dict)  # by task; others are in training
    _hashes: TurnHashes = field(default_factory=TurnHashes)
    _numbers: dict[str, int] = field(default_factory=dict)  # by task

    def count(self, episode: Trajectory) -> None:
        """Counts an episode; ``starts`` and ``split_of`` are the caller's to fill."""
        self.episodes += 1
        self.turns += len(episode.turns)
        self.empty += not episode.turns
        self.tasks[episode.task_id] += 1
        self.agents[episode.agent] += 1
        self.lengths[len(episode.turns)] += 1
        self.terminated += bool(episode.turns) and episode.turns[-1].terminated
        self.failed += episode.stop.is_failure
        self.empty_starts += not episode.start.strip()
        self.stated_success += episode.success is not None
        self.solved += episode.solved
        written = sum(len(turn.action) + len(turn.observation) for turn in episode.turns)
        self.episode_sizes[len(episode.start) + written] += 1
        self.read_sizes[episode.task_id] += len(episode.turns) * len(episode.start) + written
        task = self._numbers.setdefault(episode.task_id, len(self._numbers))
        state = episode.start
        for turn in episode.turns:
            self._hashes.add(task, state, turn.action, turn.observation)
            self.action_sizes[len(turn.action)] += 1
            self.observation_sizes[len(turn.observation)] += 1
            self.invalid += bool(INVALID.match(turn.observation.strip()))
            state = turn.observation
        for key, count in episode.turns[-1].info.items() if episode.turns else ():
            if key.startswith(LEFT_OUT) and isinstance(count, int | float):
                self.left_out[key.removeprefix(LEFT_OUT)] += int(count)
            elif episode.success is None and _OUTCOME.fullmatch(key) and count in (True, False):
                self.outcomes[key.removeprefix(LOG)] += 1
        self._count_rewards(episode)

    def _count_rewards(self, episode: Trajectory) -> None:
        rewards = [turn.reward for turn in episode.turns if turn.reward is not None]
        if not rewards:
            return
        self.rewarded_turns += len(rewards)
        self.nonzero_rewards += sum(reward != 0 for reward in rewards)
        self.nonzero_final_rewards += bool(episode.turns[-1].reward)
        self.rewarded_episodes += 1
        self.total_reward += episode.total_reward
        self.best_reward = max(self.best_reward, episode.total_reward)
        self.reaching_one += episode.earned(1.0)
        self.only_rewarded += episode.success is None
        self.contradictions += episode.success is not None and episode.success != episode.earned(self.solved_at)
        steps = [b - a for a, b in pairwise(rewards)]
        self.cumulative += len(rewards) > 2 and min(steps) >= 0 and sum(step > 0 for step in steps) > 1

    @property
    def success_known(self) -> int:
        """Episodes of which it is known whether they were solved.

        They state it; or they have rewards in a log in which some episode earned 1, which is what solved ones earn.
        """
        return self.stated_success + (self.only_rewarded if self.reaching_one else 0)

    def to_json(self) -> dict[str, Any]:
        """All of it in plain values, as ``coverage.json`` has them, with ``missing`` in words."""
        repeated = self._hashes.repeated()
        lengths = sorted(self.lengths.elements())
        by_split: dict[str, set[str]] = {}
        for task in self.tasks:
            by_split.setdefault(self.split_of.get(task, TRAIN), set()).add(task)
        held_out = set().union(*(tasks for split, tasks in by_split.items() if split != TRAIN))
        held_out_turns = self._hashes.of_tasks([self._numbers[task] for task in held_out])
        groups = self.starts.groups()
        leaking = leaks(held_out, groups)
        ungrouped = heldout_tasks(list(self.tasks), len(held_out) / max(1, len(self.tasks)))
        return {
            "episodes": self.episodes,
            "turns": self.turns,
            "tasks": {split: len(tasks) for split, tasks in sorted(by_split.items())},
            "agents": dict(self.agents.most_common()),
            "episodes_per_task": round(self.episodes / max(1, len(self.tasks)), 2),
            "distinct_actions": self._hashes.distinct_actions,
            "distinct_observations": self._hashes.distinct_answers,
            "turns_per_episode": {
                "least": lengths[0] if lengths else 0,
                "median": lengths[len(lengths) // 2] if lengths else 0,
                "most": lengths[-1] if lengths else 0,
            },
            "characters_99_of_100": {
                "action": quantile(self.action_sizes),
                "observation": quantile(self.observation_sizes),
                "episode": quantile(self.episode_sizes),
            },
            "rewards": {
                "turns": self.rewarded_turns,
                "turns_not_zero": self.nonzero_rewards,
                "of_these_at_the_end": self.nonzero_final_rewards,
                "episodes": self.rewarded_episodes,
                "mean_total": round(self.total_reward / self.rewarded_episodes, 5) if self.rewarded_episodes else None,
                "best_total": self.best_reward if self.rewarded_episodes else None,
            },
            "success": {"known": self.success_known, "stated": self.stated_success, "solved": self.solved},
            "terminated": self.terminated,
            "failed": self.failed,
            "invalid_answers": self.invalid,
            "left_out": dict(self.left_out.most_common()),
            "determinism": {
                "repeated_pairs": repeated.pairs,
                "same_answer": round(repeated.usual / repeated.turns, 4) if repeated.pairs else None,
            },
            "duplicate_turns": self._hashes.duplicates(~held_out_turns) + self._hashes.duplicates(held_out_turns),
            "heldout_turns_in_train": self._hashes.shared(held_out_turns, ~held_out_turns),
            "near_duplicates": {
                "tasks": sum(len(group) for group in groups if len(group) > 1),
                "groups": sum(len(group) > 1 for group in groups),
                "leaks_if_split_by_task": len(leaks(ungrouped, groups)),
            },
            "heldout_tasks_like_train": leaking,
            "missing": list(self._missing(len(leaking), repeated)),
        }

    def _missing(self, leaking: int, repeated: RepeatedPairs) -> Iterator[str]:
        """What stands in the way of dreams, in sentences; ``leaking`` held-out tasks begin like a training task."""
        if self.turns == 0:
            yield "no turn was logged: there is nothing to learn from"
            return
        if self.episodes < _FEW_EPISODES:
            yield f"only {self.episodes} episodes: a world model from scratch wants hundreds; start from a checkpoint"
        if len(self.tasks) < _FEW_TASKS:
            yield f"only {len(self.tasks)} tasks: nothing tells how dreams of other tasks would be"
        if self.empty_starts:
            yield (
                f"{self.empty_starts} episodes begin with no text: what was asked was not logged, so they count as one "
                "task"
            )
        unknown = self.episodes - self.failed - self.success_known
        if unknown > 0:
            name, known = next(iter(self.outcomes.most_common(1)), ("", 0))
            may = f"'{name}' of {known} episodes may be it (imports.mapping.success={name}); else " if known else ""
            yield (
                f"success is unknown in {unknown} of {self.episodes} episodes: {may}give success, or rewards that "
                "total 1 where it is solved, or imports.solved_at=<total reward>; until then dreams have no goal to "
                "train a policy on"
            )
        elif self.solved == 0:
            yield "no episode is solved: dreams never see a success; add some, or clone.agents of another log"
        elif self.solved == self.episodes:
            yield "every episode is solved: dreams never see a failure, and forgive mistakes; add failed episodes"
        if self.rewarded_turns == 0:
            yield (
                "no turn has a reward: a world model learns none, so a goal must be declared by "
                "worldmodel.goal.observation=PATTERN, what the world says when a task is solved"
            )
        elif self.rewarded_episodes < self.episodes - self.empty:
            yield f"{self.episodes - self.empty - self.rewarded_episodes} episodes have no reward at all"
        if self.contradictions:
            yield (
                f"in {self.contradictions} episodes success and a total reward of {self.solved_at:g} disagree: dreams "
                f"count as solved from a total of {self.solved_at:g} on; "
                "imports.solved_at=<total reward> says otherwise"
            )
        if self.terminated == 0:
            yield "no episode says that the world ended: dreams end by dream.max_turns alone"
        if self.cumulative > 0.5 * self.episodes:
            yield "rewards only grow within episodes: are they scores so far? then imports.reward=cumulative"
        if repeated.pairs < _FEW_PAIRS:
            yield f"only {repeated.pairs} pairs of state and action occur twice: episodes hardly share any ground"
        if leaking:
            yield f"{leaking} held-out tasks begin like a training task: the held-out numbers flatter"


def quantile(sizes: Mapping[int, int], share: float = 0.99) -> int:
    """The least size that ``share`` of the counted things do not exceed; 0 if nothing was counted."""
    total, below = sum(sizes.values()), 0
    for size in sorted(sizes):
        below += sizes[size]
        if below >= share * total:
            return size
    return 0
