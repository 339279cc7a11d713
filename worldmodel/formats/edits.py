r"""A small language for edits of observations: lines of text, and nodes of accessibility trees.

An edit is a text of its own. Its first line names what is edited, each further line is one operation, from top to
bottom::

    =                         the last observation; alone: nothing changed
    =-= Kitchen =-            from this line to its end, the latest observation that has this line
    -3    -3..5    -[12]*     lines go: one, several, or a node and all that is deeper below it
    ~3 A table. It is empty.  a line becomes another one
    ~[12] button 'Save'       a node becomes another one, at the same depth and with the same [id]
    ~3..5 One line for three  several lines become others
    +3 There is a key here.   a new line after this one; 0 stands before the first
    |It is heavy.             one more line after that of the ~ or + before it

An edit whose first line does not begin with ``=`` is the whole new text, as it stands: what shares little with
anything seen costs nothing extra. A text that itself begins with ``=`` or ``\`` is written behind a ``\``.

Addresses are those of the text that is edited: line numbers from 1; ``[12]`` for the line that begins with ``[12]``
behind its indentation, as BrowserGym writes the nodes of a tree (where no other line begins so); ``[12]+2`` for the
second line below it. Operations ascend and never overlap, and nothing is applied before all of them were found valid.

Example::

    apply("-= Hall =-\nA lamp is here.\nGo east.", "=\n-2")  # "-= Hall =-\nGo east."

The reference of an edit was chosen on the TextWorld log of the demo (27,330 training turns, 11.5 target tokens a turn
as whole text): edits of the last observation alone save 3 % of the tokens, and edits from a line of any earlier one 20
%, for walking back into a room repeats most of a text from several turns before. A line names that text rather than a
number of turns, because the model writes the title of the room in any case, and would have to count for the number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from functools import lru_cache

from real_envs.trajectory import Trajectory, Turn
from worldmodel.formats.full import FullObservation, TransitionFormat, status_line
from worldmodel.world_model import InvalidReason, PredictionInvalid

_NODE = re.compile(r"([ \t]*)\[([^\[\]\s]+)\](?=\s|\Z)")
_PLACE = r"\[[^\[\]\s]+\](?:\+\d+)?|\d+"
_CUT = re.compile(rf"-(?P<at>{_PLACE})(?:\.\.(?P<to>{_PLACE})|(?P<below>\*))?")
_NEW = re.compile(rf"(?P<op>[~+])(?P<at>{_PLACE})(?:\.\.(?P<to>{_PLACE}))?(?: (?P<text>.*))?", re.DOTALL)
_AT = re.compile(r"(?:\[(?P<node>[^\[\]\s]+)\](?:\+(?P<below>\d+))?|(?P<line>\d+))\Z", re.ASCII)


class EditFault(StrEnum):
    """Why an edit cannot be applied."""

    UNKNOWN_OP = "unknown operation"
    OUT_OF_RANGE = "out of range"
    WRONG_CONTEXT = "wrong context"  # it names a line or a node that is not there, or there twice
    OUT_OF_ORDER = "out of order"


class EditInvalid(ValueError):
    """The edit cannot be applied, and nothing of it was.

    Attributes:
        number: which one it is, from 1.
    """

    def __init__(self, fault: EditFault, line: str, number: int, detail: str) -> None:
        super().__init__(f"{fault.value} in line {number} of the edit, {line!r}: {detail}")
        self.fault, self.line, self.number = fault, line, number


@dataclass(frozen=True, slots=True)
class _Op:
    """Lines ``first`` to ``last - 1`` (from 0) of the reference are replaced by ``new``."""

    first: int
    last: int
    new: tuple[str, ...]


def apply(before: str, edits: str, earlier: Sequence[str] = ()) -> str:
    """The text that the edit makes.

    Args:
        earlier: observations before the last one, oldest first; ``=line`` searches ``before``, then these backwards.

    Raises:
        EditInvalid: an operation that does not exist, or an address that is not in the text or out of order.
    """
    if not edits.startswith("="):
        return edits.removeprefix("\\")
    head, *written = edits.split("\n")
    lines = before.split("\n") if head == "=" else _block((*earlier, before), head[1:])
    if lines is None:
        raise EditInvalid(EditFault.WRONG_CONTEXT, head, 1, "no observation of the episode has this line")
    out: list[str] = []
    done = 0
    for op in _parsed(lines, written):
        out += lines[done : op.first]
        out += op.new
        done = op.last
    return "\n".join([*out, *lines[done:]])


def diff(before: str, after: str, earlier: Sequence[str] = (), cost: Callable[[str], float] = len) -> str:
    """The edit of ``before``, or of an earlier observation, that makes ``after`` at the least cost.

    It is canonical: one pair of texts has one edit, whoever made the second text. Candidates are the whole text, the
    edit of ``before``, and that of the block which begins with the first line of ``after``; the earlier in this list
    wins a tie. Which lines stay is difflib's choice, so a shorter edit may exist where lines repeat.

    Args:
        cost: what is to be small, such as the number of tokens.
    """
    whole = f"\\{after}" if after.startswith(("=", "\\")) else after
    candidates = [whole, _edit("=", before.split("\n"), after)]
    title = after.split("\n", 1)[0]
    block = _block((*earlier, before), title) if title else None
    if block is not None:
        candidates.append(_edit(f"={title}", block, after))
    return min((c for c in candidates if c is not None), key=cost)


def _block(texts: Sequence[str], line: str) -> list[str] | None:
    """The lines of the last text that has ``line``, from there to its end."""
    for text in reversed(texts):
        if line in text:  # cheap; the split tells whether it is a line
            lines = text.split("\n")
            if line in lines:
                return lines[lines.index(line) :]
    return None


# --- reading


def _parsed(lines: Sequence[str], written: Sequence[str]) -> list[_Op]:
    nodes = _nodes(lines)
    ops: list[_Op] = []
    open_for_more = False
    for number, line in enumerate(written, start=2):
        if line.startswith("|") and open_for_more:
            ops[-1] = _Op(ops[-1].first, ops[-1].last, (*ops[-1].new, line[1:]))
            continue
        cut, new = _CUT.fullmatch(line), _NEW.fullmatch(line)
        match = cut or new
        if match is None or (new is not None and new["op"] == "+" and new["to"]):
            detail = "it wants -, ~ or + and an address, or | behind a new line"
            raise EditInvalid(EditFault.UNKNOWN_OP, line, number, detail)
        if new is not None and new["text"] is None and not (new["op"] == "~" and _node_alone(new)):
            raise EditInvalid(EditFault.UNKNOWN_OP, line, number, "a space and the new line belong behind the address")
        op = _op(lines, nodes, match, line, number)
        if ops and (op.first < ops[-1].last or (op.first == op.last == ops[-1].first == ops[-1].last)):
            raise EditInvalid(EditFault.OUT_OF_ORDER, line, number, "it belongs before, or overlaps, the line above it")
        ops.append(op)
        open_for_more = new is not None
    return ops


def _node_alone(match: re.Match[str]) -> bool:
    """Whether the address is a node's own line, whose depth and id an operation keeps."""
    return match["to"] is None and match["at"].endswith("]")


