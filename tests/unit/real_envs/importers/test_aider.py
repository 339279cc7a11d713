"""Aider's history in Markdown. If these fail, a user's words or the program's are taken for the agent's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.imported import items, left_out, steps, write

HISTORY = """
# aider chat started at 2026-01-01 10:00:00

> /usr/bin/aider --model m--
> Main model: m with diff edit format--

#### Fix it.--
#### And test it.--

<think>
Easy.
</think>

a.py
```
> quoted
#### heading
```

> Tokens: 2k sent, 9 received.--
> Applied edit to a.py--

#### Thanks.--

Good.

# aider chat started at 2026-01-02 10:00:00

#### /exit--
"""


@pytest.mark.parametrize("name", [".aider.chat.history.md", "history.txt"])
def test_users_and_programs_lines_are_told_from_markdown_of_the_agent(tmp_path: Path, name: str) -> None:
    (episode,), (refusal,) = items(write(tmp_path / name, HISTORY.replace("--", "  ")))
    assert (episode.start, episode.agent) == ("Fix it.\nAnd test it.", "m")
    edit = "a.py\n```\n> quoted\n#### heading\n```"
    assert steps(episode) == [(edit, "Applied edit to a.py\nThanks."), ("Good.", "")]
    assert episode.turns[0].info["log.thought"] == "Easy."
    assert left_out(episode) == {"line of the program": 3}
    assert refusal.record == "session of 2026-01-02 10:00:00"


def test_without_spaces_at_the_ends_the_beginnings_decide(tmp_path: Path) -> None:
    text = HISTORY.replace("--", "").replace("> quoted\n#### heading\n", "")
    (episode,), _ = items(write(tmp_path / "a.md", text))
    assert [turn.observation for turn in episode.turns] == ["Applied edit to a.py\nThanks.", ""]
