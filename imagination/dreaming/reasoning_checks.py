"""Can the world model of these settings reason? What is asked before anything is trained or dreamed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from imagination.settings import DreamSettings, UserError, WorldModelSettings
from policy.lm.render import ChatFormat
from real_envs.trajectory import Trajectory
from worldmodel.form import DELIMITER, Form, prompt_tokens
from worldmodel.reasoning import reasoning_of


def check_room(settings: WorldModelSettings, dream: DreamSettings) -> None:
    """
    Raises:
        UserError: not even an empty history leaves room to think and to predict.
    """
    answer = dream.max_tokens
    if settings.reasoning_tokens and settings.reasoning_tokens + answer >= settings.context:
        raise UserError(
            f"worldmodel.context={settings.context} has no room for a history beside "
            f"worldmodel.reasoning_tokens={settings.reasoning_tokens} and dream.max_tokens={answer}: raise it, or "
            "lower one of those"
        )


def thoughts_of(settings: WorldModelSettings, log: Sequence[Trajectory]) -> list[str]:
    """The reasoning in the log, turn by turn; none where the world model does not reason.

    Raises:
        UserError: it should reason, and nothing could teach it; or a logged reasoning cannot be one.
    """
    if not settings.reasoning_tokens:
        return []
    try:
        found = [thought for t in log for turn in t.turns if (thought := reasoning_of(turn)) is not None]
    except ValueError as error:
        raise UserError(f"worldmodel.reasoning_tokens: {error}; mend the log") from error
    if not found and not settings.follows_instructions:
        raise UserError(
            "a world model from scratch has nothing to learn reasoning from: no turn of the log has a text "
            'info["reasoning"]. Add some, set worldmodel.model to a pretrained chat model, or '
            "worldmodel.reasoning_tokens=0"
        )
    return found


def check_thoughts(
    max_tokens: int, thoughts: Sequence[str], log: Sequence[Trajectory], chat: ChatFormat, form: Form, context: int
) -> None:
    """What needs the tokenizer.

    Args:
        max_tokens: of a predicted answer.
        context: the longest sequence of the model.

    Raises:
        UserError: more than one in a hundred logged thoughts is longer than it may be, or more than one in a hundred
            first turns leaves no room to think and to predict.
    """
    if not form.reasoning:
        return
    line = len(chat.encode(DELIMITER))
    sizes = [len(chat.encode(thought)) + line for thought in thoughts]
    long = sum(size > form.reasoning for size in sizes)
    if long > 0.01 * len(sizes):
        raise UserError(
            f"{long} of {len(sizes)} logged thoughts are longer than worldmodel.reasoning_tokens={form.reasoning}; the "
            f"longest is {max(sizes)} with the line that ends it"
        )
    starts = {(t.start, t.turns[0].action) for t in log}
    first = [len(prompt_tokens(chat, form, start, [], action).ids) for start, action in starts]
    needed = [size + form.reasoning + max_tokens for size in first]
    if sum(size > context for size in needed) > 0.01 * len(needed):
        raise UserError(
            f"the first turn of an episode needs up to {max(needed)} tokens to read, think and predict, but the "
            f"context has {context}: raise worldmodel.context, or lower worldmodel.reasoning_tokens or dream.max_tokens"
        )


def note_unended(measured: Mapping[str, Any], limit: int) -> None:
    """Tells the user where more than a tenth of the answers on held-out turns never came to a prediction."""
    unended, n = measured["invalid_reasoning"], measured["n"]
    if unended > 0.1 * n:
        print(
            f"note: in {unended} of {n} held-out turns the world model did not end its reasoning within {limit} "
            "tokens; raise worldmodel.reasoning_tokens, or add reasoning to the log, which shows how to end it",
            file=sys.stderr,
        )
