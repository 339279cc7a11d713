"""The report in words: the verdict, the Markdown page and the table in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from imagination.evaluation.compare.alignment import Row, replayed_pairs
from imagination.evaluation.costs import spent_to_learn
from imagination.evaluation.monitors.rules import stopped_sentence
from imagination.report.costs import cost_table, notes, without_dreams
from imagination.report.episodes import choose
from imagination.report.page import plain
from worldmodel.evaluation.proportions import count, interval, number, proportion, signed

AUDIT_ROWS = {
    "exact_match": ("Exact match", "words, reward and end of the next turn are all as in reality"),
    "token_f1": ("Token F1", "overlap of its words with the real ones"),
    "reward_precision": ("Reward precision", "of the rewards it predicted, how many were paid"),
    "reward_recall": ("Reward recall", "of the rewards that were paid, how many it predicted"),
    "end_accuracy": ("End accuracy", "it knows whether the episode is over"),
    "ece": ("Calibration error", "gap between its confidence and how often it is right; 0 is best"),
    "invalid": ("Malformed", "predictions that could not be read; they count as wrong"),
    "n": ("Turns judged", ""),
}
AUDIT_COLUMNS = {
    "": "on held-out episodes",
    "heldout_tasks": "on held-out tasks",
    "heldout_tasks_known": "the same, tasks known by other episodes",
    "on_policy": "on the policy’s actions",
}
POLICY_COLUMNS = {"train_tasks": "training tasks", "heldout_tasks": "held-out tasks", "dream_success": "in the dream"}


def verdict(report: Mapping[str, Any]) -> list[str]:
    """What the run showed, in plain sentences; the first is the headline, of tasks never trained on if there are any.

    "Rose" and "fell" are said only where the 95 % interval of the change excludes zero.
    """
    before, after = report["policy"]["before"], report["policy"]["after"]
    trained = f"Trained with {count(spent_to_learn(report)[0], 'real step')}: "
    sentences: list[str] = []
    never = "held-out tasks that it trained on" if trained_on_heldout(report) else "tasks it never trained on"
    for key, where in (("heldout_tasks", never), ("train_tasks", "training tasks")):
        if not _measured(before[key], after[key]):
            continue
        change, caveat = _change(before[key], after[key], report["change_ci95"][key])
        believed = after["dream_success"] if key == "train_tasks" else None  # dreams are of training tasks
        dream = f"; the dream believed {number(believed['success'])}" if believed and _measured(believed) else ""
        opening = f"On {where}, it" if sentences else f"{trained}real success on {where}"
        sentences += [f"{opening} {change}{dream}.", *([caveat] if caveat else [])]
    for name, share in after.get("heldout_notes", {}).items():
        earlier = before.get("heldout_notes", {}).get(name)
        where = f"of the episodes on {never} ended with '{name}'"
        sentences.append(f"{proportion(share)} {where}; before training {proportion(earlier)}.")
    if not sentences and _measured(before["train_tasks"]):
        sentences.append(
            f"Before training, real success on training tasks is {proportion(before['train_tasks'])}; "
            "there is no evaluation after training yet."
        )
    elif not sentences and _measured(after["train_tasks"]):
        sentences.append(
            f"{trained}real success on training tasks is {proportion(after['train_tasks'])}; "
            "what it was before was not measured."
        )
    elif not sentences and report["money"]["control"] == "imported":
        sentences.append("The log was imported and its world cannot be played here, so no success was measured.")
        held = report["world_model"].get("heldout_tasks")
        if held and held["n"]:
            right = f"right in {number(held['exact_match'])} of {held['n']:,} turns"
            sentences.append(f"On held-out tasks the world model's next turn is {right}; `imagine audit` says more.")
    elif not sentences:
        sentences.append("The policy has not been evaluated in the real environment yet.")
    if report["real_steps"]["collect"] is not None:
        logged = count(report["real_steps"]["collect"], "real step")
        dreamed = f"; {report['dreamed_turns']:,} turns were dreamed" if report["dreamed_turns"] else ""
        sentences.append(f"The log for the world model and for cloning took {logged}{dreamed}.")
    return [*sentences, *outdated_sentences(report)]


def trained_on_heldout(report: Mapping[str, Any]) -> bool:
    """Whether the policy was trained in the held-out tasks (``train.tasks``)."""
    return report.get("trained_tasks") == "heldout"


def outdated_sentences(report: Mapping[str, Any]) -> list[str]:
    """One for each stage whose numbers are not of the settings that the page shows."""
    stages = [f"`imagine {stage.replace('_', '-')}`" for stage in report["outdated"]]
    done = "was done with other settings than the run has now, and its numbers are of those: run it again."
    return [f"{stage} {done}" for stage in stages]


def tripwire_note(report: Mapping[str, Any]) -> tuple[str, str] | None:
    """Heading and sentence about the tripwires, where a reader must know: one tripped, they were off or blind."""
    tripwires = report.get("tripwires")
    if not tripwires:
        return None
    if not tripwires["enabled"]:
        return (
            "The tripwires were off",
            "tripwires.enabled=false: nothing watched whether the policy learned the world model's mistakes.",
        )
    if tripwires["stopped_by"]:
        late = tripwires["stopped_by"].get("after_training")
        return f"{'Taken back' if late else 'Stopped'} by a tripwire", stopped_sentence(tripwires["stopped_by"])
    if tripwires["blind"]:
        return (
            "Some tripwires were blind",
            f"The log is too varied or too small to say when these should trip: {', '.join(tripwires['blind'])}.",
        )
    return None


def render_markdown(name: str, report: Mapping[str, Any], rollouts: Sequence[Row]) -> str:
    """The report as Markdown: verdict, tables, cost, one dream beside reality."""
    headline, *rest = report["verdict"]
    lines = [f"# {_cell(name)}", "", f"**{headline}**", "", *rest, ""]
    if note := tripwire_note(report):
        lines += [f"> **{note[0]}.** {_cell(note[1])}", ""]
    if report["notes"]:
        lines += ["> This report is partial." if report["partial"] else "> Not everything could be measured."]
        lines += [f"> {_cell(note)}" for note in report["notes"]] + [""]
    rows = [
        [f"{which} training", *(_with_n(report["policy"][which][key]) for key in POLICY_COLUMNS), _gap(report, which)]
        for which in ("before", "after")
    ]
    lines += ["## Success rate", "", *_table(["policy", *POLICY_COLUMNS.values(), "optimism gap"], rows), ""]
    lines += ["Brackets: 95 % intervals for tasks like these, each of them one trial. Gap: dreamed minus real success."]
    if rounds := loop_view(report):
        lines += ["", "## Round by round", "", rounds["sentence"], "", *_table(rounds["heads"], rounds["rows"])]
    columns, audit = audit_table(report)
    lines += ["", "## World model", ""]
    lines += _table(["measure", *columns], [[title, *cells] for title, _, cells in audit])
    for sentence in audit_sentences(report):
        lines += ["", sentence]
    if rules := report.get("answered_by_rule"):
        by_rule = [[rule, f"{n:,}"] for rule, n in rules["by_rule"]]
        lines += ["", rules_sentence(rules), "", *_table(["rule", "dreamed turns"], by_rule)]
    replays = report["twins"]
    if replays["n"]:
        replayed = f"Of {count(replays['n'], 'replayed dream')}, {replays['never_parted']} never parted from reality; "
        lines += ["", f"{replayed}{replays['false_success']} were solved in the dream and not in the game."]
    lines += ["", "## Cost", "", *_cost_table(report)]
    for sentence in (*notes(report), " ".join(without_dreams(report)).replace("<", "&lt;")):
        lines += ["", sentence]
    lines += ["", *_pair(rollouts)]
    panel = report.get("panel")
    tasks = f"Held-out tasks: panel {_cell(panel['name'])} ({_cell(panel['digest'])}). " if panel else ""
    machine = f"{_cell(plain(report['hardware']))}. {_cell(plain(report['versions']))}."
    lines += [f"{tasks}Seed {report['seed']}. {machine}", ""]
    return "\n".join(lines)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown."""
    lines = [heads, *([_cell(cell) for cell in row] for row in rows)]
    first, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return [first, "|---|" + "--:|" * (len(heads) - 1), *rest]


