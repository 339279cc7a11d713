from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from pathlib import Path

from imagination.rollout.dream_env import Start, dream_starts
from imagination.runs.lifecycle import need
from imagination.scale.ray_envs import Envs, RemoteEnvs, connect, host_envs, resources
from imagination.serving.sessions import DreamWorld
from imagination.session import Session
from imagination.settings import Config, UserError
from real_envs.calls import read_tools
from worldmodel.formats.retrieval import TransitionIndex


def serve(config: Config, folder: Path) -> None:
    """Serve the world model as an environment: OpenEnv, AgentGym, MCP, and a page to play by hand.

    Answers clients of three protocols until Ctrl-C. An episode begins at a state of the log, chosen by task
    and seed; every step is dreamed, and has the world model's confidence and the guard's verdict.

      OpenEnv     ws://127.0.0.1:8000: reset(seed=0) or reset(seed=0, task=...), step({'message': 'look'})
      AgentGym    http://127.0.0.1:8000/agentgym: a task's number is data_idx
      MCP         http://127.0.0.1:8000/mcp: the tools of the world, or reset and step; imagination[mcp]
      by hand     http://127.0.0.1:8000/ in a browser
      watch       /health, /metrics (Prometheus)

    Only this machine may ask. For others: serve.host=0.0.0.0 and a token in the environment variable
    IMAGINE_SERVE_TOKEN, which clients send as Bearer or as the password in the address. TLS is for a proxy
    in front of it. `pip install 'imagination[serve]'` brings what it needs.

    Reads: log/, models/worldmodel/
    Writes: nothing

    Examples:
        imagine serve run=mine
        imagine serve run=mine serve.port=9000 serve.sessions=256 engine.slots=256
        imagine serve run=mine scale=ray scale.players=4 scale.gpus_per_player=1

    Raises:
        UserError: the packages of ``imagination[serve]`` are missing, there is no fitted world model, nothing can
            listen there, or other machines would need no token.
    """
    try:
        from imagination.serving.app import Server, listen, make_app
        from imagination.serving.http import Gate
    except ImportError as error:
        raise UserError(f"{error}; run `pip install 'imagination[serve]'`") from error
    settings = config.serve
    token = os.environ.get(settings.token, "")
    gate = Gate(settings, token)
    world = open_world(config, folder)
    app, listening = make_app(world, gate), listen(settings.host, settings.port)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{listening.getsockname()[1]}"
    connect = how_to_connect(world, address, bool(token), settings.token)
    with listening:  # until the process is told to stop; then all is closed, and Ctrl-C is a KeyboardInterrupt
        server = Server(app, settings.message_bytes, on_start=lambda: print(connect, flush=True))
        asyncio.run(server.serve(sockets=[listening]))


def open_world(config: Config, folder: Path) -> DreamWorld:
    """The dreams of the run in ``folder``, as its guard and its settings have them. Raises ``UserError``: it is no run,
    or its world model is not fitted.
    """
    need(need(folder, "fit-world-model") / "models", "fit-world-model")
    session = Session.open(config, folder, "serve")
    relabelled = config.worldmodel.goal.relabel_log(session.log.train)
    try:
        index = TransitionIndex(relabelled)
    except ValueError:  # no turn has a reward
        index = None
    dreams = dreams_of(session) if config.scale.name == "none" else _dreams_elsewhere(session)
    return DreamWorld(
        name=config.run,
        version=str(dreams.version),
        make_env=dreams.make,
        starts=_starts(session),
        max_turns=config.serve.max_turns or config.dream.max_turns,
        index=index,
        tools=read_tools(session.run.games),
    )


def dreams_of(session: Session) -> Envs:
    """Environments that dream from the run's states."""
    model = session.world_model()
    return Envs(session.dreams(model, _starts(session)), model.version)


def _dreams_elsewhere(session: Session) -> Envs:
    """The same in actors, which have a world model each."""
    settings = session.config.scale
    ray = connect(settings, settings.players * settings.cpus_per_player)
    needs = resources(settings.cpus_per_player, settings.gpus_per_player, settings.gb_per_player)
    actors = host_envs(ray, session, dreams_of, settings.players, needs)
    try:
        versions = ray.get([actor.version.remote() for actor in actors], timeout=settings.start_seconds)
    except ray.exceptions.RayError as error:
        raise UserError(f"the world model cannot be served by {settings.players} actors: {error}") from error
    return Envs(RemoteEnvs(actors), versions[0])


def _starts(session: Session) -> dict[str, Start]:
    config = session.config
    starts = dream_starts(config.worldmodel.goal.relabel_log(session.known), config.dream.max_turns)
    if config.serve.branch:
        return starts
    return {name: start for name, start in starts.items() if not start.history}


def how_to_connect(world: DreamWorld, address: str, locked: bool, variable: str) -> str:
    """What is printed once the server answers; ``locked``: clients must show the token, which ``variable`` holds."""
    user = f"any:<{variable}>@" if locked else ""
    return (
        f"dreams of {world.name} ({len(world.tasks)} tasks) at http://{address}; Ctrl-C ends it\n\n"
        f"play by hand:  http://{address}/\n\n"
        f"from openenv.core.generic_client import GenericEnvClient\n"
        f'env = GenericEnvClient(base_url="ws://{user}{address}").sync()'
        '; env.reset(seed=0); env.step({"message": "look"})\n\n'
        f"AgentGym:      http://{user}{address}/agentgym\n"
        f"MCP:           http://{address}/mcp{'' if find_spec('mcp') else ', with pip install imagination[mcp]'}\n"
        f"measured:      http://{address}/metrics"
    )
