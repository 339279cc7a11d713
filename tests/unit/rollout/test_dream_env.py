"""If these fail, a dream pays out what the world model is not sure of, or breaks in a way that no real world does."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from imagination.rollout.dream_env import NO_GUARD, DreamEnv, Guard, Start, starts_from_log
from imagination.rollout.play import Episode, Provenance, Replay, play
from policy.agent import LanguageModelAgent
from policy.lm.engine import Completion, ContextFull, EngineFailure, Sampling
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.check import check_env
from real_envs.env import EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, Source, StopReason, Trajectory, Turn
from tests.support.scripted import Acts
from worldmodel.calibration import Calibration, Isotonic, Score
from worldmodel.formats.full import FullObservation, prompt_tokens
from worldmodel.text import TextWorldModel
from worldmodel.world_model import Prediction, PredictionInvalid

HISTORY = (Turn("go east", "HALL", 0.25, False), Turn("take lamp", "TAKEN", 0.0, False))
STARTS = {"begin": Start("t", "ATTIC"), "branch": Start("t", "ATTIC", HISTORY)}
BEGIN, BRANCH = Task("t", {"start": "begin"}), Task("t", {"start": "branch"})


@dataclass
class Model:
    """Answers with its script, turn by turn; afterwards with "on". Notes all that it is asked."""

    script: Sequence[Prediction | Exception] = ()
    asked: list[tuple[str, tuple[Turn, ...], str, int, object]] = field(default_factory=list)
    released: list[object] = field(default_factory=list)
    version: str = "w1"

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        self.asked.append((start, tuple(history), action, seed, session))
        k = len(self.asked) - 1
        answer = self.script[k] if k < len(self.script) else Prediction("on", 0.0, False, 1.0, 1.0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def release(self, session: object) -> None:
        self.released.append(session)


def dream(env: DreamEnv, actions: Sequence[str], task: Task = BEGIN, seed: int = 0) -> list[Any]:
    """What reset and steps gave; the last entry is the exception that a step raised."""

    async def run() -> list[Any]:
        found: list[Any] = [await env.reset(task, seed)]
        try:
            for action in actions:
                found.append(await env.step(action))
        except (EnvFailure, RuntimeError) as error:
            found.append(error)
        return found

    return asyncio.run(run())


def by_model(confidence: float, outcome_confidence: float) -> dict[str, float | str | bool]:
    return {"confidence": confidence, "outcome_confidence": outcome_confidence, "outcome_by": "model"}


def test_a_dream_goes_on_from_another_one() -> None:
    """What was dreamed before is history to model and policy, and its own turns to whoever judges; the turns of both
    together are limited."""
    earlier = (Turn("look", "A lamp.", 0.5, False, {"probability": 0.75}), Turn("wait", "Dark.", 0.0, False))
    model, task = Model(), replace(BRANCH, dreamed=earlier)
    episode = Episode("e", task, "g", seed=3)
    found = asyncio.run(
        play(DreamEnv(model, STARTS), Replay(("a", "b", "c", "d")), episode, Provenance(Source.DREAM), max_turns=4)
    )
    assert model.asked[0][1] == (*HISTORY, *earlier)
    assert found.turns[:4] == (*HISTORY, *earlier)
    assert found.prefix_turns == 2
    assert [turn.action for turn in found.own_turns] == ["look", "wait", "a", "b"]
    assert found.stop is StopReason.TURN_LIMIT
    alone = asyncio.run(
        play(DreamEnv(Model(), STARTS), Replay(("a",) * 4), replace(episode, task=BRANCH), Provenance(Source.DREAM), 4)
    )
    assert len(alone.own_turns) == 4


# --- the guard ---


@pytest.mark.parametrize(
    ("reward", "terminated", "confidence", "outcome_confidence", "trusted"),
    [
        (0.0, False, 0.30, 0.0, True),  # at the bound; what decides nothing needs no outcome confidence
        (0.0, False, 0.29, 1.0, False),
        (1.0, False, 0.30, 0.6, True),
        (1.0, False, 0.30, 0.59, False),  # it pays
        (-1.0, False, 0.30, 0.59, False),  # it costs
        (0.0, True, 0.30, 0.59, False),  # it ends
        (0.0, True, 0.30, 0.6, True),
        (1.0, True, 0.29, 1.0, False),  # sure of the outcome, not of the words
    ],
)
def test_whom_the_guard_trusts(
    reward: float, terminated: bool, confidence: float, outcome_confidence: float, trusted: bool
) -> None:
    guard = Guard(min_confidence=0.3, min_outcome_confidence=0.6)
    assert guard.trusts(Prediction("x", reward, terminated, confidence, outcome_confidence)) is trusted
    assert NO_GUARD.trusts(Prediction("x", reward, terminated, 1e-9, 1e-9))


def test_a_dream_cannot_earn_more_than_any_episode_could() -> None:
    """The coin that was taken is taken again: however sure the model is, it pays no second time."""
    paid = [Prediction("You take the coin.", 0.5, False, 1.0, 1.0) for _ in range(3)]
    env = DreamEnv(Model(paid), STARTS, Guard(0.0, 0.0, max_return=1.0))
    _, *results = dream(env, ["take", "take", "take"])
    assert [(r.reward, r.stop) for r in results] == [(0.5, None), (0.5, None), (0.0, StopReason.UNSURE)]
    assert not Guard(0.0, 0.0, max_return=1.0).trusts(paid[0], earned=0.75)
    assert Guard(0.0, 0.0, max_return=1.0).trusts(Prediction("x", -0.5, False, 1.0, 1.0), earned=1.5)  # it costs


def test_an_unsure_prediction_ends_the_dream_unpaid_and_truncated() -> None:
    """Paid, the policy would learn to go where the model is wrong; terminated, a critic would learn that the world ends
    there. The observation is kept, as the state to bootstrap from."""
    sure, unsure = Prediction("HALL", 0.25, False, 0.9, 0.9), Prediction("GOLD", 1.0, True, 0.2, 0.3)
    env = DreamEnv(Model([sure, unsure]), STARTS, Guard(0.0, 0.5))
    _, first, second, third = dream(env, ["a", "b", "c"])
    assert first == StepResult(Observation("HALL"), 0.25, False, False, by_model(0.9, 0.9), None)
    assert second == StepResult(Observation("GOLD"), 0.0, False, True, by_model(0.2, 0.3), StopReason.UNSURE)
    assert isinstance(third, RuntimeError)


def test_an_unsure_dream_in_the_rollout() -> None:
    model = Model([Prediction("x", 0.111111, False, 1.0, 1.0)] * 9 + [Prediction("y", 1.0, True, 1.0, 0.1)])
    env = DreamEnv(model, STARTS, Guard(0.0, 0.5))

    def rollout(max_turns: int) -> Trajectory:
        model.asked.clear()
        episode = Episode("e", BEGIN, "g", 0)
        return asyncio.run(play(env, Acts("a"), episode, Provenance(Source.DREAM, None, "w1"), max_turns))

    cut = rollout(20)
    assert cut.stop is StopReason.UNSURE
    assert [turn.reward for turn in cut.turns] == [0.111111] * 9 + [0.0]
    assert rollout(9).solved  # nine ninths, to six decimals as dreams write them, are a solved task
    assert not rollout(8).solved


def test_a_doubted_turn_that_does_not_end_the_dream_is_marked_and_unpaid() -> None:
    """Paid, one garbled command that the model takes for the solution would be the best there is."""
    sure, unsure = Prediction("HALL", 0.0, False, 0.9, 0.9), Prediction("GOLD", 0.5, False, 0.2, 0.3)
    env = DreamEnv(Model([sure, unsure]), STARTS, Guard(0.5, 0.5, ends=False))
    _, first, second, third = dream(env, ["a", "b", "c"])
    assert "doubted" not in first.info
    assert second == StepResult(Observation("GOLD"), 0.0, False, False, {**by_model(0.2, 0.3), "doubted": True})
    assert third.observation.text == "on"


def test_the_guard_can_go_by_the_calibrated_probability() -> None:
    """Which the disagreement of an ensemble is part of: the members' doubt counts where the words are likely enough."""
    halves = Isotonic((0.0, 1.0), (0.0, 0.5))
    agreed, disputed = (Prediction("x", 0.0, False, 0.9, 1.0, disagreement=d) for d in (0.0, 2.0))
    plain = Calibration(Score(), halves, halves, 1.0, 9)
    assert Guard(0.8, 0.0, min_probability=0.44, calibration=plain).trusts(agreed)  # 0.45
    assert not Guard(0.8, 0.0, min_probability=0.46, calibration=plain).trusts(agreed)
    both = Calibration(Score(1.0, 1.0), halves, halves, 1.0, 9)  # sigma(logit 0.9 - 2) = 0.55, so 0.27
    assert Guard(0.8, 0.0, min_probability=0.3, calibration=both).trusts(agreed)
    assert not Guard(0.8, 0.0, min_probability=0.3, calibration=both).trusts(disputed)
    with pytest.raises(ValueError, match="needs a calibration"):
        Guard(0.0, 0.0, min_probability=0.1)


