"""If these fail, a stopped run keeps a policy that has already learned from the mistakes it was stopped for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from imagination.evaluation.monitors.monitor import Probe, TripwireMonitor
from imagination.evaluation.monitors.rollout_stats import LogReference
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError
from real_envs.env import Task
from real_envs.trajectory import Source, StopReason, Trajectory, Turn


def episode(group: str, *said: tuple[str, float], agent: str = "policy") -> Trajectory:
    turns = tuple(Turn(action, f"After {action}.", reward, False) for action, reward in said)
    return Trajectory(f"{group}/{said}", "t", group, Source.DREAM, agent, 0, "S", turns, StopReason.TERMINATED)


HONEST = (("go east", 0.0), ("take lamp", 1.0))
HACK = (("look", 0.0), ("take folder", 1.0))  # earned nothing in the log
LOG = [
    episode("1", *HONEST, agent="expert"),
    episode("2", ("look", 0.0), ("take folder", 0.0), ("take lamp", 1.0), agent="noisy"),
] * 5


class Policy(torch.nn.Module):
    """``learned`` counts the updates that it has learned from; ``base`` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = torch.nn.Parameter(torch.zeros(2))
        self.base = torch.nn.Parameter(torch.ones(1000), requires_grad=False)


Make = Callable[..., tuple[TripwireMonitor, Policy]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(**tripwires: Any) -> tuple[TripwireMonitor, Policy]:
        config = Config()
        config.train.updates = 24
        config.tripwires.drift = 100.0  # half a dozen words say nothing
        for name, value in tripwires.items():
            setattr(config.tripwires, name, value)
        run, policy = RunFolder(tmp_path / "run", 0), Policy()
        return TripwireMonitor(
            config.tripwires,
            config.train.updates,
            policy,
            LogReference(LOG),
            Probe(Session(config, run), config.seed),
        ), policy

    return make


def play(watch: TripwireMonitor, policy: Policy, hacked: set[int], updates: range) -> None:
    """Two groups an update, both honest or one of them paid for the hack; learns where the wires let it."""
    for update in updates:
        second = HACK if update in hacked else HONEST
        watch.look(update, [episode(f"{update}/0", *HONEST), episode(f"{update}/1", *second)])
        if watch.tripped is not None:
            return
        with torch.no_grad():
            policy.learned += 1


def test_the_policy_goes_back_to_before_the_first_update_of_the_evidence(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """One group of 16 in a memory of eight updates at 10 and 13 is little, three at 16 are too many. The policy of 15
    has learned from the first two; that which played 10 from none. What was paid at 5 is forgotten by then."""
    watch, policy = make()
    play(watch, policy, {5, 10, 13, 16}, range(20))
    assert watch.tripped is not None
    assert (watch.tripped.wire, watch.tripped.update, watch.tripped.since) == ("contradicted", 16, 10)
    assert policy.learned.tolist() == [16, 16]
    watch.roll_back()
    assert policy.learned.tolist() == [10, 10]  # updates 0 to 9
    stopped = watch.summary()["stopped_by"]
    assert (stopped["policy_of_update"], stopped["since"], stopped["after_training"]) == (10, 10, False)
    said = capsys.readouterr().err
    assert "stopped at update 16" in said
    assert "that played update 10" in said


def test_evidence_of_the_first_update_leaves_the_policy_that_training_started_with(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    watch, policy = make(min_groups=2, contradicted=0.02)
    play(watch, policy, {0, 4}, range(20))
    watch.roll_back()
    assert policy.learned.tolist() == [0, 0]
    assert "it started with" in capsys.readouterr().err


def test_nothing_tripped_changes_nothing(make: Make) -> None:
    watch, policy = make()
    play(watch, policy, {3}, range(20))
    watch.roll_back()
    assert policy.learned.tolist() == [20, 20]
    assert watch.summary()["stopped_by"] is None


@pytest.mark.parametrize(("memory", "window"), [(8, 3), (2, 5)])
def test_only_as_many_policies_are_kept_as_evidence_may_need(make: Make, memory: int, window: int) -> None:
    """And of each only what is trained: all of a large model eight times would not fit."""
    watch, policy = make(memory=memory, window=window)
    play(watch, policy, set(), range(20))
    kept = watch.state_dict()["kept"]
    assert list(kept) == list(range(20 - max(memory, window), 20))
    assert all(list(weights) == ["learned"] for weights in kept.values())
    assert [weights["learned"].tolist() for weights in kept.values()] == [[k, k] for k in kept]


def test_a_resumed_run_goes_back_as_far(make: Make, tmp_path: Path) -> None:
    """Saved and killed between the first evidence and the trip."""
    whole, policy = make()
    play(whole, policy, {10, 13, 16}, range(15))
    state = tmp_path / "train.ckpt"
    torch.save({"callbacks": {whole.state_key: copy.deepcopy(whole.state_dict())}}, state)
    resumed, other = make()
    resumed.resume(str(state))
    assert resumed.tripped is None
    other.load_state_dict(policy.state_dict())
    for watch, trained in ((whole, policy), (resumed, other)):
        play(watch, trained, {10, 13, 16}, range(15, 20))
        watch.roll_back()
        assert trained.learned.tolist() == [10, 10]
    assert resumed.summary() == whole.summary()


def test_a_state_of_an_earlier_version_is_no_riddle(make: Make, tmp_path: Path) -> None:
    watch, _ = make()
    state = tmp_path / "train.ckpt"
    old = {"trusted": {"learned": torch.zeros(2)}, "update": 3, "history": [], "example": ""}
    torch.save({"callbacks": {watch.state_key: old}}, state)
    with pytest.raises(UserError, match=r"train\.ckpt .*earlier version.*delete it"):
        watch.resume(str(state))


def test_a_probe_plays_the_games_that_are_trained_in(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not those that ``train.tasks`` leaves alone."""
    played: list[str] = []

    class Tasks:
        make_env = None

        def tasks(self, split: str) -> list[Task]:
            return [Task(f"{split}-1")]

        async def close(self) -> None: ...

    async def play_all(episodes: list[Any], *_: Any, **__: Any) -> list[Trajectory]:
        played.extend(episode.task.id for episode in episodes)
        return []

    monkeypatch.setattr("imagination.evaluation.monitors.monitor.play_all", play_all)
    monkeypatch.setattr(Session, "tasks", lambda *_: Tasks())
    probe = make(real_episodes=2)[0].probe
    probe._session.config.train.tasks = "heldout"
    assert probe.play(0, None) == (0, 0)  # type: ignore[arg-type]
    assert played == ["heldout-1", "heldout-1"]


def test_the_last_look_plays_no_probe(make: Make) -> None:
    """Update 24 of 0 to 23: with a probe every five updates one would be due, and there are no games here to play."""
    watch, _ = make(real_episodes=2, every=5)
    agent: Any = object()
    played = [episode("24/0", *HONEST)]
    with pytest.raises(UserError, match="imagine collect"):
        watch.look(24, played, agent)
    watch.look(24, played)
    assert watch.probe.spent.steps == 0


def test_a_trip_at_the_last_look_is_told_apart(make: Make) -> None:
    watch, policy = make()
    play(watch, policy, {22, 23, 24}, range(25))
    watch.roll_back()
    assert policy.learned.tolist() == [22, 22]
    found = watch.summary()
    assert (found["updates"], found["last_look"], found["stopped_by"]["after_training"]) == (24, True, True)
