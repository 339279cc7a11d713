"""A comparison in a terminal: the table, and single pairs side by side.

Texts of games and models are untrusted: they are shown as text, without markup and without control characters, which
could move the cursor or worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from imagination.evaluation.compare.pairs import NEVER, first_kind
from worldmodel.evaluation.proportions import count, interval, number, proportion, signed

KINDS = {
    "same": "the same",
    "wording": "wording differs",
    "state": "state differs",
    "reward": "reward differs",
    "end": "end differs",
    "invalid": "dream unreadable",
    "alone": "one world only",
    NEVER: "never parts",
}
SOURCES = {"dream": "the policy's dreams", "log": "logged episodes"}
SIGNALS_ON = {
    "replays": "the policy's dreams, where replays part",
    "answers": "answers given the real history, not exact",
    "refusals": "the same, refused or accepted wrongly",
}
SIDES = {"dream": "dreamed", "replayed": "dreamed actions, replayed", "real": "real"}
STYLES = {"state": "red", "reward": "magenta", "end": "yellow", "invalid": "bold red", "wording": "cyan"}
AROUND = 1  # turns before the first divergence that a brief view shows


def printable(text: str) -> str:
    """The text without control characters other than line ends."""
    return "".join(c if c == "\n" or (c.isprintable()) else " " if c == "\t" else "\ufffd" for c in text)


def summary_table(comparison: Mapping[str, Any]) -> RenderableType:
    """Where pairs part, by source and split, and the same policy free in both worlds."""
    table = Table(title="The same actions in both worlds: where do they part?", title_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in ("pairs", "never part", "in substance", "first difference", "solved only in dream / real"):
        table.add_column(title, justify="left" if title.startswith("first") else "right", no_wrap=title == "never part")
    for row in comparison["aligned"]:
        kinds = ", ".join(f"{n} {kind}" for kind, n in row["first"].items() if kind != NEVER)
        table.add_row(
            f"{SOURCES[row['source']]}\n{printable(row['split'])}",
            f"{row['pairs']} ({row['left_out']} left out)" if row["left_out"] else f"{row['pairs']}",
            _share(row["never_parted"]),
            number(row["never_in_substance"]["share"]),
            kinds or "–",
            f"{row['false_success']} / {row['missed_success']}",
        )
    parts = [table] if comparison["aligned"] else []
    parts += [_free_table(comparison["free"])] if comparison["free"] else []
    parts += [_signal_table(comparison["signals"])] if comparison.get("signals") else []
    return Group(*parts, *(Text(f"note: {printable(note)}", style="yellow") for note in comparison["notes"]))


def _table(title: str, columns: Sequence[str], caption: str) -> Table:
    """Numbers beside a first column of names."""
    table = Table(title=title, caption=caption, title_style="bold")
    for k, column in enumerate(columns):
        table.add_column(column, justify="right" if k else "left")
    return table


def _free_table(free: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("", "success", "turns", "reward", "tokens an answer")
    table = _table("The same policy, free in both", columns, "95 % intervals in brackets")
    for split in free:
        for name, title in SIDES.items():
            side = split.get(name)
            if side is None:
                continue
            numbers = [number(side.get(key)) for key in ("mean_turns", "mean_reward", "tokens_per_observation")]
            table.add_row(f"{title}, {printable(split['split'])}", Text(f"{proportion(side)} n={side['n']}"), *numbers)
        gap = split["optimism_gap"]
        if gap["value"] is not None:
            table.add_row("dreamed minus real", Text(f"{signed(gap['value'])} {interval(gap['ci95'], with_sign=True)}"))
        table.add_section()
    return table


def _signal_table(signals: Sequence[Mapping[str, Any]]) -> Table:
    title = "Which signal tells a false turn without the real world?"
    caption = "a signal that knows nothing: AUROC 0.5, average precision = share of false turns; 95 % intervals"
    table = _table(title, ("", "false turns", "AUROC", "average precision"), caption)
    judged_on = ""
    for row in signals:
        if row["on"] != judged_on:
            judged_on = row["on"]
            table.add_section()
            table.add_row(Text(SIGNALS_ON[judged_on], style="bold"))
        measured = [
            f"{number(row[key]['value'])} {interval(row[key]['ci95'])}" for key in ("auroc", "average_precision")
        ]
        table.add_row(row["name"], f"{row['false']} of {row['n']}", *map(Text, measured))
    return table


def _share(data: Mapping[str, Any]) -> Text:
    return Text("–" if data["share"] is None else f"{number(data['share'])}\n{interval(data['ci95'])}")


def diverging(pairs: Sequence[Mapping[str, Any]], limit: int) -> list[Mapping[str, Any]]:
    """The pairs that part earliest, at most ``limit``: the policy's own dreams first, of as many splits and tasks as
    there are."""
    parted = [pair for pair in pairs if pair["comparable"] and pair["first"] is not None]
    parted.sort(key=lambda pair: (pair["first"], pair["id"]))
    mixed = _in_turn(_in_turn(parted, "task_id"), "split")
    return sorted(mixed, key=lambda pair: pair["source"] != "dream")[: max(limit, 0)]


def _in_turn(pairs: Sequence[Mapping[str, Any]], key: str) -> list[Mapping[str, Any]]:
    """The first pair of each ``key``, then the second of each, and so on; otherwise in their order."""
    seen: Counter[str] = Counter()
    ranked = []
    for pair in pairs:
        ranked.append((seen[pair[key]], pair))
        seen[pair[key]] += 1
    return [pair for _, pair in sorted(ranked, key=lambda entry: entry[0])]


def pair_view(pair: Mapping[str, Any], width: int, brief: bool = False) -> RenderableType:
    """One pair of ``compare.json`` side by side, under each other below 60 columns.

    ``brief`` shows only the turns around the first divergence.
    """
    table = Table(title=Text(_title(pair), style="bold"), width=width, show_lines=True)
    narrow = width < 60
    table.add_column("Action", ratio=2, overflow="fold")
    for title, side in (("Dream, then reality", ""),) if narrow else (("Dream", "dream"), ("Reality", "real")):
        table.add_column(f"{title}: {pair[side]['outcome']}" if side else title, ratio=5, overflow="fold")
    first, turns = pair["first"], pair["turns"]
    begin = max(0, first - AROUND) if brief and first is not None else 0
    end = first + 1 if brief and first is not None else len(turns)
    same = Text("(the same)", style="dim")
    if begin == 0:
        sides = [Text(printable(pair["start"]), style="dim"), same]
        table.add_row("where both start", *([Group(*sides)] if narrow else sides))
    for k in range(begin, end):
        turn = turns[k]
        head = Text.assemble(f"{k + 1} ", ("> " + printable(turn["action"]), "bold"), "\n")
        head.append(KINDS[turn["kind"]], style=STYLES.get(turn["kind"], "dim"))
        if k == first:
            head.append("\nhere they part", style="bold")
        sides = [_answer(turn["dream"]), same if turn["kind"] == "same" else _answer(turn["real"])]
        under = Group(Text("dream", style="italic"), sides[0], Text("reality", style="italic"), sides[1])
        table.add_row(head, *([under] if narrow else sides))
    hidden = len(turns) - (end - begin)
    if brief and hidden:
        table.caption = f"{count(hidden, 'more turn')}: compare.show={printable(pair['id'])}"
    return table


def _title(pair: Mapping[str, Any]) -> str:
    n, first = len(pair["turns"]), pair["first"]
    where = KINDS[NEVER] if first is None else f"parts at turn {first + 1} of {n}: {KINDS[first_kind(pair)]}"
    return f"{printable(pair['id'])} · {where if pair['comparable'] else 'not comparable'}"


def _answer(turn: Mapping[str, Any] | None) -> Text:
    if turn is None:
        return Text("(no answer)", style="dim italic")
    observation = turn["observation"]
    text, at = Text(), 0
    if turn.get("reasoning"):
        text.append(f"(thought: {printable(turn['reasoning'])})\n", style="dim")
    for start, end in turn["marks"]:
        text.append(printable(observation[at:start]))
        text.append(printable(observation[start:end]), style="bold underline")
        at = end
    text.append(printable(observation[at:]))
    text.append(f"\n[reward {turn['reward']:g}]" if turn["reward"] else "", style="green")
    text.append("\n[the end]" if turn["terminated"] else "", style="green")
    text.append(f"\nby rule: {printable(turn['rule'])}" if turn.get("rule") else "", style="dim")
    text.append("" if turn["confidence"] is None else f"\nconfidence {100 * turn['confidence']:.0f} %", style="dim")
    return text