def _op(lines: Sequence[str], nodes: dict[str, int], match: re.Match[str], line: str, number: int) -> _Op:
    def place(address: str, least: int) -> int:
        """The line, from 1."""
        parts = _AT.match(address)
        if parts is None:
            raise EditInvalid(EditFault.UNKNOWN_OP, line, number, "an address is a line number, [id] or [id]+number")
        if parts["node"] is not None and parts["node"] not in nodes:
            raise EditInvalid(EditFault.WRONG_CONTEXT, line, number, f"not exactly one line begins with {address}")
        # a number of more digits than any text has lines is out of range, however long it is
        if len(parts["line"] or parts["below"] or "") > 12:
            raise EditInvalid(EditFault.OUT_OF_RANGE, line, number, f"the text has {len(lines)} lines")
        at = nodes[parts["node"]] + int(parts["below"] or 0) + 1 if parts["node"] is not None else int(parts["line"])
        if not least <= at <= len(lines):
            raise EditInvalid(EditFault.OUT_OF_RANGE, line, number, f"the text has {len(lines)} lines")
        return at

    groups = match.groupdict()
    if groups.get("op") == "+":
        at = place(match["at"], 0)
        return _Op(at, at, (match["text"],))
    first = place(match["at"], 1) - 1
    last = place(match["to"], 1) if match["to"] else first + 1
    if last <= first:
        raise EditInvalid(EditFault.OUT_OF_RANGE, line, number, "the second address stands before the first")
    if groups.get("below"):
        last = _end_of_subtree(lines, first)
    if "op" not in groups:
        return _Op(first, last, ())
    if not _node_alone(match):
        return _Op(first, last, (match["text"],))
    node = _NODE.match(lines[first])
    assert node is not None
    return _Op(first, last, (node[0] + ("" if match["text"] is None else f" {match['text']}"),))


def _nodes(lines: Sequence[str]) -> dict[str, int]:
    """The line, from 0, of each [id] that begins exactly one line."""
    named = [(node[2], k) for k, line in enumerate(lines) if (node := _NODE.match(line))]
    times = Counter(name for name, _ in named)
    return {name: k for name, k in named if times[name] == 1}


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def _end_of_subtree(lines: Sequence[str], first: int) -> int:
    last = first + 1
    while last < len(lines) and _depth(lines[last]) > _depth(lines[first]):
        last += 1
    return last


