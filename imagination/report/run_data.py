"""The numbers of a run, read from its folder, checked, and what follows from them. Nothing needs the models::

outputs/my-run/
  config.yaml      resolved settings
  summary.json     the numbers the run collected itself: the keys of REQUIRED
  metrics.jsonl    {"stage": "train", "step": 3, "time": 61.2, "loss": 0.41, "dream_success": 0.5, ...}
  rollouts.jsonl   {"id": "d7", "stage": "evaluate", "which": "after", "split": "train", "source": "dream", ...}
  control/         a run folder: the same clone, trained in the real games
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagination.evaluation.compare.alignment import replayed_pairs, still_true
from imagination.evaluation.costs import ledger, loop_dreams, price_of, read_control, spent_to_learn, without_dreams
from imagination.runs.fingerprint import outdated
from real_envs.errors import UserError
from real_envs.files import read_json, read_text
from worldmodel.evaluation.proportions import Proportion, difference_ci95

STAGES = ("collect", "fit_world_model", "clone", "train", "evaluate")
AUDIT = ("exact_match", "token_f1", "reward_precision", "reward_recall", "end_accuracy", "n")
PAGES = ("audit.html", "compare.html")
ELSEWHERE = ("heldout_tasks", "heldout_tasks_known", "on_policy")  # the same audit on other turns, where it was made
POLICY = ("train_tasks", "heldout_tasks", "dream_success")
LOOPED = ("collect", "fit_world_model", "clone", "train")  # what `imagine loop` does by itself, or begins with

# path in report.json -> (what it must be, the stage that measures it)
REQUIRED: dict[str, tuple[str, str]] = {
    **{f"real_steps.{stage}": ("count", stage) for stage in STAGES},
    "dreamed_turns": ("count", "train"),
    "wall_seconds": ("seconds", "collect"),
    **{f"world_model.{key}": ("count" if key == "n" else "share", "fit_world_model") for key in AUDIT},
    **{f"policy.before.{key}": ("proportion", "evaluate (before training)") for key in POLICY},
    **{f"policy.after.{key}": ("proportion", "evaluate (after training)") for key in POLICY},
    "seed": ("count", "start of the run"),
    "hardware": ("any", "start of the run"),
    "versions": ("any", "start of the run"),
}


class ReportError(UserError):
    """The run folder does not hold what a report needs; the message says what is missing and which stage makes it."""


@dataclass(frozen=True, slots=True)
class RunData:
    """The files of a run folder, parsed. A file that is not there is an empty one, a control that is not there none."""

    folder: Path
    config: str
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]
    control: RunData | None = None


def load_run(run_folder: Path | str) -> RunData:
    """Reads a run folder. Raises ``UserError``: there is no such folder, a file is damaged, or a line is no JSON object
    (a torn last line of a run that was killed is skipped).
    """
    folder = Path(run_folder)
    if not folder.is_dir():
        raise ReportError(f"{folder} is no run folder")
    summary = folder / "summary.json"
    return RunData(
        folder=folder,
        config=_text(folder / "config.yaml"),
        summary=read_json(summary) if summary.exists() else {},
        metrics=_jsonl(folder / "metrics.jsonl"),
        rollouts=_jsonl(folder / "rollouts.jsonl"),
        control=load_run(folder / "control") if (folder / "control" / "summary.json").exists() else None,
    )


def build_report(run: RunData, *, partial: bool = False, machine_price: float = 0.0) -> dict[str, Any]:
    """The run's own numbers, checked, and what follows from them.

    Added to the keys of ``summary.json``: ``optimism_gap`` (dreamed minus real success on train tasks) with
    ``optimism_gap_ci95``, ``change_ci95`` (after minus before, by kind of task), ``twins`` (dreams replayed in the real
    game), ``answered_by_rule`` (not without rules), ``outdated`` (stages of other settings than the run has now),
    ``money`` (``ledger``, and ``without_dreams``), ``notes`` (a sentence for each number that is null), ``pages`` (of
    other stages, in the same folder) and ``partial``.

    Raises:
        ReportError: a number is missing and ``partial`` is false, or a number is of the wrong kind.
    """
    report: dict[str, Any] = json.loads(json.dumps(run.summary))  # a copy: what the run wrote is not ours to change
    missing = _check(report)
    looped = bool((report.get("loop") or {}).get("rounds"))
    by_loop = {key for stage in LOOPED for key in missing.pop(stage, ())} if looped else set()
    if missing and not partial:
        lines = "; ".join(f"stage {stage!r} has not run yet: no {', '.join(keys)}" for stage, keys in missing.items())
        raise ReportError(f"the report of {run.folder} is incomplete: {lines}. partial=True reports what there is")
    report["partial"] = bool(missing)
    report["pages"] = [name for name in PAGES if (run.folder / name).exists()]
    report["notes"] = [
        f"Stage {stage!r} has not run yet; {', '.join(keys)} {'is' if len(keys) == 1 else 'are'} null."
        for stage, keys in missing.items()
    ]
    absent = by_loop | {key for keys in missing.values() for key in keys}
    report["notes"] += [
        f"{key} is null: there was nothing to measure it on." for key in _empty(report) if key not in absent
    ]
    policy, gaps, intervals = report["policy"], {}, {}
    for which in ("before", "after"):
        dreamed, real = _proportion(policy[which]["dream_success"]), _proportion(policy[which]["train_tasks"])
        gaps[which] = None if dreamed.rate is None or real.rate is None else dreamed.rate - real.rate
        intervals[which] = difference_ci95(dreamed, real)
    report["optimism_gap"], report["optimism_gap_ci95"] = gaps, intervals
    report["change_ci95"] = {
        key: difference_ci95(_proportion(policy["after"][key]), _proportion(policy["before"][key])) for key in POLICY
    }
    pairs = replayed_pairs(run.rollouts)
    report["twins"] = {
        "n": len(pairs),
        "never_parted": sum(t.alignment.first is None for t in pairs),
        "false_success": sum(t.false_success for t in pairs),
        "still_true": [list(point) for point in still_true(pairs)],
    }
    if (by_rule := answered_by_rule(run.rollouts)) is not None:
        report["answered_by_rule"] = by_rule
    report["outdated"] = outdated(run.folder, STAGES)
    report["money"] = {**ledger(run.summary, machine_price), **_against_control(run, report)}
    if looped and report["dreamed_turns"] is None:
        report["dreamed_turns"] = loop_dreams(report)
    return report


def answered_by_rule(rollouts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How many of the dreamed ``turns`` that the run kept rules answered; ``None`` where no rule did.

    ``by_rule``: ``[rule in words, turns]``, the most frequent first.
    """
    dreamed = [
        turn["info"]
        for row in rollouts
        if row.get("source") == "dream"
        for turn in row["turns"][int(row.get("prefix_turns") or 0) :]
    ]
    used = Counter(info["rule"] for info in dreamed if "rule" in info)
    if not used:
        return None
    return {
        "turns": len(dreamed),
        "answered": sum(used.values()),
        "mended": sum("mended" in info for info in dreamed),
        "inconsistent": sum("broken" in info for info in dreamed),
        "by_rule": [list(item) for item in used.most_common()],
    }


