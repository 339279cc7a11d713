"""If these fail, a policy is told what it must find out: a gold answer, a plan or hidden state reaches its tokens.

Everything declared privileged holds random secrets; every prompt that a policy is given, in the real world and in a
dream, and every token that its loss sees, is decoded and searched for them. The last test leaks on purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.learning.experience import policy_row
from imagination.rollout.dream_env import NO_GUARD, DreamEnv, Start
from imagination.rollout.play import Episode, Provenance, play
from policy.agent import LanguageModelAgent
from policy.lm.engine import Completion, Sampling
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.env import Env, StepResult, Task
from real_envs.trajectory import Observation, Source, StopReason, Trajectory, Turn
from real_envs.worker_pool import SyncEnv
from real_envs.worlds.generated import TaskRequest
from real_envs.worlds.search import Search, SearchGame, SearchSettings
from worldmodel.calibration import Calibration, Isotonic, Score
from worldmodel.formats.full import FullObservation
from worldmodel.formats.memory import MemoryFormat, TaskMemory
from worldmodel.formats.reasoning import ReasoningFormat
from worldmodel.text import TextWorldModel
from worldmodel.world_model import Prediction, WorldModel

quick = settings(max_examples=20)
CHAT = ChatFormat(train_tokenizer(["You see a hall. take lamp go east"], 300))
secrets = st.lists(st.text("QXZ0123456789", min_size=6, max_size=12), min_size=6, max_size=6, unique=True)


@dataclass
class Notes:
    """An engine that says one thing and keeps every prompt."""

    text: str = "wait"
    context: int = 10**6
    version: int = 0
    prompts: list[list[int]] = field(default_factory=list)

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        self.prompts.append(list(ids))
        said = (*CHAT.encode(self.text), CHAT.stop)
        return Completion(said, (-0.5,) * len(said), True)

    def release(self, session: Hashable) -> None: ...

    def update_weights(self) -> None: ...


@dataclass
class Real:
    """A world that knows secrets, says so where it is declared, and (``leaks``) once where it is not."""

    hidden: Sequence[str]
    leaks: bool = False

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation("You see a hall.", {"plan": self.hidden[0], "state": [self.hidden[1]]})

    async def step(self, action: str) -> StepResult:
        text = f"A lamp {self.hidden[2]}." if self.leaks else "A lamp."
        return StepResult(Observation(text, {"plan": self.hidden[2]}), 0.5, False, False, {"judge": self.hidden[3]})

    async def close(self) -> None: ...


@dataclass
class Dreamer:
    version: str = "w"
    asked: list[str] = field(default_factory=list)

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        self.asked.append("\n".join([start, action, *(turn.action + turn.observation for turn in history)]))
        return Prediction("A lamp.", 0.5, False, 0.7, 0.6)

    def release(self, session: object) -> None: ...


def task(hidden: Sequence[str]) -> Task:
    """The spec is the environment's too: a path may hold an answer."""
    spec = {"start": "s", "path": f"games/{hidden[4]}.z8"}
    return Task("t", spec, privileged={"answer": hidden[5]}, world_facts=(hidden[3],))


def dream(hidden: Sequence[str], model: WorldModel) -> DreamEnv:
    past = (Turn("go east", "A hall.", 0.0, False, {"judge": hidden[0], "reasoning": hidden[1]}),)
    calibration = Calibration(Score(), Isotonic((0.5,), (0.5,)), Isotonic((0.5,), (0.5,)), 1.0, 1)
    return DreamEnv(model, {"s": Start("t", "You see a hall.", past)}, NO_GUARD, calibration)


def seen_by_policy(env: Env, hidden: Sequence[str], played: Task | None = None) -> tuple[str, Trajectory]:
    """All that a policy was asked and all that it would be trained on, as one text."""
    engine = Notes()
    agent = LanguageModelAgent(engine, CHAT)
    episode = Episode("e", played or task(hidden), "g", 0)
    trajectory = asyncio.run(play(env, agent, episode, Provenance(Source.DREAM), max_turns=3))
    row = policy_row(trajectory)
    assert row is not None
    assert len(engine.prompts) == 3
    return "\n".join(CHAT.tokenizer.decode(ids) for ids in [*engine.prompts, list(row.ids)]), trajectory


@quick
@given(secrets)
def test_no_secret_of_a_real_world_reaches_the_policy(hidden: list[str]) -> None:
    text, trajectory = seen_by_policy(Real(hidden), hidden)
    assert not [secret for secret in hidden if secret in text]
    assert "A lamp." in text
    assert trajectory.turns[0].info == {"judge": hidden[3]}  # it was there to be leaked
    assert trajectory.world_facts == (hidden[3],)  # the log keeps it for the world model


