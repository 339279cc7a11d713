"""Episodes on the report page: dreams beside reality, and what the policy did before and after training.

All text comes from a model or a game and is escaped here, at the only place where it becomes HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from imagination.evaluation.compare.alignment import ReplayedPair, Row, TurnClass, word_diff
from worldmodel.evaluation.proportions import count

EARLIER = 3  # agreeing turns shown before the first difference; twice as many and more fold
LATER = 2  # turns shown after it; more than these fold
LONG = 420  # characters; longer texts fold
KEPT = 90  # characters kept at both ends of a long passage in which dream and reality agree
PARTING = {
    TurnClass.STATE: "here they part, the words differ",
    TurnClass.WORDING: "here they part, the words differ",
    TurnClass.REWARD: "here they part, with the same words and a different reward",
    TurnClass.END: "here they part, with the same words, but only one of them ends",
}


def render_pair(kind: str, pair: ReplayedPair) -> str:
    """A dream and its replay, aligned turn by turn, with the first difference marked."""
    dream, real = pair.dream, pair.real
    prefix, parts_at = int(dream.get("prefix_turns") or 0), pair.parts_at
    turns = []
    for k in range(max(len(dream["turns"]), len(real["turns"]))):
        a, b = (turns_of[k] if k < len(turns_of) else None for turns_of in (dream["turns"], real["turns"]))
        parted = (parts_at is not None and k >= parts_at) or a is None or b is None
        state = "agree" if not parted else "first" if k == parts_at else "after"
        banner = ""
        if state == "first":
            banner = f'<div class="parting">Turn {k + 1}: {PARTING[_words_first(pair.differs)]}</div>'
        known = "copied from a log" if k < prefix else _confidence(a)
        action = (a or b or {})["action"]
        body = _cells(a, b) if parted else f'<div class="both text">{_agreed(a or {})}</div>'
        body += "" if k < prefix else _thought(a)
        turns.append(
            f'<li class="turn {state}" data-turn="{k + 1}">{banner}<div class="act"><span class="no">{k + 1}</span>'
            f'<code>&gt; {escape(action)}</code><span class="conf">{known}</span></div>{body}</li>'
        )
    where = f"parts at turn {parts_at + 1} of {pair.length}" if parts_at is not None else "never parts"
    return f"""<article class="pair">
<header><h3>{escape(kind)}</h3><p class="note">{escape(str(dream.get("task_id", "")))} · {where}</p></header>
<div class="heads"><span class="dream">Dream · {_outcome(dream)}</span>
<span class="real">Reality · {_outcome(real)}</span></div>
<details class="start"><summary>Where both start</summary><div class="text">{escape(dream["start"])}</div></details>
{_list(turns, len(turns) if parts_at is None else parts_at)}
</article>"""


def _words_first(differs: Sequence[TurnClass]) -> TurnClass:
    """What a reader is told of a turn that differs in several ways: its words, if they do."""
    return TurnClass.WORDING if TurnClass.WORDING in differs else differs[0]


def _list(turns: Sequence[str], agreed: int) -> str:
    """The turns around the first difference (or the last ones, if there is none); long stretches of the rest fold."""
    start = agreed - EARLIER if agreed > 2 * EARLIER else 0
    end = agreed + 1 if len(turns) - agreed - 1 > LATER else len(turns)
    parts = [
        (turns[:start], f"{count(start, 'turn')} on which they agree"),
        (turns[start:end], ""),
        (turns[end:], f"{count(len(turns) - end, 'later turn')}, in different states"),
    ]
    lists = [(title, f'<ol class="turns">{"".join(part)}</ol>') for part, title in parts if part]
    return "".join(
        f'<details class="folded"><summary>{title}</summary>{shown}</details>' if title else shown
        for title, shown in lists
    )


def render_episodes(rollouts: Sequence[Row], limit: int = 3) -> str:
    """A few tasks as the policy played them for real before and after: one gained, one lost, one unsolved, if any."""
    played: dict[tuple[str, str], Row] = {}
    for row in rollouts:
        if row.get("source") == "real" and row.get("which") in ("before", "after"):
            played.setdefault((str(row.get("task_id")), row["which"]), row)
    tasks = [task for task, which in played if which == "after" and (task, "before") in played]
    by_change: dict[tuple[bool, bool], list[str]] = {}
    for task in tasks:
        change = bool(played[task, "before"].get("solved")), bool(played[task, "after"].get("solved"))
        by_change.setdefault(change, []).append(task)
    order = [(False, True), (True, False), (False, False), (True, True)]
    chosen = [by_change[change][0] for change in order if change in by_change][:limit]
    rows = [played[task, which] for task in chosen for which in ("before", "after")]
    if not rows:  # a partial run: show what there is
        rows = list(played.values())[:limit]
    if not rows:
        return ""
    return f"""<section>
