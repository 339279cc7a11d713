"""Reasoning before the prediction, in any form: the model thinks in free text, writes a line, and then predicts.

DreamGym (arXiv 2511.03773) and DynaWeb (arXiv 2601.22149) let a chat model reason about what an action changes before
it says so. What is written in one turn::

    The lamp is in the hall, so it can be taken.
    [prediction]
    You take the lamp.
    [reward=1 done]

The reasoning is thrown away once the turn is over: later prompts hold the line and what follows it, as if nothing had
been thought, so contexts stay short and a policy can be shown nothing of it. It is kept in ``Prediction.reasoning`` and
from there in ``Turn.info["reasoning"]``, for people to read.

A logged turn with such an entry teaches its reasoning. One without teaches its prediction after an empty reasoning, and
neither the emptiness nor the line, which nobody chose: a model that can think is not taught to stop it. What then
trains the thoughts is ``imagine refine-world-model``, by how right the predictions behind them are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from policy.lm.render import ChatFormat
from real_envs.trajectory import Trajectory, Turn
from worldmodel.form import DELIMITER, Form
from worldmodel.world_model import InvalidReason, PredictionInvalid

KEY = "reasoning"  # of ``Turn.info``: text that was thought before the observation was predicted
INSTRUCTION = (
    "(First think in a few words about what the command changes. Then write the line [prediction], and after it only "
    "what is seen next, with its reward.)\n> "
)


class Reasoned:
    """Another form, with reasoning before each answer. It goes outside: nothing wraps it.

    Args:
        form: how predictions are written.
        reasoning: most tokens of reasoning, the line that ends it included.
        instruction: stands before the first action, for a model that can read one; nothing by default.
    """

    def __init__(self, form: Form, reasoning: int, instruction: str = "") -> None:
        if reasoning < 1:
            raise ValueError(f"reasoning needs at least one token, got {reasoning}")
        self.form, self.reasoning, self.instruction = form, reasoning, instruction

    def answers(self, start: str, turns: Sequence[Turn]) -> list[str]:
        return self.form.answers(start, turns)

    def notes(self, start: str, history: Sequence[Turn], action: str) -> list[str]:
        """See ``Form``. The instruction stands in the first, so that it stays where it is in longer prompts."""
        notes = self.form.notes(start, history, action)
        if not self.instruction:
            return notes
        first, *others = notes or [""] * (len(history) + 1)
        return [self.instruction + first, *others]

    def read(self, text: str, start: str, history: Sequence[Turn]) -> tuple[str, float, bool]:
        """See ``Form``; ``text`` is what follows the reasoning."""
        return self.form.read(text, start, history)

    def phrases(self, log: Sequence[Trajectory]) -> list[str]:
        return [DELIMITER, *self.form.phrases(log)]

    def excluding(self, episodes: Sequence[Trajectory]) -> Form:
        return Reasoned(self.form.excluding(episodes), self.reasoning, self.instruction)


@dataclass(frozen=True, slots=True)
class Cut:
    """A written text, cut where its reasoning ends.

    Attributes:
        reasoning, prediction: the texts before and after the line.
        begin: index of the first token of the prediction. A token that ends the line and goes on belongs to it.
    """

    reasoning: str
    prediction: str
    begin: int


def cut_reasoning(chat: ChatFormat, ids: Sequence[int], limit: int) -> Cut:
    """Finds the first line that ends a reasoning.

    Args:
        ids: what was written, without the token that ends it.
        limit: most tokens of the reasoning, the line included.

    Raises:
        PredictionInvalid: there is no such line within the limit.
    """
    end = bisect_left(range(len(ids)), True, key=lambda n: DELIMITER in chat.decode(ids[: n + 1])) + 1  # 1 past its end
    begin = end if chat.decode(ids[:end]).endswith(DELIMITER) else end - 1
    if end > len(ids) or begin > limit:
        raise PredictionInvalid(
            f"the reasoning did not end with a line {DELIMITER.strip()} within {limit} tokens", InvalidReason.REASONING
        )
    reasoning, _, prediction = chat.decode(ids).partition(DELIMITER)
    return Cut(reasoning, prediction, begin)


def reasoning_of(turn: Turn) -> str | None:
    """What was thought in a logged turn; ``None`` where the log does not say, which is not an empty thought.

    Raises:
        ValueError: it is no text, or holds the line that would end it.
    """
    found = turn.info.get(KEY)
    if found is None or (isinstance(found, str) and DELIMITER not in f"\n{found}\n"):
        return found
    what = f"holds the line {DELIMITER.strip()}" if isinstance(found, str) else f"is {found!r}, not text"
    raise ValueError(f"info[{KEY!r}] of the turn {turn.action!r} {what}")


def render_answers(form: Form, start: str, turns: Sequence[Turn]) -> list[str]:
    """All that the model should say in each turn, the reasoning included."""
    answers = form.answers(start, turns)
    if not form.reasoning:
        return answers
    return [(reasoning_of(turn) or "") + DELIMITER + answer for turn, answer in zip(turns, answers, strict=True)]


__all__ = ["INSTRUCTION", "KEY", "Cut", "Reasoned", "cut_reasoning", "reasoning_of", "render_answers"]
