"""Sessions, without any protocol. If these fail, a client reads another's dream, or takes the server for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import pytest

from imagination.serving.sessions import Refusal, Refused, Sessions, SessionStep
from imagination.settings.dreams import ServeSettings
from real_envs.trajectory import StopReason
from tests.support.served import STARTS, Planted, planted_world


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(actions: list[str], task: str | None = "hall", seed: int | None = 0, **world: Any) -> list[SessionStep]:
    async def run() -> list[SessionStep]:
        session = await Sessions(planted_world(**world), ServeSettings()).open()
        return [await session.reset(task, seed), *[await session.step(action) for action in actions]]

    return asyncio.run(run())


async def refusal(work: Coroutine[Any, Any, Any]) -> Refusal:
    with pytest.raises(Refused) as caught:
        await work
    return caught.value.kind


# --- what an episode says


def test_a_step_says_what_the_dream_and_its_guard_say() -> None:
    begun, step = play(["look"])
    assert (begun.text, begun.reward, begun.done, begun.trusted) == (STARTS["hall@0"].text, None, False, None)
    assert step.text.startswith("look 0 ")
    assert (step.reward, step.terminated, step.truncated, step.stop, step.trusted) == (0.0, False, False, None, True)
    assert step.judgements == {"confidence": 0.75, "outcome_confidence": 0.95}
    assert step.facts()["turn"] == 1


def test_the_worlds_end_and_the_guards_are_kept_apart() -> None:
    """Truncated is bootstrapped, terminated is not; and what is doubted pays nothing."""
    *_, won = play(["win"])
    assert (won.reward, won.terminated, won.truncated, won.stop) == (1.0, True, False, StopReason.TERMINATED)
    *_, doubted = play(["doubt"])
    assert (doubted.reward, doubted.terminated, doubted.truncated) == (0.0, False, True)
    assert (doubted.stop, doubted.trusted) == (StopReason.UNSURE, False)
    *_, marked = play(["doubt"], guard=False)
    assert (marked.reward, marked.trusted, marked.stop) == (0.0, False, StopReason.TERMINATED)


def test_the_last_turn_is_truncated_unless_it_won() -> None:
    *_, before, last = play(["look", "look"], max_turns=2)
    assert (before.done, last.terminated, last.truncated, last.stop) == (False, False, True, StopReason.TURN_LIMIT)
    *_, won = play(["look", "win"], max_turns=2)
    assert (won.terminated, won.truncated, won.stop) == (True, False, StopReason.TERMINATED)


def test_what_the_world_model_thought_is_not_told() -> None:
    """It may have been shown facts that are hidden from policies."""
    _, step = play(["look"])
    assert "red" not in str(step)
    assert "red" not in str(step.facts())


def test_task_and_seed_decide_the_episode() -> None:
    actions = ["look", "go"]
    assert play(actions, seed=5) == play(actions, seed=5)
    assert [a.text for a in play(actions, seed=5)[1:]] != [a.text for a in play(actions, seed=6)[1:]]
    assert [play([], None, seed)[0].task for seed in range(4)] == ["cave", "hall", "cave", "hall"]


def test_a_seed_chooses_among_the_states_of_a_task_and_history_is_told() -> None:
    texts = {play([], "hall", seed, starts=STARTS)[0].text for seed in range(20)}
    plain = STARTS["hall@0"].text
    assert texts == {plain, f"{plain}\n> wait\nTime passes."}
    assert play([], "hall", 3, starts=STARTS)[0].text == play([], "hall", 3, starts=STARTS)[0].text


def test_a_reset_without_a_seed_draws_one_and_names_it() -> None:
    drawn = play(["look"], seed=None)
    assert play(["look"], seed=drawn[0].seed)[1] == drawn[1]
    assert len({play([], seed=None)[0].seed for _ in range(5)}) > 1


# --- what is refused


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "1", True, [1]])
async def test_a_malformed_seed_is_refused(seed: object) -> None:
    session = await Sessions(planted_world(), ServeSettings()).open()
    assert await refusal(session.reset("hall", seed)) is Refusal.INVALID


async def test_steps_that_cannot_be_taken_are_refused_and_change_nothing() -> None:
    model = Planted()
    session = await Sessions(planted_world(model), ServeSettings(action_chars=10)).open()
    assert await refusal(session.step("look")) is Refusal.NOT_RUNNING
    assert await refusal(session.reset("nowhere", 0)) is Refusal.UNKNOWN_TASK
    assert await refusal(session.reset(7, 0)) is Refusal.INVALID
    await session.reset("hall", 0)
    for action in (None, 3, ["look"], "a" * 11):
        assert await refusal(session.step(action)) is Refusal.INVALID
    assert model.asked == []
    assert (await session.step("a" * 10)).turn == 1
    await session.step("win")
    assert await refusal(session.step("look")) is Refusal.NOT_RUNNING


async def test_a_dream_that_broke_is_over_and_no_observation() -> None:
    sessions = Sessions(planted_world(), ServeSettings())
    session = await sessions.open()
    await session.reset("hall", 0)
    with pytest.raises(Refused, match="prediction_invalid: no status line") as caught:
        await session.step("break")
    assert caught.value.kind is Refusal.FAILED
    assert await refusal(session.step("look")) is Refusal.NOT_RUNNING
    await session.reset("hall", 0)
    assert (await session.step("look")).turn == 1
    assert sessions.counts.episodes == {"prediction_invalid": 1}
    assert sessions.counts.steps == 1


def test_half_a_surrogate_pair_reaches_no_tokenizer() -> None:
    model = Planted()
    play(["\ud800 go"], model=model)
    assert model.asked[0][0] == "? go"


# --- how many, how long, whose


async def test_sessions_are_bounded_and_room_comes_back() -> None:
    sessions = Sessions(planted_world(), ServeSettings(sessions=2))
    first = await sessions.open()
    await sessions.open()
    assert await refusal(sessions.open()) is Refusal.FULL
    await sessions.close(first.id)
    await sessions.open()
    assert (len(sessions), sessions.counts.opened) == (2, 3)


async def test_an_idle_session_is_closed_and_a_used_one_is_not() -> None:
    clock, model = Clock(), Planted()
    sessions = Sessions(planted_world(model), ServeSettings(sessions=2, idle_seconds=10), clock)
    idle, used = await sessions.open(), await sessions.open()
    clock.now = 9.0
    await sessions.get(used.id).reset("hall", 0)
    clock.now = 11.0
    third = await sessions.open()  # in the room of the idle one
    assert await refusal(idle.reset("hall", 0)) is Refusal.UNKNOWN_SESSION
    with pytest.raises(Refused, match="no such session"):
        sessions.get(idle.id)
    assert (await sessions.get(used.id).step("look")).turn == 1
    assert (third.id in sessions, sessions.counts.expired, len(model.released)) == (True, 1, 1)


async def test_while_an_idle_session_is_closed_another_may_go_or_come_back() -> None:
    """The sweep would end with an error, or take the dream from who has just asked for a step."""
    clock = Clock()
    sessions = Sessions(planted_world(), ServeSettings(idle_seconds=10), clock)
    idle, gone, back = [await sessions.open() for _ in range(3)]

    async def meanwhile() -> None:
        await sessions.close(gone.id)
        sessions.get(back.id)

    idle.on_close = meanwhile
    clock.now = 11.0
    await sessions.expire()
    assert (back.id in sessions, len(sessions), sessions.counts.expired) == (True, 1, 1)


async def test_a_session_does_one_thing_at_a_time_and_is_not_idle_meanwhile() -> None:
    clock, model = Clock(), Planted()
    model.gate = asyncio.Event()
    sessions = Sessions(planted_world(model), ServeSettings(idle_seconds=10), clock)
    session = await sessions.open()
    await session.reset("hall", 0)
    stepping = asyncio.create_task(session.step("slow"))
    await asyncio.sleep(0.01)
    assert await refusal(session.step("look")) is Refusal.BUSY
    assert await refusal(session.reset("hall", 0)) is Refusal.BUSY
    clock.now = 100.0
    await sessions.expire()
    assert session.id in sessions
    await sessions.close(session.id)  # its step goes on; what the engine keeps for it is freed after that
    assert model.released == []
    model.gate.set()
    assert (await stepping).turn == 1
    assert len(model.released) == 1


async def test_a_step_that_is_cancelled_ends_its_episode_alone() -> None:
    model = Planted()
    model.gate = asyncio.Event()
    session = await Sessions(planted_world(model), ServeSettings()).open()
    await session.reset("hall", 0)
    stepping = asyncio.create_task(session.step("slow"))
    await asyncio.sleep(0.01)
    stepping.cancel()
    await asyncio.wait([stepping])
    assert await refusal(session.step("look")) is Refusal.NOT_RUNNING
    await session.reset("hall", 0)
    assert (await session.step("look")).turn == 1


def test_sessions_do_not_know_each_other() -> None:
    """Interleaved, two episodes are what each is alone."""

    expected = play(["a", "c"], "hall", 1)[1:], play(["b", "d"], "cave", 2)[1:]

    async def run() -> tuple[list[str], list[str]]:
        sessions = Sessions(planted_world(), ServeSettings())
        one, two = await sessions.open(), await sessions.open()
        await one.reset("hall", 1)
        await two.reset("cave", 2)
        answers = await asyncio.gather(one.step("a"), two.step("b"))
        more = await asyncio.gather(two.step("d"), one.step("c"))
        return [answers[0].text, more[1].text], [answers[1].text, more[0].text]

    assert asyncio.run(run()) == tuple([answer.text for answer in answers] for answers in expected)


async def test_ids_are_drawn_and_not_counted() -> None:
    sessions = Sessions(planted_world(), ServeSettings(sessions=64))
    ids = [int((await sessions.open()).id) for _ in range(64)]
    assert len(set(ids)) == 64
    assert all(0 <= id < 2**63 for id in ids)
    gaps = [abs(b - a) for a, b in pairwise(ids)]
    assert min(gaps) > 2**40, "64 draws of 63 bits lie that close once in 2**16 runs"


async def test_the_end_of_the_server_closes_all() -> None:
    model = Planted()
    sessions = Sessions(planted_world(model), ServeSettings())
    opened = [await sessions.open() for _ in range(3)]
    await sessions.close_all()
    assert (len(sessions), len(model.released)) == (0, 3)
    assert await refusal(opened[0].reset("hall", 0)) is Refusal.UNKNOWN_SESSION
