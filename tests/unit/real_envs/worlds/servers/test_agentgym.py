"""AgentGym servers. If these fail, environments leak on servers, or what a broken server says is learned from."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from real_envs.env import EnvFailure
from real_envs.trajectory import StopReason
from real_envs.world import find_world
from real_envs.worlds.servers.agentgym import AgentGym, AgentGymSession, AgentGymSettings, close_left_open, numbers_of
from real_envs.worlds.servers.client import ServerTasks
from tests.support import played
from tests.support.agentgym_server import RAW, agentgym_server
from tests.support.lamp_game import doors, solution
from tests.support.refusal import refused
from tests.support.subprocess_server import Server, free_port

OPTIONS = {  # by style of the server
    "id": {},
    "score": {"score": "score", "solved": 100.0},
    "env_idx": {"task": "session_id"},
    "name": {},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with agentgym_server(tmp_path_factory.mktemp("agentgym")) as running:
        yield running


def settings_of(server: Server, **options: object) -> AgentGymSettings:
    return AgentGymSettings(**{"url": server.url, "timeout": 20.0, **options})  # type: ignore[arg-type]


def generated(folder: Path, settings: AgentGymSettings, counts: dict[str, int], seed: int = 0) -> ServerTasks:
    return played.generated(AgentGym(), folder, counts, settings, seed, workers=2)  # type: ignore[no-any-return]


@pytest.mark.parametrize("style", list(OPTIONS))
def test_each_style_is_played_to_its_end(style: str, tmp_path: Path) -> None:
    with agentgym_server(tmp_path, style) as server:
        session = AgentGymSession(settings_of(server, **OPTIONS[style]))
        for task in (3, 5):  # one after the other in the same environment
            began = session.start({"task": str(task)})
            first, second = doors(task)
            goal, seen = f"Find the lamp behind the {second} door.", f"You see a {first} door."
            assert began.text == (f"{goal}\n{seen}" if style == "score" else f"{goal} {seen}")
            assert not began.done
            said = [session.act(action) for action in ["fly", *solution(task)]]
            assert [s.text for s in said][::3] == ["Unknown action.", "You take the lamp."]
            assert [s.reward for s in said] == pytest.approx([0.0, 0.0, 0.5, 0.5])
            assert [s.done for s in said] == [False, False, False, True]
            assert bool(said[0].commands) == (style in ("id", "name")), "the others do not offer what can be done"
        assert server.counts()["open"] == 1
        session.close()
        session.close()
        closes = style != "name"
        assert server.all_closed(5.0 if closes else 0.2) == closes, "one server knows no /close, and that is no fault"


def test_a_reset_that_says_nothing_is_followed_by_a_look(tmp_path: Path) -> None:
    with agentgym_server(tmp_path, misbehaving="quiet") as server:
        session = AgentGymSession(settings_of(server))
        assert session.start({"task": "3"}).text.startswith("Find the lamp")
        session.close()


def test_the_protocol_of_environments_holds(server: Server, tmp_path: Path) -> None:
    tasks = generated(tmp_path, settings_of(server), {"train": 2, "heldout": 2})
    number = int(tasks.tasks("train")[0].spec["task"])
    assert played.findings(tasks, ["look", *solution(number)]) == []
    assert server.all_closed()
    assert tasks.pool.stats.crashes == tasks.pool.stats.timeouts == 0


FAULTS = dict.fromkeys([*RAW, "error 500", "moved", "endless", "drop", "half"], StopReason.ENV_CRASHED)
FAULTS |= dict.fromkeys(["hang", "drip"], StopReason.ENV_TIMEOUT)


@pytest.mark.parametrize("fault", list(FAULTS))
def test_what_a_server_must_not_do_is_a_failure(server: Server, fault: str) -> None:
    session = AgentGymSession(settings_of(server, timeout=0.5 if FAULTS[fault] is StopReason.ENV_TIMEOUT else 20.0))
    session.start({"task": "3"})
    began = time.monotonic()
    failure = refused(lambda: session.act(fault), error=EnvFailure)
    assert failure.reason is FAULTS[fault]
    assert time.monotonic() - began < 5
    assert len(str(failure)) < 320
    session.close()
    assert server.all_closed()


def test_errors_with_status_200_are_failures(server: Server) -> None:
    session = AgentGymSession(settings_of(server))
    refused(lambda: session.start({"task": "9999"}), "'list index out of range'", error=EnvFailure)
    session.start({"task": "3"})
    for action in solution(3):
        session.act(action)
    refused(lambda: session.act("look"), "has finished", error=EnvFailure)
    session.close()


@pytest.mark.parametrize(("misbehaving", "token"), [("full", "is left"), ("no handle", "'id'"), ("over", "is over")])
def test_a_server_that_cannot_be_played_is_told_in_a_line(misbehaving: str, token: str, tmp_path: Path) -> None:
    with agentgym_server(tmp_path, misbehaving=misbehaving) as server:
        refused(lambda: generated(tmp_path / "games", settings_of(server), {"train": 1, "heldout": 1}), token)
        assert server.counts()["open"] == server.counts()["closed"]


def test_a_reset_that_takes_too_long_is_a_failure(tmp_path: Path) -> None:
    with agentgym_server(tmp_path, misbehaving="slow") as server:
        session = AgentGymSession(settings_of(server, timeout=0.5))
        failure = refused(lambda: session.start({"task": "3"}), "/reset", server.url, "0.5 s", error=EnvFailure)
        assert failure.reason is StopReason.ENV_TIMEOUT


def test_failures_are_counted_and_the_next_episode_is_played(server: Server, tmp_path: Path) -> None:
    tasks = generated(tmp_path, settings_of(server, timeout=1.0), {"train": 1, "heldout": 1})
    crash, hang = StopReason.ENV_CRASHED, StopReason.ENV_TIMEOUT
    assert played.failed_and_played_on(tasks, ["nonsense", "hang", "drop", "error 500"]) == [crash, hang, crash, crash]
    stats = tasks.pool.stats
    assert (stats.crashes, stats.timeouts, stats.steps, stats.resets) == (3, 1, 5, 5)
    assert server.all_closed()


def test_what_killed_workers_had_open_is_closed(server: Server, tmp_path: Path) -> None:
    """An episode that is cancelled, as all are at Ctrl-C, ends its worker by force."""
    tasks = generated(tmp_path, settings_of(server), {"train": 1, "heldout": 1})

    async def play() -> None:
        env = tasks.make_env()
        await env.reset(tasks.tasks("train")[0], 0)
        step = asyncio.ensure_future(env.step("hang"))
        await asyncio.sleep(0.3)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        counts = server.counts()
        assert counts["open"] == counts["closed"] + 1, "nobody could close it yet"
        await tasks.close()

    asyncio.run(play())
    assert server.all_closed()


def test_handles_that_cannot_be_closed_hold_nothing_up(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    (folder / "a").write_text(json.dumps({"id": 3}))
    (folder / "b").write_text("{")
    close_left_open(f"http://127.0.0.1:{free_port()}", folder)
    assert not folder.exists()
    close_left_open("http://127.0.0.1:1", folder)


def test_splits_do_not_meet_and_a_seed_decides(server: Server, tmp_path: Path) -> None:
    settings = settings_of(server, train="0-49", heldout="50-99+120")
    drawn = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        tasks = generated(tmp_path / name, settings, {"train": 12, "heldout": 8}, seed)
        drawn[name] = [[int(t.spec["task"]) for t in tasks.tasks(split)] for split in ("train", "heldout")]
        asyncio.run(tasks.close())
    assert drawn["a"] == drawn["b"] != drawn["c"]
    train, heldout = drawn["a"]
    assert set(train) <= set(range(50))
    assert set(heldout) <= {*range(50, 100), 120}
    starts = [tuple(doors(number)) for number in train + heldout]
    assert len(set(starts)) == 20, "tasks that start alike are one task"


def test_a_server_that_moved_is_found_by_its_url(server: Server, tmp_path: Path) -> None:
    with agentgym_server(tmp_path) as other:
        played.moved(AgentGym(), tmp_path / "games", settings_of(server), settings_of(other))
        assert other.all_closed()


def test_a_bad_server_or_option_is_told_in_a_line(server: Server, tmp_path: Path) -> None:
    counts = {"train": 1, "heldout": 1}
    nobody = f"http://127.0.0.1:{free_port()}"
    cases: list[tuple[dict[str, object], list[str]]] = [
        ({"url": nobody}, [nobody, "env.options.url"]),
        ({"url": f"{server.url}/lamp"}, ["/create", "HTTP 404"]),
        ({"task": "game"}, ["data_idx"]),
        ({"task": "id"}, ["env.options.task"]),
        ({"reward": "points"}, ["'points'", "observation, reward, done"]),
        ({"heldout": "9000-9001"}, ["index out of range"]),
    ]
    for options, tokens in cases:
        refused(lambda o=options: generated(tmp_path, settings_of(server, **o), counts), *tokens)  # type: ignore[misc]
    few, three = settings_of(server, train="0-1"), counts | {"train": 3}
    refused(lambda: generated(tmp_path, few, three), "env.options.train=0-1", "games.train=3", "2 found")
    assert not (tmp_path / "games.json").exists()
    assert server.all_closed()
    alike = settings_of(server, train="0-99", distinct=False)
    asyncio.run(generated(tmp_path, alike, {"train": 90, "heldout": 1}).close())


@pytest.mark.parametrize(
    ("options", "token"),
    [
        ({"url": "ws://localhost:1"}, "http://host:port"),
        ({"task": ""}, "task"),
        ({"reward": ""}, "reward"),
        ({"commands": "|"}, "commands"),
        ({"create": "id"}, "name=text"),
        ({"solved": 0.0}, "more than 0"),
        ({"timeout": float("nan")}, "more than 0"),
        ({"train": "0-100"}, "such as 100"),
        ({"train": "9-3"}, "1 to 1,000,000"),
        ({"train": "0-99999999999999"}, "1 to 1,000,000"),
        ({"train": "all"}, "first-last"),
        ({"train": ""}, "first-last"),
        ({"train": "1-2-3"}, "first-last"),
        ({"train": "1-"}, "first-last"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, object], token: str) -> None:
    refused(lambda: AgentGymSettings(**options), token, error=ValueError)  # type: ignore[arg-type]


def test_numbers_of_tasks_are_read() -> None:
    assert numbers_of("0-3 + 7+2-4") == [0, 1, 2, 3, 4, 7]


def test_it_is_found_by_its_name_and_its_agents_are_shares_of_one() -> None:
    world = find_world("agentgym")
    assert isinstance(world, AgentGym)
    assert sum(share for _, share in world.behaviours([])) == pytest.approx(1.0)
