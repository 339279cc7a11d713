"""If these fail, an episode in several contexts is learned from as something else than one episode.

The engine samples from a model, so that log-probs are those of its tokens; what is expected is a plain loop over single
tokens, a full forward pass a context.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.learning.algorithms import ALGORITHMS, build_algorithm
from imagination.learning.experience import assign_credit, policy_row, policy_rows
from imagination.rollout.dream_env import DreamEnv, Start
from imagination.rollout.play import Episode, Provenance, play, play_all
from imagination.settings import AlgorithmSettings
from imagination.settings.algorithm_parts import GroupRelative
from policy.agent import LanguageModelAgent
from policy.lm.backbone import build_model
from policy.lm.batch import Row, RowBatch, collate
from policy.lm.engine import Completion, ContextFull, Sampling
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.render import SUMMARY_REQUEST, ChatFormat
from policy.lm.settings import ModelSettings
from real_envs.env import Env, StepResult, Task
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Observation, Owner, Source, StopReason, Trajectory, Turn
from tests.support.plain import TOKENIZER, assert_same, credited, gradient, gradients_of, make_model, scored
from worldmodel.world_model import Prediction

CHAT = ChatFormat(TOKENIZER)
CONTEXT, ACTION, SUMMARY = 256, 6, 12
VIEW = ", with a lamp, a chest and a door"


@dataclass
class Rooms:
    """A world that pays by the length of actions, so that episodes of a group differ."""

    turns: int
    view: str = ""
    done: int = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        self.done = 0
        return Observation(f"HALL {task.id}")

    async def step(self, action: str) -> StepResult:
        self.done += 1
        ended = self.done == self.turns
        return StepResult(Observation(f"ROOM {self.done}{self.view}"), len(action) / 8, ended, False)

    async def close(self) -> None: ...


class RoomsDreamed:
    """The same world as a world model."""

    version = "rooms"

    def __init__(self, turns: int, view: str = "") -> None:
        self.turns, self.view = turns, view

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: Hashable = None
    ) -> Prediction:
        done = len(history) + 1
        return Prediction(f"ROOM {done}{self.view}", len(action) / 8, done == self.turns, 1.0, 1.0)

    def release(self, session: Hashable) -> None: ...


def agent_of(engine: object, summary: int = SUMMARY) -> LanguageModelAgent:
    return LanguageModelAgent(engine, CHAT, ACTION, summary_tokens=summary)  # type: ignore[arg-type]


def rollouts(count: int = 4) -> tuple[torch.nn.Module, list[Trajectory]]:
    model = make_model()
    episodes = [Episode(str(seed), Task("t"), "g", seed) for seed in range(count)]
    agent = agent_of(InProcessEngine(model, CONTEXT))
    worlds = iter([Rooms(turns) for turns in (12, 3, 9, 6)])  # of one to several contexts
    stamp = Provenance(Source.REAL)
    return model, asyncio.run(play_all(episodes, lambda: next(worlds), agent, stamp, 20))


def test_the_gradient_of_episodes_in_several_contexts_is_that_of_a_plain_loop() -> None:
    """GRPO on policy: each token that was sampled, in an action or in a summary, has the gradient of its log-prob in
    the context in which it was sampled, times the advantage of its episode; an episode counts once in the mean."""
    model, played = rollouts()
    assert sorted(len(e.trace.spans) for e in played if e.trace)[0] == 1
    assert max(len(e.trace.spans) for e in played if e.trace) > 2
    returns = [e.total_reward for e in played]
    terms = []
    for episode in played:
        trace = episode.trace
        assert trace is not None
        advantage = (episode.total_reward - mean(returns)) / (stdev(returns) + GroupRelative().std_eps)
        for begin, end in trace.spans:
            scores = scored(model, trace.ids[begin:end], 1.0)
            terms += [-advantage * s for s, p in zip(scores, trace.logprobs[begin:end], strict=True) if p is not None]
    got = gradient(model, policy_rows(played), judge=True)
    assert_same(got, gradients_of(torch.stack(terms).mean(), model), tolerance=2e-4)


def judged(rows: Sequence[Row], name: str, values: Sequence[Sequence[float]]) -> tuple[RowBatch, list[list[float]]]:
    """A batch with advantages; and those of each token that was sampled, in order, by episode."""
    batch = collate(rows, pad=0)
    given = {key: iter(numbers) for key, numbers in enumerate(values)}
    algorithm = ALGORITHMS[name]
    for k, row in enumerate(rows):
        for t in range(len(row)):
            batch.values[k, t] = next(given[int(row.episode)])
        batch.bootstrap[k] = 0.7 if row.truncated else 0.0
    assign_credit(batch, algorithm)
    found: dict[int, list[float]] = {}
    for k, row in enumerate(rows):
        found.setdefault(int(row.episode), []).extend(batch.advantages[k, : len(row)][row.action_mask].tolist())
    return batch, [found[number] for number in sorted(found)]


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "istar"])  # refused with summaries
def test_every_algorithm_judges_contexts_as_the_episode_that_they_are(name: str) -> None:
    """Cut or not, the same tokens have the same advantages, with a critic and across the cut, too."""
    _, played = rollouts()
    played[0] = replace(played[0], stop=StopReason.TURN_LIMIT)
    whole = [replace(row, episode=torch.tensor(k)) for k, e in enumerate(played) if (row := policy_row(e)) is not None]
    rng = torch.Generator().manual_seed(0)
    values = [torch.rand(len(row), generator=rng).tolist() for row in whole]
    cut = policy_rows(played)
    assert len(whole) == 4 < len(cut)
    one, expected = judged(whole, name, values)
    several, got = judged(cut, name, values)
    for a, b in zip(got, expected, strict=True):
        assert a == pytest.approx(b, abs=1e-6)
    assert any(x != 0 for numbers in got for x in numbers)
    for column in ("rl_weight", "learned"):
        assert int((getattr(one, column) != 0).sum()) == int((getattr(several, column) != 0).sum())
    assert not several.advantages[several.rl_weight == 0].any() or name == "filtered_bc"


@pytest.mark.parametrize("masks", [{"loss_mask": False}, {"name": "ppo", "advantage_mask": False}])
def test_nothing_predicts_the_first_token_of_a_context(masks: dict[str, Any]) -> None:
    """Without the masks, too, under which all others are trained on."""
    model, played = rollouts()
    rows = policy_rows(played)
    trained = AlgorithmSettings(**masks)
    batch = credited(rows, build_algorithm(trained), 0.5)
    assert not batch.trained_mask[:, 0].any()
    assert int((batch.trained_mask | ~batch.attention_mask)[:, 1:].sum()) == batch.ids[:, 1:].numel()
    assert gradient(model, rows, algorithm=trained, judge=True)


# --- whose tokens they are ---


class Writes:
    """An engine that writes given letters, each with a log-prob of its own, and keeps what it was asked."""

    def __init__(self, texts: Sequence[str], context: int) -> None:
        self.texts, self.context, self.made = list(texts), context, list[tuple[list[int], Completion, int]]()

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        if len(ids) + sampling.max_tokens > self.context:
            raise ContextFull
        written = [*CHAT.encode(self.texts[len(self.made) % len(self.texts)]), CHAT.stop][: sampling.max_tokens]
        logprobs = tuple(-1.0 - len(self.made) - i / 100 for i in range(len(written)))
        self.made.append((list(ids), Completion(tuple(written), logprobs, written[-1] == CHAT.stop), seed))
        return self.made[-1][1]

    def release(self, session: Hashable) -> None: ...


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text("abcdefgh", max_size=14), min_size=1, max_size=5),
    context=st.integers(190, 420),
    turns=st.integers(1, 25),
    limit=st.integers(1, 30),
    past=st.integers(0, 4),
)
def test_every_sampled_token_is_trained_once_in_the_context_in_which_it_was_sampled(
    texts: list[str], context: int, turns: int, limit: int, past: int
) -> None:
    """Prompts, observations, requests, forced ends and what is repeated of a summary are never trained, also where the
    episode begins in the middle of a logged one, is cut, or does not fit at all."""
    engine = Writes(texts, context)
    history = tuple(Turn(f"go {k}", f"PAST {k}", 0.0, False) for k in range(past))
    world = DreamEnv(RoomsDreamed(turns + past), {"s": Start("t", "HALL", history)})  # type: ignore[arg-type]
    episode = Episode("e", Task("t", {"start": "s"}), "g", 0)
    played = asyncio.run(play(world, agent_of(engine), episode, Provenance(Source.DREAM), limit))
    assert len(played.own_turns) <= min(turns, limit)
    left_out = {len(played.turns)} if played.stop is StopReason.CONTEXT_LIMIT else set()  # no action came of it
    trace = played.trace
    assert trace is not None
    rows = policy_rows([played])
    trained = [
        (row.ids[:t].tolist(), int(row.ids[t]), float(row.behavior_logprobs[t]))
        for row in rows
        for t in range(len(row))
        if row.rl_weight[t]
    ]
    sampled = [
        ([*prompt, *made.ids[:t]], token, pytest.approx(logprob))
        for prompt, made, _ in engine.made
        for t, (token, logprob) in enumerate(zip(made.ids, made.logprobs, strict=True))
    ]
    unanswered = sum(o == Owner.AGENT and t in left_out for o, t in zip(trace.owners, trace.turns, strict=True))
    assert trained == sampled[: len(sampled) - unanswered]
    assert all(len(row) <= context for row in rows[:-1])
    assert len({seed for _, _, seed in engine.made}) == len(engine.made)
    request = CHAT.encode(SUMMARY_REQUEST)
    asked = [
        tuple(prompt[-len(request) - len(CHAT.to_assistant) :][: len(request)]) == request for prompt, *_ in engine.made
    ]
    assert sum(asked) == len(trace.segments)
    assert len(engine.made) - sum(asked) == len(played.own_turns)
    assert not any(a and b for a, b in pairwise(asked))


# --- a long episode in a short context ---


@pytest.mark.parametrize("dreamed", [False, True])
def test_two_hundred_turns_in_a_context_of_2048(dreamed: bool) -> None:
    """Without summaries the context ends the episode. With them it goes to its end, is read back from a store as it
    was, and the trainer finds each log-prob that the engine recorded, of summaries, too."""
    sizes = ModelSettings(hidden=16, layers=2, heads=2, kv_heads=1, mlp=32, context=2048)
    model = build_model(sizes, TOKENIZER, 0)
    dream = {"s": Start("t", "HALL")}

    def world() -> Env:
        return DreamEnv(RoomsDreamed(200, VIEW), dream) if dreamed else Rooms(200, VIEW)  # type: ignore[arg-type]

    def played(summary: int) -> Trajectory:
        agent = agent_of(InProcessEngine(model, 2048), summary)
        stamp = Provenance(Source.DREAM if dreamed else Source.REAL)
        return asyncio.run(play(world(), agent, Episode("e", Task("t", {"start": "s"}), "g", 0), stamp, 400))

    assert played(0).stop is StopReason.CONTEXT_LIMIT
    episode = played(100)
    assert episode.stop is StopReason.TERMINATED
    assert len(episode.turns) == 200
    assert episode.trace is not None
    assert len(episode.trace.segments) >= 2
    with tempfile.TemporaryDirectory() as folder:
        store = TrajectoryStore.create(Path(folder) / "log", {"train": ["t"]})
        store.append([episode])
        (back,) = TrajectoryStore.open(Path(folder) / "log").read("train")
    assert back.trace is not None
    assert replace(back.trace, versions=episode.trace.versions) == episode.trace
    rows = policy_rows([back])
    assert len(rows) == len(episode.trace.spans)
    for row in rows:
        assert len(row) <= 2048
        with torch.no_grad():
            scores = torch.stack(scored(model, row.ids, 1.0))
        torch.testing.assert_close(scores[row.action_mask], row.behavior_logprobs[row.action_mask], rtol=0, atol=1e-4)
