"""Hours of clients that come, play and go: does the server's memory stay flat?

``python -m tests.benchmarks.serving_soak --minutes 60`` fits a tiny world model and starts ``imagine serve`` of it.
Clients of OpenEnv and AgentGym then play episodes with pauses; now and then one hangs up in the middle. Every few
seconds the server's resident memory, open files, threads and sessions are read. The slope of memory over time, after a
warm-up, has a 95 % interval of the means of blocks, since neighbouring readings are alike (batch means: Law 2015,
Simulation Modeling and Analysis, section 9.5.3); flat is a slope that is surely not more than ``--most``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import connect

from tests.benchmarks.machine import hardware
from tests.support.imagine_serve import fit_tiny_run, imagine_serve
from tests.support.served import measured

ACTIONS = ("look", "go east", "go west", "take lamp", "take book")
MIB = 2**20
WARM_UP = 0.5  # of the readings: allocator and caches fill slowly
BLOCKS = 10
_T95 = 2.306  # Student's, two-sided, of BLOCKS - 2 degrees of freedom


@dataclass(frozen=True, slots=True)
class Reading:
    """
    Attributes:
        seconds: since the clients began.
        rss: bytes that are resident.
        files: open descriptors, sockets among them.
        steps: that the server has dreamed.
    """

    seconds: float
    rss: int
    files: int
    threads: int
    sessions: int
    steps: int

    def line(self) -> str:
        return (
            f"{self.seconds:7.0f} s  {self.rss / MIB:8.2f} MiB  {self.files:4d} files  {self.threads:3d} threads  "
            f"{self.sessions:4d} sessions  {self.steps:8d} steps"
        )


def read(pid: int, address: str, begun: float) -> Reading:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    found = measured(address)
    return Reading(
        time.monotonic() - begun,
        int(status["VmRSS"].split()[0]) * 1024,
        len(os.listdir(f"/proc/{pid}/fd")),
        int(status["Threads"]),
        int(found["imagination_sessions",]),
        int(found["imagination_step_seconds_count",]),
    )


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Least squares through the means of ``BLOCKS`` blocks: the slope, and its 95 % interval.

    Raises:
        ValueError: there are fewer readings than blocks.
    """
    if len(times) < BLOCKS:
        raise ValueError(f"{len(times)} readings are too few for {BLOCKS} blocks")
    cuts = [round(k * len(times) / BLOCKS) for k in range(BLOCKS + 1)]
    x, y = ([statistics.fmean(each[a:b]) for a, b in pairwise(cuts)] for each in (times, values))
    rate, offset = statistics.linear_regression(x, y)
    spread = sum((b - rate * a - offset) ** 2 for a, b in zip(x, y, strict=True)) / (BLOCKS - 2)
    half = _T95 * math.sqrt(spread / (statistics.pvariance(x) * BLOCKS))
    return rate, rate - half, rate + half


def verdict(low: float, high: float, most: float) -> str:
    """``flat`` and ``grows`` are sure; a short or noisy soak tells neither."""
    return "flat" if high <= most else "grows" if low > most else "unclear"


# --- clients


async def over_socket(address: str, chance: random.Random, pause: float, aborts: float) -> None:
    """A few episodes over one socket, which the client leaves without a word after a share ``aborts`` of its steps."""
    async with connect(f"ws://{address}/ws") as socket:
        for _ in range(chance.randrange(1, 6)):
            await socket.send(json.dumps({"type": "reset", "data": {"seed": chance.randrange(10**6)}}))
            if json.loads(await socket.recv())["type"] == "error":
                return  # all sessions are taken: the server hangs up
            done = False
            while not done:
                await asyncio.sleep(chance.uniform(0, 2 * pause))
                await socket.send(json.dumps({"type": "step", "data": {"message": chance.choice(ACTIONS)}}))
                reply = json.loads(await socket.recv())
                done = reply["type"] == "error" or reply["data"]["done"]
                if chance.random() < aborts:
                    socket.transport.abort()
                    return


