"""A call of a tool as models write it: Python (also in Llama's list), and the JSON of Hermes, Qwen and Llama.

Text is parsed and never evaluated: arguments are literals.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_LONGEST = 8000  # characters; parsers recurse
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_BEGINS = re.compile(r"[A-Za-z_][\w.]*\(")
_UNREADABLE = "this cannot be read as a call, such as tool(name='value')"


class CallError(ValueError):
    """Text that begins as a call and is none; the message says why."""


@dataclass(frozen=True)
class Call:
    """``mv(source='a', destination='b')``."""

    tool: str
    positional: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.tool}({', '.join([*map(repr, self.positional), *(f'{k}={v!r}' for k, v in self.named.items())])})"
        )


def read_call(text: str) -> Call | None:
    """The call that a text makes, or ``None`` for one that makes none.

    Examples: ``cd(folder='a')``, ``[cd(folder='a')]``, ``<tool_call>{"name": "cd", "arguments": {"folder": "a"}}
    </tool_call>``, ``{"name": "cd", "parameters": {"folder": "a"}}``.

    Raises:
        CallError: it begins as a call and cannot be read, or makes several.
    """
    tagged = _TAGGED.findall(text)
    written = (tagged[0] if tagged else text).strip().removeprefix("<|python_tag|>").strip()
    if not (tagged or written.startswith(("{", "[")) or _BEGINS.match(written)):
        return None
    if len(written) > _LONGEST:
        raise CallError(f"a call has at most {_LONGEST} characters")
    try:
        calls = _from_json(json.loads(written)) if re.match(r"\[?\s*\{", written) else _from_python(written)
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise CallError(_UNREADABLE) from error
    if max(len(calls), len(tagged)) != 1:
        raise CallError("one call at a time")
    return calls[0]


def _from_json(value: Any) -> list[Call]:
    calls = []
    for one in value if isinstance(value, list) else [value]:
        arguments = one["arguments"] if "arguments" in one else one.get("parameters", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(one["name"], str) or not isinstance(arguments, dict):
            raise TypeError("a name is text, and arguments are an object")
        calls.append(Call(one["name"], (), arguments))
    return calls


def _from_python(written: str) -> list[Call]:
    body = ast.parse(written, mode="eval").body
    calls = []
    for node in body.elts if isinstance(body, ast.List | ast.Tuple) else [body]:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise TypeError("no call")
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
        if len(named) < len(node.keywords):
            raise TypeError("** is no argument")
        calls.append(Call(node.func.id, tuple(map(ast.literal_eval, node.args)), named))
    json.dumps([[call.positional, call.named] for call in calls])  # neither bytes, sets nor complex numbers
    return calls
