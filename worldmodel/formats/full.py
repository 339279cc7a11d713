"""How a language model writes transitions: whole observations, and what every other format builds on.

The world model is the assistant of the conversation and writes what the world answers::

    user: <start> > go east   assistant: -= Hall =- ... [reward=0]   user: take lamp   assistant: ... [reward=1 done]

Model, training rows and dreams all use the same format, so a dream's prompts are those of training.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from policy.lm.render import ChatFormat, Tokens
from real_envs.trajectory import Owner, Trajectory, Turn
from worldmodel.world_model import InvalidReason, PredictionInvalid

DELIMITER = "\n[prediction]\n"  # between reasoning and prediction
_STATUS = re.compile(r"\A(?P<text>.*)\n\[reward=(?P<reward>-?\d+(?:\.\d+)?)(?P<done> done)?\]\Z", re.DOTALL)


def status_line(reward: float | None, terminated: bool) -> str:
    """The line that follows a predicted observation: ``[reward=0]`` or ``[reward=1 done]``; no reward counts as 0.

    Six decimals are kept, and never an exponent, so that every line that is written can be parsed.
    """
    amount = f"{round(reward or 0.0, 6) or 0.0:.6f}".rstrip("0").rstrip(".")
    return f"\n[reward={amount}{' done' if terminated else ''}]"


def prediction_text(turn: Turn) -> str:
    return turn.observation + status_line(turn.reward, turn.terminated)


def parse_prediction(text: str) -> tuple[str, float, bool] | None:
    """``(observation, reward, terminated)``, or ``None`` where the text is no well-formed prediction."""
    match = _STATUS.match(text)
    if match is None:
        return None
    return match["text"], float(match["reward"]), match["done"] is not None


class TransitionFormat(Protocol):
    """How transitions are written.

    All its texts are functions of the arguments alone, and a longer history only adds to those of a shorter one: the
    prompt of a turn is a prefix of that of the next.
    """

    @property
    def reasoning_tokens(self) -> int:
        """The most tokens of reasoning before an answer, the line that ends it included; 0 where there is none."""
        ...

    def answers(self, start: str, turns: Sequence[Turn]) -> list[str]:
        """What the model writes for each turn, the status line included."""
        ...

    def contexts(self, start: str, history: Sequence[Turn], action: str) -> list[str]:
        """What stands before each action of ``history`` and before ``action``; empty where no turn has any."""
        ...

    def read(self, text: str, start: str, history: Sequence[Turn]) -> tuple[str, float, bool]:
        """The observation, reward and end that a written text stands for.

        Raises:
            PredictionInvalid: none.
        """
        ...

    def phrases(self, log: Sequence[Trajectory]) -> list[str]:
        """What a tokenizer trained on this log should have as one token each, besides the status lines."""
        ...

    def excluding(self, episodes: Sequence[Trajectory]) -> TransitionFormat:
        """The format for training on, or judging by, these episodes: it shows nothing that it knows from them."""
        ...


class FullObservation:
    """The whole next observation."""

    reasoning_tokens = 0

    def answers(self, start: str, turns: Sequence[Turn]) -> list[str]:
        return [prediction_text(turn) for turn in turns]

    def contexts(self, start: str, history: Sequence[Turn], action: str) -> list[str]:
        return []

    def read(self, text: str, start: str, history: Sequence[Turn]) -> tuple[str, float, bool]:
        parsed = parse_prediction(text)
        if parsed is None:
            raise PredictionInvalid(
                f"no status line such as [reward=0] at the end of {text[-60:]!r}", InvalidReason.NO_STATUS
            )
        return parsed

    def phrases(self, log: Sequence[Trajectory]) -> list[str]:
        return []

    def excluding(self, episodes: Sequence[Trajectory]) -> TransitionFormat:
        return self


class FormatWrapper:
    """Another format with something added before actions or answers; its answers are those of ``inner``."""

    reasoning_tokens = 0

    def __init__(self, inner: TransitionFormat | None) -> None:
        self.inner: TransitionFormat = inner or FullObservation()

    def answers(self, start: str, turns: Sequence[Turn]) -> list[str]:
        return self.inner.answers(start, turns)

    def inner_contexts(self, start: str, history: Sequence[Turn], action: str) -> list[str]:
        """The contexts of ``inner``, one for each action also where it has none."""
        return self.inner.contexts(start, history, action) or [""] * (len(history) + 1)

    def read(self, text: str, start: str, history: Sequence[Turn]) -> tuple[str, float, bool]:
        return self.inner.read(text, start, history)


def prompt_tokens(chat: ChatFormat, form: TransitionFormat, start: str, history: Sequence[Turn], action: str) -> Tokens:
    """What the world model continues with its prediction of what ``action`` does. No reasoning stands in it."""
    actions = [*(turn.action for turn in history), action]
    contexts = form.contexts(start, history, action)
    return transition_tokens(chat, start, actions, form.answers(start, history), contexts, answer_prefix(form))


def episode_tokens(chat: ChatFormat, trajectory: Trajectory, form: TransitionFormat) -> Tokens:
    """A whole episode as the world model reads and writes it, with an empty reasoning where it reasons.

    Raises:
        ValueError: the episode has no turn.
    """
    if not trajectory.turns:
        raise ValueError(f"episode {trajectory.id} has no turn")
    *history, last = trajectory.turns
    answers = form.answers(trajectory.start, trajectory.turns)
    contexts = form.contexts(trajectory.start, history, last.action)
    actions = [turn.action for turn in trajectory.turns]
    return transition_tokens(chat, trajectory.start, actions, answers, contexts, answer_prefix(form))


def answer_prefix(form: TransitionFormat) -> str:
    """What stands before each answer of a prompt: where a model reasons, the line that ends an empty reasoning."""
    return DELIMITER if form.reasoning_tokens else ""


def transition_tokens(
    chat: ChatFormat,
    start: str,
    actions: Sequence[str],
    answers: Sequence[str],
    contexts: Sequence[str] = (),
    prefix: str = "",
) -> Tokens:
    """Actions and the answers to them, or to all but the last, which the model then answers.

    Args:
        contexts, prefix: before each action and answer, owned by nobody who is trained.
    """
    tokens = Tokens.empty()
    tokens.append(chat.opening, Owner.SCAFFOLD)
    tokens.append(chat.encode(start + "\n> "), Owner.SCAFFOLD)
    for turn, action in enumerate(actions):
        if turn:
            tokens.append(chat.to_user, Owner.SCAFFOLD)
        if contexts and contexts[turn]:
            tokens.append(chat.encode(contexts[turn]), Owner.SCAFFOLD)
        tokens.append(chat.encode(action), Owner.AGENT, turn)
        tokens.append(chat.to_assistant, Owner.SCAFFOLD)
        if turn < len(answers):
            tokens.append(chat.encode(prefix) if prefix else (), Owner.SCAFFOLD)
            tokens.append((*chat.encode(answers[turn]), chat.stop), Owner.ENV, turn)
    return tokens