<h2>Real episodes, before and after</h2>
<p class="lead">One task for each way it can change: gained, lost, still unsolved.</p>
{"".join(_episode(row) for row in rows)}
</section>"""


def _episode(row: Row) -> str:
    turns = "".join(
        f'<li class="turn"><div class="act"><span class="no">{k + 1}</span><code>&gt; {escape(turn["action"])}</code>'
        f'</div><div class="both text">{_agreed(turn)}</div></li>'
        for k, turn in enumerate(row["turns"])
    )
    split = {"train": "training task", "heldout": "held-out task"}.get(str(row.get("split")), "")
    name = " · ".join(escape(part) for part in (str(row.get("task_id")), split) if part)
    return (
        f'<details class="episode"><summary><b>{escape(str(row["which"]).capitalize())}</b> · {name} · {_outcome(row)}'
        f'</summary><div class="text both">{_folded(row["start"])}</div><ol class="turns">{turns}</ol></details>'
    )


def _outcome(row: Row) -> str:
    turns = count(len(row["turns"]), "turn")
    if row.get("solved"):
        return f"solved in {turns}"
    stop = "" if row["stop"] == "terminated" else f" ({escape(str(row['stop']).replace('_', ' '))})"
    return f"not solved in {turns}{stop}"


def _cells(dream: Mapping[str, Any] | None, real: Mapping[str, Any] | None) -> str:
    left, right = word_diff(dream["observation"] if dream else "", real["observation"] if real else "")
    if dream is None or real is None:  # one world is over: nothing to compare the words with
        left, right = ([(text, False) for text, _ in side] for side in (left, right))
    return (
        '<div class="cells">'
        f'<div class="text in-dream"><span class="who dream">Dream</span>{_side(dream, left)}</div>'
        f'<div class="text in-real"><span class="who real">Reality</span>{_side(real, right)}</div></div>'
    )


def _side(turn: Mapping[str, Any] | None, pieces: Sequence[tuple[str, bool]]) -> str:
    if turn is None:
        return '<span class="cut">the episode is over</span>'
    shown = []
    for text, differs in pieces:
        if differs:
            shown.append(f"<mark>{escape(text)}</mark>")
        elif len(text) > 3 * KEPT:
            shown.append(f'{escape(text[:KEPT])}<span class="cut"> … the same … </span>{escape(text[-KEPT:])}')
        else:
            shown.append(escape(text))
    return "".join(shown) + _tags(turn)


def _agreed(turn: Mapping[str, Any]) -> str:
    return _folded(turn["observation"]) + _tags(turn)


def _folded(text: str) -> str:
    """A long text shows its beginning and unfolds."""
    if len(text) <= LONG:
        return escape(text)
    cut = text.rfind(" ", 0, LONG) + 1 or LONG
    return f"{escape(text[:cut])}<details><summary>… and the rest</summary>{escape(text[cut:])}</details>"


def _tags(turn: Mapping[str, Any]) -> str:
    tags = [f"reward {turn['reward']:g}"] if turn["reward"] else []
    tags += ["the end"] if turn["terminated"] else []
    return "<br>" * bool(tags) + "".join(f'<span class="tag">{tag}</span>' for tag in tags)


def _thought(turn: Mapping[str, Any] | None) -> str:
    """What the world model thought before it dreamed a turn, folded."""
    found = (turn or {}).get("info", {}).get("reasoning")
    if not isinstance(found, str) or not found:
        return ""
    return f'<details class="text"><summary>thought before it</summary>{escape(found)}</details>'


def _confidence(turn: Mapping[str, Any] | None) -> str:
    value = (turn or {}).get("info", {}).get("confidence")
    if not isinstance(value, int | float):
        return ""
    percent = 100 * min(max(float(value), 0.0), 1.0)
    return f'<span class="gauge"><i style="width:{percent:.0f}%"></i></span>confidence {percent:.0f} %'


def choose(pairs: Sequence[ReplayedPair], limit: int = 4) -> list[tuple[str, ReplayedPair]]:
    """A few pairs, one for each kind that there is, with the kind in words. Order and choice are deterministic."""
    parted = [t for t in pairs if t.parts_at is not None]
    true = [t for t in pairs if t.parts_at is None]
    kinds: list[tuple[str, list[ReplayedPair]]] = [
        ("The dream was solved and the game was not", [t for t in pairs if t.false_success]),
        ("Never parted, and solved in both", [t for t in true if t.dream.get("solved") and t.real.get("solved")]),
        ("Parted earliest", sorted(parted, key=lambda t: (t.parts_at or 0, str(t.dream["id"])))),
        ("Parted latest", sorted(parted, key=lambda t: (-(t.parts_at or 0), str(t.dream["id"])))),
        ("Never parted", sorted(true, key=lambda t: (-t.length, str(t.dream["id"])))),
    ]
    chosen: dict[str, tuple[str, ReplayedPair]] = {}
    for kind, candidates in kinds:
        fresh = [t for t in candidates if t.dream["id"] not in chosen]
        if fresh and len(chosen) < limit:
            chosen[fresh[0].dream["id"]] = (kind, fresh[0])
    return list(chosen.values())
