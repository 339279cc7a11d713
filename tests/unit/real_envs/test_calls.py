"""Tool calls as text. If these fail, an agent's action reaches a tool with other values than it wrote, or runs code."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from real_envs.calls import Call, parse_call, parse_calls, signature

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("text", "name", "arguments", "positional"),
    [
        ("add_note(title='a', done=True)", "add_note", {"title": "a", "done": True}, ()),
        (" math.pow(2, exponent=-3.5) ", "math.pow", {"exponent": -3.5}, (2,)),
        ("[f(x=1)]", "f", {"x": 1}, ()),
        ("f(x=(1, 2), y={'a': [None]})", "f", {"x": [1, 2], "y": {"a": [None]}}, ()),
        ("f(x=[true, false], y=null)", "f", {"x": [True, False], "y": None}, ()),
        ("f()", "f", {}, ()),
        ("f(x='a)\\n[b]')", "f", {"x": "a)\n[b]"}, ()),
        ('{"name": "f", "arguments": {"x": "1"}}', "f", {"x": "1"}, ()),
        ('{"name": "user-get", "parameters": {}}', "user-get", {}, ()),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', "f", {"x": 1}, ()),
        ('Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "f", {"x": 1}, ()),
        ('<tool_call>{"name": "f"}', "f", {}, ()),
    ],
)
def test_each_format_is_read(text: str, name: str, arguments: dict[str, object], positional: tuple[object]) -> None:
    assert parse_call(text) == Call(name, arguments, positional)


@pytest.mark.parametrize(
    "text",
    [
        "", "look", "go north", "f", "f(x=y)", "f(x=g())", "f(x=1+1)", "f(x=__import__('os'))", "f(**{'x': 1})",
        "f(*[1])", "f(x=1, x=2)", "f(x=b'1')", "f(x={1, 2})", "f(x=1j)", "f(x=1e999)", "f(x=...)", "f(x=f'{1}')",
        "(lambda: f)()", "f()()", "f[0](x=1)", "f(x=1); g()", "f(x=1)\ng()", "[]", "[f(), 3]", "f(x={[]: 1})",
        "[f(x=1), g()]", "f(\0)", "(" * 10_000, "-" * 100_000 + "1", "[" * 100_000, "f(x=" + "-" * 100_000 + "1)",
        "f(x=" + "9" * 5000 + ")", "f" + ".a" * 50_000 + "()", '{"name": "f", "arguments": [1]}', '{"name": 3}',
        '{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": "x"}', '{"arguments": {}}', "3", "null",
        "<tool_call></tool_call>",
    ],
)  # fmt: skip
def test_what_is_no_call_is_told_in_one_line(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"\A[^\n]{10,250}\Z"):
            parse_call(text)


def test_several_calls_keep_their_order() -> None:
    assert [call.name for call in parse_calls("[f(x=1), g(), f(x=2)]")] == ["f", "g", "f"]
    tagged = '<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    assert [call.name for call in parse_calls(tagged)] == ["a", "b"]


@given(st.text(min_size=1), st.dictionaries(st.text(), VALUES, max_size=3))
def test_what_is_written_is_read_again(name: str, arguments: dict[str, object]) -> None:
    call = Call(name, arguments)
    assert parse_call(str(call)) == call


def test_a_call_is_written_as_python_where_it_can_be() -> None:
    assert str(Call("add", {"title": "a b", "count": 2})) == "add(title='a b', count=2)"
    assert str(Call("get-user", {"id": 1})) == '{"name": "get-user", "arguments": {"id": 1}}'
    assert str(Call("f", {"class": 1})) == '{"name": "f", "arguments": {"class": 1}}'


def test_positional_values_take_the_names_of_their_places() -> None:
    call = parse_call("move('a.txt', to='b')")
    assert call.named(["source", "to"]) == {"source": "a.txt", "to": "b"}
    assert parse_call('get_user({"id": "u1"})').named(["id"]) == {"id": "u1"}  # as importers write it
    assert parse_call('keep({"colour": "red"})').named(["facts"]) == {"facts": {"colour": "red"}}
    with pytest.raises(ValueError, match="to"):
        call.named(["to"])
    with pytest.raises(ValueError, match="move"):
        parse_call("move(1, 2)").named(["source"])


def test_a_signature_names_types_enums_and_defaults() -> None:
    schema = {
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}},
            "title": {"type": "string"},
            "place": {"enum": ["top", "end"], "default": "end"},
            "due": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "owner": {"$ref": "#/$defs/Owner"},
            "size": {"type": ["number", "null"]},
            "odd": True,
        },
        "required": ["title", "gone"],
        "$defs": {"Owner": {"type": "object"}},
    }
    assert signature("add", schema) == (
        "add(title: str, tags?: list[str], place: 'top'|'end' = 'end', due?: int|None, owner?: dict, "
        "size?: float|None, odd?: any)"
    )


@pytest.mark.parametrize(
    "schema",
    [{}, {"properties": []}, {"properties": None, "required": 3}, {"properties": {}, "required": [[]]}],
)
def test_a_schema_without_parameters_has_none(schema: dict[str, object]) -> None:
    assert signature("ping", schema) == "ping()"


def test_a_schema_that_names_itself_ends() -> None:
    node = {"type": "array", "items": {"$ref": "#/$defs/Node"}}
    schema = {"properties": {"x": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}
    assert signature("f", schema).startswith("f(x?: list[")
