"""Trajectory -> token ids with an owner per token, through the model's own chat template.

The policy is the assistant of its conversation and writes actions (the world model's view of the same episode is in
``worldmodel.formats.full``)::

    user: <start>   assistant: go east   user: -= Hall =- ...   assistant: take lamp   user: You take the lamp. ...

A chat template is cut once into the token ids between contents (``ChatFormat``). From there on sequences grow by
appending ids, so a prompt is a prefix of the next one (caches stay valid) and sampled ids are never re-tokenised.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from real_envs.errors import UserError
from real_envs.trajectory import Owner, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACTION_LINE = "\n[action]\n"  # between what a policy thinks and what it does
SUMMARY_REQUEST = (  # the user's turn that a summary answers
    "Your context is full. Summarise what you did, what you saw and what is left to do: from here on you read only the "
    "task and this summary."
)
_NO_THINKING = "{% set enable_thinking = false %}"
_OTHER = "set policy.chat_template= or worldmodel.chat_template= to a file"


class ChatTemplateError(UserError):
    """The model's chat template cannot be used turn by turn; the message says why."""


class ChatFormat:
    """The token ids that a chat template puts between contents.

    ``opening`` stands before the first user content (a default system message included), ``to_assistant`` between a
    user content and the assistant's (the generation prompt), ``to_user`` after ``stop``, which the model samples.

    Raises:
        ChatTemplateError: the tokenizer has no chat template, or the template raises, rewrites contents, be it blanks
            at their ends, or depends on their position, so that the conversation cannot grow by appending. The message
            says what would do.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ChatTemplateError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; {_OTHER} that holds one"
            )
        self.tokenizer = tokenizer
        try:
            opening, to_assistant, assistant_to_user = self._pieces()
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{error}; {self._way_out()}") from None
        self.opening = tuple(self._encode(opening, template=True))
        self.to_assistant = tuple(self._encode(to_assistant, template=True))
        stop, *to_user = self._encode(assistant_to_user, template=True)
        self.stop = stop
        self.to_user = tuple(to_user)
        written = {*self.opening, *self.to_assistant, stop, *to_user}
        added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if i in written and not token.special}
        inside = (rf"(?<={re.escape(t.content[0])})(?={re.escape(t.content[1:])})" for t in added.values())
        self._inside_marks = re.compile("|".join(inside) or "(?!)")
        self.encode = lru_cache(maxsize=65536)(self._encode)

    def _pieces(self, before: str = "") -> tuple[str, str, str]:
        """What stands before the first content, before the assistant's and after it; ``before`` the template."""
        first, answer, second, last = (f"«{name}»" for name in ("FIRST", "ANSWER", "SECOND", "LAST"))
        text = self._template(before, first, answer, second, last)
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
        if not assistant_to_user:
            raise ChatTemplateError("the chat template writes nothing after an answer, which so would have no end")
        for left, right in ((" \n", "\n "), ("\n ", " \n")):
            users, agents = ([f"{left}{name}{right}" for name in names] for names in (("A", "B", "C"), ("D", "E")))
            text = self._template(before, users[0], agents[0], users[1], agents[1], users[2])
            asked = (
                f"{user}{to_assistant}{agent}{assistant_to_user}" for user, agent in zip(users, agents, strict=False)
            )
            if text != f"{opening}{''.join(asked)}{users[2]}{to_assistant}":
                raise ChatTemplateError(
                    "the chat template trims blanks at the ends of contents (`| trim`, `.strip()`), so what a model "
                    "reads would not be what was said"
                )
        return opening, to_assistant, assistant_to_user

    def _way_out(self) -> str:
        """What to do about a template that is refused."""
        try:
            self._pieces(_NO_THINKING)
        except ChatTemplateError:
            return (
                f"{_OTHER} with another one, such as the model's training template (TRL: chat_templates/*_training"
                f".jinja), after a line {_NO_THINKING} where it opens thoughts"
            )
        return f"with enable_thinking=false it would do: {_OTHER} that holds it after a line {_NO_THINKING}"

    def _template(self, before: str, first: str, answer: str, second: str, last: str, tail: str = "«TAIL»") -> str:
        messages = [
            {"role": "user", "content": first},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": second},
            {"role": "assistant", "content": last},
            {"role": "user", "content": tail},
        ]
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                chat_template=before + self.tokenizer.get_chat_template(),
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # of a program of others, which may ask for anything of a message
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ChatTemplateError(f"the chat template cannot write plain messages ({reason})") from error
        assert isinstance(text, str)
        return text

    def _encode(self, text: str, template: bool = False) -> tuple[int, ...]:
        """Only the template may write special tokens: a mark such as ``<|im_end|>`` in a page is plain text."""
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text, and tokenizers raise at it
        # of marks that are not declared special, as DeepSeek's of roles, the tokenizer never sees a whole one
        pieces = [text] if template else self._inside_marks.split(text)
        encode = partial(self.tokenizer.encode, add_special_tokens=False, split_special_tokens=not template)
        return tuple(i for piece in pieces for i in encode(piece))

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

    def extend(self, more: Tokens) -> None:
        self.ids.extend(more.ids)
        self.owners.extend(more.owners)
        self.turns.extend(more.turns)

    def cut(self, length: int) -> None:
        """Keeps the first ``length`` tokens."""
        del self.ids[length:], self.owners[length:], self.turns[length:]


def spoken_action(text: str) -> str:
    """What the world gets of what a policy wrote: all of it, or what follows the line that ends its thought.

    Example: ``take key`` of ``drop key: It falls.\\n[action]\\ntake key``.
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


def append_observation(chat: ChatFormat, tokens: Tokens, observation: str, owner: Owner = Owner.ENV) -> None:
    """Appends what the world said, or another ``owner``, and the prompt for the next action."""
    tokens.append(chat.to_user, Owner.SCAFFOLD)
    tokens.append(chat.encode(observation), owner)
    tokens.append(chat.to_assistant, Owner.SCAFFOLD)


def render_for_policy(chat: ChatFormat, trajectory: Trajectory, thoughts: bool = False, whole: bool = False) -> Tokens:
    """A logged episode in the policy's view; actions are owned by ``AGENT`` (cross-entropy, never a PPO ratio).

    With ``thoughts``, logged reasoning stands before them; ``whole`` includes what follows the last action.
    """
    *history, last = trajectory.turns
    tokens = policy_prompt(chat, trajectory.start, history, Owner.AGENT, thoughts)
    tokens.append((*chat.encode(policy_text(last, thoughts)), chat.stop), Owner.AGENT, len(history))
    if whole:
        append_observation(chat, tokens, last.observation)
    return tokens
