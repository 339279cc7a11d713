"""Dreamed turns a second through the server, against the same dreams in process.

``python -m tests.benchmarks.serving`` fits a tiny world model; then rounds in process and through the server's sockets
take turns, so that whatever else the machine does falls on both. The clients are a process of their own, as trainers
are. The model is so small that the protocol costs about as much as the dreams: a larger one hides it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from websockets.asyncio.client import connect

from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.serve import open_world
from imagination.serving.sessions import Refused, Sessions
from imagination.settings.dreams import ServeSettings
from tests.support.served import served
from tests.support.tiny import tiny_settings, write_log

CLIENTS, TURNS, ROUNDS = 64, 40, 12
ACTIONS = ("look", "go east", "go west", "take lamp", "take book")


async def play_all(make: Callable[[int], Awaitable[Callable[[str], Awaitable[bool]]]]) -> float:
    """Turns a second of all clients together.

    Args:
        make: a client that has begun; what it returns takes an action and begins again where the episode is over.
    """
    clients = [await make(k) for k in range(CLIENTS)]

    async def play(k: int) -> None:
        for turn in range(TURNS):
            await clients[k](ACTIONS[(k + turn) % len(ACTIONS)])

    begun = time.perf_counter()
    await asyncio.gather(*(play(k) for k in range(CLIENTS)))
    return CLIENTS * TURNS / (time.perf_counter() - begun)


async def in_process(sessions: Sessions) -> float:
    async def make(k: int) -> Callable[[str], Awaitable[bool]]:
        session = await sessions.open()
        await session.reset(None, k)

        async def act(action: str) -> bool:
            try:
                over = (await session.step(action)).done
            except Refused:  # a prediction that cannot be read
                over = True
            if over:
                await session.reset(None, k)
            return over

        return act

    found = await play_all(make)
    await sessions.close_all()
    return found


async def through_sockets(address: str) -> float:
    async def make(k: int) -> Callable[[str], Awaitable[bool]]:
        socket = await connect(f"ws://{address}/ws")

        async def say(kind: str, **data: object) -> bool:
            await socket.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(await socket.recv())
            return reply["type"] == "error" or bool(reply["data"]["done"])

        async def act(action: str) -> bool:
            over = await say("step", message=action)
            if over:
                await say("reset", seed=k)
            return over

        await say("reset", seed=k)
        return act

    return await play_all(make)


def main() -> None:
    config = tiny_settings()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_log(folder)
        fit_world_model(config, folder)
        world = open_world(config, folder)
        limits = ServeSettings(sessions=CLIENTS)
        (engine,) = world.make_env()._model.engines  # type: ignore[attr-defined]
        rates: dict[str, list[float]] = {"in process": [], "served": []}
        passes: dict[str, int] = dict.fromkeys(rates, 0)
        with served(world, limits) as address:
            command = [sys.executable, "-m", "tests.benchmarks.serving", address]
            asyncio.run(in_process(Sessions(world, limits)))  # warms up
            for _ in range(ROUNDS):
                for what, found in rates.items():
                    before = engine.counts.steps
                    if what == "served":
                        found.append(float(subprocess.run(command, check=True, capture_output=True).stdout))
                    else:
                        found.append(asyncio.run(in_process(Sessions(world, limits))))
                    passes[what] += engine.counts.steps - before
    for what, found in rates.items():
        each = passes[what] / (ROUNDS * TURNS)
        print(f"{what}: median {statistics.median(found):.0f} turns/s, {each:.1f} forward passes for {CLIENTS} turns")
        print("  " + ", ".join(f"{rate:.0f}" for rate in found))
    ratios = sorted(through / plain for plain, through in zip(*rates.values(), strict=True))
    print(f"ratio: median {statistics.median(ratios):.2f}, of the rounds {ratios[0]:.2f} to {ratios[-1]:.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(asyncio.run(through_sockets(sys.argv[1])))
    else:
        main()
