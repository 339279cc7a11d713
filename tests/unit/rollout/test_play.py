"""If these fail, an episode is trained on, or counted, as something that it was not.

Worlds and agents are a few lines each: what happens at which turn can be read off the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imagination.commands import audit, evaluate
from imagination.evaluation.audit import play_three_ways
from imagination.loop.choice import _evidence
from imagination.rollout.dream_env import NO_GUARD
from imagination.rollout.play import Episode, Provenance, note_broken, plan, play, play_all, replay_all
from imagination.runs.run_folder import RunFolder
from imagination.session import Log, Session
from imagination.settings import Config
from policy.lm.engine import ContextFull, EngineFailure
from real_envs.env import EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, Owner, Source, StopReason, Trace, Trajectory, Turn
from tests.support.comparisons import episode as episode_of
from tests.support.refusal import refused
from tests.support.scripted import Acts, Answering, says
from worldmodel.rewards import Goal, GoalWorldModel

TASK = Task("t")
EPISODE = Episode("e", TASK, "g", seed=3)
REAL = Provenance(Source.REAL, policy_version="p1")


def step(
    text: str, reward: float | None = 0.0, terminated: bool = False, truncated: bool = False, **rest: object
) -> StepResult:
    return StepResult(Observation(text), reward, terminated, truncated, **rest)  # type: ignore[arg-type]


@dataclass
class World:
    """Answers its script; an exception in it is raised. After the end of the script it answers "on" for ever."""

    script: Sequence[StepResult | Exception] = ()
    start: Observation | Exception = field(default_factory=lambda: Observation("START"))
    resets: list[tuple[Task, int]] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    closed: bool = False

    async def reset(self, task: Task, seed: int) -> Observation:
        self.resets.append((task, seed))
        self.actions = []
        if isinstance(self.start, Exception):
            raise self.start
        return self.start

    async def step(self, action: str) -> StepResult:
        self.actions.append(action)
        await asyncio.sleep(0)
        answer = self.script[len(self.actions) - 1] if len(self.actions) <= len(self.script) else step("on")
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed = True


@dataclass
class Player:
    """Says "a0", "a1", ...; raises where its script says so. Its trace holds one token per action and observation."""

    failures: dict[int, Exception] = field(default_factory=dict)
    name: str = "player"
    started: list[tuple[Observation, int]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    closed: int = 0

    def start(self, observation: Observation, seed: int) -> PlayerActor:
        self.started.append((observation, seed))
        return PlayerActor(self)


@dataclass
class PlayerActor:
    player: Player
    owners: list[Owner] = field(default_factory=list)
    said: int = 0

    async def act(self) -> str:
        if self.said in self.player.failures:
            raise self.player.failures[self.said]
        self.owners.append(Owner.AGENT)
        self.said += 1
        return f"a{self.said - 1}"

    def observe(self, observation: Observation) -> None:
        self.owners.append(Owner.ENV)
        self.player.seen.append(observation.text)

    def trace(self) -> Trace:
        agents = [owner == Owner.AGENT for owner in self.owners]
        turns = tuple(sum(agents[:i]) if agent else -1 for i, agent in enumerate(agents))
        logprobs = tuple(-1.0 if agent else None for agent in agents)
        return Trace(tuple(range(len(agents))), tuple(self.owners), logprobs, turns)

    def close(self) -> None:
        self.player.closed += 1


def run(world: World, player: Player, max_turns: int = 5, provenance: Provenance = REAL) -> Trajectory:
    return asyncio.run(play(world, player, EPISODE, provenance, max_turns))


# --- why an episode ended ---


def test_an_episode_that_the_world_ends() -> None:
    """Everything that happened, in order, and nothing after the end."""
    world = World([step("s0", None, info={"refused": "why"}), step("s1", 1.0, terminated=True), step("never")])
    player = Player()
    found = run(world, player)
    assert found == Trajectory(
        id="e", task_id="t", group_id="g", source=Source.REAL, agent="player", seed=3, start="START",
        turns=(Turn("a0", "s0", None, False, {"refused": "why"}), Turn("a1", "s1", 1.0, True)),
        stop=StopReason.TERMINATED, policy_version="p1",
        trace=Trace((0, 1, 2), (Owner.AGENT, Owner.ENV, Owner.AGENT), (-1.0, None, -1.0), (0, -1, 1)),
    )  # fmt: skip
    assert world.resets == [(TASK, 3)]
    assert player.started == [(Observation("START"), 3)]
    assert player.seen == ["s0"]  # nobody acts after the end, so the last observation is not read
    assert player.closed == 1


@pytest.mark.parametrize(
    ("last", "stop"),
    [
        (None, StopReason.TURN_LIMIT),  # our own limit
        (step("s2", 0.5, truncated=True), StopReason.TURN_LIMIT),  # the environment's limit, of no kind
        (step("s2", 0.0, truncated=True, stop=StopReason.UNSURE), StopReason.UNSURE),
    ],
)
def test_an_episode_that_we_cut(last: StepResult | None, stop: StopReason) -> None:
    """The turn counts, and the state after it is read: a critic bootstraps from it. Merged with the world's end, the
    critic would learn that time-outs are worth nothing."""
    world = World([step("s0"), step("s1"), last or step("s2", 0.5)])
    player = Player()
    found = run(world, player, max_turns=3 if last is None else 5)
    assert found.stop is stop
    assert found.stop.is_truncation
    assert found.failure is None
    assert [turn.observation for turn in found.turns] == ["s0", "s1", "s2"]
    assert not any(turn.terminated for turn in found.turns)
    assert player.seen == ["s0", "s1", "s2"]
    assert world.actions == ["a0", "a1", "a2"]


def test_the_end_wins_over_the_turn_limit() -> None:
    found = run(World([step("s0"), step("s1", 1.0, terminated=True)]), Player(), max_turns=2)
    assert (found.stop, found.solved) == (StopReason.TERMINATED, True)


def test_a_full_context_of_the_policy() -> None:
    """No action was made, so there is no turn; what was played before is a truncated episode."""
    player = Player({2: ContextFull("no room")})
    found = run(World(), player)
    assert found.stop is StopReason.CONTEXT_LIMIT
    assert [turn.action for turn in found.turns] == ["a0", "a1"]
    assert found.trace is not None
    assert len(found.trace.ids) == 4
    assert player.closed == 1


def test_a_full_context_of_the_world() -> None:
    """The world could not answer: the action is in the trace, but there is no turn with an observation made up."""
    player = Player()
    found = run(World([step("s0"), step("", None, truncated=True, stop=StopReason.CONTEXT_LIMIT)]), player)
    assert found.stop is StopReason.CONTEXT_LIMIT
    assert [turn.action for turn in found.turns] == ["a0"]
    assert found.trace is not None
    assert found.trace.turns == (0, -1, 1)
    assert player.seen == ["s0"]


@pytest.mark.parametrize(
    "reason", [StopReason.ENV_CRASHED, StopReason.ENV_TIMEOUT, StopReason.PREDICTION_INVALID, StopReason.ENGINE_FAILED]
)
def test_a_world_that_breaks_keeps_the_turns_played(reason: StopReason) -> None:
    """The failure is typed and explained, and it is neither an observation nor an exception of the whole batch."""
    player = Player()
    found = run(World([step("s0", 0.5), EnvFailure(reason, "it broke")]), player)
    assert (found.stop, found.failure) == (reason, "it broke")
    assert found.stop.is_failure
    assert found.turns == (Turn("a0", "s0", 0.5, False),)
    assert found.start == "START"
    assert found.trace is not None
    assert player.closed == 1
    assert not found.solved


def test_an_engine_that_breaks_keeps_the_turns_played() -> None:
    player = Player({1: EngineFailure("NaN")})
    found = run(World([step("s0", 1.0)]), player)
    assert (found.stop, found.failure) == (StopReason.ENGINE_FAILED, "NaN")
    assert [turn.action for turn in found.turns] == ["a0"]
    assert not found.solved  # whatever it had earned
    assert player.closed == 1


def test_a_reset_that_breaks() -> None:
    """Nobody was started, so there is nothing to trace or to close."""
    player = Player()
    found = run(World(start=EnvFailure(StopReason.ENV_TIMEOUT, "slow")), player)
    assert (found.stop, found.failure) == (StopReason.ENV_TIMEOUT, "slow")
    assert (found.start, found.turns, found.trace) == ("", (), None)
    assert (player.started, player.closed) == ([], 0)


def test_real_episodes_that_broke_are_told_with_their_commonest_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def broke(why: str, provenance: Provenance = REAL) -> Trajectory:
        return run(World([EnvFailure(StopReason.ENV_CRASHED, why)]), Player(), provenance=provenance)

    trace = "Traceback:\n  File x\nKeyError: 'lamp'"
    note_broken([broke(trace), broke(trace), broke("no text: ('look',)"), run(World(), Player())], "; mend it")
    assert capsys.readouterr().err == "note: 3 of 4 episodes broke, 2 of them so: KeyError: 'lamp'; mend it\n"
    note_broken([run(World(), Player()), broke("a dream", Provenance(Source.DREAM))])
    assert capsys.readouterr().err == ""


def test_a_mistake_of_ours_is_no_failed_episode() -> None:
    """A bug that is counted as a crash of the environment would never be found."""
    with pytest.raises(KeyError, match="typo"):
        run(World([KeyError("typo")]), Player())


def test_a_branched_start_keeps_its_history_apart() -> None:
    """The prefix is in the record but was not played: the turn limit is for the episode's own turns."""
    past = (Turn("x", "y", 0.5, False), Turn("v", "w", 0.0, False))
    dream = Provenance(Source.DREAM, "p1", "w1")
    found = run(World(start=Observation("START", history=past)), Player(), max_turns=3, provenance=dream)
    assert found.turns[:2] == past
    assert found.prefix_turns == 2
    assert [turn.action for turn in found.own_turns] == ["a0", "a1", "a2"]
    assert (found.source, found.policy_version, found.world_model_version) == (Source.DREAM, "p1", "w1")


