"""Worlds behind a server that dies and comes back elsewhere. If these fail, an outage costs what was logged before."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from imagination.cli import main
from real_envs.store import TrajectoryStore
from real_envs.trajectory import StopReason
from tests.support.agentgym_server import agentgym_server
from tests.support.lamp_game import COMMANDS
from tests.support.openenv_server import openenv_server
from tests.support.subprocess_server import Server

Start = Callable[..., AbstractContextManager[Server]]
FEW = ["games.train=2", "games.heldout=1", "collect.heldout_episodes=2", "collect.max_turns=6", "collect.workers=2"]


@pytest.fixture(params=["agentgym", "openenv"])
def world(request: pytest.FixtureRequest) -> tuple[str, Start]:
    name = request.param
    if name == "openenv":
        pytest.importorskip("openenv", reason="pip install 'imagination[openenv]'")
    return name, {"agentgym": agentgym_server, "openenv": openenv_server}[name]


def collect(name: str, server: Server, folder: Path, episodes: int, more: Sequence[str] = ()) -> int:
    options = [f"env.options.url={server.url}", f'env.options.commands="{COMMANDS}"', "env.options.timeout=20"]
    size = [f"collect.episodes={episodes}", f"output={folder}"]
    return main(["collect", "preset=tiny", f"env={name}", *options, *FEW, *size, *more])


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "tiny" / "log").glob("shard-*")}


def test_collecting_goes_on_at_a_server_elsewhere_after_one_died(
    world: tuple[str, Start], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, start = world
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with start(first) as server:
        assert collect(name, server, tmp_path, 5) == 0
        assert server.all_closed(), "the run has left environments on the server"
    log = TrajectoryStore.open(tmp_path / "tiny" / "log")
    assert log.meta["environment"] == name
    logged = list(log.read())
    assert len(logged) == 2 * 5 + 2
    assert not any(t.stop.is_failure for t in logged)
    before, tasks = shards(tmp_path), (tmp_path / "tiny" / "games" / "games.json").read_text()

    capsys.readouterr()
    assert collect(name, server, tmp_path, 8) == 2, "nobody answers there any more"
    told = [line for line in capsys.readouterr().err.splitlines() if "error" in line.lower()]
    assert len(told) == 1
    assert server.url in told[0]
    assert "set env.options.url" in told[0]
    assert shards(tmp_path) == before
    assert (tmp_path / "tiny" / "games" / "games.json").read_text() == tasks

    with start(second) as moved:
        assert collect(name, moved, tmp_path, 8) == 0
        assert moved.all_closed()
    assert before.items() <= shards(tmp_path).items(), "what was logged is kept as it is"
    again = list(TrajectoryStore.open(tmp_path / "tiny" / "log").read())
    assert len(again) > len(logged)
    assert {t.id for t in logged} < {t.id for t in again}
    assert {t.task_id for t in logged} == {t.task_id for t in again}


def test_a_server_that_dies_under_way_makes_typed_failures_that_are_counted(
    world: tuple[str, Start], tmp_path: Path
) -> None:
    """One of the two commands that scripted agents know ends the server."""
    name, start = world
    with start(tmp_path) as server:
        assert collect(name, server, tmp_path, 2, ["env.options.commands=look|exit"]) == 0
        assert server.process.wait(10) == 1
    episodes = list(TrajectoryStore.open(tmp_path / "tiny" / "log").read(require_actions=False))
    failed = [t for t in episodes if t.stop.is_failure]
    assert {t.stop for t in failed} == {StopReason.ENV_CRASHED}
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    counted = summary["real_failures"]["collect"]
    assert sum(counted.values()) == len(failed) > 0
    shown = [turn.observation for t in episodes for turn in t.turns]
    assert all(text.startswith(("You ", "Unknown action.")) for text in shown), "a failure is no observation"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_no_environments_on_the_server(how: signal.Signals, tmp_path: Path) -> None:
    with agentgym_server(tmp_path) as server:
        size = ["collect.episodes=5000", f"output={tmp_path}", f"env.options.url={server.url}"]
        # a shell that has put the tests in the background has made all of them deaf to SIGINT
        script = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        script += "from imagination.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", script, "collect", "preset=tiny", "env=agentgym", *FEW, *size]
        run = subprocess.Popen(command, stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + 120
            while server.counts()["open"] < 3 and time.monotonic() < deadline:  # one to draw tasks, and the workers'
                time.sleep(0.05)
            assert server.counts() == {"open": 3, "closed": 1}
            run.send_signal(how)
            run.communicate(timeout=120)
        finally:
            run.kill()
        assert server.all_closed(10)
