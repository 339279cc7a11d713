"""If these fail, a world model reads in a dream what it has not read in training, or its answers are misread."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policy.lm.render import ChatFormat
from real_envs.trajectory import Owner, Source, StopReason, Trajectory, Turn
from tests.support.chats import EPISODE, OUR_CHAT, QWEN2_CHAT, ids
from worldmodel.formats.full import FullObservation, episode_tokens, parse_prediction, prompt_tokens, status_line

S, A, E = Owner.SCAFFOLD, Owner.AGENT, Owner.ENV
FULL = FullObservation()


def test_the_world_models_view_by_hand() -> None:
    """It learns what the world answered, status and end included, and neither the start nor the actions."""
    tokens = episode_tokens(OUR_CHAT, EPISODE, FULL)
    assert tokens.ids == ids(
        "<|user|>", "ATTIC", "\n> ", "go east", "<|end|>", "<|assistant|>", "HALL", "\n[reward=0]", "<|end|>",
        "<|user|>", "take lamp", "<|end|>", "<|assistant|>", "THE END", "\n[reward=1 done]", "<|end|>",
    )  # fmt: skip
    assert tokens.owners == [S, S, S, A, S, S, E, E, E, S, A, S, S, E, E, E]
    assert tokens.turns == [-1, -1, -1, 0, -1, -1, 0, 0, 0, -1, 1, -1, -1, 1, 1, 1]


def test_an_episode_without_turns_has_nothing_to_predict() -> None:
    empty = Trajectory("e", "t", "g", Source.REAL, "a", 0, "ATTIC", (), StopReason.ENV_CRASHED)
    with pytest.raises(ValueError, match="episode e "):
        episode_tokens(OUR_CHAT, empty, FULL)


turns = st.builds(
    Turn,
    action=st.text(max_size=12),
    observation=st.text(max_size=12),
    reward=st.sampled_from([None, 0.0, 1.0, 0.25]),
    terminated=st.booleans(),
)


@settings(max_examples=60)
@given(st.text(max_size=12), st.lists(turns, min_size=1, max_size=4), st.sampled_from([OUR_CHAT, QWEN2_CHAT]))
def test_a_prompt_and_its_answer_begin_the_training_row(start: str, played: list[Turn], chat: ChatFormat) -> None:
    """The conversation grows by appending. Else cached keys and values stand for other tokens, and what a model was
    trained on is not what it is asked in a dream."""
    episode = Trajectory("e", "t", "g", Source.REAL, "a", 0, start, tuple(played), StopReason.TURN_LIMIT)
    row = episode_tokens(chat, episode, FULL)
    for k, turn in enumerate(played):
        question = prompt_tokens(chat, FULL, start, played[:k], turn.action)
        answer = chat.encode(turn.observation + status_line(turn.reward, turn.terminated))
        assert row.ids[: len(question.ids)] == question.ids
        assert row.ids[len(question.ids) :][: len(answer) + 1] == [*answer, chat.stop]
        assert set(row.owners[len(question.ids) :][: len(answer) + 1]) == {Owner.ENV}
    assert len(row.ids) == len(question.ids) + len(answer) + 1


# --- status lines ---


@settings(max_examples=300)
@given(
    st.text(max_size=40) | st.sampled_from(["a\n[reward=1 done]", "\n[reward=0]", "a\n"]),
    st.floats(-1e9, 1e9) | st.sampled_from([1 / 3, 1e-5, 2e6, 1e-4, 123456.789, 1.0, -0.0]),
    st.booleans(),
)
@example("x", 1e-05, False)  # %g writes 1e-05, which is no number for a parser that expects digits
@example("x", 1e6, True)
def test_a_prediction_round_trips(text: str, reward: float, terminated: bool) -> None:
    """What was logged can be told by a perfect world model. Rewards keep six decimals: a task pays 1 in total."""
    parsed = parse_prediction(text + status_line(reward, terminated))
    assert parsed is not None
    assert parsed[0] == text
    assert math.isclose(parsed[1], reward, abs_tol=1e-6)
    assert parsed[2] is terminated


def test_status_lines_by_hand() -> None:
    """The text is the interface to the weights: another spelling would make all trained models malformed."""
    assert status_line(0.0, False) == status_line(None, False) == "\n[reward=0]"
    assert status_line(1.0, True) == "\n[reward=1 done]"
    assert status_line(-0.5, False) == "\n[reward=-0.5]"
    assert status_line(1 / 3, False) == "\n[reward=0.333333]"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "You see a lamp.",
        "[reward=0]",  # no line of its own
        "a [reward=0]",
        "a\n[reward=0",
        "a\n[reward=]",
        "a\n[reward=.]",
        "a\n[reward=1.]",
        "a\n[reward=1 2]",
        "a\n[reward=nan]",
        "a\n[reward=1done]",
        "a\n[reward=1 done] ",
        "a\n[reward=1 done]\n",
        "a\n[reward=1 done] b",
        "a\n[Reward=1]",
        "a\n[reward=1 DONE]",
        "a\n [reward=1]",
    ],
)
def test_malformed_predictions_are_none(text: str) -> None:
    """Never a guess: a made-up reward would be paid out in the dream."""
    assert parse_prediction(text) is None
