"""Reasoning before the prediction, in any format: the model thinks in free text, writes a line, and then predicts.

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
from worldmodel.formats.full import DELIMITER, FormatWrapper, TransitionFormat
from worldmodel.world_model import InvalidReason, PredictionInvalid

KEY = "reasoning"  # of ``Turn.info``: text that was thought before the observation was predicted
INSTRUCTION = (
    "(First think in a few words about what the command changes. Then write the line [prediction], and after it only "
    "what is seen next, with its reward.)\n> "
)


class ReasoningFormat(FormatWrapper):
    """Another format, with reasoning before each answer. It goes outside: nothing wraps it.

    Args:
        reasoning_tokens: most tokens of reasoning, the line that ends it included.
        instruction: stands before the first action, for a model that can read one; nothing by default.
    """

    def __init__(self, inner: TransitionFormat, reasoning_tokens: int, instruction: str = "") -> None:
        if reasoning_tokens < 1:
            raise ValueError(f"reasoning needs at least one token, got {reasoning_tokens}")
        super().__init__(inner)
        self.reasoning_tokens, self.instruction = reasoning_tokens, instruction

    def contexts(self, start: str, history: Sequence[Turn], action: str) -> list[str]:
        """The first has the instruction, which so stays where it is in longer prompts."""
        if not self.instruction:
            return self.inner.contexts(start, history, action)
        first, *others = self.inner_contexts(start, history, action)
        return [self.instruction + first, *others]

    def phrases(self, log: Sequence[Trajectory]) -> list[str]:
        return [DELIMITER, *self.inner.phrases(log)]

    def excluding(self, episodes: Sequence[Trajectory]) -> TransitionFormat:
        return ReasoningFormat(self.inner.excluding(episodes), self.reasoning_tokens, self.instruction)


@dataclass(frozen=True, slots=True)
class Split:
    """A written text, split where its reasoning ends.

    Attributes:
        reasoning, prediction: the texts before and after the line.
    """

    reasoning: str
    prediction: str
    begin: int  # index of the first token of the prediction. A token that ends the line and goes on belongs to it.


def split_reasoning(chat: ChatFormat, ids: Sequence[int], limit: int) -> Split:
    """Finds the first line that ends a reasoning.

    Raises:
        PredictionInvalid: there is none within ``limit`` tokens, the line included.
    """
    end = bisect_left(range(len(ids)), True, key=lambda n: DELIMITER in chat.decode(ids[: n + 1])) + 1  # 1 past its end
    begin = end if chat.decode(ids[:end]).endswith(DELIMITER) else end - 1
    if end > len(ids) or begin > limit:
        raise PredictionInvalid(
            f"the reasoning did not end with a line {DELIMITER.strip()} within {limit} tokens", InvalidReason.REASONING
        )
    reasoning, _, prediction = chat.decode(ids).partition(DELIMITER)
    return Split(reasoning, prediction, begin)


def reasoning_of(turn: Turn) -> str | None:
    """What was thought in a logged turn; ``None`` where the log does not say, which is not an empty thought.

    Raises:
        ValueError: it is no text, or holds the line that would end it.
    """
    reasoning = turn.info.get(KEY)
    if reasoning is None or (isinstance(reasoning, str) and DELIMITER not in f"\n{reasoning}\n"):
        return reasoning
    fault = f"holds the line {DELIMITER.strip()}" if isinstance(reasoning, str) else f"is {reasoning!r}, not text"
    raise ValueError(f"info[{KEY!r}] of the turn {turn.action!r} {fault}")


def answers_with_reasoning(form: TransitionFormat, start: str, turns: Sequence[Turn]) -> list[str]:
    answers = form.answers(start, turns)
    if not form.reasoning_tokens:
        return answers
    return [(reasoning_of(turn) or "") + DELIMITER + answer for turn, answer in zip(turns, answers, strict=True)]
