"""What rules mined from the log are worth, world by world: dreams without them, with those that refuse, with all.

    python -m tests.benchmarks.rules_table --worlds demo coin gymnasium --seeds 0 1 --training-seeds 1 2
    python -m tests.benchmarks.rules_table --worlds demo --modes off refuse repair real
    python -m tests.benchmarks.rules_table --worlds textworld --modes true-outcomes true-refusals true-seen true-new

A world is a preset, or the demo's with another game of TextWorldExpress; its held-out tasks are a panel, where there is
one of that name, or else drawn by the seed. Each seed has one log, one world model, one clone. Its rules are mined from
the log and judged on held-back episodes of it; 100 dreams of the clone a mode, from the beginnings of held-out tasks,
say how often turns contradict their own dream; and the clone is trained in dreams of each mode (``real``: in the real
games; ``true-<part>``: without rules, one part answered by the real games, see ``partly_true.py``) by every training
seed and then played on the held-out tasks.
``sft`` clones all solved episodes of the log instead, by whatever agent, three times as long; ``sft-repair`` goes on
from there in dreams.

What exists is not done again. Writes ``<out>/table.md`` after every part; ``--table`` only reads.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from imagination.commands.clone import clone
from imagination.commands.experiments.arms import play_clone, prepared_run, train_arm
from imagination.commands.train import _RealSteps
from imagination.evaluation.world_model_eval import heldout_tasks
from imagination.rollout.dream_env import DreamEnv, starts_from_log
from imagination.rollout.play import Provenance, plan, play_all
from imagination.rollout.world_models import rules_of
from imagination.runs.machine import give_back_memory
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config
from imagination.settings.compose import config_folder, load_config
from real_envs.env import Task
from real_envs.files import write_atomically
from real_envs.trajectory import Source
from real_envs.worker_pool import PoolStats
from tests.benchmarks import study
from tests.benchmarks.partly_true import PARTS, PartlyTrue, Truth
from worldmodel.evaluation.dreams import contradiction_metrics
from worldmodel.evaluation.proportions import Proportion, pooled
from worldmodel.rules.refusals import learn_refusals

_DEMO = ["preset=demo", *(f"{stage}.max_turns=20" for stage in ("collect", "dream", "evaluate"))]
_DEMO += ["evaluate.heldout_episodes=2", "evaluate.tasks=20"]
_EXPRESS = [
    *(*_DEMO, "games.train=400", "clone.agents=[expert,noisy-0.2]", "clone.solved_only=true", "train.updates=24"),
    *("train.validation_tasks=48", "train.validate_every=4", "env.options.params=''"),
]
FIVE_ROOMS = "numLocations=5,includeDoors=1,numDistractorItems=2"
ONE_ROOM = "numLocations=1,numItemsToPutAway=1,includeDoors=0"
GAMES = {  # in place of ``preset=<world>``
    "coin": [*_DEMO, "env.options.game=coin", f"env.options.params='{FIVE_ROOMS}'"],
    "twc-easy": [
        *(*_DEMO, "games.train=250", "collect.episodes=12", "env.options.game=twc", f"env.options.params='{ONE_ROOM}'"),
        *("dream.known_rewards=true", "dream.min_outcome_confidence=0.5"),
    ],
    **{game: [*_EXPRESS, f"env.options.game={game}"] for game in ("twc", "sorting", "arithmetic")},
    "babyai-local": ["preset=gymnasium", "env.options.id=BabyAI-GoToLocal-v0"],
}
PANELS = {"demo": "mapreader", "gymnasium": "babyai"}  # of worlds that have another name there
MODES = ("off", "refuse", "repair", "real")
SFT, AFTER_SFT = "sft", "sft-repair"
TRUE = tuple(f"true-{part}" for part in PARTS)
ARMS = (AFTER_SFT, *MODES, *TRUE)
DREAMS = 100
KEPT = ("heldout_tasks", "dream_success", "stopped_by", "real_steps")
PART = "rules_part.json"


def main() -> int:
    parser = study.make_parser(__doc__, "outputs/rules", [0, 1])
    parser.add_argument("--worlds", nargs="+", default=["demo", *GAMES, "gymnasium", "textworld"])
    parser.add_argument("--training-seeds", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=(SFT, *ARMS), default=["off", "repair"])
    options, settings = study.options_and_settings(parser, "all worlds or, such as coin:games.train=300, of one")

    def make(world: str, seed: int) -> None:
        own = study.settings_of(world, settings, options.worlds)
        panel = PANELS.get(world, world)
        words = [f"games.panel={panel}"] * (config_folder() / "panels" / f"{panel}.json").exists()
        config = load_config([*GAMES.get(world, [f"preset={world}"]), *words, *own, f"seed={seed}"], Config)
        make_part(config, options.out / world, seed, options.modes, options.training_seeds)

    parts = [(f"{w}, seed {s}", partial(make, w, s)) for s in options.seeds for w in options.worlds]
    return study.run_parts(options, parts, lambda: write_table(options.out))


def make_part(config: Config, folder: Path, seed: int, modes: Sequence[str], training_seeds: Sequence[int]) -> None:
    """One world and seed; what is there already is kept."""
    path = prepared_run(config, folder, seed, until="clone")
    run = RunFolder(path, seed)
    place = path / PART
    part: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {"contradictions": {}, "arms": {}}

    def keep() -> None:
        write_atomically(place, json.dumps(part, indent=1))
        give_back_memory()

    part |= {"seed": seed, "world": folder.name, "rules": run.summary["rules"], "hardware": run.summary["hardware"]}
    config = deepcopy(config)
    config.seed = seed
    if "clone" not in part:
        part["clone"] = play_clone(config, path)["heldout_tasks"]
        keep()
    if {SFT, AFTER_SFT} & {*modes} and SFT not in part:
        part[SFT] = _imitate_solved(config, path, path / SFT)
        keep()
    for mode in (mode for mode in modes if mode != SFT):
        mine = deepcopy(config)
        if mode in TRUE:
            mine.worldmodel.rules = "off"
        elif mode not in ("real", AFTER_SFT):
            mine.worldmodel.rules = mode  # type: ignore[assignment]
            if mode not in part["contradictions"]:
                part["contradictions"][mode] = asyncio.run(_contradictions(mine, run))
                keep()
        mine.train.world = "real" if mode == "real" else "dream"
        for k in training_seeds:
            mine.train.seed = k
            name = f"{mode}-{k}"
            if name not in part["arms"]:
                print(f"{folder.name}, seed {seed}: {name}", flush=True)
                with _partly_true(mine, run, mode) if mode in TRUE else nullcontext():
                    arm = train_arm(mine, path / SFT if mode == AFTER_SFT else path, path / name)
                part["arms"][name] = {key: arm[key] for key in KEPT}
                keep()


def _imitate_solved(config: Config, source: Path, there: Path) -> dict[str, Any]:
    """The other thing to do with a log: success on the held-out tasks after longer imitation of all that was solved."""
    mine = deepcopy(config)
    mine.clone.agents, mine.clone.solved_only, mine.clone.steps = [""], True, 3 * config.clone.steps
    for name in (name for name in ("games", "log", "tokenizer", "models", "supplements") if (source / name).exists()):
        shutil.copytree(source / name, there / name, dirs_exist_ok=True)
    known = RunFolder(source, config.seed).summary
    RunFolder(there, config.seed).update(
        {key: known[key] for key in ("world_model_form", "best_return") if key in known}
    )
    study.run_once(mine, there, clone)
    return dict(play_clone(mine, there)["heldout_tasks"])


@contextmanager
def _partly_true(config: Config, run: RunFolder, mode: str) -> Iterator[None]:
    """Whatever dreams meanwhile has one part of its world model's answers from the real games."""
    session, make = Session(config, run), Session.world_model
    log, tasks = session.log.train, session.tasks()
    by_id = {task.id: task for task in tasks.tasks("train")}
    truth = Truth(tasks, {t.start: by_id[t.task_id] for t in log if t.task_id in by_id})
    part, refusals = mode.removeprefix("true-"), learn_refusals(log)

    def world_model(self: Session, *args: Any, **settings: Any) -> PartlyTrue:
        return PartlyTrue(make(self, *args, **settings), part, truth, refusals)

    try:
        # a training in dreams that took real steps is refused; these are the experiment's own
        with patch.object(Session, "world_model", world_model), patch.object(_RealSteps, "used", PoolStats()):
            yield
    finally:
        asyncio.run(tasks.close())