@quick
@given(secrets)
def test_no_secret_reaches_the_policy_or_the_world_model_in_a_dream(hidden: list[str]) -> None:
    """Nor the notes on a turn of the log that the dream branched from; nor how sure the world model was."""
    model = Dreamer()
    text, trajectory = seen_by_policy(dream(hidden, model), hidden)
    assert not [secret for secret in hidden if secret in text + "\n".join(model.asked)]
    assert "A hall." in text
    assert "0.7" not in text
    assert trajectory.turns[-1].info["confidence"] == 0.7


@quick
@given(secrets)
def test_no_thought_of_the_world_model_reaches_the_policy_or_a_later_turn(hidden: list[str]) -> None:
    """Neither one that was thought in this dream, nor one of the logged turn that the dream branched from."""
    engine = Notes(f"{hidden[2]}\n[prediction]\nA lamp.\n[reward=0.5]")
    model = TextWorldModel(engine, CHAT, "w", 400, 1.0, ReasoningFormat(FullObservation(), 400))
    text, trajectory = seen_by_policy(dream(hidden, model), hidden)
    assert len(engine.prompts) == 3
    asked = "\n".join(CHAT.tokenizer.decode(ids) for ids in engine.prompts)
    assert not [secret for secret in hidden if secret in text + asked]
    assert "A lamp." in text
    assert [turn.info["reasoning"] for turn in trajectory.own_turns] == [hidden[2]] * 3


@quick
@given(secrets)
def test_facts_of_the_world_reach_the_world_model_and_not_the_policy(hidden: list[str]) -> None:
    """What other episodes of the task have shown is the initial state of the world, which the policy must find out."""
    engine = Notes("A lamp.\n[reward=0.5]")
    shown = tuple(Turn("look", secret, 0.0, False) for secret in hidden)
    told = tuple(hidden[:3])  # by the task itself; the others by an episode
    log = [
        Trajectory("l", "t", "g", Source.REAL, "a", 0, "A hall.", shown[3:], StopReason.TURN_LIMIT, world_facts=told)
    ]
    model = TextWorldModel(engine, CHAT, "w", 400, 1.0, MemoryFormat(TaskMemory(log), 99))
    text, _ = seen_by_policy(DreamEnv(model, {"s": Start("t", "A hall.")}, NO_GUARD), hidden)
    assert not [secret for secret in hidden if secret in text]
    for ids in engine.prompts:
        assert [secret for secret in hidden if secret in CHAT.tokenizer.decode(ids)] == hidden


class Here:
    """A world's game in this process."""

    def __init__(self, game: SyncEnv) -> None:
        self._game = game

    async def reset(self, task: Task, seed: int) -> Observation:
        return self._game.reset(task, seed)

    async def step(self, action: str) -> StepResult:
        return self._game.step(action)

    async def close(self) -> None:
        self._game.close()


def test_no_answer_to_a_question_reaches_the_policy_before_it_searches() -> None:
    """Neither in the real world, as scripts see it, nor in dreams, whose world model reads articles and no more."""
    world, size = Search(), SearchSettings(entities=100)
    for drawn in world.draw(size, TaskRequest({"train": 8}, 0, lambda done, total: None))["train"]:
        asked = world.task(drawn, asdict(size))
        links = {name for hop in drawn["hops"] for name in hop if name not in drawn["question"]}
        hidden = [*drawn["answers"], *links, *asked.world_facts]
        real, trajectory = seen_by_policy(Here(SearchGame(size, privileged=True)), [], asked)
        assert [turn.observation[:7] for turn in trajectory.turns] == ["Unknown"] * 3
        engine = Notes("No results.\n[reward=0]")
        model = TextWorldModel(engine, CHAT, "w", 400, 1.0, MemoryFormat(TaskMemory([trajectory]), 9))
        start = {"s": Start(asked.id, trajectory.start)}
        dreamed, _ = seen_by_policy(DreamEnv(model, start, NO_GUARD), [], Task("t", {"start": "s"}))
        assert drawn["question"] in real
        assert drawn["question"] in dreamed
        assert not [secret for secret in hidden if secret in real + dreamed]
        for ids in engine.prompts:
            prompt = CHAT.tokenizer.decode(ids)
            for fact in asked.world_facts:
                assert fact in prompt
                prompt = prompt.replace(fact, "")
            assert not [secret for secret in hidden if secret in prompt]


@quick
@given(secrets)
def test_the_search_finds_a_leak(hidden: list[str]) -> None:
    text, _ = seen_by_policy(Real(hidden, leaks=True), hidden)
    assert [secret for secret in hidden if secret in text] == [hidden[2]]


def test_a_task_that_is_printed_keeps_its_secret() -> None:
    assert "gold" not in repr(Task("t", privileged={"answer": "gold"}, world_facts=("gold",)))
