"""Aider's ``.aider.chat.history.md``: Markdown of what was said, in sessions ``# aider chat started at ...``.

Lines ``#### ...`` are the user's and lines ``> ...`` the program's; both end with two spaces, by which they are told
from Markdown of the agent, whose all other lines are. The program's lines before the user's first one, and counts of
tokens, are left out: the agent never saw them. Where an editor took the spaces off, the beginnings of the lines decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from real_envs.importers.drafts import Dialogue, EpisodeDraft, Format, Reading
from real_envs.importers.messages import apart
from real_envs.importers.records import Record, Sample, text_lines
from real_envs.store.codec import FieldError

_SESSION = re.compile(r"# aider chat started at (.+)")
_MODEL = re.compile(r"> (?:Main )?[Mm]odel: (\S+)")
_USER, _PROGRAM, _AGENT = "####", ">", ""


class Aider(Format):
    name = "aider"
    about = "Aider's .aider.chat.history.md: sessions of user, program and agent in Markdown"

    def recognises(self, sample: Sample) -> str:
        begun = re.search(rf"^{_SESSION.pattern}", sample.text, re.MULTILINE) if sample.record is None else None
        return "it has lines '# aider chat started at ...'" if begun else ""

    def records(self, path: Path) -> Iterator[Record]:
        lines = [line.rstrip("\n") for line in text_lines(path)]
        spaced = any(line.startswith((f"{_USER} ", f"{_PROGRAM} ")) and line.endswith("  ") for line in lines)
        begins = [i for i, line in enumerate(lines) if _SESSION.match(line)]
        for begin, end in zip(begins, [*begins[1:], len(lines)], strict=True):
            yield Record(f"session of {lines[begin][24:].strip()}", (lines[begin + 1 : end], spaced))

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        lines, spaced = value

        def speaker(line: str) -> str:
            mark = next((mark for mark in (_USER, _PROGRAM) if line.startswith(f"{mark} ")), _AGENT)
            return mark if line.endswith("  ") or not spaced else _AGENT

        dialogue = Dialogue()
        asked = False
        for who, group in groupby(lines, speaker):
            spoken = list(group)
            asked |= who == _USER
            hidden = [line for line in spoken if not asked or line.startswith("> Tokens: ")]
            dialogue.left_out["line of the program"] += sum(bool(line.strip()) for line in hidden)
            shown = [line for line in spoken if line not in hidden]
            text = "\n".join(line[len(who) + 1 :].rstrip() if who else line for line in shown).strip()
            if who == _AGENT and text:
                thoughts, action, _ = apart(text)
                dialogue.act(action, thoughts)
            elif text:
                dialogue.answer(text)
        if not dialogue.turns:
            raise FieldError("", "has no text of the agent")
        stop = dialogue.end(None)
        model = next(filter(None, map(_MODEL.match, lines)), None)
        return EpisodeDraft(
            start="\n".join(dialogue.start),
            turns=dialogue.turns,
            agent=model and model[1],
            stop=stop,
            left_out=dialogue.left_out,
        )
