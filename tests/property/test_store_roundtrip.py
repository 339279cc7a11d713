"""Whatever an episode holds, the store gives it back; if not, models train on something that never happened."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from real_envs.store import TrajectoryStore
from real_envs.trajectory import Owner, Source, StopReason, Trace, Trajectory, Turn

TASKS = {"train": ["t0", "t1"], "test": ["t2"]}
text = st.text(max_size=30)  # all of Unicode but lone surrogates, which UTF-8 cannot hold
number = st.floats(allow_nan=False)  # NaN is equal to nothing; test_store.py has it
int64 = st.integers(-(2**63), 2**63 - 1)
infos = st.dictionaries(text, st.one_of(number, text, st.booleans()), max_size=3)
turns = st.builds(
    Turn,
    action=text,
    observation=text,
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    terminated=st.booleans(),
    info=infos,
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    owners = tuple(draw(st.lists(st.sampled_from(Owner), max_size=12)))
    return Trace(
        ids=tuple(draw(int64) for _ in owners),
        owners=owners,
        logprobs=tuple(draw(number) if owner == Owner.AGENT else None for owner in owners),
        turns=tuple(draw(st.integers(-1, 5)) for _ in owners),
        temperature=draw(number),
        top_p=draw(number),
        top_k=draw(st.integers(0, 99)),
        segments=tuple(sorted(draw(st.sets(st.integers(1, len(owners) - 1), max_size=3)))) if len(owners) > 1 else (),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    played = tuple(draw(st.lists(turns, max_size=4)))
    return Trajectory(
        id=draw(text),
        task_id=draw(st.sampled_from(["t0", "t1", "t2"])),
        group_id=draw(text),
        source=draw(st.sampled_from(Source)),
        agent=draw(text),
        seed=draw(int64),
        start=draw(text),
        turns=played,
        stop=draw(st.sampled_from(StopReason)),
        prefix_turns=draw(st.integers(0, len(played))),
        policy_version=draw(st.none() | text),
        world_model_version=draw(st.none() | text),
        trace=draw(st.none() | traces()),
        failure=draw(st.none() | text),
        success=draw(st.none() | st.booleans()),
    )


def types(trajectory: Trajectory) -> list[object]:
    """What ``==`` does not tell apart: 1.0 from True, an enum from its value, None being unequal to 0.0 already."""
    trace = trajectory.trace
    return [
        type(trajectory.source),
        type(trajectory.stop),
        [type(turn.reward) for turn in trajectory.turns],
        [{key: type(value) for key, value in turn.info.items()} for turn in trajectory.turns],
        trace and [type(owner) for owner in trace.owners],
    ]


@settings(max_examples=50)
@given(st.lists(trajectories(), max_size=5, unique_by=lambda t: t.id), st.integers(0, 5))
def test_episodes_come_back_as_they_were_in_their_order(episodes: list[Trajectory], cut: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = TrajectoryStore.create(Path(name) / "log", TASKS)
        store.append(episodes[:cut])
        store.append(episodes[cut:])
        again = TrajectoryStore.open(Path(name) / "log")
        for split, tasks in [(None, {"t0", "t1", "t2"}), ("train", {"t0", "t1"}), ("test", {"t2"})]:
            wanted = [episode for episode in episodes if episode.task_id in tasks]
            if wanted:
                got = list(again.read(split, require_actions=False))
                assert got == wanted
                assert [types(t) for t in got] == [types(t) for t in wanted]
        summary = again.summary()
        assert summary.total.episodes == len(episodes)
        assert summary.total.turns == sum(len(episode.turns) for episode in episodes)
        assert summary.total.turns == sum(tally.turns for tally in summary.by_split.values())
        assert summary.total.turns == sum(tally.turns for tally in summary.by_agent.values())