def test_a_calibrated_dream_says_how_likely_each_turn_is_to_be_right() -> None:
    """The guard still judges the model's own confidence, in which its thresholds are set."""
    calibration = Calibration(Score(), Isotonic((0.0, 1.0), (0.0, 0.5)), Isotonic((0.0, 1.0), (0.5, 1.0)), 1.0, 9)
    env = DreamEnv(Model([Prediction("HALL", 0.0, False, 0.8, 0.4)]), STARTS, Guard(0.7, 0.0), calibration)
    _, result = dream(env, ["a"])
    assert result.stop is None
    assert {key: value for key, value in result.info.items() if key != "outcome_by"} == pytest.approx(
        {"confidence": 0.8, "outcome_confidence": 0.4, "probability": 0.4, "outcome_probability": 0.7}
    )


# --- what breaks ---


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PredictionInvalid("no status line"), StopReason.PREDICTION_INVALID),
        (EngineFailure("NaN"), StopReason.ENGINE_FAILED),
    ],
)
def test_a_broken_prediction_is_a_typed_failure(error: Exception, reason: StopReason) -> None:
    """Never an observation: "Nothing happens." is something that worlds do say."""
    model = Model([Prediction("HALL", 0.0, False, 1.0, 1.0), error])
    env = DreamEnv(model, STARTS)
    *_, failure = dream(env, ["a", "b"])
    assert isinstance(failure, EnvFailure)
    assert (failure.reason, str(failure)) == (reason, str(error))
    with pytest.raises(RuntimeError):  # the dream is over
        asyncio.run(env.step("c"))
    assert dream(env, ["a"])[1].observation == Observation("on")  # and another one can begin


