"""Runs of browser-use: a folder a task with ``history.json`` (actions and their results) and ``result.json``.

``result.json`` states ``task_id``, ``instruction`` and ``passed``. Where ``conversations.jsonl.gz`` lies above the
tasks (``task``, ``step``, ``text``), observations are the pages that the agent was shown, the page at step k+1 being
the answer to the actions of step k; else they are what the actions said of their results.

The browser numbers elements anew at every load. Here the elements of a page are numbered from 1 in their order, so the
same page is the same text in every episode; actions have the numbers of the page they were chosen on. Asterisks for
what is new since the last step are left out. A step with several actions is one action of several lines. No page
answers the last step: its observation is what its actions returned. What the agent thought is a note of the turn. A
step whose answer could not be read is no turn, and its error is counted.

``passed`` is the success; nothing says what a step earned.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from real_envs.importers.drafts import THOUGHT, EpisodeDraft, Format, Reading
from real_envs.importers.events import objects
from real_envs.importers.records import Record, Sample, has_keys, json_records
from real_envs.store.codec import FieldError

HISTORY, RESULT, PAGES = "history.json", "result.json", "conversations.jsonl.gz"
_ELEMENT = re.compile(r"\*?\[(\d+)\]<")
_STATE = re.compile(r"<browser_state>(.*?)</browser_state>", re.DOTALL)
_LISTED = re.compile(r"^Interactive elements:\n", re.MULTILINE)
_KNOWN = ("task_id", "instruction", "passed", "is_done")


class BrowserUse(Format):
    name = "browser-use"
    about = "folders of history.json and result.json of a web agent, as of browser-use; give a run's folder"

    def recognises(self, sample: Sample) -> str:
        if sample.path.is_dir():
            return f"it is a folder with {RESULT} of tasks" if task_folders(sample.path) else ""
        steps = sample.record.get("history") if isinstance(sample.record, dict) else None
        good = isinstance(steps, list) and bool(steps) and isinstance(steps[0], dict) and "model_output" in steps[0]
        return "its 'history' has 'model_output'" if good else ""

    def records(self, path: Path) -> Iterator[Record]:
        folders = task_folders(path) if path.is_dir() else [path.parent]
        for folder in folders:
            where = folder.relative_to(path).as_posix() if path.is_dir() else path.name
            try:
                result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
                history = json.loads((folder / HISTORY).read_text(encoding="utf-8"))
            except FileNotFoundError as error:
                name = Path(str(error.filename)).name
                reason = "nothing was logged" if name == HISTORY else "nothing says what the task was, and if it passed"
                yield Record(where, FieldError(name, f"is missing: {reason}"))
            except (ValueError, RecursionError) as error:
                yield Record(where, FieldError("", f"is no JSON: {error}"))
            else:
                yield Record(where, {"result": result, "history": history, "pages": pages_of(folder), "run": folder})

    def columns(self, value: Any) -> Mapping[str, Any]:
        result = value.get("result") if isinstance(value, dict) else None
        return result if isinstance(result, dict) else {}

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        result, history, pages = value["result"], value["history"], value["pages"]
        steps = history.get("history") if isinstance(history, dict) else None
        if not isinstance(steps, list):
            raise FieldError("history", "is no list of steps")
        goal = result.get("instruction") if isinstance(result, dict) else None
        if not isinstance(goal, str):
            raise FieldError("instruction", f"is {goal!r:.40}, not text")
        acted = [(_number(step, place), step) for place, step in enumerate(steps) if _actions(step)]
        if pages:  # the browser went to the first page by itself
            acted = [(number, step) for number, step in acted if number in pages]
        if not acted:
            raise FieldError("history", "has no step with an action")
        turns: list[dict[str, Any]] = []
        for k, (number, step) in enumerate(acted):
            numbers = renumbered(pages[number])[1] if pages else {}
            last = k == len(acted) - 1
            answer = _results(step) if last or not pages else renumbered(pages[acted[k + 1][0]])[0]
            action = "\n".join(as_call(one, numbers) for one in _actions(step))
            info = {THOUGHT: thought} if (thought := _thought(step["model_output"])) else {}
            turns.append({"action": action, "observation": answer, "info": info})
        turns[-1]["terminated"] = any(result.get("is_done") for result in objects(acted[-1][1].get("result")))
        first = renumbered(pages[acted[0][0]])[0] if pages else ""
        return EpisodeDraft(
            start=f"Goal: {goal}\n{first}".strip(),
            turns=turns,
            # task_1 of one application is another task than task_1 of the next
            task_id=f"{result.get('task_id', 'task')}-{hashlib.sha256(goal.encode()).hexdigest()[:6]}",
            success=result.get("passed"),
            left_out={"error of a step without an action": sum(map(_only_failed, steps))},
            extra={name: note for name, note in result.items() if name not in _KNOWN},
        )


def task_folders(path: Path) -> list[Path]:
    """The folders of tasks below a folder, sorted: those with a history beside a result, or a result that says so."""
    results = path.rglob(RESULT)
    return sorted(file.parent for file in results if (file.parent / HISTORY).exists() or has_keys(file, "instruction"))


def pages_of(folder: Path) -> Mapping[int, str]:
    """The pages that the agent of a task's folder was shown, by step; empty where they were not kept."""
    file = folder.parent / PAGES
    return _pages(file).get(folder.name, {}) if file.exists() else {}