def _cost_table(report: Mapping[str, Any]) -> list[str]:
    lines = cost_table(report)
    heads = [title for title, _ in lines[0].cells] if lines else ["real steps", "wall seconds"]
    rows = [[line.source, *(number for _, number in line.cells)] for line in lines]
    shown = [[f"**{cell}**" for cell in row] if line.total else row for line, row in zip(lines, rows, strict=True)]
    return _table(["source", *heads], shown)


def terminal_table(report: Mapping[str, Any]) -> Table:
    """The main table for a terminal of 80 columns: before and after by training, held-out and dreamed tasks."""
    table = Table(title=Text(report["verdict"][0], style="bold"), caption="95 % intervals in brackets")
    table.add_column("policy")
    for title in (*POLICY_COLUMNS.values(), "optimism gap"):
        table.add_column(title, justify="right")
    for which in ("before", "after"):
        cells = [_with_n(report["policy"][which][key]) for key in POLICY_COLUMNS] + [_gap(report, which)]
        lines = [cell.replace(" [", "\n[").replace(" n=", "\nn=") for cell in cells]  # fits into 80 columns
        table.add_row(which, *(Text(line) for line in lines), end_section=True)  # Text: brackets are no markup
    return table


def audit_table(report: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, str, list[str]]]]:
    """Titles of the columns that were measured, and rows of title, meaning and cells."""
    audit = report["world_model"]
    columns = {title: audit.get(key) if key else audit for key, title in AUDIT_COLUMNS.items()}
    measured = {title: column for title, column in columns.items() if column}
    rows = []
    for key, (title, meaning) in AUDIT_ROWS.items():
        values = [column.get(key) for column in measured.values()]
        whole = key in ("n", "invalid")
        if any(value is not None for value in values):
            cells = ["–" if v is None else f"{v:,}" if whole else f"{v:.3f}" for v in values]
            rows.append((title, meaning, cells))
    return list(measured), rows


