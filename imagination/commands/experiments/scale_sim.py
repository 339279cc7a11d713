from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from imagination.commands.experiments.arms import markdown, write_results
from imagination.report.plots import DREAM, EXPERT, GRID, INK, MUTED, REAL, STYLE
from imagination.runs.run_folder import RunFolder
from imagination.scale.dispatch import groups_at_once
from imagination.scale.simulation import Workload, simulate
from imagination.settings import Config, UserError
from imagination.settings.scale import ScaleSimSettings
from real_envs.files import read_text

# how many dreams of the demo had 1, 2, ... 14 turns (seed 1, training seed 2, 40 updates)
_DEMO = (13, 12, 29, 24, 27, 32, 89, 31, 89, 36, 15, 11, 9, 63)
DEMO_TURNS = [turns for turns, count in enumerate(_DEMO, 1) for _ in range(count)]
# what takes no time, to see what an update waits for
_FREE: Mapping[str, Mapping[str, Any]] = {
    "learner": {"learn_seconds": 0.0},
    "weights": {"send_seconds": 0.0},
    "store": {"publish_seconds": 0.0, "store_seconds": 0.0},
    "players": {"round_seconds": lambda rows: 1e-3},
}
_MARKERS = {"learner": "s", "weights": "^", "store": "D", "stragglers": "o"}
_INKS = {INK: "#1b1d21", MUTED: "#5f646d", GRID: "#e3e0d9", DREAM: "#0069a8", REAL: "#b54a00", EXPERT: "#73777f"}


def scale_sim(config: Config, folder: Path) -> None:
    """Simulate trainings with thousands of players: where they stop being faster, and why.

    The rules by which scale=ray hands groups to players and bounds their staleness are driven by a simulated clock.
    Times are arithmetic of GPUs, models and links in scale_sim.*; scale_sim.from_run=outputs/mine takes lengths
    of dreams from a trained run, and simulates more players of its own machine beside. Takes some minutes.

    Reads: nothing, or rollouts.jsonl and metrics.jsonl of scale_sim.from_run
    Writes: scale-sim.json, scale-sim.md, scale-sim.png

    Examples:
        imagine scale-sim
        imagine scale-sim scale_sim.parameters=[8] scale_sim.links=[100] scale_sim.weight_bytes=2
        imagine scale-sim scale_sim.from_run=outputs/mine

    Raises:
        UserError: simpy is not installed, or the run of ``scale_sim.from_run`` has not been trained in dreams.
    """
    settings, own = config.scale_sim, None
    turns: Sequence[int] = DEMO_TURNS
    if settings.from_run:
        own = played_as(Path(settings.from_run))
        turns = own.turns
    designs = []
    for size, link, most in product(settings.parameters, settings.links, settings.max_staleness):
        machines = [gpus(settings, turns, size, link, players) for players in settings.players]
        designs.append({"parameters": size, "link": link} | sweep(settings, machines, most, config.seed))
        print(f"== {size:g} billion parameters, {link:g} Gbit/s, staleness {most}: {designs[-1]['bound']}", flush=True)
    result: dict[str, Any] = {"settings": asdict(settings), "designs": designs, "own": []}
    if own is not None:
        machines = [Machines(own, players, gpus=0, moved_bytes=0, turn_tokens=1, start_tokens=0)
                    for players in settings.players]  # fmt: skip
        result["own"] = [sweep(settings, machines, most, config.seed) for most in settings.max_staleness]
    draw(designs, folder / "scale-sim.png")
    write_results(folder, "scale-sim", result, table(result))


@dataclass(frozen=True, slots=True)
class Machines:
    """What a training runs on.

    Attributes:
        moved_bytes: an update.
        turn_tokens: of a turn that is learned from.
        start_tokens: of an episode besides.
    """

    work: Workload
    players: int
    gpus: int
    moved_bytes: float
    turn_tokens: float
    start_tokens: float


