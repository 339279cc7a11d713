"""The stage ``serve``: a fitted world model, asked over the network. If these fail, nobody else can dream in it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")
from websockets.asyncio.client import connect

from imagination.cli import main
from imagination.commands.serve import open_world, serve
from imagination.serving.sessions import Refused, Sessions, SessionStep
from imagination.settings import UserError
from imagination.settings.dreams import ServeSettings
from policy.lm.engine import Engine
from tests.support.imagine_serve import AS_FITTED, ServedRun, imagine_serve
from tests.support.served import served
from tests.support.tiny import TASKS, start, tiny_settings

CLIENTS = 16


def world_and_engine(folder: Path) -> tuple[Sessions, Engine]:
    world = open_world(tiny_settings(), folder)
    env = world.make_env()
    return Sessions(world, ServeSettings()), env._model.engines[0]  # type: ignore[attr-defined]


async def look(sessions: Sessions, seed: int) -> tuple[SessionStep, SessionStep | str]:
    """What a session begins with and answers to ``look``; of a prediction that cannot be read, what is said of it."""
    session = await sessions.open()
    begun = await session.reset(None, seed)
    try:
        return begun, await session.step("look")
    except Refused as refused:  # whether a model of a few steps answers well is not asked here
        return begun, str(refused)
    finally:
        await sessions.close(session.id)


def test_a_fitted_run_begins_as_its_log_does(cloned: Path) -> None:
    sessions, _ = world_and_engine(cloned)
    assert sessions.world.tasks == sorted(TASKS)
    begun, looked = asyncio.run(look(sessions, 0))
    assert begun.text == start("corridor-a")
    assert asyncio.run(look(sessions, 0)) == (begun, looked), "the same seed and action, the same dream"


def test_steps_of_many_clients_are_one_batch(cloned: Path) -> None:
    """Sixteen sockets that ask at the same time cost about the forward passes of one, not of sixteen."""
    sessions, engine = world_and_engine(cloned)

    async def ask_all(address: str) -> list[str]:
        async def client() -> str:
            async with connect(f"ws://{address}/ws") as socket:
                await socket.send(json.dumps({"type": "reset", "data": {"seed": 0}}))
                await socket.recv()
                await together.wait()
                await socket.send(json.dumps({"type": "step", "data": {"message": "look"}}))
                return str(await socket.recv())

        together = asyncio.Barrier(CLIENTS)
        return await asyncio.gather(*(client() for _ in range(CLIENTS)))

    before = engine.counts.steps
    with served(sessions.world, ServeSettings(sessions=CLIENTS)) as address:
        answers = asyncio.run(ask_all(address))
    together = engine.counts.steps - before
    engine.reset()
    before = engine.counts.steps
    asyncio.run(look(sessions, 0))
    alone = engine.counts.steps - before
    assert len(set(answers)) == 1, "the same dream, whoever dreams beside it"
    assert alone > 0
    assert together < CLIENTS * alone / 2


@pytest.fixture
def run(cloned: Path, tmp_path: Path) -> Iterator[ServedRun]:
    (tmp_path / "tiny").symlink_to(cloned)
    with imagine_serve(tmp_path / "tiny") as served_run:
        yield served_run


def test_the_stage_says_how_to_connect_and_ends_at_ctrl_c(run: ServedRun, cloned: Path) -> None:
    python = [line for line in run.lines if line.startswith(("from openenv", "env = "))]
    assert len(python) == 2
    pytest.importorskip("openenv", reason="pip install 'imagination[openenv]'")
    names: dict[str, Any] = {}
    try:
        exec("".join(python), names)  # what it prints works as it stands
    except RuntimeError as error:  # unless a model of a few steps writes what cannot be read
        if "prediction_invalid" not in str(error):
            raise
    assert names["env"].state()["episode_id"] == "corridor-a/0"
    assert httpx.get(f"http://{run.address}/health", trust_env=False).json() == {"status": "healthy"}
    run.process.send_signal(signal.SIGINT)
    run.process.communicate(timeout=60)
    errors = run.log.read_text(encoding="utf-8")
    assert run.process.returncode == 130
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("stopped; ")
    assert "imagine serve run=tiny" in errors
    assert not (cloned / "config.yaml").exists(), "it only looks at the run"


def test_a_run_is_a_gymnasium_environment_by_its_folder(cloned: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="pip install 'imagination[gymnasium]'")
    env = gymnasium.make("imagination.gym:imagination/Dream-v0", run=str(cloned), overrides=AS_FITTED)
    try:
        text, _ = env.reset(seed=1)
        assert text == start("corridor-b")
        _, looked = asyncio.run(look(world_and_engine(cloned)[0], 1))
        if isinstance(looked, SessionStep):
            assert env.step("look")[:4] == (looked.text, looked.reward, looked.terminated, looked.truncated)
        else:
            with pytest.raises(Refused, match=re.escape(looked)):
                env.step("look")
    finally:
        env.close()
    with pytest.raises(UserError, match="fit-world-model"):
        gymnasium.make("imagination.gym:imagination/Dream-v0", run=str(cloned / "nothing"))


# --- what cannot be served


@pytest.fixture
def refused(cloned: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def run(folder: Path = cloned, token: str = "", **changes: object) -> str:
        config = tiny_settings()
        for name, value in changes.items():
            setattr(config.serve, name, value)
        monkeypatch.setenv(config.serve.token, token)
        with pytest.raises(UserError) as error:
            serve(config, folder)
        assert "\n" not in str(error.value)
        return str(error.value)

    return run


def test_other_machines_need_a_token(refused: Callable[..., str]) -> None:
    assert "IMAGINE_SERVE_TOKEN" in refused(host="0.0.0.0")


def test_a_taken_port_is_named(refused: Callable[..., str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"serve.port={port}" in refused(port=port)


def test_a_run_that_is_not_there_is_not_made(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "fit-world-model" in refused(folder=tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_a_token_on_the_command_line_is_refused_and_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "run=nothing", "serve.token=s3cret"]) == 2
    told = capsys.readouterr().err
    assert "environment variable" in told
    assert "s3cret" not in told