def test_a_full_context_of_the_world_model_cuts_the_dream() -> None:
    """There is no answer, so there is no reward: None is not zero."""
    env = DreamEnv(Model([ContextFull("long")]), STARTS)
    _, result, after = dream(env, ["a", "b"])
    assert result == StepResult(Observation(""), None, False, True, stop=StopReason.CONTEXT_LIMIT)
    assert isinstance(after, RuntimeError)


def test_a_start_that_is_not_there_is_our_mistake() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        asyncio.run(DreamEnv(Model(), STARTS).reset(Task("t", {"start": "nowhere"}), 0))


# --- what the model is asked ---


def test_the_history_of_a_branch_reaches_the_model() -> None:
    """Without it the model would dream from the log's first state, while the policy acts in a later one."""
    model = Model([Prediction("LIT", 0.5, False, 1.0, 1.0)])
    reset, first, second = dream(DreamEnv(model, STARTS), ["light lamp", "look"], BRANCH)
    assert reset == Observation("ATTIC", history=HISTORY)
    assert model.asked[0][:3] == ("ATTIC", HISTORY, "light lamp")
    assert model.asked[1][:3] == ("ATTIC", (*HISTORY, Turn("light lamp", "LIT", 0.5, False)), "look")
    assert (first.reward, second.reward) == (0.5, 0.0)  # what the log earned is not paid again