def audit_sentences(report: Mapping[str, Any]) -> list[str]:
    """What the models write, and what calibration did, where that was measured."""
    return [sentence for sentence in (language_sentence(report), calibration_sentence(report)) if sentence]


def calibration_sentence(report: Mapping[str, Any]) -> str:
    """What calibration did for the sampled predictions; empty where it was not measured."""
    fit = report["world_model"].get("calibration")
    if not fit or fit.get("ece_after") is None:
        return ""
    return (
        f"Sampled as in dreams, {number(fit['right'])} of {fit['n']:,} held-out turns are exactly right; the gap "
        f"to the model's own probability is {fit['ece_before']:.3f}, after calibration {fit['ece_after']:.3f} "
        f"(of reward and end: {fit['outcome_ece_before']:.3f} and {fit['outcome_ece_after']:.3f}; cross-fitted)."
    )


def rules_sentence(rules: Mapping[str, Any]) -> str:
    """How much of the dreams was answered by rule (see ``answered_by_rule``)."""
    share, mended, left = (rules[key] / rules["turns"] for key in ("answered", "mended", "inconsistent"))
    return (
        f"Of {count(rules['turns'], 'dreamed turn')} that are kept, rules of the log answered {share:.1%}, and words "
        f"of {mended:.1%} were mended; {left:.1%} break a rule all the same."
    )


def language_sentence(report: Mapping[str, Any]) -> str:
    """How long what the models write is, and how new the words of held-out tasks; empty where it was not measured."""
    language = report.get("language")
    if not language or language["tokens_per_action"] is None:
        return ""
    sentence = (
        f"An action has {language['tokens_per_action']:.1f} tokens, an observation "
        f"{language['tokens_per_observation']:.0f}"
    )
    written = language.get("tokens_per_prediction")  # runs of earlier versions have none
    if written is not None and written < language["tokens_per_observation"]:
        sentence += f", of which the world model writes {written:.0f}, as edits"
    if language["unread_words"] is None:
        return f"{sentence}."
    share = f"{100 * language['unread_words']:.1f} % of {language['n']:,} observations of held-out tasks"
    return f"{sentence}; {share} hold a word that the log never had."


LOOP_HEADS = (
    "round",
    "real steps",
    "real success while acting",
    "dreamed success",
    "world model",
    "turns of a dream",
    "stale",
)


