"""InterCode's episodes: parallel arrays of actions, observations, rewards and valid_action in ``turn_history``.

An observation is the output of the action beside it; the start is the query. A reward is the score of the state so far,
0 to 1, not what the action earned: a turn earns what it adds to the score, so the episode's rewards add up to its last
score. (Some agents are judged only when they submit; their zeros before are scores, too.) The task is solved where the
best score is 1. There is no flag of an end: an episode ended that reached a score of 1 or submitted.

Thoughts and the validity of an action are notes of its turn. A last action ``blocked`` without an observation is what
the runner wrote where the model's server refused to answer; it is left out, and the episode was cut.
"""

from __future__ import annotations

from typing import Any

from real_envs.importers.drafts import LOG, EpisodeDraft, Format, Reading
from real_envs.importers.records import Sample
from real_envs.store.codec import FieldError

HISTORY = "turn_history"
_ARRAYS = ("actions", "observations", "rewards")
_KNOWN = ("environment", "task_id", "query", HISTORY, "summary")


class InterCode(Format):
    name = "intercode"
    about = "parallel arrays of actions, observations and scores in turn_history, as of InterCode"
    as_spoken = True
    marks = (HISTORY,)

    def recognises(self, sample: Sample) -> str:
        good = isinstance(sample.record, dict) and isinstance(sample.record.get(HISTORY), dict)
        return f"its records have '{HISTORY}'" if good else ""

    def draft(self, value: Any, reading: Reading) -> EpisodeDraft:
        history = value.get(HISTORY) if isinstance(value, dict) else None
        if not isinstance(history, dict) or not history:
            raise FieldError(HISTORY, "is missing or empty: nothing was logged")
        columns = {name: history.get(name) for name in (*_ARRAYS, "valid_action", "thoughts")}
        arrays = {name: array for name, array in columns.items() if isinstance(array, list)}
        lengths = {name: len(array) for name, array in arrays.items()}
        blocked = (
            arrays.get("actions", [])[-1:] == ["blocked"] and lengths["actions"] == lengths.get("observations", -1) + 1
        )
        if blocked:
            if not lengths["observations"]:
                raise FieldError(f"{HISTORY}.actions", "hold nothing but 'blocked': nobody acted")
            arrays = {name: array[: lengths["observations"]] for name, array in arrays.items()}
            lengths = {name: len(array) for name, array in arrays.items()}
        if missing := [name for name in _ARRAYS if name not in lengths]:
            raise FieldError(f"{HISTORY}.{missing[0]}", "is no list")
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
            raise FieldError(HISTORY, f"has arrays of unequal lengths ({counts})")
        score, turns = 0.0, []
        for k, (action, observation, reward) in enumerate(zip(*(arrays[name] for name in _ARRAYS), strict=True)):
            if isinstance(reward, bool) or not isinstance(reward, int | float):
                raise FieldError(f"{HISTORY}.rewards[{k}]", f"is {reward!r:.40}, not a number")
            info = {
                f"{LOG}{name.rstrip('s')}": arrays[name][k]
                for name in ("valid_action", "thoughts")
                if name in arrays and isinstance(arrays[name][k], bool | str)
            }
            turns.append({"action": action, "observation": observation, "reward": reward - score, "info": info})
            score = reward
        if turns:
            turns[-1]["terminated"] = score == 1 or turns[-1]["action"] == "submit"
        best = value.get("summary", {}).get("max_reward") if isinstance(value.get("summary"), dict) else None
        task = "/".join(str(value[name]) for name in ("environment", "task_id") if value.get(name) is not None)
        return EpisodeDraft.of_record(
            value,
            _KNOWN,
            start=value.get("query"),
            turns=turns,
            task_id=task or None,
            success=None if best is None else best == 1,
            left_out={"action that was blocked": int(blocked)},
        )