def test_a_dream_starts_anew_after_a_reset() -> None:
    model = Model()
    env = DreamEnv(model, STARTS)
    dream(env, ["a", "b"])
    dream(env, ["c"], BRANCH)
    dream(env, ["d"])
    assert [asked[1] for asked in model.asked] == [(), (Turn("a", "on", 0.0, False),), HISTORY, ()]


@pytest.mark.parametrize("seed", [0, 1, 2**62])
def test_policy_and_world_model_draw_different_numbers(seed: int) -> None:
    """In an episode of seed 0, equal uniforms would choose the action and, by the same luck, what it brings about."""

    class Engine:
        context = 100

        def __init__(self) -> None:
            self.seeds: list[int] = []

        async def complete(
            self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
        ) -> Completion:
            self.seeds.append(seed)
            return Completion((sampling.stop,), (-1.0,), True)

        def release(self, session: Hashable) -> None: ...

    engine, model = Engine(), Model()
    agent = LanguageModelAgent(engine, CHAT)  # type: ignore[arg-type]
    episode = Episode("e", BEGIN, "g", seed)
    asyncio.run(play(DreamEnv(model, STARTS), agent, episode, Provenance(Source.DREAM), max_turns=4))
    assert len({*engine.seeds, *(asked[3] for asked in model.asked)}) == 8


def test_chance_comes_from_the_episodes_seed_and_the_turn() -> None:
    """A sampled dream is a function of its seed; turns of one dream, and dreams of one group, differ."""

    def seeds(seed: int, task: Task = BEGIN) -> list[int]:
        model = Model()
        dream(DreamEnv(model, STARTS), ["a", "b", "c"], task, seed)
        return [asked[3] for asked in model.asked]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 6
    assert seeds(1, BRANCH)[0] == seeds(1)[2]  # the third turn of the same world
    assert all(0 <= seed < 1 << 63 for seed in seeds((1 << 62) + 1))


def test_every_environment_has_a_session_of_its_own_and_frees_it() -> None:
    """Sessions name the cache: shared, two dreams at a time would recompute everything at every turn."""
    model = Model()
    first, second = DreamEnv(model, STARTS), DreamEnv(model, STARTS)
    dream(first, ["a"])
    dream(second, ["a"])
    sessions = [asked[4] for asked in model.asked]
    assert sessions[0] != sessions[1]
    asyncio.run(first.close())
    assert model.released == sessions[:1]


# --- conformance ---


class CountsToThree:
    """Deterministic: the third turn pays and ends."""

    version = "three"

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        done = len(history) == 2
        return Prediction(f"{start} {len(history)} {action}", float(done), done, 1.0, 1.0)

    def release(self, session: object) -> None: ...


def test_a_dream_keeps_the_protocol_of_an_environment() -> None:
    """The rollout cannot tell it from a real one."""
    assert asyncio.run(check_env(DreamEnv(CountsToThree(), STARTS), BEGIN, ["a", "b", "c", "never"])) == []
    assert asyncio.run(check_env(DreamEnv(CountsToThree(), STARTS, Guard(0.5, 0.5)), BRANCH, ["a"])) == []


CHAT = ChatFormat(train_tokenizer(["-= Hall =-\n[reward=0]"], 300))


class Writes:
    """An engine that writes one text, whatever it is asked, with the log-prob -0.1 for each token."""

    context = 10**6

    def __init__(self, text: str, stopped: bool = True) -> None:
        self.ids = (*CHAT.encode(text), *([CHAT.stop] if stopped else []))
        self.asked: list[tuple[list[int], Sampling, int]] = []

    async def complete(
        self, ids: Sequence[int], sampling: Sampling, seed: int, session: Hashable | None = None
    ) -> Completion:
        self.asked.append((list(ids), sampling, seed))
        return Completion(self.ids, (-0.1,) * len(self.ids), self.ids[-1] == sampling.stop)

    def release(self, session: Hashable) -> None: ...


