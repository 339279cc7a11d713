"""OpenEnv servers. If these fail, sessions leak on servers, or what a broken server says is learned from."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("openenv", reason="pip install 'imagination[openenv]'")

from real_envs.check import check_env
from real_envs.env import EnvFailure
from real_envs.errors import UserError
from real_envs.trajectory import StopReason
from real_envs.world import UnknownWorld, find_world
from real_envs.worlds.servers.client import ServerTasks
from real_envs.worlds.servers.openenv import OpenEnv, OpenEnvSession, OpenEnvSettings
from tests.support.lamp_game import COMMANDS, doors, solution
from tests.support.openenv_server import openenv_server
from tests.support.subprocess_server import Server, free_port, talking_nonsense


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with openenv_server(tmp_path_factory.mktemp("openenv")) as running:
        yield running


def settings_of(server: Server, **options: object) -> OpenEnvSettings:
    return OpenEnvSettings(**{"url": server.url, "commands": COMMANDS, "timeout": 20.0, **options})  # type: ignore[arg-type]


def generated(folder: Path, settings: OpenEnvSettings, counts: dict[str, int], workers: int = 2) -> ServerTasks:
    world = OpenEnv()
    world.generate(folder, counts, 0, settings, lambda done, total: None, 1)
    return world.open(folder, True, workers)


def test_an_episode_is_played_to_its_end(server: Server) -> None:
    session = OpenEnvSession(settings_of(server, solved=2.0, fixed="tone=loud"))
    for seed in (3, 5):
        began = session.start({"seed": str(seed)})
        first, second = doors(seed)
        assert began.text == f"Find the lamp behind the {second} door. You see a {first} door."
        assert (began.reward, began.done) == (0.0, False)
        said = [session.act(action) for action in ["fly", *solution(seed)]]
        assert [s.text for s in said][::3] == ["Unknown action.", "You take the lamp."]
        assert [s.reward for s in said] == [0.0, 0.0, 0.25, 0.25]
        assert [s.done for s in said] == [False, False, False, True]
        assert server.all_closed(), "an episode that is over holds no session"
    session.close()


def test_the_text_of_an_observation_is_chosen(server: Server) -> None:
    session = OpenEnvSession(settings_of(server, text="text+hint"))
    assert session.start({"seed": "3"}).text.endswith("door.")
    session.close()
    session = OpenEnvSession(settings_of(server, text="words"))
    with pytest.raises(EnvFailure, match="has no 'words', only text, hint"):
        session.start({"seed": "3"})
    session.close()
    assert server.all_closed()


def test_the_protocol_of_environments_holds(server: Server, tmp_path: Path) -> None:
    tasks = generated(tmp_path, settings_of(server), {"train": 2, "heldout": 2})
    task = tasks.tasks("train")[0]

    async def check() -> list[str]:
        try:
            return await check_env(tasks.make_env(), task, ["look", *solution(int(task.spec["seed"]))])
        finally:
            await tasks.close()

    assert asyncio.run(check()) == []
    assert server.all_closed()
    assert tasks.pool.stats.crashes == tasks.pool.stats.timeouts == 0


@pytest.mark.parametrize(
    ("fault", "match"),
    [("raise", "the lamp went out"), ("nonsense", "'text' is 1, no text"), ("hang", "step at .* took longer than 2 s")],
)
def test_what_a_server_must_not_do_is_a_failure(server: Server, fault: str, match: str) -> None:
    session = OpenEnvSession(settings_of(server, text="text", timeout=2.0 if fault == "hang" else 20.0))
    session.start({"seed": "3"})
    with pytest.raises(EnvFailure, match=match) as told:
        session.act(fault)
    assert told.value.reason is (StopReason.ENV_TIMEOUT if fault == "hang" else StopReason.ENV_CRASHED)
    assert "\n" not in str(told.value)
    session.close()
    assert server.all_closed()


@pytest.mark.parametrize(
    "message",
    [
        "no JSON",
        "[1, 2]",
        "7",
        "null",
        "{}",
        '{"type": "observation", "data": null}',
        '{"type": "observation", "data": {"observation": "a lamp", "reward": 0, "done": false}}',
        '{"type": "observation", "data": {"observation": {}, "reward": 0, "done": false}}',
        '{"type": "observation", "data": {"observation": {"n": 1}, "reward": 0, "done": false}}',
        '{"type": "observation", "data": {"observation": {"text": "a lamp"}, "reward": NaN, "done": false}}',
        '{"type": "observation", "data": {"observation": {"text": "a lamp"}, "reward": 0, "done": "no"}}',
        '{"type": "observation", "data": {"observation": {"text": "a lamp"}, "done": false}}',
        '{"type": "error", "data": "it broke"}',
        '{"type": "error"}',
        "[" * 100_000,
    ],
)
def test_messages_that_are_none_are_failures(message: str) -> None:
    with talking_nonsense(message) as url:
        session = OpenEnvSession(OpenEnvSettings(url=url, timeout=5.0))
        with pytest.raises(EnvFailure) as told:
            session.start({"seed": "3"})
        assert told.value.reason is StopReason.ENV_CRASHED
        assert len(str(told.value)) < 320
        session.close()


def test_a_server_that_dies_is_a_failure(tmp_path: Path) -> None:
    with openenv_server(tmp_path) as server:
        session = OpenEnvSession(settings_of(server))
        session.start({"seed": "3"})
        with pytest.raises(EnvFailure, match=r"the server at .* dropped the connection in step"):
            session.act("exit")
        with pytest.raises(EnvFailure, match="no OpenEnv server answers at"):
            session.start({"seed": "3"})
        session.close()


def test_a_reset_that_takes_too_long_is_a_failure(tmp_path: Path) -> None:
    with openenv_server(tmp_path, misbehaving="slow") as server:
        began = time.monotonic()
        session = OpenEnvSession(settings_of(server, timeout=0.5))
        with pytest.raises(EnvFailure, match=r"reset at .* took longer than 0\.5 s") as told:
            session.start({"seed": "3"})
        assert told.value.reason is StopReason.ENV_TIMEOUT
        assert time.monotonic() - began < 10


def test_failures_are_counted_and_the_next_episode_is_played(server: Server, tmp_path: Path) -> None:
    tasks = generated(tmp_path, settings_of(server, text="text", timeout=2.0), {"train": 1, "heldout": 1}, workers=1)
    task = tasks.tasks("train")[0]

    async def play() -> list[StopReason]:
        reasons = []
        env = tasks.make_env()
        for fault in ("nonsense", "hang", "raise"):
            await env.reset(task, 0)
            try:
                await env.step(fault)
            except EnvFailure as failure:
                reasons.append(failure.reason)
        await env.reset(task, 0)
        assert (await env.step("look")).observation.text.startswith("You see")
        await env.close()
        await tasks.close()
        return reasons

    crash, hang = StopReason.ENV_CRASHED, StopReason.ENV_TIMEOUT
    assert asyncio.run(play()) == [crash, hang, crash]
    stats = tasks.pool.stats
    assert (stats.crashes, stats.timeouts, stats.steps, stats.resets) == (2, 1, 4, 4)


def test_sessions_are_counted_by_episodes_under_way(tmp_path: Path) -> None:
    with openenv_server(tmp_path, sessions=2) as server:
        tasks = generated(tmp_path / "games", settings_of(server), {"train": 3, "heldout": 1}, workers=2)

        async def play() -> None:
            async def episode(number: int) -> None:
                task = tasks.tasks("train")[number % 3]
                env = tasks.make_env()
                await env.reset(task, 0)
                for action in solution(int(task.spec["seed"]))[: 3 if number % 2 else 2]:  # half are broken off
                    await env.step(action)
                await env.close()

            await asyncio.gather(*map(episode, range(8)))
            await tasks.close()

        asyncio.run(play())
        assert server.all_closed()
        assert server.most_open() <= 2

        held = [OpenEnvSession(settings_of(server)) for _ in range(3)]
        for session in held[:2]:
            session.start({"seed": "3"})
        with pytest.raises(EnvFailure, match=r"has no session left: .* collect\.workers or more"):
            held[2].start({"seed": "3"})
        held[0].close()
        assert held[2].start({"seed": "3"}).text
        for session in held:
            session.close()
        assert server.all_closed()


def test_a_session_ends_with_a_worker_that_is_killed(server: Server, tmp_path: Path) -> None:
    tasks = generated(tmp_path, settings_of(server), {"train": 1, "heldout": 1}, workers=1)
    before = server.counts()["closed"]

    async def play() -> None:
        env = tasks.make_env()
        await env.reset(tasks.tasks("train")[0], 0)
        step = asyncio.ensure_future(env.step("look"))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert await asyncio.to_thread(server.all_closed)
        assert server.counts()["closed"] > before
        await tasks.close()

    asyncio.run(play())


def test_a_server_that_moved_is_found_by_its_url(server: Server, tmp_path: Path) -> None:
    games, counts = tmp_path / "games", {"train": 2, "heldout": 1}
    asyncio.run(generated(games, settings_of(server), counts).close())
    before = json.loads((games / "games.json").read_text())
    with openenv_server(tmp_path) as other:
        tasks = generated(games, settings_of(other, url=other.url.replace("http", "ws")), counts)
        after = json.loads((games / "games.json").read_text())
        assert after == {**before, "url": other.url.replace("http", "ws")}

        async def play() -> None:
            await tasks.make_env().reset(tasks.tasks("train")[0], 0)
            await tasks.close()

        asyncio.run(play())
        assert other.all_closed()


def test_a_bad_server_or_option_is_told_in_a_line(server: Server, tmp_path: Path) -> None:
    counts = {"train": 1, "heldout": 1}
    cases: list[tuple[dict[str, object], str]] = [
        ({"url": f"ws://127.0.0.1:{free_port()}"}, "no OpenEnv server answers at ws.*set env.options.url"),
        ({"url": f"{server.url}/lamp"}, "no OpenEnv server answers at"),
        ({"action": "words"}, "refuses the action words='look': name the field of its text"),
        ({"fixed": "mood=bad"}, "others that it needs in env.options.fixed"),
    ]
    for options, match in cases:
        with pytest.raises(UserError, match=match) as told:
            generated(tmp_path, settings_of(server, **options), counts)
        assert "\n" not in str(told.value)
    assert not (tmp_path / "games.json").exists()
    assert server.all_closed()


def test_seeds_that_start_alike_are_one_task(tmp_path: Path) -> None:
    with openenv_server(tmp_path, misbehaving="same") as server:
        with pytest.raises(UserError, match=r"too few different starts for games\.train=2: 1 found among 60 seeds"):
            generated(tmp_path / "games", settings_of(server), {"train": 2, "heldout": 1})
        tasks = generated(tmp_path / "games", settings_of(server, distinct=False), {"train": 2, "heldout": 1})
        assert len({task.id for split in ("train", "heldout") for task in tasks.tasks(split)}) == 3
        asyncio.run(tasks.close())


def test_an_episode_that_is_over_at_once_cannot_be_played(tmp_path: Path) -> None:
    with openenv_server(tmp_path, misbehaving="over") as server:
        with pytest.raises(UserError, match="the server's reset says that the episode is over"):
            generated(tmp_path, settings_of(server), {"train": 1, "heldout": 1})
        assert server.all_closed()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"url": "localhost:8000"}, "url wants ws://host:port"),
        ({"action": ""}, "must not be empty"),
        ({"commands": ""}, "must not be empty"),
        ({"fixed": "loud"}, "name=text"),
        ({"solved": -1.0}, "more than 0"),
        ({"timeout": 0.0}, "more than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        OpenEnvSettings(**options)  # type: ignore[arg-type]


def test_it_is_found_by_its_name_or_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = find_world("openenv")
    assert isinstance(world, OpenEnv)
    assert sum(share for _, share in world.behaviours([])) == pytest.approx(1.0)
    monkeypatch.setattr("real_envs.worlds.servers.openenv.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnknownWorld, match=r"pip install 'imagination\[openenv\]'"):
        find_world("openenv")
