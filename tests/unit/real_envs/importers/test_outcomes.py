"""Who solved a task. If these fail, success rates of a log are made up, or a server's error page solves tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from real_envs.chat_server import ChatServer
from real_envs.importers.outcomes import LogJudge, Verdict, shown, with_outcome
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.imported import only, write
from tests.support.judging import Answer, judge, says


def episode(start: str = "Find the key.", turns: int = 1, seen: str = "A key.") -> Trajectory:
    played = tuple(Turn(f"go {k}", seen, 1.0, False) for k in range(turns))
    return Trajectory(start, "t", "g", Source.REAL, "a", 0, start, played, StopReason.TURN_LIMIT, success=True)


def ask(url: str, tmp_path: Path, *episodes: Trajectory, **settings: Any) -> tuple[list[Verdict], dict[str, int]]:
    limits = {key: settings.pop(key) for key in ("timeout", "retries") if key in settings}
    server = ChatServer(url, "m", backoff=0.0, **limits)
    asking = LogJudge(server, tmp_path / "judge.jsonl", **settings)
    try:
        return asking.judge(episodes), dict(asking.counts)
    finally:
        asking.close()


@pytest.mark.parametrize(
    ("answer", "success", "failure"),
    [
        (says('{"success": true}'), True, ""),
        (says('Let me see. {"why": "no key", "success" : false}'), False, ""),
        (says("The task was solved: success is true."), None, "malformed"),
        (says('{"success": true} or {"success": false}'), None, "malformed"),
        (says('{"success": "true"}'), None, "malformed"),
        (says(None), None, "malformed"),
        ((200, b"<html>success: true</html>"), None, "malformed"),
        ((200, {"choices": []}), None, "malformed"),
        (says('{"success": true}', refusal="I will not."), None, "refused"),
        ((400, {"error": "too long"}), None, "refused"),
        ((503, {}), None, "unreachable"),
    ],
)
def test_an_answer_is_a_verdict_or_a_failure_with_a_type(
    tmp_path: Path, answer: Answer, success: bool | None, failure: str
) -> None:
    with judge(lambda _: answer) as server:
        (verdict,), counts = ask(server.url, tmp_path, episode())
    assert (verdict.success, verdict.failure) == (success, failure)
    assert counts == {"asked": 1, "known": 0} | ({failure: 1} if failure else {})
    assert len(server.asked) == (3 if failure == "unreachable" else 1)


def test_nobody_there_is_unreachable_and_a_server_that_comes_back_is_asked_again(tmp_path: Path) -> None:
    with judge(lambda _: says('{"success": true}')) as server:
        url = server.url
    (verdict,), _ = ask(url, tmp_path, episode(), retries=0)
    assert verdict.failure == "unreachable"
    answers = iter([(500, {}), (429, {}), says('{"success": true}')])
    with judge(lambda _: next(answers)) as server:
        (verdict,), _ = ask(server.url, tmp_path, episode())
    assert verdict.success is True


def test_nothing_is_asked_twice_but_failures(tmp_path: Path) -> None:
    def answer(text: str) -> Answer:
        return says('{"success": true}' if "good" in text else '{"success": false}' if "bad" in text else "?")

    told = [episode("good"), episode("bad"), episode("odd"), episode("good")]
    with judge(answer) as server:
        first, _ = ask(server.url, tmp_path, *told)
        assert [verdict.success for verdict in first] == [True, False, None, True]
        assert len(server.asked) == 3
        (tmp_path / "judge.jsonl").open("a").write('{"asked": "cut o')
        again, counts = ask(server.url, tmp_path, *told)
        assert [verdict.success for verdict in again] == [True, False, None, True]
        assert counts == {"asked": 1, "known": 3, "malformed": 1}


def test_the_judge_is_not_told_the_answer(tmp_path: Path) -> None:
    text = shown(episode(), 1000)
    assert "1.0" not in text
    assert "True" not in text
    long = shown(episode(turns=500, seen="x" * 50), 3000)
    assert len(long) < 3100
    assert long.startswith("START: ")
    assert "go 499" in long


def rewarded(*rewards: float | None, success: bool | None = None) -> Trajectory:
    turns = tuple(Turn(f"a{k}", "o", reward, False) for k, reward in enumerate(rewards))
    return Trajectory("e", "t", "g", Source.REAL, "a", 0, "s", turns, StopReason.TURN_LIMIT, success=success)


@pytest.mark.parametrize(
    ("found", "solved_at", "success"),
    [
        (rewarded(20.0, 30.0), 50.0, True),
        (rewarded(20.0, 29.0), 50.0, False),
        (rewarded(-3.0, -2.0), -5.0, True),  # costs
        (rewarded(None, None), 50.0, None),  # nobody measured anything: unknown, and not guessed
        (rewarded(20.0, 30.0), None, None),
        (rewarded(0.0, success=True), 50.0, True),  # what is stated stays
        (rewarded(90.0, success=False), 50.0, False),
    ],
)
def test_the_threshold_judges_who_does_not_say(
    found: Trajectory, solved_at: float | None, success: bool | None
) -> None:
    assert with_outcome(found, solved_at).success is success
    assert [turn.reward for turn in with_outcome(found, solved_at).turns] == [turn.reward for turn in found.turns]


def test_a_bare_success_is_earned_at_the_end_and_worth_what_solves_in_this_log() -> None:
    for found, solved_at, rewards in (
        (rewarded(None, None, success=True), None, [0.0, 1.0]),
        (rewarded(None, None, success=False), None, [0.0, 0.0]),
        (rewarded(None, None, success=True), 10.0, [0.0, 10.0]),
        (rewarded(None, success=True), -5.0, [None]),  # costs: 0 would solve
    ):
        assert [turn.reward for turn in with_outcome(found, solved_at).turns] == rewards


def test_what_broke_is_not_with_outcome() -> None:
    broken = replace(rewarded(None, success=True), stop=StopReason.ENV_CRASHED)
    assert with_outcome(broken, 1.0) == broken


@pytest.mark.parametrize(
    ("observation", "seen", "reward", "success"),
    [
        ("Your score (min 0.0, max 1.0): 1.0\n\n1 1.0 1.0 0.0\n", "Your score (min 0.0, max 1.0): 1.0", 1.0, True),
        ("m =\n\n1 2 3 4", "m =\n\n1 2 3 4", None, None),
        ("rows\n1 0.5 0.5 0.0", "rows\n1 0.5 0.5 0.0", None, None),
        ("rows\n\n1 0.5 0.5 0.0\n\nmore", "rows\n\n1 0.5 0.5 0.0\n\nmore", None, None),
        ("pages\n5 1-2 3-4 6", "pages\n5 1-2 3-4 6", None, None),
        ("Your score (min 0.0, max 1.0): 0.5.1", "Your score (min 0.0, max 1.0): 0.5.1", 0.5, None),
    ],
)
def test_rates_of_a_runner_are_floats_at_the_end_of_an_episode(
    tmp_path: Path, observation: str, seen: str, reward: float | None, success: bool | None
) -> None:
    episode = only(write(tmp_path / "a.txt", f"Question: q\nAction: go\nObservation: {observation}"))
    assert [(turn.observation, turn.reward) for turn in episode.turns] == [(seen, reward)]
    assert episode.success is success