def test_a_dream_of_a_language_model_keeps_the_protocol_too() -> None:
    """Whatever is done in it goes through the tokenizer, so no action may be one that it cannot read."""
    model = TextWorldModel(Writes("It is dark.\n[reward=0]"), CHAT, "w1")
    assert asyncio.run(check_env(DreamEnv(model, STARTS), BEGIN, ["look", "go east"])) == []


def test_a_prediction_is_read_off_the_models_tokens() -> None:
    """Confidence is the probability of all tokens, the end included; that of the outcome starts where the status line
    does. Any other cut and the guard would judge the words, of which there are many ways to be right."""
    engine = Writes("It is dark.\n[reward=0.5 done]")
    model = TextWorldModel(engine, CHAT, "w1", max_tokens=30, temperature=0.4)
    found = asyncio.run(model.predict("ATTIC", HISTORY, "wait", seed=9))
    assert (found.observation, found.reward, found.terminated) == ("It is dark.", 0.5, True)
    assert found.confidence == pytest.approx(math.exp(-0.1 * len(engine.ids)))
    words = len(CHAT.encode("It is dark."))
    assert CHAT.encode("It is dark.") == engine.ids[:words]  # here the status line starts at a token of its own
    assert found.outcome_confidence == pytest.approx(math.exp(-0.1 * (len(engine.ids) - words)))
    prompt = prompt_tokens(CHAT, FullObservation(), "ATTIC", HISTORY, "wait").ids
    assert engine.asked == [(prompt, Sampling(30, CHAT.stop, 0.4), 9)]


@pytest.mark.parametrize(
    ("text", "stopped", "message"),
    [
        ("It is dark.", True, "no status line"),
        ("It is dark.\n[reward=0]", False, "did not end"),  # more might have followed
        ("", True, "no status line"),
    ],
)
def test_malformed_text_is_an_invalid_prediction(text: str, stopped: bool, message: str) -> None:
    model = TextWorldModel(Writes(text, stopped), CHAT, "w1")
    with pytest.raises(PredictionInvalid, match=message):
        asyncio.run(model.predict("ATTIC", (), "wait", seed=0))


# --- start states ---


def logged(id_: str, task: str, *actions: str, start: str = "ATTIC") -> Trajectory:
    turns = tuple(Turn(action, f"after {action}", 0.0, False) for action in actions)
    return Trajectory(id_, task, "g", Source.REAL, "a", 0, start, turns, StopReason.TURN_LIMIT)


LOG = [logged("1", "t", "a", "b", "c"), logged("2", "t", "a", "x"), logged("3", "u", "a"), logged("4", "v")]


def test_starts_are_the_states_of_the_log_with_a_future() -> None:
    """Each state once. From the last one of an episode nothing is known to be possible: it may be the world's end. Of a
    task that was only reset there is its beginning.
    """
    starts = starts_from_log(LOG, branch=True)
    a, b = Turn("a", "after a", 0.0, False), Turn("b", "after b", 0.0, False)
    states = [("t", ()), ("t", (a,)), ("t", (a, b)), ("u", ()), ("v", ())]
    assert list(starts.values()) == [Start(task, "ATTIC", history) for task, history in states]


def test_without_branches_every_task_starts_once_at_its_beginning() -> None:
    starts = starts_from_log(LOG, branch=False)
    assert list(starts.values()) == [Start(task, "ATTIC") for task in ("t", "u", "v")]


def test_names_of_starts_are_stable() -> None:
    """A resumed run, or one on another machine, means the same states by the same names: they hold no counter, no order
    and no salted hash, only the task and the actions."""
    names = set(starts_from_log(LOG, branch=True))
    assert names == set(starts_from_log(LOG[::-1], branch=True))
    digests = {repr(actions): hashlib.sha256(repr(actions).encode()).hexdigest() for actions in ([], ["a"], ["a", "b"])}
    assert {name for name in names if name.startswith("t@")} == {f"t@{d[:12]}" for d in digests.values()}
    assert set(starts_from_log(LOG[:1], branch=False)) <= names
