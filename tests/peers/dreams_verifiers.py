"""verifiers plays in a served dream: a taskset of seeds, and an environment whose user is a session of the server.

Run by ``tests.peers.dreams`` in an environment that has ``verifiers[openenv]``, ``websockets`` and nothing of ours. The
policy is whatever an OpenAI-compatible endpoint serves; verifiers' own chat program talks to it. Beside the environment
below, verifiers' own ``openenv`` taskset plays in the same dreams.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers import __version__ as version
from websockets.asyncio.client import ClientConnection, connect


class DreamData(vf.TaskData):
    seed: int


class DreamTask(vf.Task[DreamData]):
    pass


class DreamTasksetConfig(vf.TasksetConfig):
    address: str = ""
    seeds: list[int] = []  # noqa: RUF012  pydantic copies it


class DreamTaskset(vf.Taskset[DreamTask, DreamTasksetConfig]):
    def load(self) -> Iterator[DreamTask]:
        for seed in self.config.seeds:
            yield DreamTask(DreamData(name=f"dream-{seed}", seed=seed), self.config.task)


class DreamEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


async def ask(socket: ClientConnection, kind: str, **data: object) -> dict[str, Any]:
    """
    Raises:
        RuntimeError: the server says so; a dream that broke is an error of the episode and no observation.
    """
    await socket.send(json.dumps({"type": kind, "data": data}))
    reply = json.loads(await socket.recv())
    if reply["type"] == "error":
        raise RuntimeError(reply["data"]["message"])
    return dict(reply["data"])


class DreamEnv(vf.Env[DreamEnvConfig]):
    """The policy's message is the action; of the answer it reads the text alone, and nothing that a dream adds."""

    async def run(self, task: DreamTask, agents: vf.Agents) -> None:
        async with connect(f"ws://{self.taskset.config.address}/ws") as socket:
            data = await ask(socket, "reset", seed=task.data.seed)
            total, steps = 0.0, 0
            async with agents.player.interaction(task) as interaction:
                while not data["done"]:
                    segment = await interaction.turn(data["observation"]["text"])
                    if segment.terminated:
                        break
                    data = await ask(socket, "step", message=segment.last_reply)
                    total, steps = total + (data["reward"] or 0.0), steps + 1
                    interaction.trace.info["steps"] = steps
        interaction.trace.record_reward("dream", total)
        interaction.trace.info["terminated"] = data["metadata"]["terminated"]


__all__ = ["DreamEnv", "DreamTaskset"]


async def play(taskset: dict[str, Any], context: vf.ModelContext) -> list[vf.Episode]:
    """All tasks of a taskset, four at a time."""
    player = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 12}
    env = vf.load_environment(vf.resolve_env_config({"taskset": taskset, "player": player}))
    at_a_time = asyncio.Semaphore(4)
    async with env.serving():
        slots = [slot for task in env.taskset.load() for slot in env.slots(task)]
        return await asyncio.gather(*(env.run_slot(slot, context, at_a_time) for slot in slots))


def summary(episodes: list[vf.Episode]) -> dict[str, Any]:
    traces = [trace for episode in episodes for trace in episode.traces]
    return {
        "rewards": [trace.reward for trace in traces],
        "turns": [trace.num_turns for trace in traces],
        "steps": sum(trace.info.get("steps", 0) for trace in traces),
        "terminated": sum(trace.info.get("terminated", False) for trace in traces),
        "errors": [error.message for run in [*episodes, *traces] for error in run.errors],
    }


async def run(spec: dict[str, Any]) -> dict[str, Any]:
    client = vf.EvalClientConfig(base_url=spec["endpoint"], api_key_var="NO_KEY")
    context = vf.ModelContext(spec["model"], client, vf.Sampling(max_tokens=16, temperature=1.0))
    return {"version": version, **summary(await play(spec["taskset"], context))}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(run(json.loads(Path(sys.argv[1]).read_text())))))
