"""If these fail, how sure a prediction is depends on what was thought before it, or a thought stays in a context."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from imagination.rollout.engines import drafts_from
from policy.lm.backbone import build_model
from policy.lm.engines.inprocess.drafts import Drafts
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.render import ChatFormat
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.engines import shake
from worldmodel.ensemble import EnsembleWorldModel
from worldmodel.formats.full import DELIMITER, FullObservation, prompt_tokens, status_line
from worldmodel.formats.reasoning import ReasoningFormat
from worldmodel.text import TextWorldModel
from worldmodel.world_model import Prediction, PredictionInvalid

SIZES = ModelSettings(hidden=16, layers=2, heads=2, kv_heads=1, mlp=32, context=512)
CHAT = ChatFormat(train_tokenizer(["HALL"], 270, [status_line(0, False), DELIMITER]))
FORM = ReasoningFormat(FullObservation(), 24)


def make_model(seed: int) -> Any:
    """Random weights that end a thought and an answer soon."""
    model = build_model(SIZES, CHAT.tokenizer, seed)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model = shake(model, seed)
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(len(CHAT.tokenizer)))
        for text, bias in ((DELIMITER, 6.5), (status_line(0, False), 6.5)):
            model.lm_head.bias[CHAT.encode(text)[0]] = bias
        model.lm_head.bias[CHAT.stop] = 5.5
    return model


def member(seed: int, drafts: Drafts | None = None) -> TextWorldModel:
    return TextWorldModel(
        InProcessEngine(make_model(seed), SIZES.context, drafts=drafts), CHAT, f"w{seed}", 40, 1.0, FORM
    )


def predictions(model: Any, count: int, history: Sequence[Turn] = ()) -> list[tuple[int, Prediction]]:
    """Of the first seeds at which what is written can be read, with a reasoning that is not empty."""
    found: list[tuple[int, Prediction]] = []
    for seed in range(400):
        try:
            told = asyncio.run(model.predict("HALL", history, "go", seed))
        except PredictionInvalid:
            continue
        if told.reasoning:
            found.append((seed, told))
        if len(found) == count:
            return found
    raise AssertionError("the random model writes nothing that can be read")


def by_loop(model: Any, seed: int) -> tuple[list[int], int, int]:
    """The whole sequence of a prediction, and where in it reasoning and prediction begin."""
    prompt = prompt_tokens(CHAT, FullObservation(), "HALL", [], "go").ids
    written = asyncio.run(model.engine.complete(prompt, model.sampling, seed)).ids
    line = CHAT.encode(DELIMITER)
    assert len(line) == 1
    return [*prompt, *written], len(prompt), len(prompt) + written.index(line[0]) + 1


def given_all_before(model: Any, ids: Sequence[int], start: int) -> list[float]:
    """Probability of each token from ``start`` on, one pass of transformers a token."""
    found = []
    for at in range(start, len(ids)):
        with torch.no_grad():
            logits = model.engine.model(torch.tensor([list(ids[:at])])).logits[0, -1].float()
        found.append(float(logits.softmax(-1)[ids[at]]))
    return found


def test_confidence_is_that_of_the_answer_given_the_reasoning() -> None:
    model = member(0)
    for seed, told in predictions(model, 4):
        ids, thought, answer = by_loop(model, seed)
        assert CHAT.decode(ids[thought : answer - 1]) == told.reasoning
        probabilities = given_all_before(model, ids, answer)
        status = max(i for i in range(answer, len(ids)) if "\n[reward=" in CHAT.decode([ids[i]]))
        assert told.confidence == pytest.approx(math.prod(probabilities), rel=1e-3)
        assert told.outcome_confidence == pytest.approx(math.prod(probabilities[status - answer :]), rel=1e-3)
        assert math.prod(given_all_before(model, ids, thought)) < 0.5 * told.confidence  # of both together: less


def test_members_score_the_prediction_given_the_same_reasoning() -> None:
    model = EnsembleWorldModel([member(0), member(1)])
    for seed, told in predictions(model, 3):
        leader = model.members[model.leader(seed)]
        ids, thought, answer = by_loop(leader, seed)
        assert CHAT.decode(ids[thought : answer - 1]) == told.reasoning
        each = [math.prod(given_all_before(m, ids, answer)) for m in model.members]
        assert told.confidence == pytest.approx(sum(each) / 2, rel=1e-3)


def test_what_is_kept_of_an_episode_holds_no_thought_and_saves_its_history() -> None:
    """The next turn takes over all that it read before the thought, and predicts as if it had read it for itself."""
    model = member(0)
    counts = model.engine.counts  # type: ignore[attr-defined]
    (seed, told), *_ = predictions(model, 1)
    asyncio.run(model.predict("HALL", [], "go", seed, session="s"))
    history = [Turn("go", told.observation, told.reward, False)]
    before, after = (prompt_tokens(CHAT, FORM, "HALL", h, "go").ids for h in ([], history))
    assert after[: len(before)] == before
    (again, alone), *_ = predictions(member(0), 1, history)
    reused, fed, made = counts.reused, counts.fed, counts.generated
    kept = asyncio.run(model.predict("HALL", history, "go", again, session="s"))
    assert (kept.observation, kept.reasoning) == (alone.observation, alone.reasoning)
    assert kept.confidence == pytest.approx(alone.confidence, rel=1e-3)
    assert counts.reused - reused >= len(before)
    assert counts.fed - fed == len(after) - (counts.reused - reused) + (counts.generated - made) - 1


def test_guesses_from_the_log_change_nothing() -> None:
    plain = member(0)
    found = predictions(plain, 5)
    turns = tuple(Turn("go", p.observation, p.reward, p.terminated, {"reasoning": p.reasoning}) for _, p in found)
    log = [
        Trajectory(f"{k}", "t", "g", Source.REAL, "a", 0, "HALL", (turn,), StopReason.TURN_LIMIT)
        for k, turn in enumerate(turns)
    ]
    drafted = member(0, drafts_from(log, CHAT, FORM))
    assert [(s, p.observation, p.reasoning) for s, p in predictions(drafted, 5)] == [
        (s, p.observation, p.reasoning) for s, p in found
    ]
    assert drafted.engine.counts.accepted > 0  # type: ignore[attr-defined]
