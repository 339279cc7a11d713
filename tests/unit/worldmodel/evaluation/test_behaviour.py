"""BehR compares log-probs of whole actions; if these fail, it measures something else than what an agent would do."""

from __future__ import annotations

import pytest
import torch

from policy.lm.render import ChatFormat, policy_prompt
from real_envs.trajectory import Owner, Source, StopReason, Trajectory, Turn
from tests.support.asking import TOKENIZER
from tests.support.engines import CONTEXT, MODEL
from worldmodel.evaluation.behaviour import action_logprobs, behaviour_metrics
from worldmodel.evaluation.transitions import Judged
from worldmodel.world_model import Prediction

CHAT = ChatFormat(TOKENIZER)


def plain(start: str, history: list[Turn], action: str) -> float:
    """One row, one full forward pass, one token at a time."""
    prompt = policy_prompt(CHAT, start, history, Owner.SCAFFOLD).ids
    wanted = [*CHAT.encode(action), CHAT.stop]
    ids = torch.tensor([[*prompt, *wanted]])
    with torch.no_grad():
        table = MODEL(ids).logits[0].float().log_softmax(-1)
    return sum(table[len(prompt) + k - 1, token].item() for k, token in enumerate(wanted))


def turn(action: str, observation: str) -> Turn:
    return Turn(action, observation, 0.0, False)


def test_log_probs_of_whole_actions() -> None:
    """Several lengths in one batch, padded; the end token counts; what does not fit the context has no answer."""
    questions = [
        ("HALL", [], "a"),
        ("HALL", [turn("go", "DARK")], "take it"),
        ("H", [turn("a", "b"), turn("c", "d")], ""),
    ]
    found = action_logprobs(MODEL, CHAT, questions, CONTEXT)
    assert found == pytest.approx([plain(s, h, a) for s, h, a in questions], abs=1e-3)
    assert action_logprobs(MODEL, CHAT, questions, CONTEXT, max_tokens=1) == pytest.approx(found, abs=1e-3)
    long = ("x" * CONTEXT, [], "a")
    assert action_logprobs(MODEL, CHAT, [long, questions[0]], CONTEXT)[0] is None
    assert action_logprobs(MODEL, CHAT, [], CONTEXT) == []


def test_behr_by_a_plain_loop() -> None:
    """Only the last observation is replaced; a right prediction counts as 0, a malformed one and a last turn not."""
    turns = (turn("go", "DARK"), turn("look", "LAMP"), turn("take", "TAKEN"), turn("end", "END"))
    played = Trajectory("e", "t", "g", Source.REAL, "a", 0, "HALL", turns, StopReason.TURN_LIMIT)
    guesses = [
        Prediction("LIGHT", 0.0, False, 1.0, 1.0),
        Prediction("LAMP", 0.0, False, 1.0, 1.0),
        None,
        Prediction("?", 0.0, False, 1.0, 1.0),
    ]
    judged = [Judged("e", k, turns[k], guess, "t") for k, guess in enumerate(guesses)]
    difference = plain("HALL", [turn("go", "LIGHT")], "look") - plain("HALL", [turn("go", "DARK")], "look")
    assert abs(difference) > 1e-2  # the policy notices
    found = behaviour_metrics(judged, [played], MODEL, CHAT, CONTEXT, seed=0)
    assert (found["behr"]["value"], found["behr"]["n"]) == (pytest.approx(difference / 2, abs=1e-3), 2)
    assert found["absolute"]["value"] == pytest.approx(abs(difference) / 2, abs=1e-3)
    assert found["differing"] == 1
