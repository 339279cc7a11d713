"""When a new world model is believed. If these fail, a policy dreams in one that got worse."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from imagination.loop.refit import log_likelihood, no_worse, true_turns
from imagination.session import Log
from imagination.settings import Config
from policy.lm.backbone import build_model
from policy.lm.render import ChatFormat
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import NO_ANSWER, Owner, Turn
from tests.support.scripted import Answering
from tests.support.tiny import logged_episode
from worldmodel.formats.full import FullObservation, episode_tokens
from worldmodel.rewards import Goal, GoalWorldModel
from worldmodel.world_model import Prediction


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ({"old": -0.5, "new": -2.0}, {"old": -0.505, "new": -0.9}, True),
        ({"old": -0.5, "new": -2.0}, {"old": -0.6, "new": -0.1}, False),  # its own batch alone got likelier
        ({"old": -0.5, "new": -2.0}, {"old": -0.4, "new": -2.1}, False),
        ({"old": -0.5, "new": None}, {"old": -0.5, "new": None}, True),
        ({"old": None, "new": None}, {"old": None, "new": None}, False),  # nothing is known of it
        ({"old": -0.5, "new": None}, {"old": math.nan, "new": None}, False),
    ],
)
def test_a_version_is_believed_where_no_kind_of_episode_got_less_likely(
    before: dict[str, float | None], after: dict[str, float | None], wanted: bool
) -> None:
    assert no_worse(before, after, tolerance=0.01) is wanted


def test_a_dream_with_a_declared_goal_is_true_where_it_pays_as_the_goal_does() -> None:
    """The log pays for each turn, and does not end where the goal is met."""
    turns = (Turn("go", "A hall.", 0.25, False), Turn("go", "You win.", 0.75, False))
    held = [replace(logged_episode("corridor-a", k), turns=turns) for k in range(12)]
    config = Config()
    config.worldmodel.goal = goal = Goal(observation="win")
    says = Answering(lambda seen, action: Prediction(turns[len(seen)].observation, 0.0, False, 0.9, 0.9))
    model = GoalWorldModel(says, goal)
    session: Any = SimpleNamespace(config=config, log=Log(held, held), world_model=lambda temperature: model)
    assert true_turns(session) == 2


def test_the_log_likelihood_of_a_turn_is_that_of_a_plain_loop() -> None:
    episodes = [logged_episode(task, k) for task in ("corridor-a", "corridor-b") for k in range(3)]
    texts = [t.start for t in episodes] + [u.observation for t in episodes for u in t.turns]
    chat = ChatFormat(train_tokenizer(texts, 300, []))
    settings = ModelSettings(hidden=32, layers=1, heads=2, kv_heads=2, mlp=64, context=256)
    model = build_model(settings, chat.tokenizer, 0).eval()
    total, turns = 0.0, 0
    for episode in episodes:
        tokens = episode_tokens(chat, episode, FullObservation())
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens.ids])).logits[0].double().log_softmax(-1)
        total += sum(
            float(logprobs[i - 1, token])
            for i, (token, owner) in enumerate(zip(tokens.ids, tokens.owners, strict=True))
            if owner == Owner.ENV
        )
        turns += len(episode.turns)
    for micro in (64, 4096):
        found = log_likelihood(model, chat, FullObservation(), episodes, 256, micro)
        assert found == pytest.approx(total / turns, rel=1e-4)
    assert log_likelihood(model, chat, FullObservation(), [], 256, 64) is None
    cut = Turn("look", "", 0.0, False, {NO_ANSWER: 1.0})
    episodes = [replace(t, turns=(*t.turns, cut)) for t in episodes]
    assert log_likelihood(model, chat, FullObservation(), episodes, 256, 64) == pytest.approx(total / turns, rel=1e-4)
