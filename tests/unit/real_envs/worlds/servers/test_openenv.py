"""OpenEnv servers. If these fail, sessions leak on servers, or what a broken server says is learned from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("openenv", reason="pip install 'imagination[openenv]'")

from real_envs.env import EnvFailure
from real_envs.trajectory import StopReason
from real_envs.world import UnknownWorld, find_world
from real_envs.worlds.servers.client import ServerTasks
from real_envs.worlds.servers.openenv import OpenEnv, OpenEnvSession, OpenEnvSettings
from tests.support import played
from tests.support.lamp_game import COMMANDS, doors, solution
from tests.support.openenv_server import openenv_server
from tests.support.refusal import refused
from tests.support.subprocess_server import Server, free_port, talking_nonsense


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with openenv_server(tmp_path_factory.mktemp("openenv")) as running:
        yield running


def settings_of(server: Server, **options: object) -> OpenEnvSettings:
    return OpenEnvSettings(**{"url": server.url, "commands": COMMANDS, "timeout": 20.0, **options})  # type: ignore[arg-type]


def generated(folder: Path, settings: OpenEnvSettings, counts: dict[str, int], workers: int = 2) -> ServerTasks:
    return played.generated(OpenEnv(), folder, counts, settings, workers=workers)  # type: ignore[no-any-return]


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
    refused(lambda: session.start({"seed": "3"}), "'words'", "text, hint", error=EnvFailure)
    session.close()
    assert server.all_closed()


def test_the_protocol_of_environments_holds(server: Server, tmp_path: Path) -> None:
    tasks = generated(tmp_path, settings_of(server), {"train": 2, "heldout": 2})
    seed = int(tasks.tasks("train")[0].spec["seed"])
    assert played.findings(tasks, ["look", *solution(seed)]) == []
    assert server.all_closed()
    assert tasks.pool.stats.crashes == tasks.pool.stats.timeouts == 0


@pytest.mark.parametrize(("fault", "token"), [("raise", "lamp went out"), ("nonsense", "'text' is 1"), ("hang", "2 s")])
def test_what_a_server_must_not_do_is_a_failure(server: Server, fault: str, token: str) -> None:
    session = OpenEnvSession(settings_of(server, text="text", timeout=2.0 if fault == "hang" else 20.0))
    session.start({"seed": "3"})
    failure = refused(lambda: session.act(fault), token, error=EnvFailure)
    assert failure.reason is (StopReason.ENV_TIMEOUT if fault == "hang" else StopReason.ENV_CRASHED)
    session.close()
    assert server.all_closed()


SEEN = '{"type": "observation", "data": {"observation": %s, "reward": %s, "done": %s}}'


@pytest.mark.parametrize(
    "message",
    [
        *("no JSON", "[1, 2]", "7", "null", "{}", "[" * 100_000),
        *('{"type": "observation", "data": null}', '{"type": "error", "data": "it broke"}', '{"type": "error"}'),
        *(SEEN % (seen, 0, "false") for seen in ('"a lamp"', "{}", '{"n": 1}')),
        *(SEEN % ('{"text": "a lamp"}', *rest) for rest in (("NaN", "false"), (0, '"no"'))),
        '{"type": "observation", "data": {"observation": {"text": "a lamp"}, "done": false}}',
    ],
)
def test_messages_that_are_none_are_failures(message: str) -> None:
    with talking_nonsense(message) as url:
        session = OpenEnvSession(OpenEnvSettings(url=url, timeout=5.0))
        failure = refused(lambda: session.start({"seed": "3"}), error=EnvFailure)
        assert failure.reason is StopReason.ENV_CRASHED
        assert len(str(failure)) < 320
        session.close()


def test_a_server_that_dies_is_a_failure(tmp_path: Path) -> None:
    with openenv_server(tmp_path) as server:
        session = OpenEnvSession(settings_of(server))
        session.start({"seed": "3"})
        refused(lambda: session.act("exit"), "dropped", "step", error=EnvFailure)
        refused(lambda: session.start({"seed": "3"}), "no OpenEnv server", error=EnvFailure)
        session.close()


def test_a_reset_that_takes_too_long_is_a_failure(tmp_path: Path) -> None:
    with openenv_server(tmp_path, misbehaving="slow") as server:
        began = time.monotonic()
        session = OpenEnvSession(settings_of(server, timeout=0.5))
        failure = refused(lambda: session.start({"seed": "3"}), "reset", "0.5 s", error=EnvFailure)
        assert failure.reason is StopReason.ENV_TIMEOUT
        assert time.monotonic() - began < 10


def test_failures_are_counted_and_the_next_episode_is_played(server: Server, tmp_path: Path) -> None:
    tasks = generated(tmp_path, settings_of(server, text="text", timeout=2.0), {"train": 1, "heldout": 1}, workers=1)
    crash, hang = StopReason.ENV_CRASHED, StopReason.ENV_TIMEOUT
    assert played.failed_and_played_on(tasks, ["nonsense", "hang", "raise"]) == [crash, hang, crash]
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
        refused(lambda: held[2].start({"seed": "3"}), "session", "collect.workers", error=EnvFailure)
        held[0].close()
        assert held[2].start({"seed": "3"}).text
        for session in held:
            session.close()
        assert server.all_closed()


async def test_a_session_ends_with_a_worker_that_is_killed(server: Server, tmp_path: Path) -> None:
    tasks = generated(tmp_path, settings_of(server), {"train": 1, "heldout": 1}, workers=1)
    before = server.counts()["closed"]
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


def test_a_server_that_moved_is_found_by_its_url(server: Server, tmp_path: Path) -> None:
    with openenv_server(tmp_path) as other:
        there = settings_of(other, url=other.url.replace("http", "ws"))
        played.moved(OpenEnv(), tmp_path / "games", settings_of(server), there)
        assert other.all_closed()


def test_a_bad_server_or_option_is_told_in_a_line(server: Server, tmp_path: Path) -> None:
    counts = {"train": 1, "heldout": 1}
    nobody = f"ws://127.0.0.1:{free_port()}"
    cases: list[tuple[dict[str, object], list[str]]] = [
        ({"url": nobody}, ["no OpenEnv server", nobody, "env.options.url"]),
        ({"url": f"{server.url}/lamp"}, ["no OpenEnv server", "/lamp"]),
        ({"action": "words"}, ["words='look'", "env.options.action"]),
        ({"fixed": "mood=bad"}, ["env.options.fixed"]),
    ]
    for options, tokens in cases:
        refused(lambda o=options: generated(tmp_path, settings_of(server, **o), counts), *tokens)  # type: ignore[misc]
    assert not (tmp_path / "games.json").exists()
    assert server.all_closed()


def test_seeds_that_start_alike_are_one_task(tmp_path: Path) -> None:
    with openenv_server(tmp_path, misbehaving="same") as server:
        counts = {"train": 2, "heldout": 1}
        refused(lambda: generated(tmp_path / "games", settings_of(server), counts), "games.train=2", "1 found", "60")
        tasks = generated(tmp_path / "games", settings_of(server, distinct=False), counts)
        assert len({task.id for split in ("train", "heldout") for task in tasks.tasks(split)}) == 3
        asyncio.run(tasks.close())


def test_an_episode_that_is_over_at_once_cannot_be_played(tmp_path: Path) -> None:
    with openenv_server(tmp_path, misbehaving="over") as server:
        refused(lambda: generated(tmp_path, settings_of(server), {"train": 1, "heldout": 1}), "reset", "is over")
        assert server.all_closed()


@pytest.mark.parametrize(
    ("options", "token"),
    [
        ({"url": "localhost:8000"}, "ws://host:port"),
        ({"action": ""}, "action"),
        ({"commands": ""}, "commands"),
        ({"fixed": "loud"}, "name=text"),
        ({"solved": -1.0}, "more than 0"),
        ({"timeout": 0.0}, "more than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, object], token: str) -> None:
    refused(lambda: OpenEnvSettings(**options), token, error=ValueError)  # type: ignore[arg-type]


def test_it_is_found_by_its_name_or_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = find_world("openenv")
    assert isinstance(world, OpenEnv)
    assert sum(share for _, share in world.behaviours([])) == pytest.approx(1.0)
    monkeypatch.setattr("real_envs.worlds.servers.openenv.importlib.util.find_spec", lambda name: None)
    refused(lambda: find_world("openenv"), "pip install 'imagination[openenv]'", error=UnknownWorld)