async def _contradictions(config: Config, run: RunFolder) -> dict[str, Any] | None:
    """How often dreams of the clone, from beginnings of held-out tasks, contradict themselves; ``None`` where the log
    has no rules."""
    rules = rules_of(run)
    if rules is None:
        return None
    session = Session(config, run)
    world, guard, agent = session.world_model(), session.guard(), session.agent(session.policy())
    starts = {start.task_id: start for start in starts_from_log(heldout_tasks(run), branch=False).values()}
    tasks = [Task(name, {"start": name}) for name in sorted(starts)]
    episodes = plan(tasks, -(-DREAMS // len(tasks)), "contradictions", config.seed)
    stamp = Provenance(Source.DREAM, None, world.version)
    played = await play_all(episodes, lambda: DreamEnv(world, starts, guard), agent, stamp, config.dream.max_turns)
    return contradiction_metrics(played, rules)


def write_table(out: Path) -> str:
    """``table.md`` of all parts that are there; what it says."""
    parts = [json.loads(path.read_text()) for path in sorted(out.glob(f"*/seed-*/{PART}"))]
    head = ["world", "seed", "rules (that refuse)", "of held-back turns they answer", "wrongly"]
    head += ["contradicting turns, off / refuse / repair", "cloned"]
    head += ["solved episodes cloned", "and then dreams", "off", "refuse", "repair", "real games"]
    head += [f"true {part}" for part in PARTS]
    return study.write_files(out, table=study.markdown(head, map(_row, parts)))


def _row(part: dict[str, Any]) -> list[object]:
    rules, share = part["rules"], part["rules"]["answered"] / max(1, part["rules"]["turns"])
    rates = [_rate(part["contradictions"].get(mode)) for mode in MODES[:3]]
    of_mode = {mode: [arm for name, arm in part["arms"].items() if name.startswith(f"{mode}-")] for mode in ARMS}
    arms = list(map(_arms, of_mode.values()))
    return [
        part["world"],
        part["seed"],
        f"{rules['rules']} ({rules['refusing']})",
        f"{share:.2f}",
        f"{rules['wrong']} of {rules['answered']}",
        " / ".join(rates),
        Proportion.from_json(part["clone"]).cell,
        Proportion.from_json(part[SFT]).cell if SFT in part else study.DASH,
        *arms,
    ]


def _rate(found: dict[str, Any] | None) -> str:
    value = found["rate"]["value"] if found else None
    return study.DASH if value is None else f"{value:.3f}"


def _arms(arms: Iterable[dict[str, Any]]) -> str:
    """The training seeds pooled, and one by one with the real steps that they took."""
    arms = list(arms)
    rates = [Proportion.from_json(arm["heldout_tasks"]) for arm in arms]
    steps = [arm.get("real_steps", {}).get("train", 0) for arm in arms]
    taken = f"; {', '.join(f'{n:,}' for n in steps)} real steps" if any(steps) else ""
    return f"{pooled(rates).cell} ({', '.join(f'{p.rate or 0:.2f}' for p in rates)}{taken})" if rates else study.DASH


if __name__ == "__main__":
    sys.exit(main())
