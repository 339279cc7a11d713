"""Tool calls as the text of an action, and the tools of a world. Nothing of such a text is ever evaluated."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from real_envs.errors import UserError
from real_envs.files import write_atomically

_FILE = "tools.json"  # of the tools of a world, beside its tasks
_WANTED = 'write name(argument=value) or {"name": ..., "arguments": {...}}'
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)  # of Hermes and Qwen
_JSON_NAMES = {"true": True, "false": False, "null": None}  # which models write in Python calls, too
_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "object": "dict", "null": "None"}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; all values are JSON.

    ``str`` writes it as ``name(argument=value)``, or as JSON where a name is none that Python knows; ``parse_call``
    reads either.
    """

    name: str
    arguments: Mapping[str, object]
    positional: Sequence[object] = ()  # values without a name, in their order

    def named(self, parameters: Sequence[str]) -> dict[str, object]:
        """All arguments by name, the positional ones by the order of ``parameters``.

        One object alone, whose keys are parameters, holds all of them: importers write ``get_user({"id": "u1"})``.

        Raises:
            ValueError: there are too many, or one is given twice.
        """
        if len(self.positional) > len(parameters):
            raise ValueError(f"{self.name} takes {len(parameters)} arguments, not {len(self.positional)}")
        first = self.positional[0] if len(self.positional) == 1 and not self.arguments else None
        if isinstance(first, dict) and first.keys() <= set(parameters):
            return dict(first)
        placed = dict(zip(parameters, self.positional, strict=False))
        if twice := placed.keys() & self.arguments.keys():
            raise ValueError(f"{self.name}: the argument {min(twice)!r} is given twice")
        return {**placed, **self.arguments}

    def __str__(self) -> str:
        if all(part.isidentifier() for part in (*self.name.split("."), *self.arguments)):
            values = [*map(repr, self.positional), *(f"{key}={value!r}" for key, value in self.arguments.items())]
            written = f"{self.name}({', '.join(values)})"
            try:
                if parse_call(written) == self:
                    return written
            except ValueError:  # such as an argument called ``class``
                pass
        return json.dumps({"name": self.name, "arguments": dict(self.arguments)}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that an agent may call; ``schema`` is the JSON schema of its arguments, an object."""

    name: str
    description: str
    schema: Mapping[str, object]


def write_tools(folder: Path, tools: Sequence[Tool]) -> None:
    write_atomically(folder / _FILE, json.dumps([asdict(tool) for tool in tools], indent=1))


def read_tools(folder: Path) -> tuple[Tool, ...]:
    """The tools of the world whose tasks are in ``folder``; none of a world without. Raises ``UserError``: damaged."""
    path = folder / _FILE
    if not path.exists():
        return ()
    try:
        tools = tuple(Tool(**content) for content in json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise UserError(f"{path} is no list of tools: collect again") from None
    if not all(
        isinstance(t.name, str) and isinstance(t.description, str) and isinstance(t.schema, dict) for t in tools
    ):
        raise UserError(f"{path} is no list of tools: collect again")
    return tools


def parse_call(text: str) -> Call:
    """The only call of a text. Raises ``ValueError`` with one line: it is none, or there are several."""
    calls = parse_calls(text)
    if len(calls) != 1:
        raise ValueError(f"{len(calls)} calls at once: make one at a time")
    return calls[0]


def parse_calls(text: str) -> list[Call]:
    """The calls of a text, at least one.

    ``f(x=1)`` with literal values, Llama's ``[f(x=1), g()]``, ``{"name": "f", "arguments": {"x": 1}}`` alone or in a
    list, and the same between Hermes' ``<tool_call>`` and ``</tool_call>``, where text may stand around them.

    Raises:
        ValueError: it is none of these; the message is one line.
    """
    parts = [part.strip() for part in _TAGGED.findall(text)] or [text.strip()]
    try:
        calls = [call for part in parts for call in _calls(part)]
    except (RecursionError, MemoryError):  # MemoryError: the parser's, of thousands of signs within each other
        raise ValueError(f"the call is nested too deeply: {_WANTED}") from None
    if not calls:
        raise ValueError(f"there is no call: {_WANTED}")
    return calls


def _calls(text: str) -> list[Call]:
    try:
        content = json.loads(text)
    except ValueError:
        return _python_calls(text)
    return [_json_call(one) for one in (content if isinstance(content, list) else [content])]


def _json_call(content: object) -> Call:
    if not isinstance(content, dict) or not isinstance(name := content.get("name"), str) or not name:
        raise ValueError(f"this JSON is no call: {_WANTED}")
    arguments = content.get("arguments", content.get("parameters", {}))
    if isinstance(arguments, str):  # as OpenAI writes them
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise ValueError(f"{name[:80]}: arguments are no JSON") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{name[:80]}: arguments must be an object")
    return Call(name, {key: _plain(value, name) for key, value in arguments.items()})


def _python_calls(text: str) -> list[Call]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of an unknown escape in a string
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):  # ValueError: of a null character
        raise ValueError(f"this is no call: {_WANTED}") from None
    return [_python_call(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or not re.fullmatch(r"\w+(\.\w+)*", name := ast.unparse(node.func)):
        raise ValueError(f"this is no call: {_WANTED}")
    arguments: dict[str, object] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError(f"{name[:80]}: every argument is given once, as argument=value")
        arguments[keyword.arg] = _literal(keyword.value, name)
    return Call(name, arguments, tuple(_literal(value, name) for value in node.args))


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _literal(node: ast.expr, name: str) -> object:
    try:
        value = ast.literal_eval(_JsonNames().visit(node))
    except (ValueError, TypeError, SyntaxError):
        raise ValueError(f"{name[:80]}: values are literals, such as 3, 'text', [1, 2] or True") from None
    return _plain(value, name)


def _plain(value: object, name: str) -> object:
    """The value as JSON has it: tuples are lists. Raises ``ValueError``: JSON has no such value."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise ValueError(f"{name[:80]}: a value is none that JSON has") from None


def signature(name: str, json_schema: Mapping[str, object]) -> str:
    """``add(title: str, tags?: list[str], place: 'top'|'end' = 'end')`` of a tool's input schema, required ones first.

    What of the schema is none, or says no type, is ``any``.
    """
    properties, required = json_schema.get("properties"), json_schema.get("required")
    kinds = properties if isinstance(properties, dict) else {}
    needed = [str(key) for key in required if str(key) in kinds] if isinstance(required, list) else []
    parts = [f"{key}: {_type(kinds[key], json_schema)}" for key in needed]
    for key in (key for key in kinds if key not in needed):
        default = kinds[key].get("default") if isinstance(kinds[key], dict) else None
        kind = _type(kinds[key], json_schema)
        parts.append(f"{key}?: {kind}" if default is None else f"{key}: {kind} = {default!r}")
    return f"{name}({', '.join(parts)})"


def _type(schema: object, root: Mapping[str, object], depth: int = 0) -> str:
    if not isinstance(schema, dict) or depth > 3:
        return "any"
    if isinstance(reference := schema.get("$ref"), str):
        target: object = root
        for key in reference.removeprefix("#/").split("/"):
            target = target.get(key) if isinstance(target, dict) else None
        return _type(target, root, depth + 1)
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list) and values:
        return "|".join(map(repr, values))
    for choice in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(choice), list) and options:
            return "|".join(dict.fromkeys(_type(option, root, depth + 1) for option in options))
    kind = schema.get("type")
    if isinstance(kind, list):
        return "|".join(_TYPES.get(str(one), "any") for one in kind) or "any"
    if kind == "array":
        return f"list[{_type(schema.get('items'), root, depth + 1)}]" if "items" in schema else "list"
    return _TYPES.get(str(kind), "any")