async def over_agentgym(address: str, chance: random.Random, pause: float, aborts: float) -> None:
    """The same over HTTP; a session that is left is there until it is idle for too long."""
    async with httpx.AsyncClient(base_url=f"http://{address}/agentgym", trust_env=False, timeout=60) as client:

        async def post(path: str, body: object = None) -> Any:
            reply = await client.post(path, json=body)
            if reply.status_code >= 500:
                raise RuntimeError(f"{path} answered {reply.status_code}: {reply.text}")
            return reply.json()

        handle = await post("/create")
        for _ in range(chance.randrange(1, 6)):
            await post("/reset", {**handle, "data_idx": chance.randrange(2), "seed": chance.randrange(10**6)})
            done = False
            while not done:
                await asyncio.sleep(chance.uniform(0, 2 * pause))
                reply = await post("/step", {**handle, "action": chance.choice(ACTIONS)})
                done = "error" in reply or reply["done"]
                if chance.random() < aborts:
                    return
        await post("/close", handle)


async def play(number: int, address: str, pause: float, aborts: float, until: float) -> None:
    chance, way = random.Random(number), over_agentgym if number % 2 else over_socket
    while time.monotonic() < until:
        await way(address, chance, pause, aborts)


async def soak(pid: int, address: str, options: argparse.Namespace) -> list[Reading]:
    begun = time.monotonic()
    until = begun + 60 * options.minutes
    playing = asyncio.gather(*(play(k, address, options.pause, options.aborts, until) for k in range(options.clients)))
    readings: list[Reading] = []
    while not playing.done():
        await asyncio.wait([playing], timeout=options.every)
        if time.monotonic() < until:
            readings.append(await asyncio.to_thread(read, pid, address, begun))
            if len(readings) % options.show == 1:
                print(readings[-1].line(), flush=True)
    await playing
    return readings


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.4, help="seconds between a client's requests, on average")
    parser.add_argument("--aborts", type=float, default=1 / 60, help="share of steps after which a client is gone")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between readings")
    parser.add_argument("--show", type=int, default=30, help="prints one reading in so many")
    parser.add_argument("--most", type=float, default=5.0, help="MiB an hour that still count as flat")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        folder.mkdir()
        fit_tiny_run(folder)
        # who leaves over HTTP is gone when nobody asks any more
        words = ["serve.sessions=512", "serve.idle_seconds=10"]
        with imagine_serve(folder, *words, seconds=60 * options.minutes + 600) as served:
            pid, address = served.process.pid, served.address
            before = read(pid, address, time.monotonic())
            readings = asyncio.run(soak(pid, address, options))
            time.sleep(1)  # what was hung up on is noticed
            after = read(pid, address, time.monotonic())
            said = served.log.read_text(encoding="utf-8")
    kept = readings[round(WARM_UP * len(readings)) :]
    times = [one.seconds / 3600 for one in kept]
    quarters = [readings[round(k * len(readings) / 4) : round((k + 1) * len(readings) / 4)] for k in range(4)]
    grown = ", ".join(f"{(quarter[-1].rss - quarter[0].rss) / 1024:+.0f}" for quarter in quarters)
    rate, low, high = slope(times, [one.rss / MIB for one in kept])
    files = slope(times, [one.files for one in kept])
    steps = kept[-1].steps - kept[0].steps
    print(f"{hardware()}; {options.clients} clients, {options.minutes:g} minutes, {after.steps} steps")
    print(
        f"before {before.rss / MIB:.2f} MiB, {before.files} files; after {after.rss / MIB:.2f} MiB, {after.files} files"
    )
    print(f"sessions left: {after.sessions}; tracebacks in the log: {said.count('Traceback')}")
    print(f"memory over each quarter of the time: {grown} KiB")
    print(f"files: {files[0]:+.2f} an hour, 95 % {files[1]:+.2f} to {files[2]:+.2f}")
    each = rate * MIB * (times[-1] - times[0]) / max(1, steps)
    told = f"memory: {rate:+.2f} MiB an hour, 95 % {low:+.2f} to {high:+.2f} ({each:+.1f} bytes a step)"
    print(f"{told}: {verdict(low, high, options.most)} (limit {options.most:g})")


if __name__ == "__main__":
    main()
