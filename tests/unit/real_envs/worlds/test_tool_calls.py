"""How models write calls. If these fail, a policy's calls are misread, or its text is run."""

from __future__ import annotations

import pytest

from real_envs.worlds.tool_calls import Call, CallError, read_call

MOVE = Call("mv", (), {"source": "a b.txt", "destination": "c"})


@pytest.mark.parametrize(
    "text",
    [
        "mv(source='a b.txt', destination='c')",
        "  mv(source='a b.txt',destination='c')\n",
        "[mv(source='a b.txt', destination='c')]",
        '<tool_call>\n{"name": "mv", "arguments": {"source": "a b.txt", "destination": "c"}}\n</tool_call>',
        'I move it.\n<tool_call>{"name": "mv", "arguments": {"source": "a b.txt", "destination": "c"}}',
        '{"name": "mv", "parameters": {"source": "a b.txt", "destination": "c"}}',
        '<|python_tag|>{"name": "mv", "parameters": {"source": "a b.txt", "destination": "c"}}',
        '[{"name": "mv", "arguments": "{\\"source\\": \\"a b.txt\\", \\"destination\\": \\"c\\"}"}]',
    ],
)
def test_each_way_of_writing_makes_the_same_call(text: str) -> None:
    assert read_call(text) == MOVE
    assert read_call(str(MOVE)) == MOVE


def test_arguments_are_literals_of_all_kinds() -> None:
    call = read_call("f('x', -1.5, [1, 'a'], {'k': None}, on=True)")
    assert call == Call("f", ("x", -1.5, [1, "a"], {"k": None}), {"on": True})
    assert read_call("done()") == Call("done")


@pytest.mark.parametrize("text", ["", "   ", "I am done.", "look " * 2000, "done", "All is well (I think).", "(((("])
def test_text_that_is_no_call_is_none(text: str) -> None:
    assert read_call(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "f(__import__('os').system('touch hacked'))",
        "f(x=open('a').read())",
        "__import__('os').system('touch hacked')",
        "a.b()",
        "f(**{'a': 1})",
        "f(*[1])",
        "f(x=1)(y=2)",
        "f(x=9**9**9)",
        "f(x=b'a')",
        "f(x={1, 2})",
        "f(x=lambda: 1)",
        "f('\ud800')",
        "f(\x00)",
        "f('a'",
        "f(" + "9" * 6000 + ")",
        "f(" + "-" * 7000 + "1)",
        "f(" + "[" * 3000 + "]" * 3000 + ")",
        "f('" + "a" * 9000 + "')",
        "{" * 7000,
        '{"a":' * 1500,
        "{}",
        '{"name": 3}',
        '{"name": "f", "arguments": [1]}',
        "[1, 2]",
        "[]",
        "[f(), g()]",
        "<tool_call>f()</tool_call><tool_call>g()</tool_call>",
        "<tool_call>none</tool_call>",
    ],
)
def test_what_begins_as_a_call_and_is_none_is_refused(text: str) -> None:
    with pytest.raises(CallError):
        read_call(text)
