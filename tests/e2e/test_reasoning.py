"""A world model that thinks before it predicts goes through the stages; nobody but the record hears its thoughts."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from imagination.commands.clone import clone
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.refine_world_model import Answers, refine_world_model
from imagination.commands.train import train
from imagination.learning.experience import policy_row
from imagination.rollout.dream_env import DreamEnv, starts_from_log
from imagination.rollout.engines import Engines, drafts_from
from imagination.rollout.play import Episode, Provenance, play
from imagination.rollout.world_models import form_of
from imagination.runs.log import read_log
from imagination.runs.models import load_model
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError
from real_envs.env import Task
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Owner, Source, Trajectory
from tests.support.killing import summary_of
from tests.support.tiny import TASKS, logged_episode
from worldmodel.objective import transition_weights

MARK = "Zounds"  # said in thoughts, and never by a corridor


def thoughtful(episode: Trajectory) -> Trajectory:
    """The episode with what could be thought before each answer; a turn in seven says nothing."""
    inside, turns = False, []
    for k, turn in enumerate(episode.turns):
        thought = f"{MARK}, I am {'inside' if inside else 'outside'}."
        silent = (episode.seed + k) % 7 == 0
        turns.append(turn if silent else replace(turn, info={"reasoning": thought}))
        inside = inside or turn.observation.startswith("You walk")
    return replace(episode, turns=tuple(turns))


@pytest.fixture
def pensive(tmp_path: Path) -> Path:
    """A run folder that holds nothing but a log with thoughts."""
    store = TrajectoryStore.create(tmp_path / "log", {"train": list(TASKS)}, meta={"environment": "corridors"})
    store.append(thoughtful(logged_episode(task, number)) for task in TASKS for number in range(30))
    return tmp_path


@pytest.fixture
def thinking(tiny: Config) -> Config:
    tiny.worldmodel.reasoning_tokens = 24
    tiny.collect.validation = 0.3
    tiny.fit.steps, tiny.fit.batch_tokens = 200, 4096  # a row a turn, most of it history
    tiny.clone.steps, tiny.clone.lr = 80, 1e-2  # a policy that says commands
    tiny.refine.updates, tiny.refine.turns, tiny.refine.group_size = 2, 8, 4
    tiny.dream.temperature = 0.0
    return tiny


def test_thoughts_are_learned_thrown_away_and_kept_in_the_record(thinking: Config, pensive: Path) -> None:
    run = pensive
    fit_world_model(thinking, run)
    found = summary_of(run)
    assert found["world_model"]["exact_match"] > 0.5, found["world_model"]
    refine_world_model(thinking, run)
    assert [line["step"] for line in RunFolder(run, 0).metrics("refine_world_model")] == [0, 1]
    clone(thinking, run)
    thinking.train.updates = 2
    train(thinking, run)

    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    turns = [turn for row in rows for turn in row["turns"][row["prefix_turns"] :]]
    assert turns
    thoughts = [turn["info"]["reasoning"] for turn in turns]
    assert sum(thought.startswith(MARK) for thought in thoughts) > 0.9 * len(turns)
    assert not [turn for turn in turns if MARK in turn["observation"] or "[prediction]" in turn["observation"]]

    trajectories = asyncio.run(dreams(thinking, run))
    thought = [turn.info["reasoning"] for t in trajectories for turn in t.own_turns]
    assert MARK in "".join(map(str, thought))
    for trajectory in trajectories:
        check_policy(thinking, run, trajectory)

    thinking.worldmodel.reasoning_tokens = 0  # the same weights asked for something else would dream nonsense
    with pytest.raises(UserError, match=r"trained as text\+reasoning.*reasoning_tokens"):
        Session(thinking, RunFolder(run, 0)).world_model((), 0.0)


async def dreams(config: Config, run: Path) -> list[Trajectory]:
    """A dream from each of a few starts, in the middle of logged episodes as well."""
    session = Session(config, RunFolder(run, 0))
    log, world, agent = session.log.train, session.world_model(temperature=0.0), session.agent(session.policy("policy"))
    starts = starts_from_log(log, branch=True)
    assert any("reasoning" in turn.info for start in starts.values() for turn in start.history)
    played = []
    for number, (name, start) in enumerate(list(starts.items())[:12]):
        env = DreamEnv(world, starts)
        episode = Episode(f"{number}", Task(start.task_id, {"start": name}), "g", number)
        played.append(await play(env, agent, episode, Provenance(Source.DREAM), max_turns=4))
        await env.close()
    return [trajectory for trajectory in played if not trajectory.stop.is_failure]


def check_policy(config: Config, run: Path, trajectory: Trajectory) -> None:
    """The world's words in the policy's tokens are the observations and nothing else; no thought is in the rest."""
    _, chat = load_model(run / "models/policy", "train", config.policy)
    trace = trajectory.trace
    assert trace is not None
    owned = list(zip(trace.ids, trace.owners, strict=True))
    seen = trajectory.turns[:-1] if trajectory.turns[-1].terminated else trajectory.turns
    told = chat.decode([id for id, owner in owned if owner == Owner.ENV])
    assert told == trajectory.start + "".join(turn.observation for turn in seen)
    assert MARK not in chat.decode([id for id, owner in owned if owner != Owner.AGENT])
    row = policy_row(trajectory)
    assert row is not None
    assert row.ids.tolist() == list(trace.ids)[: len(row.ids)]


def test_refining_trains_the_sampled_thought_with_its_answer(thinking: Config, pensive: Path) -> None:
    thinking.fit.steps, thinking.refine.supervised_share = 120, 0.0
    thinking.refine.turns, thinking.refine.group_size = 16, 6
    fit_world_model(thinking, pensive)
    log, _ = read_log(RunFolder(pensive, 0), thinking.collect.validation)
    model, chat = load_model(pensive / "models/worldmodel", "fit-world-model", thinking.worldmodel)
    form = form_of(thinking.worldmodel, log)
    engine = Engines(thinking.engine).make(model, chat, 256, drafts_from(log, chat, form))
    answers = Answers(engine, chat, form, log, transition_weights(log), thinking)
    rows = answers.update(0).rows
    assert rows
    assert any(row.rewards[-1] == 1 for row in rows)
    for row in rows:
        first = row.action_mask.tolist().index(True)
        prompt, said = chat.tokenizer.decode(row.ids[:first]), chat.tokenizer.decode(row.ids[first:])
        assert MARK not in prompt
        assert all(row.action_mask[first:])
        assert all(weight == 1 for weight in row.rl_weight[first:])
        assert not any(math.isnan(p) for p in row.behavior_logprobs[first:])
        if row.rewards[-1]:
            assert "\n[prediction]\n" in said
    thoughts = [chat.tokenizer.decode(row.ids[row.action_mask]) for row in rows]
    assert sum(MARK in thought for thought in thoughts) > len(rows) / 2
    thinking.refine.supervised_share = 0.5
    logged = [row for row in answers.update(0).rows if row.ce_weight.any()]
    assert logged
    assert any(MARK in chat.tokenizer.decode(row.ids) for row in logged)


def test_what_cannot_work_is_said_at_once(thinking: Config, run: Path) -> None:
    with pytest.raises(UserError, match="learn reasoning from"):
        fit_world_model(thinking, run)
    thinking.worldmodel.context = 100
    for stage in (fit_world_model, refine_world_model):
        with pytest.raises(UserError, match=r"worldmodel\.context=100 has no room"):
            stage(thinking, run)