def gpus(s: ScaleSimSettings, turns: Sequence[int], billions: float, link: float, players: int) -> Machines:
    """The arithmetic: 6 operations for each parameter and token that is learned from, 2 for each that is read or
    sampled; a decoding step reads the weights of one model and the keys and values of all episodes.

    A player holds policy and world model of the same size in bf16, the learner 18 bytes a parameter. Machines pass
    the weights on to each other. Keys and values of a token: 54 kB * billions^0.425, which is within 2 % of
    SmolLM2-135M, Llama-3-8B and Llama-3-70B.
    """
    n, mean = billions * 1e9, fmean(turns)
    turn_tokens, episodes = s.action_tokens + s.observation_tokens, s.groups * s.group_size
    of_player = _holding(4 * n, s)
    learners = max(s.learner_gpus, _holding(18 * n, s), math.ceil(s.learner_share * players * of_player))
    flops, memory = (of_player * s.sample_utilisation * x for x in (s.gpu_tflops * 1e12, s.gpu_gb_per_second * 1e9))
    cached = 54e3 * billions**0.425 * (s.start_tokens + mean * turn_tokens / 2)
    read_tokens = turn_tokens + 2 * s.start_tokens / mean  # of a turn, by both models

    def round_seconds(rows: float) -> float:
        step = max(s.step_seconds, (2 * n + rows * cached) / memory, 2 * n * rows / flops)
        return turn_tokens * step + max(s.read_steps * s.read_seconds, 2 * n * read_tokens * rows / flops)

    weights, link_bytes = n * s.weight_bytes, link * 1e9 / 8
    group_turns, machines = s.group_size * mean, math.ceil(players * of_player / s.machine_gpus)
    learned = 6 * n * episodes * (mean * turn_tokens + s.start_tokens)
    work = Workload(
        turns=turns,
        groups=s.groups,
        group_size=s.group_size,
        round_seconds=round_seconds,
        learn_seconds=learned / (learners * s.gpu_tflops * 1e12 * s.learn_utilisation),
        publish_seconds=weights / (s.publish_gb_per_second * 1e9),
        send_seconds=weights / link_bytes * math.ceil(math.log2(machines + 1)),
        store_seconds=s.group_seconds + group_turns * (s.turn_seconds + s.turn_bytes / link_bytes),
        spread=s.spread,
    )
    moved = weights * machines + s.groups * group_turns * s.turn_bytes
    return Machines(work, players, players * of_player + learners, moved, turn_tokens, s.start_tokens)


def _holding(size: float, s: ScaleSimSettings) -> int:
    """GPUs, a power of two, of whose memory so many bytes take at most four fifths."""
    return int(2 ** max(0, math.ceil(math.log2(size / (0.8 * s.gpu_gb * 1e9)))))


def played_as(path: Path) -> Workload:
    """What was measured of a trained run: lengths of dreams, the pace of its player, and the rest of an update.

    Raises:
        UserError: it has not been trained in dreams, or not for three updates.
    """
    lines: list[dict[str, Any]] = []
    if (path / "rollouts.jsonl").exists():
        lines = [json.loads(line) for line in read_text(path / "rollouts.jsonl").splitlines()]
    played = [line for line in lines if line["stage"] == "train" and line["source"] == "dream"]
    if len({line["step"] for line in played}) < 3:
        raise UserError(f"scale_sim.from_run={path}: no run that was trained in dreams for three updates")
    run = RunFolder(path, 0)
    updates, pace = run.metrics("train"), run.summary["speed"]["turns_per_second"]
    seconds = median(after["time"] - before["time"] for before, after in pairwise(updates))
    groups = len(played) // len({line["step"] for line in played})
    return Workload(
        turns=[n for line in played if (n := len(line["turns"]) - line["prefix_turns"])],
        groups=groups,
        group_size=max(1, round(median(u["turns"] / u["mean_turns"] for u in updates) / groups)),
        round_seconds=lambda rows: rows / pace,
        learn_seconds=max(0.0, seconds - fmean(u["turns"] for u in updates) / pace),
    )


