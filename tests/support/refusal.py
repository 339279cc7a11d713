"""What a user is told where something is refused: a line that names what there is to find in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from imagination.cli import main
from imagination.runs.progress_bar import LINE
from real_envs.errors import UserError


def refused(call: Callable[[], object], *tokens: str, error: type[Exception] = UserError) -> Any:
    """``call`` raises ``error``, whose text is one line with all the tokens; the exception."""
    with pytest.raises(error) as caught:
        call()
    in_a_line(str(caught.value), *tokens)
    return caught.value


def in_a_line(text: str, *tokens: str) -> None:
    assert "\n" not in text.strip("\n"), text
    assert [token for token in tokens if token not in text] == [], text


def mistaken(capsys: pytest.CaptureFixture[str], words: list[str], *tokens: str) -> None:
    """The command ends with code 2 and, but for bars, one line on standard error that has all the tokens."""
    capsys.readouterr()
    assert main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not LINE.match(line)]
    in_a_line(line, "error: ", *tokens)
