"""What a log covers, and what it lacks to be dreamed on: numbers, and the sentences that they come to.

A few numbers are kept of a turn (``repeats``), so a log larger than memory can be counted. A state is what was seen
last with the history before it left out: the observation alone, so a world with hidden state answers the same pair
differently.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from real_envs.importers.repeats import Repeated, Turns
from real_envs.importers.similar import SimilarTasks
from real_envs.importers.splits import TRAIN, heldout_tasks, leaks
from real_envs.trajectory import Trajectory

# How worlds say that an action was none, at the beginning of their answer.
INVALID = re.compile(
    r"(?:invalid action|nothing happens|this is no action|there is no (?:action|element)|unknown (?:command|action)|"
    r"i don't understand|no known action|error\b|.{0,60}command not found)",
    re.I,
)
_FEW_EPISODES, _FEW_TASKS, _FEW_PAIRS = 50, 5, 20


@dataclass(slots=True)
class Coverage:
    """Counts over the episodes of a log, to which ``add`` adds them one by one.

    Attributes:
        episodes, turns, empty: how many; ``empty`` ones have no turn.
        tasks: episodes by task.
        agents: episodes by agent.
        lengths: episodes by number of turns.
        rewarded_turns: turns with a measured reward, 0 included; ``paid_turns`` are those with another than 0.
        paid_at_the_end: of ``paid_turns``, those that are the last of their episode.
        terminated, failed: episodes that the world ended; in which the environment broke.
        invalid: turns whose answer begins like a refusal of the action (``INVALID``).
        stated_success: episodes that say whether they were solved; ``solved`` are those that were.
        rewarded_episodes: those with a measured reward; ``only_rewarded`` do not state success beside it.
        reaching_one: those with a total reward of 1 or more.
        at_odds: those whose stated success is not what their total reward would say.
        action_sizes, observation_sizes, episode_sizes: how many have so many characters.
        read_sizes: by task, the characters of what stood before and after each action: its start with each of them.
        growing: episodes of three turns and more whose rewards never fall and rise twice: they may be scores so far.
        solved_at: total reward from which dreams count as solved.
        starts: how tasks begin; may know some of them already.
        split_of: of tasks; those that are not in it are in training.
    """

    episodes: int = 0
    turns: int = 0
    empty: int = 0
    tasks: Counter[str] = field(default_factory=Counter)
    agents: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    rewarded_turns: int = 0
    paid_turns: int = 0
    paid_at_the_end: int = 0
    terminated: int = 0
    failed: int = 0
    invalid: int = 0
    growing: int = 0
    stated_success: int = 0
    rewarded_episodes: int = 0
    solved: int = 0
    total_reward: float = 0.0
    best_reward: float = -math.inf
    reaching_one: int = 0
    only_rewarded: int = 0
    at_odds: int = 0
    action_sizes: Counter[int] = field(default_factory=Counter)
    observation_sizes: Counter[int] = field(default_factory=Counter)
    episode_sizes: Counter[int] = field(default_factory=Counter)
    read_sizes: Counter[str] = field(default_factory=Counter)
    solved_at: float = 1.0
    starts: SimilarTasks = field(default_factory=SimilarTasks)
    split_of: dict[str, str] = field(default_factory=dict)
    _turns: Turns = field(default_factory=Turns)
    _numbers: dict[str, int] = field(default_factory=dict)  # of tasks

    def add(self, episode: Trajectory, split: str = TRAIN) -> None:
        """Counts an episode of a split, and how its task begins."""
        if split != TRAIN:
            self.split_of[episode.task_id] = split
        self.starts.add(episode.task_id, episode.start)
        self.count(episode)

    def count(self, episode: Trajectory) -> None:
        """Counts an episode whose start is known, and whose split will be told by ``split_of``."""
        self.episodes += 1
        self.turns += len(episode.turns)
        self.empty += not episode.turns
        self.tasks[episode.task_id] += 1
        self.agents[episode.agent] += 1
        self.lengths[len(episode.turns)] += 1
        self.terminated += bool(episode.turns) and episode.turns[-1].terminated
        self.failed += episode.stop.is_failure
        self.stated_success += episode.success is not None
        self.solved += episode.solved
        written = sum(len(turn.action) + len(turn.observation) for turn in episode.turns)
        self.episode_sizes[len(episode.start) + written] += 1
        self.read_sizes[episode.task_id] += len(episode.turns) * len(episode.start) + written
        task = self._numbers.setdefault(episode.task_id, len(self._numbers))
        state = episode.start
        for turn in episode.turns:
            self._turns.add(task, state, turn.action, turn.observation)
            self.action_sizes[len(turn.action)] += 1
            self.observation_sizes[len(turn.observation)] += 1
            self.invalid += bool(INVALID.match(turn.observation.strip()))
            state = turn.observation
        rewards = [turn.reward for turn in episode.turns if turn.reward is not None]
        self.rewarded_turns += len(rewards)
        self.paid_turns += sum(reward != 0 for reward in rewards)
        if rewards:
            self.rewarded_episodes += 1
            self.paid_at_the_end += bool(episode.turns[-1].reward)
            total = episode.total_reward
            self.total_reward += total
            self.best_reward = max(self.best_reward, total)
            self.reaching_one += episode.earned(1.0)
            self.only_rewarded += episode.success is None
            self.at_odds += episode.success is not None and episode.success != episode.earned(self.solved_at)
            steps = [b - a for a, b in pairwise(rewards)]
            self.growing += len(rewards) > 2 and min(steps) >= 0 and sum(step > 0 for step in steps) > 1

    @property
    def success_known(self) -> int:
        """Episodes of which it is known whether they were solved.

        They state it; or they have rewards in a log in which some episode earned 1, which is what solved ones earn.
        """
        return self.stated_success + (self.only_rewarded if self.reaching_one else 0)

    def to_json(self) -> dict[str, Any]:
        """All of it in plain values, as ``coverage.json`` has them, with ``missing`` in words."""
        repeated = self._turns.repeated()
        lengths = sorted(self.lengths.elements())
        by_split: dict[str, set[str]] = {}
        for task in self.tasks:
            by_split.setdefault(self.split_of.get(task, TRAIN), set()).add(task)
        held = set().union(*(tasks for split, tasks in by_split.items() if split != TRAIN))
        heldout = self._turns.of([self._numbers[task] for task in held])
        groups = self.starts.groups()
        near = leaks(held, groups)
        alone = heldout_tasks(list(self.tasks), len(held) / max(1, len(self.tasks)))
        return {
            "episodes": self.episodes,
            "turns": self.turns,
            "tasks": {split: len(tasks) for split, tasks in sorted(by_split.items())},
            "agents": dict(self.agents.most_common()),
            "episodes_per_task": round(self.episodes / max(1, len(self.tasks)), 2),
            "distinct_actions": self._turns.actions,
            "distinct_observations": self._turns.answers,
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
                "turns_not_zero": self.paid_turns,
                "of_these_at_the_end": self.paid_at_the_end,
                "episodes": self.rewarded_episodes,
                "mean_total": round(self.total_reward / self.rewarded_episodes, 5) if self.rewarded_episodes else None,
                "best_total": self.best_reward if self.rewarded_episodes else None,
            },
            "success": {"known": self.success_known, "stated": self.stated_success, "solved": self.solved},
            "terminated": self.terminated,
            "failed": self.failed,
            "invalid_answers": self.invalid,
            "determinism": {
                "repeated_pairs": repeated.pairs,
                "same_answer": round(repeated.usual / repeated.turns, 4) if repeated.pairs else None,
            },
            "duplicate_turns": self._turns.doubles(~heldout) + self._turns.doubles(heldout),
            "heldout_turns_in_train": self._turns.shared(heldout, ~heldout),
            "near_duplicates": {
                "tasks": sum(len(group) for group in groups if len(group) > 1),
                "groups": sum(len(group) > 1 for group in groups),
                "leaks_if_split_by_task": len(leaks(alone, groups)),
            },
            "heldout_tasks_like_train": near,
            "missing": list(self.missing(len(near), repeated)),
        }

    def missing(self, near: int = 0, repeated: Repeated | None = None) -> Iterable[str]:
        """What stands in the way of dreams, in sentences; nothing where nothing does.

        Args:
            near: held-out tasks that begin like a training task.
            repeated: what ``to_json`` has counted already.
        """
        if self.turns == 0:
            yield "no turn was logged: there is nothing to learn from"
            return
        if self.episodes < _FEW_EPISODES:
            yield f"only {self.episodes} episodes: a world model from scratch wants hundreds; start from a checkpoint"
        if len(self.tasks) < _FEW_TASKS:
            yield f"only {len(self.tasks)} tasks: nothing tells how dreams of other tasks would be"
        unknown = self.episodes - self.failed - self.success_known
        if unknown > 0:
            yield (
                f"success is unknown in {unknown} of {self.episodes} episodes: give success or rewards, or "
                "imports.solved_at=<total reward>; until then dreams have no goal to train a policy on"
            )
        elif self.solved == 0:
            yield "no episode is solved: dreams never see a success; add some, or clone.agents of another log"
        elif self.solved == self.episodes:
            yield "every episode is solved: dreams never see a failure, and forgive mistakes; add failed episodes"
        if self.rewarded_turns == 0:
            yield "no turn has a reward: a world model learns none, so a goal must be declared (worldmodel.goal)"
        elif self.rewarded_episodes < self.episodes - self.empty:
            yield f"{self.episodes - self.empty - self.rewarded_episodes} episodes have no reward at all"
        if self.at_odds:
            yield (
                f"in {self.at_odds} episodes success and a total reward of {self.solved_at:g} disagree: dreams count "
                f"as solved from a total of {self.solved_at:g} on; imports.solved_at=<total reward> says otherwise"
            )
        if self.terminated == 0:
            yield "no episode says that the world ended: dreams end by dream.max_turns alone"
        if self.growing > 0.5 * self.episodes:
            yield "rewards only grow within episodes: are they scores so far? then imports.reward=cumulative"
        repeated = repeated or self._turns.repeated()
        if repeated.pairs < _FEW_PAIRS:
            yield f"only {repeated.pairs} pairs of state and action occur twice: episodes hardly share any ground"
        if near:
            yield f"{near} held-out tasks begin like a training task: the held-out numbers flatter"


def quantile(sizes: Mapping[int, int], share: float = 0.99) -> int:
    """The least size that ``share`` of the counted things do not exceed; 0 where nothing was counted."""
    total, below = sum(sizes.values()), 0
    for size in sorted(sizes):
        below += sizes[size]
        if below >= share * total:
            return size
    return 0
