"""Printed ReAct transcripts: lines ``Action: ...`` with the ``Observation: ...`` below them, in text or a notebook.

The first action of an episode is ``reset``, whose observation is the start; where there is none, the text above the
first action is. A line of dashes with the number of the episode below it, or the next ``reset``, begins another
episode, and so does a line ``Question: ...`` or ``Context: ...`` below an action. Actions and observations may have
numbers, and may be ``Act 1:`` and ``Obs 1:``; what stands below ``Action Input:`` is a part of the action, and ``Final
Answer: ...`` is the last one. So LangChain prints its chains: ``> Entering new ... chain...`` begins an episode, and
what follows is a thought. What a line ``Thought: ...`` above an action says is a note of its turn. As WebShop prints
it:

- ``Your score (min 0.0, max 1.0): 0.5`` is the episode's reward, and its end. An episode without one has no reward.
- ``137 0.68 0.38 0.0`` at the end of an episode, below an empty line, are the mean reward and the success rate of the
  first 137: the episode was solved where the number of successes rose by it. The line itself is no observation.

Thoughts, ``think[...]``, are actions here: the transcript answers them with ``OK.``.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from real_envs.importers.drafts import ANSWER, THOUGHT, EpisodeDraft, Format, Reading
from real_envs.importers.records import Record, Sample, open_bytes, plain_suffix, text_lines
from real_envs.store.codec import FieldError

_RULE = re.compile(r"-{5,}\s*$")
_SCORE = re.compile(r"Your score \(min 0\.0, max 1\.0\): (-?\d+(?:\.\d+)?)")
_FLOAT = r"-?\d(?:\.\d+(?:e-\d{1,3})?|e-\d{1,3})"
_RATES = re.compile(rf"\n\n(\d{{1,9}}) {_FLOAT} ({_FLOAT}) {_FLOAT}(?:\n{_FLOAT} {_FLOAT} {_FLOAT})?\Z")
_STEP = re.compile(r"^Act(?:ion)?(?: ?\d+)?: ?|^(?=Final Answer:)", re.MULTILINE)
_ENDS = "Final Answer:"
_CHAIN = re.compile(r"> (?:Entering new|Finished) .*chain")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_PAIR = re.compile(
    r"^Act(?:ion)?(?: ?\d+)?: ?.*\n(?:Action Input: ?(?:.*\n){1,99}?)?(?:Final Answer|Obs(?:ervation)?(?: ?\d+)?):",
    re.MULTILINE,
)
_TASK = re.compile(r"(Question|Context): ?\S")
_THOUGHT = re.compile(r"^Thought(?: ?\d+)?: ?", re.MULTILINE)
_RESET = re.compile(r"Action: ?reset\s*$")
_SEEN = re.compile(r"^Obs(?:ervation)?(?: ?\d+)?: ?", re.MULTILINE)


class React(Format):
    name = "react"
    about = "printed 'Action:' and 'Observation:' transcripts, also in a notebook, as of ReAct's WebShop"
    as_spoken = True

    def recognises(self, sample: Sample) -> str:
        text = "".join(_printed(sample.path)) if plain_suffix(sample.path) == ".ipynb" else sample.text
        good = bool(_PAIR.search(_COLOUR.sub("", text)))
        return "it has lines 'Action: ...' above lines 'Observation: ...'" if good else ""

    def records(self, path: Path) -> Iterator[Record]:
        if plain_suffix(path) == ".ipynb":
            yield from _episodes(io.StringIO("".join(_printed(path)).replace("\r\n", "\n"), newline="\n"), path)
        else:
            yield from _episodes(text_lines(path), path)

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        text, task, solved = value
        head, *steps = _STEP.split(text)
        if not steps:
            raise FieldError("Action", "is nowhere in the episode")
        start, *thoughts = (part.strip() for part in _THOUGHT.split(head))
        turns: list[dict[str, Any]] = []
        for k, step in enumerate(steps):
            action, *observation = _SEEN.split(step, maxsplit=1)
            final = action.startswith(_ENDS) and k == len(steps) - 1
            if not observation and not final and (k == 0 or k < len(steps) - 1):
                raise FieldError(f"Observation of action {k}", "is missing")
            info = {THOUGHT: "\n\n".join(filter(None, thoughts))} if any(thoughts) else {}
            seen, *thoughts = (part.strip() for part in _THOUGHT.split("".join(observation)))
            if k == 0 and action.strip() == "reset":
                start = f"{start}\n{seen}".strip()
            else:
                turns.append({"action": action.strip(), "observation": seen, "info": info})
        if not turns:
            raise FieldError("Action", "is only 'reset': nobody acted")
        score = _SCORE.search(turns[-1]["observation"])
        return EpisodeDraft(
            start=start,
            turns=turns,
            task_id=task,
            stop="terminated" if score or final else None,
            success=solved,
            reward=float(score[1]) if score else None,
            left_out={ANSWER: int(not observation and not final), "last thought": int(any(thoughts))},
        )


def _printed(path: Path) -> Iterator[str]:
    """What the cells of a notebook printed; warnings between are none of it."""
    with open_bytes(path) as file:
        try:
            notebook = json.load(file)
        except (ValueError, RecursionError):
            return
    for cell in notebook.get("cells", []) if isinstance(notebook, dict) else []:
        for output in cell.get("outputs", []):
            if output.get("output_type") == "stream" and output.get("name") == "stdout":
                yield "".join(output.get("text", []))


def _episodes(lines: Iterable[str], path: Path) -> Iterator[Record]:
    """(text without what the runner printed, task, whether it was solved) of each episode."""
    count = 0
    solved_before = 0
    part: list[str] = []
    name = ""
    ruled = False

    def record() -> Iterator[Record]:
        nonlocal count, solved_before
        text = "".join(part)
        if not _STEP.search(text):
            return
        count += 1
        solved = None
        if rates := _RATES.search(text := text.rstrip()):
            solved_now = round(float(rates[2]) * int(rates[1]))
            solved, solved_before = solved_now > solved_before, solved_now
            text = text[: rates.start()]
        task = f"{path.stem}/{name}" if name else None
        yield Record(f"episode {name or count}", (text, task, solved))

    for line in (_COLOUR.sub("", line) for line in lines):
        if chain := _CHAIN.match(line):
            if any(_STEP.match(earlier) for earlier in part):
                yield from record()
                part, name = [], ""
            part += ["Thought:\n"] * ("Entering" in chain[0])
        elif _RULE.match(line):
            ruled = True
        elif ruled and line.strip().isdigit():
            yield from record()
            part, name, ruled = [], line.strip(), False
        else:
            if (_RESET.match(line) or _TASK.match(line)) and any(_STEP.match(earlier) for earlier in part):
                yield from record()
                part, name = [], ""
            ruled = False
            part.append(line)
    yield from record()
