"""Sessions of a line an event. If these fail, what was taken back or cut short is taken for what an agent did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from real_envs.trajectory import StopReason
from tests.support.imported import agent, only_of, steps, user


def item(message: dict[str, Any]) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": message["content"]}]
    return {"timestamp": "t", "type": "response_item", "payload": {**message, "type": "message", "content": parts}}


def event(kind: str, **more: Any) -> dict[str, Any]:
    return {"timestamp": "t", "type": "event_msg", "payload": {"type": kind} | more}


def test_turns_that_codex_rolled_back_are_counted_and_no_part_of_the_dialogue(tmp_path: Path) -> None:
    program = user("<environment_context>linux</environment_context>")
    before = [item(user("Fix it.")), item(agent("Fixed."))]
    wrong = [item(program), item(user("Now break it.")), item(agent("Broken."))]
    back, after = event("thread_rolled_back", num_turns=1), [item(user("Test it.")), item(agent("Tested."))]
    episode = only_of(tmp_path, *before, *wrong, back, *after)
    seen = "<environment_context>linux</environment_context>\nTest it."
    assert (episode.start, steps(episode)) == ("Fix it.", [("Fixed.", seen), ("Tested.", "")])
    assert episode.turns[-1].info["log.rewound_messages"] == 2


@pytest.mark.parametrize(
    ("last", "stop"),
    [
        (event("turn_aborted", reason="interrupted"), StopReason.TURN_LIMIT),
        (event("error", message="stream disconnected"), StopReason.ENV_CRASHED),
        (event("token_count"), StopReason.TERMINATED),
    ],
)
def test_an_event_of_codex_says_how_a_session_broke_off(tmp_path: Path, last: Any, stop: StopReason) -> None:
    assert only_of(tmp_path, item(user("Fix it.")), item(agent("I look.")), last).stop is stop


def test_an_error_of_openhands_broke_the_dialogue(tmp_path: Path) -> None:
    said = [{"kind": "MessageEvent", "source": one["role"], "llm_message": one} for one in (user("Hi"), agent("Yo"))]
    error = {"kind": "ConversationErrorEvent", "source": "environment", "code": "E", "detail": "gone"}
    assert only_of(tmp_path, *said, error).failure == "logged: gone"
