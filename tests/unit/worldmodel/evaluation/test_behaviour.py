"""BehR compares log-probs of whole actions; if these fail, it measures something else than what an agent would do."""

from __future__ import annotations

import math

import pytest
import torch

from policy.lm.render import ChatFormat, policy_prompt
from real_envs.trajectory import Owner, Source, StopReason, Trajectory, Turn
from tests.support.asking import TOKENIZER
from tests.support.engines import CONTEXT, MODEL
from worldmodel.evaluation.behaviour import (
    action_logprobs,
    behaviour_metrics,
    behaviour_similarity,
    embedding_distances,
)
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


def test_similarity_of_behaviour_by_a_plain_loop() -> None:
    history = [turn("go", "DARK"), turn("look", "?")]
    pairs = [("A lamp.", "A door."), ("A door.", "A door.")]
    wanted = []
    for texts in pairs:
        scores = [plain("HALL", [history[0], turn("look", text)], "take it") for text in texts]
        wanted.append(math.exp(-abs(scores[0] - scores[1])))
    asked = [(("HALL", history, "take it"), *texts) for texts in pairs]
    found = behaviour_similarity(MODEL, CHAT, asked, CONTEXT)
    assert found == pytest.approx(wanted, abs=1e-3)
    assert found[1] == 1.0
    long = ("x" * CONTEXT, history, "a")
    assert behaviour_similarity(MODEL, CHAT, [(long, "b", "b")], CONTEXT) == [0.0]


def test_distances_of_embeddings_by_hand() -> None:
    with torch.no_grad():
        states = [
            MODEL.model(input_ids=torch.tensor([CHAT.encode(text)])).last_hidden_state[0].mean(0)
            for text in ("A lamp.", "A red door.")
        ]
    wanted = 1 - float(states[0] @ states[1] / (states[0].norm() * states[1].norm()))
    found = embedding_distances(MODEL, CHAT, [("A lamp.", "A red door."), ("A lamp.", "A lamp."), ("", "A lamp.")])
    assert found[:2] == pytest.approx([wanted, 0.0], abs=1e-4)


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
