"""Dreams that nobody fitted, for servers of tests, and a server of them in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from imagination.rollout.dream_env import DreamEnv, Guard, Start
from imagination.serving.app import Server, listen, make_app
from imagination.serving.http import Gate
from imagination.serving.sessions import DreamWorld
from imagination.settings.dreams import ServeSettings
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from worldmodel.formats.retrieval import TransitionIndex
from worldmodel.world_model import Prediction, PredictionInvalid

HISTORY = (Turn("wait", "Time passes.", 0.0, False),)
STARTS = {
    "cave@0": Start("cave", "You are in a cave. Find the way out."),
    "hall@0": Start("hall", "You are in a hall. Find the lamp."),
    "hall@1": Start("hall", "You are in a hall. Find the lamp.", HISTORY),
}
PLAIN = {name: start for name, start in STARTS.items() if not start.history}


@dataclass
class Planted:
    """Answers by the action alone: ``win`` pays and ends, ``doubt`` is unsure, ``break`` is no prediction."""

    version: str = "planted"
    released: list[object] = field(default_factory=list)
    asked: list[tuple[str, int]] = field(default_factory=list)
    gate: asyncio.Event | None = None  # where there is one, ``slow`` waits for it

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        self.asked.append((action, seed))
        await asyncio.sleep(0)
        if action == "break":
            raise PredictionInvalid("no status line")
        if action == "bug":
            raise ZeroDivisionError("secret of the server")
        if action == "slow" and self.gate is not None:
            await self.gate.wait()
        if action == "doubt":
            return Prediction("Gold everywhere.", 1.0, True, 0.01, 0.02)
        if action == "win":
            return Prediction("You win.", 1.0, True, 0.9, 0.8)
        told = f"{action} {len(history)} {seed % 1000}"
        return Prediction(told, 0.0, False, 0.75, 0.95, reasoning="the hidden key is red")

    def release(self, session: object) -> None:
        self.released.append(session)


class Telling(Planted):
    """Recites all that was done, so that a step which saw another episode's history gives itself away."""

    async def predict(
        self, start: str, history: Sequence[Turn], action: str, seed: int, session: object = None
    ) -> Prediction:
        await asyncio.sleep(0)
        told = " > ".join([start[:17], *(turn.action for turn in history), action])
        return Prediction(f"{told} #{seed}", float(action == "win"), action == "win", 0.9, 0.8)


def planted_world(
    model: Planted | None = None, starts: Mapping[str, Start] = PLAIN, max_turns: int = 6, guard: bool = True
) -> DreamWorld:
    model = model or Planted()
    doubts = Guard(min_confidence=0.5, min_outcome_confidence=0.5, ends=guard)
    logged = Trajectory(
        "e", "hall", "g", Source.REAL, "a", 0, STARTS["hall@0"].text,
        (Turn("take lamp", "You take the lamp.", 1.0, True),), StopReason.TERMINATED,
    )  # fmt: skip
    return DreamWorld(
        "planted", model.version, lambda: DreamEnv(model, starts, doubts), starts, max_turns, TransitionIndex([logged])
    )


@contextmanager
def served(world: DreamWorld, settings: ServeSettings | None = None, token: str = "") -> Iterator[str]:
    """Host and port of a server of ``world``, in a thread of this process."""
    settings = settings or ServeSettings()
    began, listening = threading.Event(), listen("127.0.0.1", 0)
    server = Server(make_app(world, Gate(settings, token)), settings.message_bytes, began.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    try:
        assert began.wait(60)
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
    assert not thread.is_alive(), "the server does not stop"


def measured(address: str) -> dict[tuple[str, ...], float]:
    """What ``/metrics`` says, by name and labels: ``["imagination_sessions",]``."""
    text = httpx.get(f"http://{address}/metrics", trust_env=False).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labelled(found: Mapping[tuple[str, ...], float], name: str) -> dict[str, float]:
    """The values of a measure by its one label."""
    return {key[1]: value for key, value in found.items() if key[0] == name}


def sessions_left(address: str, seconds: float = 20.0) -> int:
    """How many sessions are open once those of clients that are gone have had ``seconds`` to be noticed."""
    deadline = time.monotonic() + seconds
    while (left := int(measured(address)["imagination_sessions",])) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
