"""SWE-agent's ``.traj`` files, an episode each: ``trajectory``, what was done, beside ``history``, what was read.

A step's ``action`` is what the shell got, its ``observation`` the answer; the ``thought`` is a note of the turn. The
start is what ``history`` (or the first step's ``query``) has before the agent's first message; demonstrations in it are
left out. The file's name is the task. A last step without an action is the runner's, not the agent's. Success stands in
no such file, unless ``imports.mapping.success`` names a field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from real_envs.importers.drafts import THOUGHT, EpisodeDraft, Format, Reading
from real_envs.importers.ends import ending_of
from real_envs.importers.events import objects
from real_envs.importers.messages import AGENT, SYSTEM, apart, read_message
from real_envs.importers.records import Record, Sample, json_records
from real_envs.store.codec import FieldError

TRAJECTORY = "trajectory"
_ATTEMPTS = "attempts"
_KNOWN = (TRAJECTORY, "history", "task_id")


class SweAgent(Format):
    name = "swe-agent"
    about = "files .traj of SWE-agent: trajectory of action and observation, and history"
    marks = (TRAJECTORY, "history")

    def recognises(self, sample: Sample) -> str:
        first = next(_attempts(iter([Record("", sample.record)])), Record("", None)).value
        steps = first.get(TRAJECTORY) if isinstance(first, dict) else None
        first = steps[0] if isinstance(steps, list) and steps else None
        good = isinstance(first, dict) and {"action", "observation"} <= first.keys()
        return f"its '{TRAJECTORY}' has 'action' and 'observation'" if good else ""

    def records(self, path: Path) -> Iterator[Record]:
        for record in _attempts(json_records(path)):
            alone = isinstance(record.value, dict) and TRAJECTORY in record.value
            yield Record(record.where, {"task_id": path.stem} | record.value) if alone else record

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        steps = value.get(TRAJECTORY) if isinstance(value, dict) else None
        if not isinstance(steps, list) or not steps:
            raise FieldError(TRAJECTORY, "is no list of steps, or an empty one")
        left_out: Counter[str] = Counter()
        turns: list[dict[str, Any]] = []
        for i, step in enumerate(steps):
            at = f"{TRAJECTORY}[{i}]"
            if not isinstance(step, dict) or not isinstance(step.get("action"), str):
                raise FieldError(f"{at}.action", "is missing, or no text")
            if not step["action"].strip() and i == len(steps) - 1 and turns:
                left_out["last step of the runner"] += 1
                continue
            if not any(map(step.get, ("action", "thought", "response", "observation"))):
                left_out["empty step"] += 1
                continue
            thought, response = step.get("thought"), step.get("response")
            action = step["action"].strip() or (apart(response)[1] if isinstance(response, str) else "")
            info = {THOUGHT: thought.strip()} if isinstance(thought, str) and thought.strip() else {}
            turns.append({"action": action, "observation": step.get("observation"), "info": info})
            turns[-1] |= {"reward": step["reward"]} if isinstance(step.get("reward"), int | float) else {}
        stop, failure = ending_of(value)
        return EpisodeDraft.of_record(
            value,
            _KNOWN,
            start="\n\n".join(_start(value, steps[0], reading, left_out)),
            turns=turns,
            task_id=value.get("task_id"),
            stop=stop,
            failure=failure,
            left_out=left_out,
        )


def _attempts(records: Iterator[Record]) -> Iterator[Record]:
    """The records; of one of several attempts, none of which was chosen, each attempt."""
    for record in records:
        if isinstance(record.value, dict) and TRAJECTORY not in record.value and _ATTEMPTS in record.value:
            for number, attempt in enumerate(objects(record.value[_ATTEMPTS]), start=1):
                yield Record(f"{record.where}, attempt {number}", attempt)
        else:
            yield record


def _start(value: dict[str, Any], first: dict[str, Any], reading: Reading, left_out: Counter[str]) -> Iterator[str]:
    key, messages = next(
        ((key, given) for key, given in (("history", value.get("history")), ("query", first.get("query"))) if given),
        ("history", None),
    )
    if not isinstance(messages, list):
        raise FieldError(key, "is no list of messages: nothing says what the task is")
    for i, message in enumerate(messages):
        if isinstance(message, dict) and message.get("is_demo"):
            left_out["demonstration"] += 1
            continue
        speaker, parts = read_message(message, f"{key}[{i}]")
        if speaker == AGENT:
            return
        if parts.unread:
            raise parts.unread
        left_out.update(parts.left_out)
        if parts.text and (speaker != SYSTEM or reading.system):
            yield parts.text