def sweep(s: ScaleSimSettings, machines: Sequence[Machines], max_staleness: int, seed: int) -> dict[str, Any]:
    """A design with more and more players: a row for each number, up to which it scales, and what an update waits for
    beyond: what, if it took no time, would make it faster most.

    It scales as long as a step of the sweep gives at least the square root of what more players could give.
    """

    def run(m: Machines, **changes: Any) -> Any:
        at_once = groups_at_once(s.slots // m.work.group_size, m.work.groups, max_staleness, m.players)
        return simulate(replace(m.work, **changes), m.players, at_once, max_staleness, s.updates, seed)

    rows = []
    for m in machines:
        outcome = run(m)
        tokens = outcome.turns * m.turn_tokens + m.work.groups * m.work.group_size * m.start_tokens
        rows.append(
            {"players": m.players, "gpus": m.gpus, "tokens_per_second": tokens / outcome.seconds}
            | {**asdict(outcome), "staleness": dict(sorted(outcome.staleness.items()))}
            | {"moved_bytes": m.moved_bytes, "price": m.gpus * s.gpu_price * outcome.seconds / 3600}
        )
    poor = (k for k, (a, b) in enumerate(pairwise(rows)) if _gain(a, b) < math.sqrt(b["players"] / a["players"]))
    stop, bound = next(poor, None), "players"
    if stop is not None:
        seconds = {name: run(machines[stop + 1], **free).seconds for name, free in _FREE.items()}
        bound = min(seconds, key=lambda name: seconds[name])
        bound = "stragglers" if bound == "players" else bound  # more of them do not help
    return {"max_staleness": max_staleness, "rows": rows, "stop": stop, "bound": bound}


def _gain(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    return float(b["tokens_per_second"] / a["tokens_per_second"])


def table(result: Mapping[str, Any]) -> str:
    """A line for each design, as it is where it stops scaling; in Markdown."""
    head = "model, 1e9 | link, Gbit/s | staleness | scales to players | GPUs | tokens/s | s an update | learner idle"
    head += " | players idle | staleness of groups | dropped | GB moved | price | then waits for"
    lines = ["As each design is where it stops scaling; dropped groups, bytes and price are those of an update.", ""]
    lines += markdown(head.split(" | "), (_cells(d) for d in result["designs"]))
    if result["own"]:
        lines += ["", "More players of the run's own machine, as it played and learned (turns in place of tokens):", ""]
        lines += markdown(["players", "staleness", "turns/s", "s an update", "learner idle"], _own(result["own"]))
    return "\n".join(lines) + "\n"


def _cells(design: Mapping[str, Any]) -> list[str]:
    row = design["rows"][-1 if design["stop"] is None else design["stop"]]
    groups = sum(row["staleness"].values())
    ages = ", ".join(f"{age}: {count / groups:.2f}" for age, count in sorted(row["staleness"].items()))
    cells = [f"{design['parameters']:g}", f"{design['link']:g}", str(design["max_staleness"]), f"{row['players']:,}"]
    cells += [f"{row['gpus']:,}", f"{row['tokens_per_second']:,.0f}", f"{row['seconds']:.3g}"]
    cells += [f"{row['learner_idle']:.2f}", f"{row['players_idle']:.2f}", ages, f"{row['dropped']:.1f}"]
    return [*cells, f"{row['moved_bytes'] / 1e9:,.3g}", f"{row['price']:.3g}", design["bound"]]


def _own(designs: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for design in designs:
        for row in design["rows"]:
            numbers = (f"{row['tokens_per_second']:,.1f}", f"{row['seconds']:.3g}", f"{row['learner_idle']:.2f}")
            yield [str(row["players"]), str(design["max_staleness"]), *numbers]


def draw(designs: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Tokens a second over players, a panel for each model and link, a line for each bound of staleness; a mark where a
    design stops scaling says what it waits for."""
    sizes, links = ([*dict.fromkeys(d[key] for d in designs)] for key in ("parameters", "link"))
    players = [row["players"] for row in designs[0]["rows"]]
    stalenesses = [*dict.fromkeys(d["max_staleness"] for d in designs)]
    colours = {most: matplotlib.colors.to_hex((0.0, 0.41, 0.66, 0.45 + 0.55 * most / max(stalenesses[-1], 1)), True)
               for most in stalenesses} | {0: _INKS[REAL]}  # fmt: skip
    with matplotlib.rc_context({key: _INKS.get(str(value), value) for key, value in STYLE.items()} | {"font.size": 11}):
        figure = Figure(figsize=(3.1 * len(sizes) + 0.6, 2.5 * len(links) + 1.1), layout="constrained")
        panels = figure.subplots(len(links), len(sizes), sharex=True, sharey="col", squeeze=False)
        for design in designs:
            axes = panels[links.index(design["link"])][sizes.index(design["parameters"])]
            rows, colour = design["rows"], colours[design["max_staleness"]]
            axes.loglog([r["players"] for r in rows], [r["tokens_per_second"] for r in rows], color=colour, lw=1.8)
            if design["stop"] is not None:
                row = rows[design["stop"]]
                axes.plot(row["players"], row["tokens_per_second"], _MARKERS[design["bound"]], color=colour, ms=8)
        for line, link in enumerate(links):
            for column, size in enumerate(sizes):
                name = "NVLink, 900 GB/s" if link == 7200 else f"{link:g} Gbit/s"
                axes = panels[line][column]
                axes.xaxis.set_major_locator(FixedLocator(players))
                axes.set_xticklabels([f"{p:,}" for p in players], fontsize=9)
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter(FuncFormatter(_short))
                axes.yaxis.set_minor_formatter(NullFormatter())
                axes.xaxis.set_minor_locator(NullLocator())
                axes.set_title(f"{size:g} billion, {name}", loc="left", fontsize=11, color=_INKS[MUTED])
        for axes in panels[-1]:
            axes.set_xlabel("players")
        figure.suptitle("Tokens a second; marks: what an update waits for beyond",
                        x=0.01, ha="left", fontsize=12)  # fmt: skip
        keys = [Line2D([], [], color=c, label=f"staleness {m}" if m else "synchronous") for m, c in colours.items()]
        keys += [Line2D([], [], ls="", marker=m, color=_INKS[INK], label=name) for name, m in _MARKERS.items()]
        figure.legend(
            handles=keys, loc="outside lower center", ncols=min(len(keys), 2 * len(sizes)), frameon=False, fontsize=10
        )
        figure.savefig(target, dpi=110, facecolor="white")


def _short(number: float, _: int = 0) -> str:
    """``20k``: as ticks of tens of powers want TeX, which the style does not read."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:g}{unit}"
    return f"{number:g}"