def loop_view(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """A loop round by round: how the policy did while it acted for real, what it believed, and what it dreamed in.

    ``None`` for a run that is no loop.
    """
    loop = report.get("loop") or {}
    if not loop.get("rounds"):
        return None
    refits = [version for version in loop["versions"] if version["round"]]
    sentence = f"{loop['charged']:,} real steps in {len(loop['rounds'])} rounds"
    if refits:
        taken = sum(version["promoted"] for version in refits)
        sentence += f"; of {len(refits)} refits of the world model, {taken} took the place of the last version."
    else:
        sentence += "; the world model was not fitted again."
    return {"sentence": sentence, "heads": LOOP_HEADS, "rows": [_loop_row(line) for line in loop["rounds"]]}


def _loop_row(line: Mapping[str, Any]) -> list[str]:
    real, new = line["real_success"], {True: ", new", False: ", kept", None: ""}[line["promoted"]]
    return [
        str(line["round"]),
        f"{line['charged']:,}",
        "–" if not real or not real["n"] else f"{proportion(real)} of {real['n']}",
        number(line["dreamed_success"]),
        f"version {line['version']}{new}",
        number(line["horizon"], 0),
        number(line["staleness"], 0),
    ]


def _measured(*data: Mapping[str, Any] | None) -> bool:
    return all(d is not None and d["success"] is not None for d in data)


def _change(
    before: Mapping[str, Any], after: Mapping[str, Any], ci95: Sequence[float] | None
) -> tuple[str, str | None]:
    """``("rose from .. to ..", None)``, or ``("went ..", a sentence of doubt)`` where chance would explain it."""
    numbers = f"from {proportion(before)} to {proportion(after)}"
    if ci95 is not None and ci95[0] > 0:
        return f"rose {numbers}", None
    if ci95 is not None and ci95[1] < 0:
        return f"fell {numbers}", None
    n = f"{before['n']} and {after['n']}" if before["n"] != after["n"] else str(after["n"])
    tasks = after.get("tasks")
    of = f"{n} episodes" + (f" of {count(tasks, 'task')}" if tasks else "")
    return (
        f"went {numbers}",
        f"That change {interval(ci95, with_sign=True)} may be chance: {of} cannot tell it from none.",
    )


def _with_n(data: Mapping[str, Any] | None) -> str:
    return "–" if data is None else f"{proportion(data)} n={_n(data)}"


def _n(data: Mapping[str, Any]) -> str:
    """``240``, or ``240, 6 tasks``."""
    return f"{data['n']}, {count(data['tasks'], 'task')}" if data.get("tasks") else str(data["n"])


def _gap(report: Mapping[str, Any], which: str) -> str:
    return f"{signed(report['optimism_gap'][which])} {interval(report['optimism_gap_ci95'][which], with_sign=True)}"


def _cell(text: str) -> str:
    """Text that cannot break a Markdown table or be read as HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")


def _pair(rollouts: Sequence[Row]) -> list[str]:
    """The first chosen dream beside reality, as a diff."""
    chosen = choose(replayed_pairs(rollouts), limit=1)
    if not chosen:
        return []
    kind, pair = chosen[0]
    lines = []
    for k, (dream, real) in enumerate(zip(pair.dream["turns"], pair.real["turns"], strict=False)):
        lines.append(f"  {k + 1} > {_line(dream['action'])}")
        if pair.alignment.first is None or k < pair.alignment.first:
            lines.append(f"    {_line(real['observation'])}")
            continue
        for sign, turn in (("-", dream), ("+", real)):
            end = " [the end]" if turn["terminated"] else ""
            reward = f" [reward {turn['reward']:g}]" if turn["reward"] else ""
            lines.append(f"{sign}   {_line(turn['observation'])}{reward}{end}")
        break
    fence = "`" * (3 + max((line.count("`") for line in lines), default=0))  # longer than any run of them in the text
    title = f"{kind}: {_cell(str(pair.dream.get('task_id', '')))}. Up to the first difference; − dream, + reality."
    return ["## A dream beside reality", "", title, "", f"{fence}diff", *lines, fence, ""]


def _line(text: str) -> str:
    return " ".join(text.split())