# --- writing


def _edit(head: str, lines: Sequence[str], after: str) -> str | None:
    """The edit of the reference that makes ``after``; ``None`` where no line of it is left."""
    wanted = after.split("\n")
    codes = SequenceMatcher(None, lines, wanted, autojunk=False).get_opcodes()
    if not any(code == "equal" for code, *_ in codes):
        return None
    names = {k: name for name, k in _nodes(lines).items()}
    written = [head]
    for code, a, b, c, d in codes:
        if code != "equal":
            written += _operations(lines, names, a, b, wanted[c:d])
    return "\n".join(written)


def _operations(lines: Sequence[str], names: dict[int, str], a: int, b: int, new: Sequence[str]) -> Iterator[str]:
    """Operations that replace lines ``a`` to ``b - 1`` by ``new``."""
    if len(new) == b - a and all(_kept_node(lines[a + k], names.get(a + k), line) for k, line in enumerate(new)):
        for line in new:  # each node on its own: their ids and depths need not be written again
            node = _NODE.match(line)
            assert node is not None
            yield f"~[{node[2]}]{line[node.end() :]}"
        return
    if not new:
        if a in names and b > a + 1 and _end_of_subtree(lines, a) == b:
            yield f"-[{names[a]}]*"
        else:
            yield f"-{_span(names, a, b)}"
        return
    first, *more = new
    yield f"~{_wholly(names, a, b)} {first}" if b > a else f"+{_address(names, a - 1)} {first}"
    for line in more:
        yield f"|{line}"


def _kept_node(old: str, name: str | None, new: str) -> bool:
    """Whether a node stays the same node; what follows its id must begin with a plain space, or with nothing."""
    before, after = _NODE.match(old), _NODE.match(new)
    return bool(name and before and after and before[0] == after[0] and new[after.end() : after.end() + 1] in ("", " "))


def _address(names: dict[int, str], k: int) -> str:
    """Of line ``k`` from 0: its [id], or how far it is below the nearest one, or its number from 1."""
    for above in range(k, -1, -1):
        if above in names:
            return f"[{names[above]}]" + (f"+{k - above}" if k > above else "")
    return str(k + 1)


def _span(names: dict[int, str], a: int, b: int) -> str:
    return _address(names, a) + (f"..{_address(names, b - 1)}" if b > a + 1 else "")


def _wholly(names: dict[int, str], a: int, b: int) -> str:
    """A span whose lines are replaced with depth and all: a single node goes by its number."""
    return str(a + 1) if b == a + 1 and a in names else _span(names, a, b)


# --- the format


@lru_cache(maxsize=1 << 16)
def _last_edit(observations: tuple[str, ...]) -> str:
    """The edit that makes the last of these observations out of those before it."""
    *earlier, before, after = observations
    return diff(before, after, earlier)


class EditFormat:
    """An edit of an earlier observation, in the prompt as in the answer; code applies it.

    Args:
        in_full: the text that an edit has made follows it in the prompt, before the next action, and trains nobody. The
            model then sees the lines that the next edit counts. Without it, they must be pieced together from all edits
            before, which suits pages too long to be repeated.
    """

    reasoning_tokens = 0

    def __init__(self, in_full: bool = True) -> None:
        self.in_full = in_full

    def answers(self, start: str, turns: Sequence[Turn]) -> list[str]:
        seen = [start]
        answers = []
        for turn in turns:
            seen.append(turn.observation)
            answers.append(_last_edit(tuple(seen)) + status_line(turn.reward, turn.terminated))
        return answers

    def contexts(self, start: str, history: Sequence[Turn], action: str) -> list[str]:
        """See ``TransitionFormat``. Where nothing has changed, the text stands there already."""
        if not self.in_full:
            return []
        edits = [answer.rpartition("\n")[0] for answer in self.answers(start, history)]
        edited = [
            f"{turn.observation}\n> " if edit.startswith("=") and edit != "=" else ""
            for turn, edit in zip(history, edits, strict=True)
        ]
        return ["", *edited]

    def read(self, text: str, start: str, history: Sequence[Turn]) -> tuple[str, float, bool]:
        edit, reward, terminated = FullObservation().read(text, start, history)
        *earlier, before = [start, *(turn.observation for turn in history)]
        try:
            return apply(before, edit, earlier), reward, terminated
        except EditInvalid as error:
            raise PredictionInvalid(f"the edit was rejected: {error}", InvalidReason.EDIT) from error

    def phrases(self, log: Sequence[Trajectory]) -> list[str]:
        return []

    def excluding(self, episodes: Sequence[Trajectory]) -> TransitionFormat:
        return self