def _against_control(run: RunData, report: Mapping[str, Any]) -> dict[str, Any]:
    """``control`` and ``without_dreams``, null where nothing says it.

    ``control`` is "real", "itself" (this run is one), "imported" (the world is not here) or "none".
    """
    control_run, control = run.control, None
    if control_run is not None:
        after = control_run.summary.get("arm", {}).get("train_tasks")
        control = read_control(control_run.metrics, control_run.rollouts, _proportion(after) if after else None)
    if control_run is None or control is None:
        itself = read_control(run.metrics, run.rollouts) is not None
        given = "import" in run.summary.get("wall_seconds", {})  # or the log was handed to ``Run.use_log``
        given = given or ((run.folder / "log").exists() and not (run.folder / "games").exists())
        nobody = "imported" if given else "none"
        return {"control": "itself" if itself else nobody, "without_dreams": None}
    reached, price = _proportion(report["policy"]["after"]["train_tasks"]), price_of(control_run.summary)
    spent = spent_to_learn(run.summary)
    cost = without_dreams(control, reached, *spent, price, run.summary.get("seed") or 0)
    return {"control": "real", "without_dreams": cost}


def _check(report: dict[str, Any]) -> dict[str, list[str]]:
    """Checks kinds in place, sets what is missing to null and returns it by stage."""
    missing: dict[str, list[str]] = {}
    for path, (kind, stage) in REQUIRED.items():
        *parents, key = path.split(".")
        holder = report
        for parent in parents:
            if not isinstance(holder.get(parent), dict):
                if holder.get(parent) is not None:
                    raise ReportError(f"summary.json: {parent} in {path} must be an object")
                holder[parent] = {}
            holder = holder[parent]
        if key not in holder:
            missing.setdefault(stage, []).append(path)
            holder[key] = {} if kind == "seconds" else None
        holder[key] = _value(path, holder[key], kind)
    for elsewhere in ELSEWHERE:
        audit = report["world_model"].get(elsewhere)
        for key in AUDIT if audit else ():
            audit[key] = _value(f"world_model.{elsewhere}.{key}", audit.get(key), "count" if key == "n" else "share")
    return missing


def _value(path: str, value: Any, kind: str) -> Any:
    """The value, NaN as null. Raises ``ReportError``: it is not of its kind."""
    if value is None or kind == "any":
        return value
    if kind == "seconds":
        if not isinstance(value, dict):
            raise ReportError(f"summary.json: {path} must be seconds by stage, not {value!r}")
        return {stage: _value(f"{path}.{stage}", seconds, "number") for stage, seconds in value.items()}
    if kind == "proportion":
        if not isinstance(value, Mapping) or not {"success", "n", "ci95"} <= value.keys():
            raise ReportError(f"summary.json: {path} must hold success, n and ci95, not {value!r}")
        _value(f"{path}.success", value["success"], "share")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind == "count" and value != int(value)):
        raise ReportError(f"summary.json: {path} must be a {kind}, not {value!r}")
    if math.isnan(value):
        return None
    if value < 0 or (kind == "share" and value > 1):
        raise ReportError(f"summary.json: {path} = {value} is no {kind}")
    return value


def _empty(report: Mapping[str, Any]) -> list[str]:
    """Paths among REQUIRED that are null, or a proportion of nothing."""
    empty = []
    for path, (kind, _) in REQUIRED.items():
        value: Any = report
        for key in path.split("."):
            value = value[key]
        if value is None or (kind == "proportion" and not value["n"]):
            empty.append(path)
    return empty


def _proportion(data: Mapping[str, Any] | None) -> Proportion:
    return Proportion(0, 0) if data is None else Proportion.from_json(data)


def _text(path: Path) -> str:
    return read_text(path) if path.exists() else ""


def _jsonl(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    lines = _text(path).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # no line end after it: the run was killed while it wrote
                break
            raise ReportError(f"{path}, line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ReportError(f"{path}, line {number} is no JSON object")
        rows.append(row)
    return rows
