"""If these fail, a world that is written as code is tested wrongly, or one that hangs is waited for."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace

import pytest

from imagination.settings.models import CodeSettings
from real_envs.chat_server import ChatServer
from tests.support.judging import judge, says
from tests.support.tiny import TASKS, logged_episode
from worldmodel.code.world_model import CodeWorldModel
from worldmodel.code.write import Written, source_of, write_world

LOG = [logged_episode(task, number) for task in TASKS for number in range(40)]
HANGS = "def step(start, history, action):\n    while True: pass\n"
NOTHING = 'def step(s, h, action):\n    return {"observation": "Nothing new.", "reward": 0, "terminated": False}\n'
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="code is run where Linux confines it")


def written(source: str, log: object = LOG, **settings: float) -> tuple[Written, list[str]]:
    """What is kept of this program, and what was asked."""
    limits = replace(CodeSettings(rounds=1, failures=100, seconds=5.0), **settings)
    with judge(lambda asked: says(source)) as server:
        client = ChatServer(server.url, "m", backoff=0.0)
        found = write_world(log, (), client, limits, seed=0)  # type: ignore[arg-type]  # a list of episodes
        client.close()
    return found, server.asked


@ON_LINUX
def test_a_version_is_judged_by_plain_counting_of_situations() -> None:
    found, asked = written(NOTHING)
    turns = {(t.start, *(u.action for u in t.turns[: k + 1])): t.turns[k] for t in LOG for k in range(len(t.turns))}
    right = sum(turn.observation == "Nothing new." for turn in turns.values())
    assert 0 < right < len(turns) == found.n
    assert found.exact == found.tested == pytest.approx(right / len(turns))
    assert f"wrong in {len(turns) - right} of {len(turns)} logged turns" in asked[1]
    assert asked[1].count("Your program gave ") == len(turns) - right


@ON_LINUX
def test_a_program_that_hangs_everywhere_is_not_waited_for() -> None:
    begin = time.monotonic()
    found, asked = written(HANGS, rounds=1, seconds=0.05)
    assert (found.exact, found.version) == (0.0, 1)
    assert time.monotonic() - begin < 20
    assert "took longer than 0.05 s" in asked[1]


@ON_LINUX
def test_long_texts_are_cut_in_a_question() -> None:
    long = [replace(t, turns=tuple(replace(u, observation="x" * 100_000) for u in t.turns)) for t in LOG[:2]]
    _, asked = written(NOTHING, long)
    assert max(map(len, asked)) < 60_000
    assert "98000 more characters" in asked[0]


@ON_LINUX
def test_a_reward_that_was_not_logged_is_shown_as_unknown() -> None:
    first, second = LOG[0], LOG[1]
    unpaid = replace(first, turns=tuple(replace(turn, reward=None) for turn in first.turns))
    _, asked = written(NOTHING, [unpaid, second])
    assert asked[0].count("(reward unknown") == len(first.turns)
    assert asked[0].count("(reward ") == len(first.turns) + len(second.turns)


@ON_LINUX
def test_nothing_runs_before_an_answer_is_there() -> None:
    """Else an engine steps with those that are answered by then, and two equal trainings round differently."""

    async def order() -> list[str]:
        seen, model = list[str](), CodeWorldModel(NOTHING)
        other = asyncio.create_task(asyncio.to_thread(seen.append, "other"))
        await model.predict("S", (), "look", 0)
        seen.append("answer")
        await other
        model.close()
        return seen

    assert asyncio.run(order()) == ["answer", "other"]


def test_code_is_found_in_an_answer() -> None:
    assert source_of("def step(): 1") == "def step(): 1"
    assert source_of("think\n```\nold\n```\nmore\n```python\nnew\n```\nend") == "new\n"
    assert source_of("```python\ncut off") == "cut off\n"


@pytest.mark.parametrize("wrong", [{"turns": 0}, {"seconds": 0}, {"megabytes": 10}])
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(CodeSettings(), **wrong)
