"""Trajectory <-> token ids with an owner per token, through the model's own chat template.

One conversation, two views. The policy is the assistant of its view and writes actions::

    user: <start>   assistant: go east   user: -= Hall =- ...   assistant: take lamp   user: You take the lamp. ...

The world model is the assistant of the other view and writes what the world answers::

    user: <start> > go east   assistant: -= Hall =- ... [reward=0]   user: take lamp   assistant: ... [reward=1 done]

A chat template is cut once into the token ids between contents (``ChatFormat``). From there on sequences grow by
appending ids, so a prompt is a prefix of the next one (caches stay valid) and sampled ids are never re-tokenised.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from real_envs.errors import UserError
from real_envs.trajectory import Owner, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACTION_LINE = "\n[action]\n"  # between what a policy thinks and what it does
_STATUS = re.compile(r"\A(?P<text>.*)\n\[reward=(?P<reward>-?\d+(?:\.\d+)?)(?P<done> done)?\]\Z", re.DOTALL)


class ChatTemplateError(UserError):
    """The model's chat template cannot be used turn by turn; the message says why."""


class ChatFormat:
    """The token ids that a chat template puts between contents.

    Attributes:
        opening: ids before the first user content (a default system message included).
        to_assistant: ids between a user content and the assistant's content (the generation prompt).
        stop: the id that ends the assistant's content; the model samples it itself.
        to_user: ids after ``stop`` up to the next user content.

    Raises:
        ChatTemplateError: the tokenizer has no chat template, or the template rewrites contents or depends on their
            position, so that the conversation cannot grow by appending.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ChatTemplateError(f"the tokenizer of {tokenizer.name_or_path!r} has no chat template")
        self.tokenizer = tokenizer
        first, answer, second, last = (
            "\u00abFIRST\u00bb",
            "\u00abANSWER\u00bb",
            "\u00abSECOND\u00bb",
            "\u00abLAST\u00bb",
        )
        text = self._template(first, answer, second, last)
        try:
            opening, rest = text.split(first)
            to_assistant, rest = rest.split(answer)
            assistant_to_user, rest = rest.split(second)
            to_assistant_again, rest = rest.split(last)
            to_user_again, tail = rest.split("«TAIL»")
        except ValueError:
            raise ChatTemplateError(
                "the chat template drops or repeats contents; it cannot grow turn by turn"
            ) from None
        if not (to_assistant == to_assistant_again == tail and assistant_to_user == to_user_again):
            raise ChatTemplateError(
                "the chat template writes the same role differently at different turns, so a prompt would not be a "
                f"prefix of the next one: {to_assistant!r} against {to_assistant_again!r} and {tail!r}, "
                f"{assistant_to_user!r} against {to_user_again!r}"
            )
        self.opening = tuple(self._encode(opening, template=True))
        self.to_assistant = tuple(self._encode(to_assistant, template=True))
        stop, *to_user = self._encode(assistant_to_user, template=True)
        self.stop = stop
        self.to_user = tuple(to_user)
        self.encode = lru_cache(maxsize=65536)(self._encode)

    def _template(self, first: str, answer: str, second: str, last: str) -> str:
        messages = [
            {"role": "user", "content": first},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": second},
            {"role": "assistant", "content": last},
            {"role": "user", "content": "«TAIL»"},
        ]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return text

    def _encode(self, text: str, template: bool = False) -> tuple[int, ...]:
        """Only the template may write special tokens: a mark such as ``<|im_end|>`` in a page is plain text."""
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text, and tokenizers raise at it
        return tuple(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not template))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(slots=True)
class Tokens:
    """A growing sequence: parallel lists with one entry per token (see ``Trace`` for their meaning)."""

    ids: list[int]
    owners: list[Owner]
    turns: list[int]

    @classmethod
    def empty(cls) -> Tokens:
        return cls([], [], [])

    def append(self, ids: Sequence[int], owner: Owner, turn: int = -1) -> None:
        self.ids.extend(ids)
        self.owners.extend([owner] * len(ids))
        self.turns.extend([turn] * len(ids))


def status_line(reward: float | None, terminated: bool) -> str:
    """The line that follows a predicted observation: ``[reward=0]`` or ``[reward=1 done]``; no reward counts as 0.

    Six decimals are kept, and never an exponent, so that every line that is written can be parsed.
    """
    amount = f"{round(reward or 0.0, 6) or 0.0:.6f}".rstrip("0").rstrip(".")
    return f"\n[reward={amount}{' done' if terminated else ''}]"


def prediction_text(turn: Turn) -> str:
    """What the world model should write for this turn."""
    return turn.observation + status_line(turn.reward, turn.terminated)


def parse_prediction(text: str) -> tuple[str, float, bool] | None:
    """``(observation, reward, terminated)``, or ``None`` where the text is no well-formed prediction."""
    match = _STATUS.match(text)
    if match is None:
        return None
    return match["text"], float(match["reward"]), match["done"] is not None


def world_model_prompt(
    chat: ChatFormat,
    start: str,
    history: Sequence[Turn],
    action: str,
    answers: Sequence[str] | None = None,
    notes: Sequence[str] = (),
    lead: str = "",
) -> Tokens:
    """The ids that the world model continues with its prediction of what ``action`` does.

    Args:
        answers: what it wrote for each turn of ``history``; by default the whole observations (``prediction_text``).
        notes: what stands before each action, that of ``action`` last; nothing by default. Trained by nobody.
        lead: what stands before each answer, trained by nobody; it is no part of the prompt's own end.
    """
    answers = [prediction_text(turn) for turn in history] if answers is None else answers
    notes = notes or [""] * (len(history) + 1)
    tokens = Tokens.empty()
    tokens.append(chat.opening, Owner.SCAFFOLD)
    tokens.append(chat.encode(start + "\n> "), Owner.SCAFFOLD)
    for index, (turn, answer, note) in enumerate(zip(history, answers, notes[:-1], strict=True)):
        tokens.append(chat.encode(note) if note else (), Owner.SCAFFOLD)
        tokens.append(chat.encode(turn.action), Owner.AGENT, index)
        tokens.append(chat.to_assistant, Owner.SCAFFOLD)
        tokens.append(chat.encode(lead) if lead else (), Owner.SCAFFOLD)
        tokens.append((*chat.encode(answer), chat.stop), Owner.ENV, index)
        tokens.append(chat.to_user, Owner.SCAFFOLD)
    tokens.append(chat.encode(notes[-1]) if notes[-1] else (), Owner.SCAFFOLD)
    tokens.append(chat.encode(action), Owner.AGENT, len(history))
    tokens.append(chat.to_assistant, Owner.SCAFFOLD)
    return tokens


def render_for_world_model(
    chat: ChatFormat,
    trajectory: Trajectory,
    answers: Sequence[str] | None = None,
    notes: Sequence[str] = (),
    lead: str = "",
) -> Tokens:
    """The whole episode in the world model's view; it trains on the tokens owned by ``ENV``.

    Args:
        answers: what it should write for each turn; by default the whole observations.
        notes: what stands before each action.
        lead: what stands before each answer, trained by nobody.

    Raises:
        ValueError: the episode has no turn, so there is nothing to predict.
    """
    if not trajectory.turns:
        raise ValueError(f"episode {trajectory.id} has no turn")
    *history, last = trajectory.turns
    answers = [prediction_text(turn) for turn in trajectory.turns] if answers is None else answers
    tokens = world_model_prompt(chat, trajectory.start, history, last.action, answers[:-1], notes, lead)
    tokens.append(chat.encode(lead) if lead else (), Owner.SCAFFOLD)
    tokens.append((*chat.encode(answers[-1]), chat.stop), Owner.ENV, len(history))
    return tokens


def spoken_action(text: str) -> str:
    """What the world gets of what a policy wrote: all of it, or what follows the line that ends its thought.

    Example::

        "drop key: It falls. take key: Taken.\\n[action]\\ntake key" is "take key"
    """
    _, line, action = text.partition(ACTION_LINE)
    return (action if line else text).strip()


def policy_text(turn: Turn, thoughts: bool = False) -> str:
    """What a policy writes in a turn: its action; with ``thoughts``, after a logged ``info["reasoning"]``."""
    thought = turn.info.get("reasoning") if thoughts else None
    return f"{thought}{ACTION_LINE}{turn.action}" if thought else turn.action


def policy_prompt(
    chat: ChatFormat, start: str, history: Sequence[Turn], history_owner: Owner, thoughts: bool = False
) -> Tokens:
    """The ids that the policy continues with its next action; past actions are owned by ``history_owner``.

    ``thoughts``: with what it thought before them, see ``policy_text``.
    """
    tokens = Tokens.empty()
    tokens.append(chat.opening, Owner.SCAFFOLD)
    tokens.append(chat.encode(start), Owner.ENV)
    tokens.append(chat.to_assistant, Owner.SCAFFOLD)
    for index, turn in enumerate(history):
        tokens.append((*chat.encode(policy_text(turn, thoughts)), chat.stop), history_owner, index)
        append_observation(chat, tokens, turn.observation)
    return tokens


def append_observation(chat: ChatFormat, tokens: Tokens, observation: str) -> None:
    """Appends what the world said and the prompt for the next action."""
    tokens.append(chat.to_user, Owner.SCAFFOLD)
    tokens.append(chat.encode(observation), Owner.ENV)
    tokens.append(chat.to_assistant, Owner.SCAFFOLD)


def render_for_policy(chat: ChatFormat, trajectory: Trajectory, thoughts: bool = False, whole: bool = False) -> Tokens:
    """A logged episode in the policy's view; actions are owned by ``AGENT`` (cross-entropy, never a PPO ratio).

    Log actions carry no behaviour log-probs. What follows the last action stands there only in ``whole``: those who
    imitate actions learn nothing from it.

    Args:
        thoughts: logged reasoning stands before the actions and is owned by ``AGENT``, too.
    """
    *history, last = trajectory.turns
    tokens = policy_prompt(chat, trajectory.start, history, Owner.AGENT, thoughts)
    tokens.append((*chat.encode(policy_text(last, thoughts)), chat.stop), Owner.AGENT, len(history))
    if whole:
        append_observation(chat, tokens, last.observation)
    return tokens
