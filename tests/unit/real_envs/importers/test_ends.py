"""Why logged episodes ended. If these fail, cut or broken rollouts teach that the world ends there."""

from __future__ import annotations

from typing import Any

import pytest

from real_envs.importers.drafts import Reading, finish
from real_envs.importers.ends import ending_of
from real_envs.importers.openai_chat import chat_draft
from real_envs.trajectory import StopReason as Stop
from worldmodel.objective import transition_weights

SAID = [
    {"role": "user", "content": "A hall."},
    {"role": "assistant", "content": "go"},
    {"role": "user", "content": "An attic."},
    {"role": "assistant", "content": "take lamp"},
]


@pytest.mark.parametrize(
    ("beside", "stop"),
    [
        ({}, None),
        ({"is_truncated": True, "stop_condition": "max_turns_reached"}, Stop.TURN_LIMIT),
        ({"is_truncated": False, "stop_condition": "max_turns_reached"}, Stop.TURN_LIMIT),
        ({"is_truncated": True, "stop_condition": "prompt_too_long"}, Stop.CONTEXT_LIMIT),
        ({"is_truncated": True, "stop_condition": "left_room"}, Stop.TURN_LIMIT),
        ({"is_truncated": False, "stop_condition": "left_room"}, Stop.TERMINATED),
        ({"is_truncated": True}, Stop.TURN_LIMIT),
        ({"is_truncated": 1}, Stop.TURN_LIMIT),
        ({"is_truncated": "True"}, Stop.TURN_LIMIT),
        ({"is_truncated": 0}, None),
        ({"is_completed": False}, Stop.TURN_LIMIT),
        ({"is_completed": True}, None),
        ({"done": True}, Stop.TERMINATED),
        ({"info": {"TimeLimit.truncated": True}, "done": True}, Stop.TURN_LIMIT),
        ({"metadata": {"stop_reason": "max_tokens"}}, Stop.CONTEXT_LIMIT),
        ({"termination_reason": "unknown"}, None),
        ({"exception_info": {"exception_type": "AgentTimeoutError"}}, Stop.ENV_TIMEOUT),
        ({"truncated": True, "terminated": False}, Stop.TURN_LIMIT),
        ({"stop_condition": "max_score_reached"}, Stop.TERMINATED),  # of the task, not a limit of ours
        ({"stop_condition": "no_errors_left"}, Stop.TERMINATED),
        ({"stop_condition": "timeout_reached"}, Stop.TURN_LIMIT),
        ({"finish_reason": "length"}, Stop.CONTEXT_LIMIT),
        ({"finish_reason": "stop"}, None),
        ({"stop_reason": "max_tokens"}, Stop.CONTEXT_LIMIT),
        ({"stop_reason": "end_turn"}, None),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, Stop.CONTEXT_LIMIT),
        ({"status": "completed"}, None),
        ({"termination_reason": "user_stop"}, Stop.TERMINATED),
        ({"termination_reason": "max_steps"}, Stop.TURN_LIMIT),
        ({"termination_reason": "too_many_errors"}, Stop.TURN_LIMIT),
        ({"termination_reason": "agent_error"}, Stop.ENV_CRASHED),
        ({"info": {"exit_status": "submitted"}}, Stop.TERMINATED),
        ({"info": {"exit_status": "submitted (exit_context)"}}, Stop.CONTEXT_LIMIT),
        ({"info": {"exit_status": "submitted (exit_cost)"}}, Stop.TURN_LIMIT),
        ({"info": {"exit_status": "LimitsExceeded"}}, Stop.TURN_LIMIT),
        ({"info": {"exit_status": "RuntimeError"}}, Stop.ENV_CRASHED),
        ({"info": {"error": "what the task is about"}}, None),
        ({"info": {"exit_status": "ContextWindowExceededError"}}, Stop.CONTEXT_LIMIT),
        ({"info": {"exit_status": "AgentTimeoutError"}}, Stop.ENV_TIMEOUT),
        ({"exit_reason": "error_max_turns"}, Stop.TURN_LIMIT),
        ({"exit_reason": "stuck_in_loop"}, Stop.TURN_LIMIT),
        ({"error": "AgentStuckInLoopError: Agent got stuck in a loop"}, Stop.TURN_LIMIT),
        ({"exit_status": "AgentStuckInLoopError"}, Stop.TURN_LIMIT),
        ({"status": "in_progress"}, Stop.TURN_LIMIT),
        ({"finish_reason": "SAFETY"}, Stop.ENV_CRASHED),
        ({"error": {"error": "SandboxError"}}, Stop.ENV_CRASHED),
        ({"error": "Read timed out"}, Stop.ENV_TIMEOUT),
        ({"error": "Agent reached maximum number of steps: max_steps"}, Stop.TURN_LIMIT),
        ({"error": "This model's maximum context length is 8192 tokens"}, Stop.CONTEXT_LIMIT),
        ({"error": None}, None),
        ({"error": ""}, None),
        ({"error": float("nan")}, None),
        ({"error": "null "}, None),
        ({"has_error": True, "stop_condition": "agent_completed"}, Stop.ENV_CRASHED),
        ({"has_error": False}, None),
        ({"error": {"type": None, "message": None}}, None),
        ({"stop_condition": "compaction_failed"}, Stop.CONTEXT_LIMIT),
        ({"stop_reason": "pause_turn"}, Stop.TURN_LIMIT),
    ],
)
def test_words_for_an_end(beside: dict[str, Any], stop: Stop | None) -> None:
    assert ending_of(beside).stop is stop


@pytest.mark.parametrize(
    ("beside", "stop", "terminated"),
    [
        ({}, Stop.TERMINATED, True),
        ({"is_truncated": True, "stop_condition": "max_turns_reached"}, Stop.TURN_LIMIT, False),
        ({"stop_condition": "prompt_too_long"}, Stop.CONTEXT_LIMIT, False),
        ({"error": "gone"}, Stop.ENV_CRASHED, False),
    ],
)
def test_a_reward_does_not_make_an_end_of_a_cut(beside: dict[str, Any], stop: Stop, terminated: bool) -> None:
    for said, reward in ((SAID, 1.0), (SAID[:3], 0.4)):
        episode, _ = finish(chat_draft({"messages": said, "reward": reward} | beside, Reading()))
        assert (episode.stop, episode.turns[-1].terminated) == (stop, terminated)
        assert episode.turns[-1].reward == reward
        assert episode.solved is (reward == 1.0 and stop is not Stop.ENV_CRASHED)
        missing = said is SAID and not terminated
        assert ("log.left_out.answer to the last action" in episode.turns[-1].info) is missing
        assert episode.turns[-1].known is not missing
        weights = transition_weights([episode])[0]
        assert (weights[-1] == 0.0) is missing, "no world model learns an answer that nobody logged"
    failed, _ = finish(chat_draft({"messages": SAID} | beside, Reading()))
    assert (failed.failure is not None) is (stop is Stop.ENV_CRASHED)


def test_the_agents_last_message_says_that_it_was_cut() -> None:
    cut = [*SAID[:3], SAID[3] | {"finish_reason": "length"}]
    assert finish(chat_draft({"messages": cut}, Reading()))[0].stop is Stop.CONTEXT_LIMIT
    earlier = [SAID[0], SAID[1] | {"finish_reason": "length"}, *SAID[2:]]
    assert finish(chat_draft({"messages": earlier}, Reading()))[0].stop is Stop.TERMINATED