@pytest.mark.parametrize(("threshold", "solved"), [(None, True), (10.0, True), (10.5, False), (-2.0, True)])
def test_a_threshold_of_the_log_decides_what_is_solved(threshold: float | None, solved: bool) -> None:
    world = World([step("s0", 4.0), step("s1", 6.0, terminated=True)])
    found = run(world, Player(), provenance=Provenance(Source.DREAM, solved_at=threshold))
    assert found.solved is solved
    broken = World([step("s0", 20.0), EnvFailure(StopReason.ENV_CRASHED, "gone")])
    assert not run(broken, Player(), provenance=Provenance(Source.DREAM, solved_at=threshold)).solved


class Games:
    """One task, whose first step wins."""

    def tasks(self, split: str) -> list[Task]:
        return [TASK] if split == "train" else []

    def make_env(self) -> World:
        return World([step("You win.", 1.0, terminated=True)])

    async def close(self) -> None: ...


def solved_dreams(
    config: Config, world: Any, logged: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[set[tuple[bool | None, bool | None]], set[float]]:
    """Whether a policy that says "go" solves dreams and the real world, by the audit; and how often dreams, by others.
    The log solves the task by ``logged``."""
    run, games = RunFolder(folder, 0), Games()
    policy = SimpleNamespace(version="p", agent=Acts("go"))
    session: Any = Session(config, run)
    session.guard = lambda *_, **__: NO_GUARD
    solved = [Turn(logged, "You win.", 1.0, True)]
    session.log, session.unplayed = Log([episode_of("e", solved, Source.REAL, task="t", start="START")], []), []
    session.policy, session.agent = lambda *_: policy, lambda *_, **__: policy.agent
    session.world_model = lambda: world
    (known,) = _evidence(session, 1, {"t": TASK}).values()
    played = asyncio.run(play_three_ways(audit._env_setup(session, world, games), "p", policy))  # type: ignore[arg-type]
    monkeypatch.setattr(evaluate, "Session", lambda *_: session)
    monkeypatch.setattr(evaluate, "real_tasks", lambda *_: games)
    asyncio.run(evaluate._evaluate(config, run))
    evaluated = run.summary["policy"]["after"]["dream_success"]["success"]
    audited = {(triple.dreamed, triple.real) for triple in played.triples}
    return audited, {known.dreamed[0] / config.loop.looks, evaluated}


def test_whoever_counts_dreams_counts_as_solved_what_a_declared_goal_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config()
    config.worldmodel.goal = goal = Goal(observation="win", reward=0.5)
    world = GoalWorldModel(Answering(lambda *_: says("You win.")), goal)
    assert solved_dreams(config, world, "go", tmp_path, monkeypatch) == ({(True, True)}, {1.0})


def test_whoever_counts_dreams_counts_what_pays_in_those_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config()
    config.dream.known_rewards = True
    world = Answering(lambda *_: says("You win.", reward=1.0))
    assert solved_dreams(config, world, "take", tmp_path, monkeypatch) == ({(False, True)}, {0.0})
    assert solved_dreams(config, world, "go", tmp_path, monkeypatch) == ({(True, True)}, {1.0})


def test_nothing_is_played_for_a_policy_that_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_evaluate", lambda *_: pytest.fail("it plays"))
    RunFolder(tmp_path, 0).record("evaluate", 0, {"kept": 1.0})
    refused(lambda: evaluate.evaluate(Config(), tmp_path), "run `imagine train`")
    assert RunFolder(tmp_path, 0).metrics("evaluate")


# --- many episodes ---


class Counted:
    """Worlds that end after as many steps as the episode's seed says, and note how many of them are open at a time."""

    def __init__(self) -> None:
        self.made: list[CountedWorld] = []
        self.playing: set[int] = set()
        self.most = 0

    def __call__(self) -> CountedWorld:
        self.made.append(CountedWorld(self, len(self.made)))
        return self.made[-1]


class CountedWorld:
    def __init__(self, all_: Counted, index: int) -> None:
        self.all, self.index, self.closed, self.left = all_, index, 0, 0

    async def reset(self, task: Task, seed: int) -> Observation:
        self.left = seed
        self.all.playing.add(self.index)
        self.all.most = max(self.all.most, len(self.all.playing))
        await asyncio.sleep(0)
        if seed == 13:
            raise EnvFailure(StopReason.ENV_CRASHED, "unlucky")
        return Observation(f"{task.id}/{seed}")

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(0)
        self.left -= 1
        if self.left == 0:
            self.all.playing.discard(self.index)
        return step("s", 0.0, terminated=self.left == 0)

    async def close(self) -> None:
        self.closed += 1


SEEDS = [9, 1, 5, 13, 2, 2, 7, 1]  # lengths of the episodes: those that start first do not end first


def episodes() -> list[Episode]:
    return [Episode(f"e{i}", Task(f"t{i}"), f"g{i // 2}", seed) for i, seed in enumerate(SEEDS)]


@pytest.mark.parametrize("concurrency", [1, 3, 100])
def test_play_all_keeps_the_order_and_bounds_the_open_worlds(concurrency: int) -> None:
    """In another order, group and reward of an episode would be those of its neighbour; more open worlds than asked for
    would overload simulators and their licences. One that breaks costs only its own episode."""
    worlds, done = Counted(), []
    found = asyncio.run(play_all(episodes(), worlds, Player(), REAL, 20, concurrency, done.append))
    assert [t.id for t in found] == [f"e{i}" for i in range(8)]
    assert [t.start for t in found if not t.stop.is_failure] == [f"t{i}/{s}" for i, s in enumerate(SEEDS) if s != 13]
    assert [len(t.turns) for t in found] == [9, 1, 5, 0, 2, 2, 7, 1]
    assert [t.stop.is_failure for t in found] == [seed == 13 for seed in SEEDS]
    assert len(worlds.made) == min(concurrency, 8)
    assert worlds.most == min(concurrency, 8)
    assert [world.closed for world in worlds.made] == [1] * len(worlds.made)
    assert sorted(t.id for t in done) == [f"e{i}" for i in range(8)]
    if concurrency == 100:
        assert [t.id for t in done] != [t.id for t in found]  # they did run at the same time


def test_agent_and_provenance_may_depend_on_the_episode() -> None:
    def stamp(episode: Episode) -> Provenance:
        return Provenance(Source.DREAM if episode.seed > 4 else Source.REAL)

    def agent(episode: Episode) -> Player:
        return Player(name=f"player of {episode.id}")

    found = asyncio.run(play_all(episodes(), Counted(), agent, stamp, 20))
    assert [t.agent for t in found] == [f"player of e{i}" for i in range(8)]
    assert [t.source for t in found] == [Source.DREAM if seed > 4 else Source.REAL for seed in SEEDS]


def test_no_episodes_need_no_world() -> None:
    worlds = Counted()
    none: list[Episode] = []
    assert asyncio.run(play_all(none, worlds, Player(), REAL, 5)) == []
    assert asyncio.run(replay_all({}, none, worlds)) == []
    assert worlds.made == []


def test_a_mistake_of_ours_ends_the_batch_and_closes_the_worlds() -> None:
    worlds = Counted()

    def broken(episode: Episode) -> Player:
        return Player({1: TypeError("ours")} if episode.id == "e2" else {})

    caught: list[str] = []
    try:
        asyncio.run(play_all(episodes(), worlds, broken, REAL, 20, 3))
    except* TypeError as group:
        caught += [str(error) for error in group.exceptions]
    assert caught == ["ours"]
    assert [world.closed for world in worlds.made] == [1, 1, 1]


class Echo:
    """Says which task it is and what was done; ends after "stop"."""

    async def reset(self, task: Task, seed: int) -> Observation:
        self.name = f"{task.id}/{seed}"
        return Observation(self.name)

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(0 if len(action) % 2 else 0.001)  # episodes end in another order than they begin
        return StepResult(Observation(f"{self.name}: {action}"), 0.0, action == "stop", False)

    async def close(self) -> None:
        pass


def dream(name: str, actions: Sequence[str]) -> Trajectory:
    turns = tuple(Turn(action, "dreamed", 0.0, False) for action in actions)
    return Trajectory(name, "t", "g", Source.DREAM, "policy", 0, "", turns, StopReason.TURN_LIMIT)


def test_every_dream_is_repeated_turn_for_turn_in_its_own_task() -> None:
    episodes = plan([Task("a"), Task("b")], 3, "replay", seed=2)
    said = [["x"], ["go", "look", "go"], ["stop", "never"], ["ab"] * 5, ["y"], ["z", "stop"]]
    dreams = {e.id: dream(e.id, actions) for e, actions in zip(episodes, said, strict=True)}
    twins = asyncio.run(replay_all(dreams, episodes, Echo, concurrency=4))
    assert [twin.id for twin in twins] == [episode.id for episode in episodes]
    said[2] = ["stop"]  # the real world ended here
    for twin, episode, actions in zip(twins, episodes, said, strict=True):
        assert [turn.action for turn in twin.turns] == actions
        assert twin.turns[0].observation == f"{episode.task.id}/{episode.seed}: {actions[0]}"
        assert (twin.source, twin.agent) == (Source.REAL, "replay")
    assert twins[0].stop is StopReason.TURN_LIMIT
    assert twins[2].stop is StopReason.TERMINATED


def test_a_plan_gives_each_task_its_own_seeds_whatever_it_is_called() -> None:
    """The same task and number get the same chance in every world; another run of the same tasks does not."""
    tasks = [Task("a"), Task("b")]
    real, dreamed = plan(tasks, 2, "real", 1), plan(tasks, 2, "dream", 1)
    assert [(e.task.id, e.seed) for e in real] == [(e.task.id, e.seed) for e in dreamed]
    assert [e.id for e in real] == ["real/a/0", "real/a/1", "real/b/0", "real/b/1"]
    assert [e.group_id for e in real] == ["real/a", "real/a", "real/b", "real/b"]
    assert len({e.seed for e in [*real, *plan(tasks, 2, "real", 2)]}) == 8
