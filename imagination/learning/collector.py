"""What one update is made of: dreams, real episodes at their share, experts and replays, and rows of them all."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from imagination.evaluation.monitors.monitor import TripwireMonitor
from imagination.learning.ahead import GroupsAhead
from imagination.learning.experience import (
    RecordedGroups,
    expert_rows,
    informative_groups,
    mean_rewards,
    policy_rows,
)
from imagination.learning.groups import (
    FailedTasks,
    ReachedGoals,
    branch_off,
    by_group,
    chosen_starts,
    resampled,
    split_for_branches,
)
from imagination.learning.metrics import measure_played, turns_lost, useful_turns, why_nothing
from imagination.learning.policy_module import Update
from imagination.learning.reward_shaping import RewardShaping
from imagination.learning.self_imitation import Replays
from imagination.learning.trainer import BestPolicy
from imagination.rollout.dream_env import Start
from imagination.rollout.play import Episode, Provenance, Span, play_all, timed
from imagination.rollout.schedules import added_episodes, longest_turns, noise_spec, real_groups, share_at
from imagination.runs.models import weights_version
from imagination.runs.run_folder import RunFolder
from imagination.scale.pool import Group
from imagination.scale.ray_players import RayPlayers
from imagination.settings import DreamSettings, ProgressSettings, TrainSettings, UserError
from policy.agent import LanguageModelAgent
from policy.lm.batch import Row
from policy.lm.engine import Engine
from policy.lm.render import ChatFormat
from real_envs.env import Env, Task
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source, StopReason, Trajectory

OVERLAP = "overlap"  # the stage under which metrics.jsonl has the seconds of updates that played in both worlds
OVERLAP_SECONDS = ("dream_seconds", "real_seconds", "both_seconds")
_CUT = (StopReason.UNSURE, StopReason.CONTEXT_LIMIT)


class NothingToLearn(UserError):
    """Every dream of a first update broke or was cut off as uncertain."""


@dataclass(slots=True)
class RolloutEnvironment:
    """Where rollouts of this run happen: dreams by default, the real games for the control."""

    make_env: Callable[[], Env]
    source: Source
    version: str | None  # of the world model
    concurrency: int
    engines: tuple[Engine, ...] = ()
    solved_at: float | None = None  # see Provenance
    close: Callable[[], Any] | None = None
    tasks: Mapping[str, Task] = field(default_factory=dict)  # by id, of a real world


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """What the settings say of the episodes of an update.

    Attributes:
        seed: of the run; with the number of the update it decides which episodes are played.
        refusals: what the world answers to actions that were not carried out.
    """

    seed: int
    train: TrainSettings
    dream: DreamSettings
    progress: ProgressSettings
    refusals: str = ""


@dataclass(slots=True)
class ExperienceCollector:
    """Plays the episodes of one update and makes rows of them.

    Attributes:
        worlds: what is trained in, and after it the real one where a share of the episodes is played there beside.
        agent: the policy, as it plays in the first of them.
        agent_beside: the policy as it plays in the second, at the same time. Its engine must be none of those that
            dream: real worlds answer when they please, and what shares a step of an engine is rounded together.
        recorded: real episodes that were played before, in place of a real world beside the first.
        failures: tasks to come again, at ``train.failure_share``.
        goals: further tasks to dream, at ``dream.hindsight``.
        worst: what uncertainty costs, see ``RewardShaping``.
        best: the policy that did best in validation dreams, where these are played.
        players: play all episodes in other processes, where there are any.
    """

    run: RunFolder
    plan: CollectionPlan
    worlds: Sequence[RolloutEnvironment]
    model: Any
    agent: LanguageModelAgent
    chat: ChatFormat
    starts: Mapping[str, Start]
    experts: Sequence[Trajectory]
    count_real_steps: Callable[[], None]
    watch: TripwireMonitor | None = None
    replays: Replays | None = None
    failures: FailedTasks | None = None
    goals: ReachedGoals | None = None
    on_turn: Callable[[], None] | None = None
    worst: tuple[float, ...] = ()
    agent_beside: LanguageModelAgent | None = None
    recorded: RecordedGroups | None = None
    best: BestPolicy | None = None
    players: RayPlayers | None = None
    policy_version: str = ""  # of the weights that play now
    seconds: float = 0.0
    turns: int = 0
    left_out: int = 0  # turns of the update in its world that no episode kept has, less those that two have
    _ahead: GroupsAhead | None = None

    @property
    def world(self) -> RolloutEnvironment:
        return self.worlds[0]

    def update(self, index: int) -> Update:
        """A pure function of the update's index, the seed and the policy's weights, and of what real games answer."""
        settings = self.plan.train
        rng = random.Random(derive_seed("starts", self.plan.seed, index))
        longest = longest_turns(self.plan.dream, index)
        played, beside, ahead = self._both_worlds(index, rng, longest)
        if self.players is not None:
            self.players.count_real()
        self.count_real_steps()
        if index == 0 and not beside and all(t.stop.is_failure or t.stop in _CUT for t in played):
            raise NothingToLearn(why_nothing(played))
        first = played[:: settings.group_size] if ahead else self._one_a_group(index, played)
        shown = [*first, *beside[:: settings.group_size]]
        self.run.add_rollouts("train", shown, which="update", step=index, split="train")
        seen = self.watch.look(index, played, self.agent) if self.watch is not None else {}
        measured = {**measure_played(played), **measure_played(beside, "real_"), **seen}
        measured |= self._played_turns(measured)
        if self.watch is not None and self.watch.tripped is not None:
            return Update(index, [], measured)
        weigh = self.plan.dream.on_doubt == "downweight" and self.world.source is Source.DREAM
        min_weight = self.plan.dream.min_weight if weigh else None
        rows = policy_rows([*played, *beside], min_weight, self._shaping(longest))
        measured |= mean_rewards(rows, bool(settings.reward_tiers)) | ahead | self._validate(index)
        if self.players is not None:
            self.players.show(measured)
        if self.plan.dream.horizon:
            measured["horizon"] = longest
        if self.failures is not None:
            measured |= self.failures.add([t for t in played if not self.goals or t.task_id not in self.goals.starts])
        replayed, expert = settings.self_imitation.share, share_at(index, settings.expert_share)
        own = len(played) + len(beside)
        wanted = added_episodes(own, expert, replayed)
        again: list[Row] = []
        if self.replays is not None:
            again = self.replays.draw(index, added_episodes(own, replayed, expert))
            measured |= self.replays.add(index, rows) | {"replayed": len(again)}
        compared = [*played, *beside] if settings.expert_form == "luffy" else None
        shaping, context = self._shaping(longest), self.agent.engine.context
        rows += expert_rows(self.chat, self.experts, wanted, rng, compared, shaping, context)
        exact = self.agent.engine.exact and not ahead and not (self.recorded is not None and beside)
        return Update(index, [*rows, *again], measured, exact=exact)

    def _validate(self, index: int, last: bool = False) -> dict[str, float]:
        """Plays the validation dreams where they are due."""
        if self.best is None or not self.best.due(index, last):
            return {}
        played = asyncio.run(self._play(self.best.episodes, self.plan.dream.max_turns))
        return self.best.consider(index, played)

    def last_look(self) -> None:
        """The monitor looks at the policy that training ended with, in the dreams of one more update.

        Nothing else would show what the last update taught. Nothing is learned from these dreams, of stage
        ``last_look``, and none of them is a real step.
        """
        index = self.plan.train.updates
        self._refresh(index)
        validated = self._validate(index, last=True)
        if self.watch is None:
            if validated:
                self.run.record("last_look", index, validated)
            return
        rng = random.Random(derive_seed("starts", self.plan.seed, index))
        longest = longest_turns(self.plan.dream, index)
        played, span = asyncio.run(timed(self._rollouts(index, rng, longest)))
        self.seconds += span.seconds
        self.run.add_rollouts("last_look", self._one_a_group(index, played), which="update", step=index, split="train")
        measured = measure_played(played)
        measured |= self._played_turns(measured)
        self.run.record("last_look", index, {**measured, **self.watch.look(index, played), **validated})

    def _both_worlds(
        self, index: int, rng: random.Random, longest: int
    ) -> tuple[list[Trajectory], list[Trajectory], dict[str, float]]:
        """What an update plays in its world and, at the same time, in the real one beside: neither waits for the other;
        and what is to be logged where these were played ahead.

        The seconds of each and of both at once are lines of ``overlap``, not metrics of the update.
        """
        self._refresh(index)
        if self.players is not None and self.plan.train.max_staleness:
            return self._played_ahead(index)

        async def play() -> tuple[tuple[list[Trajectory], Span], tuple[list[Trajectory], Span]]:
            return await asyncio.gather(
                timed(self._rollouts(index, rng, longest)), timed(self._real_groups(index, longest))
            )

        (played, here), (beside, there) = asyncio.run(play())
        self.seconds += here.seconds + there.seconds - here.both(there)
        if beside and self.recorded is None:
            seconds = (here.seconds, there.seconds, here.both(there))
            line = {key: round(s, 3) for key, s in zip(OVERLAP_SECONDS, seconds, strict=True)}
            self.run.record(OVERLAP, index, line)
        return played, beside, {}

    def _played_ahead(self, index: int) -> tuple[list[Trajectory], list[Trajectory], dict[str, float]]:
        assert self.players is not None
        if self._ahead is None:
            train = self.plan.train
            self._ahead = GroupsAhead(self.players.pool, self._groups_of, train.max_staleness, index, train.updates)
        begun = time.perf_counter()
        episodes, metrics = self._ahead.take()
        self.seconds += time.perf_counter() - begun
        self._count(episodes)
        episodes = self._kept(episodes)
        beside = [t for t in episodes if t.source is not self.world.source]
        if self.recorded is not None:
            beside = asyncio.run(self._real_groups(index, longest_turns(self.plan.dream, index)))
        return [t for t in episodes if t.source is self.world.source], beside, metrics

    def _groups_of(self, index: int) -> list[Group]:
        """All groups of an update that players play ahead."""
        longest, first = longest_turns(self.plan.dream, index), self._first_groups(index)
        rng = random.Random(derive_seed("starts", self.plan.seed, index))
        groups = self._in_groups(self._episodes(index, rng, 0, first, self.plan.dream.branch), longest, self.world)
        if first < self.plan.train.groups and len(self.worlds) > 1:
            groups += self._in_groups(self._real_episodes(index), longest, self.worlds[1])
        return groups

    def _in_groups(self, episodes: Sequence[Episode], longest: int, world: RolloutEnvironment) -> list[Group]:
        size = self.plan.train.played_per_group
        parts = [tuple(episodes[k : k + size]) for k in range(0, len(episodes), size)]
        return [Group(part, longest, world.source) for part in parts]

    def _refresh(self, index: int) -> None:
        """The policy plays as it is now, and nothing depends on what was played before."""
        if self.players is None:
            self.policy_version = weights_version(self.model)
        else:
            self.policy_version = self.players.publish(index, self.model, wait=not self.plan.train.max_staleness)
        engines = [self.agent.engine, *([self.agent_beside.engine] if self.agent_beside is not None else [])]
        for engine in {id(e): e for e in engines}.values():
            engine.update_weights()
        for engine in self.world.engines:
            engine.reset()

    async def _rollouts(self, index: int, rng: random.Random, longest: int) -> list[Trajectory]:
        """What an update plays in its world."""
        groups = self._first_groups(index)
        played = await self._play_groups(self._episodes(index, rng, 0, groups, self.plan.dream.branch), longest)
        if self.plan.dream.on_doubt == "branch" and self.world.source is Source.DREAM:
            played += await self._branches(index, rng, longest, played)
        return played + await self._in_place_of_equal_groups(index, rng, longest, played)

    def _one_a_group(self, index: int, played: Sequence[Trajectory]) -> list[Trajectory]:
        """An episode of each of the groups that are played first, to be written down."""
        return [played[g * self.plan.train.group_size] for g in range(self._first_groups(index))]

    def _first_groups(self, index: int) -> int:
        """Groups of an update that are played in its world, without those beside it and without further ones."""
        return self.plan.train.groups - real_groups(index, self.plan.train)

    async def _real_groups(self, index: int, longest: int) -> list[Trajectory]:
        """Groups of the same update that are played in the real games, at ``train.real_share``.

        Their numbers go on from those of the dreams: other seeds, and other tasks as far as there are enough. Their
        random numbers are independent of the dreams', so dreams do not change with the real share.
        """
        first = self._first_groups(index)
        groups = self.plan.train.groups - first
        if groups and self.recorded is not None:
            return self.recorded.deal(sum(real_groups(k, self.plan.train) for k in range(index)), groups)
        if not groups or len(self.worlds) == 1:
            return []
        return await self._play_groups(self._real_episodes(index), longest, self.worlds[1])

    def _real_episodes(self, index: int) -> list[Episode]:
        """What an update plays in the real world beside."""
        first, rng = self._first_groups(index), random.Random(derive_seed("starts", self.plan.seed, index))
        return self._episodes(index, rng, first, self.plan.train.groups - first, 0.0, self.worlds[1])

    def _shaping(self, longest: int) -> RewardShaping:
        """What turns earn under the settings, in episodes of at most ``longest`` turns."""
        train, progress = self.plan.train, self.plan.progress
        refusals = self.plan.refusals if progress.enabled and progress.carried_out else ""
        return RewardShaping(train.reward_tiers, train.process, refusals, self.worst, longest)

    def speed(self) -> dict[str, float]:
        """Throughput and draft acceptance. Depends on timing, so it is logged per process only."""
        speed = {"turns_per_second": self.turns / self.seconds if self.seconds else 0.0}
        if self.players is not None:
            speed |= self.players.pool.speed()
        counts = [engine.counts for engine in self.world.engines]
        if any(c.steps for c in counts):
            speed["tokens_per_step"] = sum(c.generated for c in counts) / max(1, sum(c.steps for c in counts))
            if drafted := sum(c.drafted for c in counts):
                speed["draft_acceptance"] = sum(c.accepted for c in counts) / drafted
        return speed

    async def _play_groups(
        self, episodes: Sequence[Episode], longest: int, world: RolloutEnvironment | None = None
    ) -> list[Trajectory]:
        """Plays whole groups: those episodes last that go on from others, and of each ``train.group_size`` are kept."""
        share = 0.0 if world is not None else self.plan.dream.branch_share
        first, rest = split_for_branches(episodes, share) if share else (episodes, [])
        played = await self._play(first, longest, world)
        if rest:
            rest = branch_off(rest, played)
            shared = sum(len(episode.task.dreamed) for episode in rest)
            self.left_out, self.turns = self.left_out - shared, self.turns - shared
            played = [t for group in by_group([*played, *await self._play(rest, longest)]).values() for t in group]
        return self._kept(played)

    def _kept(self, played: list[Trajectory]) -> list[Trajectory]:
        if self.plan.train.played_per_group == self.plan.train.group_size:
            return played
        kept = resampled(played, self.plan.train.group_size, self.plan.refusals, self.chat.stop)
        turns = [sum(len(t.own_turns) for t in some if t.source is self.world.source) for some in (played, kept)]
        self.left_out += turns[0] - turns[1]
        return kept

    def _played_turns(self, measured: Mapping[str, float]) -> dict[str, float]:
        """The turns that an update played in its world, where these are not those of the episodes that it judges."""
        if not self.plan.dream.branch_share and self.plan.train.played_per_group == self.plan.train.group_size:
            return {}
        turns, self.left_out = measured.get("turns", 0) + self.left_out, 0
        return {"played_turns": turns}

    async def _play(
        self, episodes: Sequence[Episode], longest: int, world: RolloutEnvironment | None = None
    ) -> list[Trajectory]:
        world = world or self.world
        stamp = Provenance(world.source, self.policy_version, world.version, world.solved_at)
        agent = self.agent if world is self.world or self.agent_beside is None else self.agent_beside
        if self.players is not None:
            played = await self.players.pool.play(self._in_groups(episodes, longest, world))
            self._count(played)
        else:
            played = await play_all(
                episodes, world.make_env, agent, stamp, longest, world.concurrency, on_turn=self.on_turn
            )
            self.turns += sum(len(t.own_turns) for t in played)
        return played

    def _count(self, played: Sequence[Trajectory]) -> None:
        """Counts turns that others played."""
        turns = sum(len(t.own_turns) for t in played)
        self.turns += turns
        if self.on_turn is not None:
            for _ in range(turns):
                self.on_turn()

    async def _branches(
        self, index: int, rng: random.Random, longest: int, played: Sequence[Trajectory]
    ) -> list[Trajectory]:
        """Further groups from the middle of logged episodes, for the turns that were lost to uncertainty.

        A dream that ended unsure after k turns it could use lost ``longest - k``. As many turns are dreamed in whole
        groups (GRPO compares within them), round after round, since these may be cut as well: until nothing is missing
        that a further group could give, or the groups allowed by ``dream.extra_groups`` are used up.
        """
        settings = self.plan.train
        missing, added = turns_lost(played, longest), list[Trajectory]()
        first = settings.groups
        last = first + int(self.plan.dream.extra_groups * self._first_groups(index))
        while first < last and missing >= settings.group_size * longest:
            groups = min(missing // (settings.group_size * longest), last - first)
            more = await self._play_groups(self._episodes(index, rng, first, groups, 1.0), longest)
            missing -= sum(useful_turns(t) for t in more)
            first += groups
            added += more
        return added

    async def _in_place_of_equal_groups(
        self, index: int, rng: random.Random, longest: int, played: Sequence[Trajectory]
    ) -> list[Trajectory]:
        """DAPO's dynamic sampling: as many further groups as were all alike, round after round, within the limit."""
        settings = self.plan.train
        wanted = self._first_groups(index)
        first = settings.groups + len({t.group_id for t in played}) - wanted  # the numbers before it are taken
        last = first + int(settings.extra_groups * wanted)
        added, shaping = list[Trajectory](), self._shaping(longest)
        while first < last and (missing := wanted - informative_groups([*played, *added], shaping)) > 0:
            groups = min(missing, last - first)
            episodes = self._episodes(index, rng, first, groups, self.plan.dream.branch)
            added += await self._play_groups(episodes, longest)
            first += groups
        return added

    def _episodes(
        self,
        index: int,
        rng: random.Random,
        first: int,
        groups: int,
        branch: float,
        world: RolloutEnvironment | None = None,
    ) -> list[Episode]:
        """Groups ``first``, ``first + 1``, ..., a share ``branch`` of them from the middle of logged episodes."""
        train, world = self.plan.train, world or self.world
        again = list[str]()
        if self.failures is not None and not first:
            again = self.failures.draw(index, round(share_at(index, train.failure_share) * groups))
        starts = self.starts
        begun = chosen_starts(starts, range(first, first + groups), rng, branch, world.source, again)
        if self.goals is not None and world.source is Source.DREAM:
            drawn = self.goals.draw(round(self.plan.dream.hindsight * groups), rng)
            begun, starts = [*begun[: groups - len(drawn)], *drawn], {**starts, **self.goals.starts}
        noise = noise_spec(self.plan.dream, index) if world.source is Source.DREAM else {}
        world_name = "" if world.source is self.world.source else f"{world.source.value}/"  # no group is of both worlds
        episodes: list[Episode] = []
        for g, name in zip(range(first, first + groups), begun, strict=True):
            task_id = starts[name].task_id
            real = world.tasks.get(task_id, Task(task_id))
            task = Task(task_id, {**real.spec, "start": name, **noise}, real.privileged)
            for k in range(train.played_per_group):
                episode_id = f"{world.source.value}/{index}/{g}/{k}"
                seed = derive_seed("episode", self.plan.seed, index, g, k)
                episodes.append(Episode(episode_id, task, f"{world_name}{index}/{g}", seed))
        return episodes
