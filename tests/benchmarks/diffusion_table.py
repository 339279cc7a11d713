"""Kinds of world model beside each other, of equal size and fitted to the same texts: whole texts, edits, retrieval,
and diffusion.

    python -m tests.benchmarks.diffusion_table --kinds text diffusion --seeds 0
    python -m tests.benchmarks.diffusion_table --worlds miniwob alfworld alfworld:env.options.data=/data/json_2.1.1
    python -m tests.benchmarks.diffusion_table --table

A part is one world, one kind and one seed. All parts of a world and seed share one log (the preset of the world, with
fewer tasks), its tokenizer's size, the sizes of the network and the number and size of optimiser steps: every kind
reads the same episodes equally often. Diffusion begins with the text model's weights and reads as much once more, so a
text model that is fitted twice as long stands beside it. A step of diffusion computes more, since its canvases stand
beside the text; what that costs is a column. Each is judged on turns of the training games that were held back and on
games that nothing was trained on.

Speed is that of the actions of the held-out log, done again in dreams at temperature 1, in turns a second of processor
time on one thread, since wall time hangs on what else the machine does. A pass is one reading of an episode's new
tokens; passes of several episodes run together.

Writes ``<out>/<world>/seed-<s>/<kind>/part.json`` and, after every part, ``<out>/table.md``. What is there is not done
again, and a fit that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from imagination.commands.collect import collect
from imagination.commands.fit_world_model import fit_world_model
from imagination.evaluation.world_model_eval import heldout_tasks, measure
from imagination.rollout.dream_env import DreamEnv, Start
from imagination.rollout.play import Episode, replay_all
from imagination.runs.lifecycle import open_run
from imagination.runs.log import read_log
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config
from imagination.settings.compose import load_config
from real_envs.env import Task
from real_envs.files import write_atomically
from tests.benchmarks import study
from worldmodel.diffusion.engine import CanvasEngine

FROM_TEXT = "from_text"  # begins with the weights of the kind "text", which has read the texts once by then
CANVAS = ["worldmodel.kind=diffusion", "worldmodel.diffusion.block=8"]
AFTER = [*CANVAS, FROM_TEXT, "fit.optimizer=muon", "fit.copying_steps=0"]
KINDS: Mapping[str, Sequence[str]] = {
    "text": ["worldmodel.kind=text"],
    "text, twice as long": ["worldmodel.kind=text", "fit.steps={twice}"],
    "delta": ["worldmodel.kind=delta"],
    "retrieval": ["worldmodel.kind=retrieval"],
    "diffusion": AFTER,
    "diffusion, one place a pass": [*AFTER, "worldmodel.diffusion.entropy_bound=0"],
    "diffusion, bolder": [*AFTER, "worldmodel.diffusion.entropy_bound=1"],
    "diffusion, by confidence": [*AFTER, "worldmodel.diffusion.sampler=confidence", "worldmodel.diffusion.steps=3"],
    "diffusion, from the last page": [*AFTER, "worldmodel.diffusion.edit=0.7"],
    "diffusion, from nothing": [*CANVAS, "fit.steps={twice}"],
    "diffusion, canvases of 32": [*AFTER, "worldmodel.diffusion.block=32"],
}
SAMPLED = ("one place a pass", "bolder", "by confidence", "from the last page")
FITTED_AS = {f"diffusion, {way}": "diffusion" for way in SAMPLED}  # the same weights
FAMILIES = "click-checkboxes click-option click-scroll-list click-dialog-2 click-button click-tab"  # of preset=screens
WORLDS: Mapping[str, Sequence[str]] = {
    "textworld": ["games.train=60", "games.heldout=20", "collect.workers=1"],
    "alfworld": ["games.train=60", "games.heldout=20", "collect.workers=1"],
    "miniwob": [
        *("games.train=150", "games.heldout=30", f"env.options.families={FAMILIES}"),
        *("collect.heldout_episodes=2", "fit.renamed=0"),
    ],
}
SIZE = ["fit.steps=500"]
QUICK = ["games.train=2", "games.heldout=1", "fit.steps=2", "fit.copying_steps=1", "worldmodel.hidden=32"]
PART = "part.json"
HEAD = (
    *("world", "kind", "seed", "fit, s", "exact", "reward P / R", "ECE", "ECE calibrated", "malformed"),
    *("exact, new games", "reward P / R, new games", "tokens a turn", "dreamed turns/s", "without drafts"),
    "passes a turn",
)


def main() -> int:
    parser = study.make_parser(__doc__, "outputs/diffusion", [0])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--quick", action="store_true", help="everything once and tiny, to see that it works")
    options, settings = study.options_and_settings(
        parser, "all parts or, such as alfworld:env.options.data=..., of one world"
    )
    torch.set_num_threads(1)

    def make(world: str, seed: int, kind: str) -> None:
        shared = [f"preset={world}", *WORLDS[world], *SIZE, *(QUICK if options.quick else []), f"seed={seed}"]
        make_part(kind, [*shared, *study.settings_of(world, settings, WORLDS)], options.out / world / f"seed-{seed}")

    parts = [
        (f"{world}, {kind}, seed {seed}", partial(make, world, seed, kind))
        for world, seed, kind in itertools.product(options.worlds, options.seeds, options.kinds)
    ]
    return study.run_parts(options, parts, lambda: write_table(options.out))


def make_part(kind: str, shared: Sequence[str], root: Path) -> None:
    """Log, fit and measurements of one kind, as far as they are not there yet."""
    config = load_config(list(shared), Config)
    given = {FROM_TEXT: f"worldmodel.model={kind_folder(root, 'text') / 'models' / 'worldmodel'}"}
    own = [given.get(word, word.format(twice=2 * config.fit.steps)) for word in KINDS[kind]]
    config = load_config([*shared, *own], Config)
    folder, source = kind_folder(root, kind), root / "log"
    if (folder / PART).exists():
        return
    if FROM_TEXT in KINDS[kind]:
        make_part("text", shared, root)
    if (other := FITTED_AS.get(kind)) is not None:
        make_part(other, shared, root)
        source = kind_folder(root, other)
    elif "collect" not in RunFolder(source, config.seed).summary.get("done", {}):
        collect(config, source)
    if not folder.exists():
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(PART))
    if other is None:
        fit_world_model(config, folder)
    else:  # judged with another sampler
        run = open_run(config, folder)
        run.update({"world_model": measure(Session(config, run))})
    run = RunFolder(folder, config.seed)
    found = {
        "world": config.env.name,
        "kind": kind,
        "seed": config.seed,
        "fit_seconds": run.summary["wall_seconds"]["fit_world_model"],
    }
    found |= {"world_model": run.summary["world_model"], "speed": asyncio.run(speed(config, run))}
    write_atomically(folder / PART, json.dumps(found, indent=1))


def kind_folder(root: Path, kind: str) -> Path:
    return root / kind.replace(", ", "-").replace(" ", "-")


async def speed(config: Config, run: RunFolder) -> dict[str, float | None]:
    """Dreamed turns a second of processor time, with drafts and without, and tokens and passes a turn without them;
    those are ``None`` where no turn could be read, or nothing is written token by token."""
    train, _ = read_log(run, config.collect.validation)
    log = heldout_tasks(run)
    again = {t.id: t for t in log}
    starts = {t.task_id: Start(t.task_id, t.start) for t in log}
    episodes = [Episode(t.id, Task(t.task_id, {"start": t.task_id}), t.id, config.seed) for t in log]
    found: dict[str, float | None] = {}
    for drafts, name in ((True, "turns_per_second"), (False, "without_drafts")):
        session = Session(replace(config, engine=replace(config.engine, drafts=drafts)), run)
        world = session.world_model(train, temperature=1.0)
        (engine,) = world.engines
        begin = time.process_time()
        played = await replay_all(again, episodes, partial(DreamEnv, world, starts), 64)
        turns = sum(len(t.turns) for t in played)
        found[name] = turns / (time.process_time() - begin)
    counts = engine.counts
    passes = engine.passes + turns if isinstance(engine, CanvasEngine) else counts.generated
    written = {"tokens": counts.generated, "passes": passes}
    return found | {"turns": turns, **{k: n / turns if turns and n else None for k, n in written.items()}}


def write_table(out: Path) -> str:
    """``table.md`` of all parts that are there; what it says."""
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in out.glob(f"*/seed-*/*/{PART}")]
    worlds, kinds = list(WORLDS), list(KINDS)
    parts.sort(key=lambda part: (worlds.index(part["world"]), part["seed"], kinds.index(part["kind"])))
    return study.write_files(out, table=table(parts))


def table(parts: Sequence[Mapping[str, Any]]) -> str:
    """A line a part."""
    rows = []
    for part in parts:
        card, speed = part["world_model"], part["speed"]
        new, sampled = card["heldout_tasks"], card["calibration"]
        cells = [
            part["world"],
            part["kind"],
            str(part["seed"]),
            f"{part['fit_seconds']:.0f}",
            f"{number(card['exact_match'])}, n={card['n']}",
            f"{number(card['reward_precision'])} / {number(card['reward_recall'])}",
            number(sampled.get("ece_before")),
            number(sampled.get("ece_after")),
            str(card["invalid"]),
            f"{number(new['exact_match'])}, n={new['n']}",
            f"{number(new['reward_precision'])} / {number(new['reward_recall'])}",
            tenth(speed["tokens"]),
            f"{speed['turns_per_second']:.0f}",
            f"{speed['without_drafts']:.0f}",
            tenth(speed["passes"]),
        ]
        rows.append(cells)
    return study.markdown(HEAD, rows)


def tenth(value: float | None) -> str:
    return study.DASH if value is None else f"{value:.1f}"


def number(value: float | None) -> str:
    return study.DASH if value is None else f"{value:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
