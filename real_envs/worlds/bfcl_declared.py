"""What the texts of a BFCL episode and the facts of its task say for sure: refusals by schemas, the user's answers, and
calls that no API refuses. A world model need not learn them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from real_envs.calls import Call, parse_call
from real_envs.trajectory import Turn
from real_envs.worlds.bfcl_tasks import CHANGING, refused

_BEGINS = re.compile(r"\s*(?:[\[{]|[A-Za-z_][\w.]*\()")  # a call; other text is for the user
_TOOL = re.compile(r"^(\w+)\((.*)\)$", re.MULTILINE)
_PARAMETER = re.compile(r"(?:^|, )(\w+)(\??): ")
_REQUEST = re.compile(r"^User: ", re.MULTILINE)
_OF_USER = re.compile(r"(?:calls|request|tools) \d+: ")
_LONGEST = 8000  # characters of a call that are read
SOLVED, FAILED = "The user is content.", "The user is not content."


def signatures(text: str) -> dict[str, inspect.Signature]:
    """The tools that lines of a text list, as ``real_envs.calls.signature`` writes them."""
    return {name: inspect.Signature(_parameters(written)) for name, written in _TOOL.findall(text)}


def _parameters(written: str) -> list[inspect.Parameter]:
    _, *parts = _PARAMETER.split(written)  # name, ``?`` or nothing, and the type with a default, again and again
    free = [bool(optional) or " = " in kind for optional, kind in zip(parts[1::3], parts[2::3], strict=True)]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = zip(parts[::3], free, strict=True)
    return [inspect.Parameter(name, kind, default=None if may else inspect.Parameter.empty) for name, may in names]


def call_of(action: str, tools: Mapping[str, inspect.Signature]) -> Call | None:
    """The call that an action makes; ``None``: it ends the user's turn.

    Raises:
        ValueError: no tool can be called so; the message says why.
    """
    if not _BEGINS.match(action) and "<tool_call>" not in action:
        return None
    call = parse_call(action[:_LONGEST])
    if call.name == "done":
        return None
    if call.name not in tools:
        raise ValueError(f"there is no tool '{call.name[:80]}'")
    try:
        tools[call.name].bind(**call.named(list(tools[call.name].parameters)))
    except TypeError as error:
        raise ValueError(f"{call.name}: {error}") from None
    return call


def refusal(start: str, history: Sequence[Turn], action: str) -> str | None:
    """What is said to a call that the tools in an episode's texts do not allow; ``None`` where others answer.

    Where the tools are a function of the texts, so is this answer: a world model need not learn it.
    """
    # before the user speaks, in the start and in what ends a turn
    spoken = [text.partition("\nUser: ") for text in (start, *(turn.observation for turn in history))]
    tools = signatures("\n".join(before for before, user, _ in spoken if user))
    try:
        call_of(action, tools)
    except ValueError as error:
        return f"Error: {error}"
    return None


@dataclass(frozen=True, slots=True)
class _Requests:
    """What the user of an episode asks, by ``BfclTask.facts``, and how far it has come.

    Attributes:
        of_user: facts by their names, such as ``calls 1``.
        begun: for each request so far, how many turns were before it.
    """

    of_user: Mapping[str, str]
    begun: Sequence[int]
    tools: Mapping[str, inspect.Signature]

    @classmethod
    def of(cls, start: str, history: Sequence[Turn], facts: Sequence[str]) -> _Requests:
        # by what the agent did: a dreamed answer of a tool may look like a request, and is none
        begun = [0, *(k + 1 for k, turn in enumerate(history) if _ends_turn(turn.action))]
        texts = [start, *(turn.observation for turn in history)]
        tools = signatures("\n".join(_REQUEST.split(texts[k], 1)[0] for k in begun))
        return cls(dict(fact.split(": ", 1) for fact in facts if _OF_USER.match(fact)), begun, tools)

    @property
    def turns(self) -> int:
        return sum(key.startswith("calls") for key in self.of_user)

    def bound(self, text: str) -> tuple[str, dict[str, Any]] | None:
        """The tool and its arguments by name; ``None`` where the schemas refuse the call, or it is none."""
        try:
            call = call_of(text, self.tools)
        except ValueError:
            return None
        if call is None:
            return None
        return call.name, self.tools[call.name].bind(**call.named(list(self.tools[call.name].parameters))).arguments

    def wanted(self, number: int) -> list[tuple[str, dict[str, Any]] | None]:
        """The true calls of a request, the first is 1."""
        asked = self.of_user.get(f"calls {number}", "none")
        return [self.bound(call) for call in re.split(r"; (?=\w+\()", asked)] if asked != "none" else []


def user_answer(
    start: str, history: Sequence[Turn], action: str, facts: Sequence[str]
) -> tuple[str, float, bool] | None:
    """What the user says to the end of a turn, what it pays and whether it ends the episode, by ``BfclTask.facts``.

    A turn is fulfilled where all its true calls were made and answered, and nothing else was that changes a state: of
    texts alone, so it is not quite the world's own judgement, which compares states. ``None`` where no turn is ended,
    and where the next one brings tools along, of which facts give the names alone.
    """
    if not _ends_turn(action):
        return None
    requests = _Requests.of(start, history, facts)
    of_user, number, turns = requests.of_user, len(requests.begun), requests.turns
    if number > turns or f"tools {number + 1}" in of_user:
        return None
    answered = (turn.action for turn in history[requests.begun[-1] :] if not refused(turn.observation))
    made = [call for call in map(requests.bound, answered) if call is not None]
    for call in requests.wanted(number):
        if call not in made:
            return FAILED, 0.0, True
        made.remove(call)
    if any(name in CHANGING and (name != "echo" or "file_name" in arguments) for name, arguments in made):
        return FAILED, 0.0, True
    part = round(1.0 / turns, 2)
    if number == turns:
        return SOLVED, round(1.0 - part * (turns - 1), 6), True
    return f"User: {of_user[f'request {number + 1}']}", part, False


def is_answered(start: str, history: Sequence[Turn], action: str, facts: Sequence[str]) -> bool:
    """Whether no API refuses a call for sure: it is the next that the user's requests need, by ``BfclTask.facts``, and
    before it nothing but such calls changed a state or a directory.
    """
    requests = _Requests.of(start, history, facts)
    wanted = [call for k in range(len(requests.begun)) for call in requests.wanted(k + 1)]
    for turn in history:
        call = requests.bound(turn.action)
        if call is None or refused(turn.observation):
            continue
        if wanted and call == wanted[0]:
            del wanted[0]
        elif call[0] == "cd" or call[0] in CHANGING:
            return False
    return bool(wanted) and requests.bound(action) == wanted[0] is not None


def _ends_turn(action: str) -> bool:
    """Whether an action is no call of any tool."""
    try:
        return call_of(action, {}) is None
    except ValueError:
        return False
