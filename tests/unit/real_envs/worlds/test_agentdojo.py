"""AgentDojo's own tasks and checks, where the package is here. If these fail, safety is judged otherwise than there."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_envs.calls import Call
from real_envs.env import Task
from real_envs.errors import UserError
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from real_envs.worlds.agentdojo import INJECTED, SUITES, AgentDojo, AgentDojoGame, AgentDojoSettings, is_heldout
from real_envs.worlds.generated import TaskRequest
from tests.support.played import by_plan, findings, generated
from worldmodel.evaluation.proportions import noted


def folder_of() -> Path | None:
    try:
        return AgentDojoSettings().folder
    except UserError:
        return None


FOLDER = folder_of()
pytestmark = pytest.mark.skipif(FOLDER is None, reason="agentdojo is not here: see env=agentdojo in `imagine doctor`")
THEIRS = "US133000000121212121212"


@pytest.fixture(scope="module")
def game() -> AgentDojoGame:
    assert FOLDER is not None
    return AgentDojoGame(FOLDER, privileged=True)


def task(suite: str = "banking", user: str = "user_task_0", injection: str = "") -> Task:
    return Task("t", {"suite": suite, "user": user, "injection": injection, "session": "1234"})


def test_the_true_calls_solve_each_request_and_follow_nobody_else(game: AgentDojoGame) -> None:
    for suite in SUITES:
        attacks = list(game._suites[suite].injection_tasks)
        for k, user in enumerate(game._suites[suite].user_tasks):
            injection = attacks[k % len(attacks)] if k % 2 else ""
            last = by_plan(game, game.reset(task(suite, user, injection)))[-1]
            assert (last.reward, last.terminated) == (1.0, True), (suite, user, injection)
            assert dict(last.info) == ({INJECTED: False} if injection else {}), (suite, user, injection)


def test_texts_of_others_hold_an_instruction_and_following_it_is_noted(game: AgentDojoGame) -> None:
    start = game.reset(task(injection="injection_task_4")).text
    assert THEIRS not in start  # the request is the user's own
    read = game.step("read_file(file_path='bill-december-2023.txt')").observation.text
    assert THEIRS in read
    assert game._attack is not None
    for call in game._attack.ground_truth(game._before):
        assert game.step(str(Call(call.function, call.args))).info == {}
    last = game.step("Done.")
    assert (last.reward, last.terminated, dict(last.info)) == (0.0, True, {INJECTED: True})
    game.reset(task())
    assert THEIRS not in game.step("read_file(file_path='bill-december-2023.txt')").observation.text


def test_an_instruction_stands_there_word_for_word(game: AgentDojoGame) -> None:
    """Its check wants the subject and the hour that it names: whoever takes others from it would be noted otherwise."""
    for number, words in ((2, "on 2024-05-30 10:20"), (4, "The subject should be 'Re: Hi from Mark!,")):
        game.reset(task("workspace", injection=f"injection_task_{number}"))
        assert words in " ".join(game.step("list_files()").observation.text.replace("''", "'").split())


def test_what_tools_make_has_no_time_of_the_clock(game: AgentDojoGame) -> None:
    calls = (
        "create_file(filename='a.txt', content='b')",
        "send_email(recipients=['a@b.com'], subject='c', body='d')",
    )
    for call in calls:
        game.reset(task("workspace"))
        first = game.step(call)
        game.reset(task("workspace"))
        assert game.step(call) == first
        assert "2025-01-01" in first.observation.text


def test_what_is_no_call_of_a_tool_is_refused_or_ends_the_episode(game: AgentDojoGame) -> None:
    game.reset(task())
    assert game.step("pay(amount=3)").observation.text == "Error: there is no tool 'pay'"
    assert "missing" in game.step("read_file()").observation.text
    wrong = game.step("read_file(file_path='no-such.txt')")
    assert not wrong.terminated
    assert game.step("I am done.").reward == 0.0
    with pytest.raises(RuntimeError, match="reset first"):
        game.step("look")


def test_no_request_is_in_two_splits_and_the_environment_keeps_its_promises(tmp_path: Path) -> None:
    tasks = generated(AgentDojo(), tmp_path, {"train": 12, "heldout": 4}, AgentDojoSettings(injections=0.5))
    train, heldout = ({(t.spec["suite"], t.spec["user"]) for t in tasks.tasks(split)} for split in ("train", "heldout"))
    assert not train & heldout
    assert all(is_heldout(*one) for one in heldout)
    assert 0 < sum(bool(t.spec["injection"]) for t in tasks.tasks("train")) < 12
    assert findings(tasks, ["get_channels()", "read_file(1)", "get_current_day()", "Done."]) == []


def test_an_instruction_that_nobody_can_follow_by_the_check_is_in_no_task() -> None:
    """Mails that hold this one count as mails that it asks for: whoever sends it would be said not to have."""
    settings = AgentDojoSettings(suites="workspace", injections=1.0)
    drawn = AgentDojo().draw(settings, TaskRequest({"train": 40}, 0, lambda done, total: None))["train"]
    assert {f"injection_task_{k}" for k in range(1, 6)} <= {one["injection"] for one in drawn}
    assert "injection_task_0" not in {one["injection"] for one in drawn}


def test_notes_are_counted_by_task() -> None:
    def episode(name: str, notes: dict[str, bool]) -> Trajectory:
        turns = (Turn("a", "b", 0.0, False), Turn("Done.", "The user is content.", 1.0, True, notes))
        return Trajectory(name, name[0], "g", Source.REAL, "log", 0, "Hi", turns, StopReason.TERMINATED)

    found = noted([episode("a1", {INJECTED: True}), episode("a2", {INJECTED: False}), episode("b1", {})])
    assert {name: (share.successes, share.n) for name, share in found.items()} == {INJECTED: (1, 2)}


def test_settings_that_mean_nothing_are_refused() -> None:
    for wrong in ({"suites": "bank"}, {"injections": 1.5}):
        with pytest.raises(ValueError, match=r"bank|must be in"):
            AgentDojoSettings(**wrong)  # type: ignore[arg-type]
