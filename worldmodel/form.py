"""The form in which a language model writes transitions: whole observations, edits, with or without notes before them.

Model, training rows and dreams all ask the same form, so what a model reads in a dream is what it has read in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from policy.lm.render import (
    ChatFormat,
    Tokens,
    parse_prediction,
    prediction_text,
    render_for_world_model,
    world_model_prompt,
)
from real_envs.trajectory import Trajectory, Turn
from worldmodel.world_model import InvalidReason, PredictionInvalid

DELIMITER = "\n[prediction]\n"  # between reasoning and prediction


class Form(Protocol):
    """How transitions are written.

    All its texts are functions of the arguments alone, and a longer history only adds to those of a shorter one: the
    prompt of a turn is a prefix of that of the next.
    """

    @property
    def reasoning(self) -> int:
        """The most tokens of reasoning before an answer, the line that ends it included; 0 where there is none."""
        ...

    def answers(self, start: str, turns: Sequence[Turn]) -> list[str]:
        """What the model writes for each turn, the line with reward and end included."""
        ...

    def notes(self, start: str, history: Sequence[Turn], action: str) -> list[str]:
        """What stands before each action of ``history`` and before ``action``; empty where no turn has any."""
        ...

    def read(self, text: str, start: str, history: Sequence[Turn]) -> tuple[str, float, bool]:
        """The observation, reward and end that a written text stands for.

        Raises:
            PredictionInvalid: none.
        """
        ...

    def phrases(self, log: Sequence[Trajectory]) -> list[str]:
        """What a tokenizer trained on this log should have as one token each, besides the lines with reward and end."""
        ...

    def excluding(self, episodes: Sequence[Trajectory]) -> Form:
        """The form for training on, or judging by, these episodes: it shows nothing that it knows from them."""
        ...


class WholeText:
    """The whole next observation."""

    reasoning = 0

    def answers(self, start: str, turns: Sequence[Turn]) -> list[str]:
        return [prediction_text(turn) for turn in turns]

    def notes(self, start: str, history: Sequence[Turn], action: str) -> list[str]:
        return []

    def read(self, text: str, start: str, history: Sequence[Turn]) -> tuple[str, float, bool]:
        """See ``Form``."""
        parsed = parse_prediction(text)
        if parsed is None:
            raise PredictionInvalid(
                f"no status line such as [reward=0] at the end of {text[-60:]!r}", InvalidReason.NO_STATUS
            )
        return parsed

    def phrases(self, log: Sequence[Trajectory]) -> list[str]:
        return []

    def excluding(self, episodes: Sequence[Trajectory]) -> Form:
        return self


def prompt_tokens(chat: ChatFormat, form: Form, start: str, history: Sequence[Turn], action: str) -> Tokens:
    """What the world model reads before it says what ``action`` does after ``history``. No reasoning stands in it."""
    answers, notes = form.answers(start, history), form.notes(start, history, action)
    return world_model_prompt(chat, start, history, action, answers, notes, lead(form))


def lead(form: Form) -> str:
    """What stands before each answer of a prompt: where a model reasons, the line that ends an empty reasoning."""
    return DELIMITER if form.reasoning else ""


def episode_tokens(chat: ChatFormat, trajectory: Trajectory, form: Form) -> Tokens:
    """A whole episode as the world model reads and writes it, with an empty reasoning where it reasons.

    Raises:
        ValueError: the episode has no turn.
    """
    if not trajectory.turns:
        raise ValueError(f"episode {trajectory.id} has no turn")
    *history, last = trajectory.turns
    answers = form.answers(trajectory.start, trajectory.turns)
    notes = form.notes(trajectory.start, history, last.action)
    return render_for_world_model(chat, trajectory, answers, notes, lead(form))


__all__ = ["DELIMITER", "Form", "WholeText", "episode_tokens", "lead", "prompt_tokens"]