@lru_cache(maxsize=1)  # the tasks of a run come one after the other, and share the file
def _pages(path: Path) -> dict[str, dict[int, str]]:
    pages: dict[str, dict[int, str]] = {}
    for record in json_records(path):
        line = record.value
        if isinstance(line, dict) and isinstance(line.get("text"), str) and isinstance(line.get("step"), int):
            state = _STATE.search(line["text"])
            pages.setdefault(str(line.get("task")), {})[line["step"]] = _listed(state[1] if state else line["text"])
    return pages


def _listed(state: str) -> str:
    """The page itself, without the statistics above it."""
    heading = _LISTED.search(state)
    return (state[heading.end() :] if heading else state).strip("\n")


def renumbered(page: str) -> tuple[str, dict[str, int]]:
    """The page with its elements numbered from 1, and the browser's number of each: ``{"66345": 5}``."""
    numbers: dict[str, int] = {}

    def renumber(element: re.Match[str]) -> str:
        return f"[{numbers.setdefault(element[1], len(numbers) + 1)}]<"

    return _ELEMENT.sub(renumber, page), numbers


def as_call(action: Mapping[str, Any], numbers: Mapping[str, int]) -> str:
    """``{"click": {"index": 66345}}`` as ``click(index=5)``; an element that the page did not show keeps its number."""
    calls = []
    for name, given in action.items():
        if not isinstance(given, Mapping):
            calls.append(f"{name}({'' if given is None else json.dumps(given, ensure_ascii=False)})")
            continue
        values = {key: value for key, value in given.items() if value is not None}
        if "index" in values:
            values["index"] = numbers.get(str(values["index"]), values["index"])
        calls.append(f"{name}({', '.join(f'{k}={json.dumps(v, ensure_ascii=False)}' for k, v in values.items())})")
    return "\n".join(calls)


def _actions(step: Any) -> list[Mapping[str, Any]]:
    output = step.get("model_output") if isinstance(step, dict) else None
    actions = output.get("action") if isinstance(output, dict) else None
    return [action for action in actions if isinstance(action, Mapping)] if isinstance(actions, list) else []


def _number(step: Mapping[str, Any], place: int) -> int:
    number = step["metadata"].get("step_number") if isinstance(step.get("metadata"), dict) else None
    return number if isinstance(number, int) else place


def _results(step: Mapping[str, Any]) -> str:
    results = objects(step.get("result"))
    return "\n".join(str(r[key]) for r in results for key in ("extracted_content", "error") if r.get(key))


def _thought(output: Mapping[str, Any]) -> str:
    """What the agent thought beside its actions; older versions have it in an object of its own."""
    given = output | output["current_state"] if isinstance(output.get("current_state"), dict) else output
    texts = (given.get(key) for key in ("thinking", "evaluation_previous_goal", "memory", "next_goal"))
    return "\n\n".join(text.strip() for text in texts if isinstance(text, str) and text.strip())


def _only_failed(step: Any) -> bool:
    """Whether nothing of a step is a turn but its error: the model's answer could not be read."""
    return isinstance(step, dict) and not _actions(step) and any(r.get("error") for r in objects(step.get("result")))
