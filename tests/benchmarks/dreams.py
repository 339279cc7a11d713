"""How fast trained models dream: 64 TextWorld episodes at a time, about 8 tokens an action and 48 an answer.

Real text, in contrast to ``rollouts``: what a trained world model answers often stands in its log, so drafts looked up
there save most steps of decoding, and change no word in fp32.
Opponents are transformers' ``generate`` on whole histories, vLLM (eager and compiled, the faster counts) and the same
engine without drafts. Everyone plays the same starts with the same models at temperature 1, in a process of its own, in
turns.

The log and both models are made in ``outputs/bench-dreams`` where they are missing (about ten minutes).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import time
from typing import Any

from imagination.commands.clone import clone
from imagination.commands.collect import collect
from imagination.commands.fit_world_model import fit_world_model
from imagination.rollout.dream_env import DreamEnv, starts_from_log
from imagination.rollout.engines import drafts_from
from imagination.rollout.play import Episode, Provenance, play_all
from imagination.rollout.world_models import form_of
from imagination.runs.log import read_log
from imagination.runs.models import load_model
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config
from imagination.settings.compose import resolve
from policy.agent import LanguageModelAgent
from policy.lm.engine import Engine
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.engines.inprocess.slot_engine import DeviceScheduler
from policy.lm.engines.vllm import VllmEngine
from policy.lm.settings import EngineSettings
from real_envs.env import Task
from real_envs.trajectory import Source, Trajectory
from tests.benchmarks.dreaming import GenerateEngine
from tests.benchmarks.measure import arguments, main_or_worker, run_worker
from tests.benchmarks.rollouts import token_seconds
from tests.benchmarks.table import Limit, table_row, write
from worldmodel.text import TextWorldModel

_SHAPE = ("hidden=192", "layers=5", "heads=3", "kv_heads=1", "mlp=512", "context=2048")
# A small vocabulary makes TextWorld's answers as long in tokens as those of richer worlds.
FULL = [
    "run=bench-dreams",
    "vocab_size=400",
    "dream={max_turns: 10, max_tokens: 400}",
    "max_action_tokens=32",
    "collect.episodes=500",
    "fit.steps=800",
    *(f"{model}.{one}" for model in ("worldmodel", "policy") for one in _SHAPE),
]
QUICK = ["run=bench-quick", "preset=tiny"]


SLOTS = 64


class Dreams:
    """64 dreams at a time from the starts of a run's log, as in training.

    Args:
        overrides: that name the run and its settings.
        engine: drafts, inprocess (without drafts), generate or vllm.
        eager: vLLM does not compile.
    """

    def __init__(self, overrides: list[str], engine: str, eager: bool = True) -> None:
        resolved = resolve(overrides, Config)
        self.config = resolved.config
        run = RunFolder(resolved.folder, self.config.seed)
        log, _ = read_log(run, self.config.collect.validation)
        scheduler = DeviceScheduler()

        def make(model: Any, chat: Any, context: int, logged: list[Trajectory]) -> Engine:
            if engine == "generate":
                return GenerateEngine(model, context)
            if engine == "vllm":
                settings = EngineSettings(name="vllm", slots=SLOTS, memory_gib=1.0, eager=eager)
                return VllmEngine(model, chat.tokenizer, context, settings, scheduler)
            drafts = (
                drafts_from(logged, chat, form_of(self.config.worldmodel, logged))
                if logged and engine == "drafts"
                else None
            )
            return InProcessEngine(
                model, context, EngineSettings(slots=SLOTS, memory_gib=4.0), drafts=drafts, scheduler=scheduler
            )

        model, chat = load_model(run.model("worldmodel"), "fit-world-model", self.config.worldmodel)
        self.world = make(model, chat, self.config.worldmodel.context, log)
        self.models = [model]
        dream = self.config.dream
        self.model = TextWorldModel(self.world, chat, "bench", dream.max_tokens, dream.temperature)
        model, chat = load_model(run.model("policy-clone"), "clone", self.config.policy)
        self.policy = make(model, chat, self.config.policy.context, [])
        self.models.append(model)
        self.agent = LanguageModelAgent(self.policy, chat, self.config.max_action_tokens)
        self.starts = starts_from_log(log, branch=False)

    def play(self, episodes: int, seed: int) -> tuple[float, int]:
        """Turns per second, and how many were dreamed."""
        chance, names = random.Random(seed), sorted(self.starts)
        queue = []
        for k in range(episodes):
            name = chance.choice(names)
            task = Task(self.starts[name].task_id, {"start": name})
            queue.append(Episode(str(k), task, str(k), seed * 10_007 + k))
        for engine in (self.policy, self.world):
            engine.update_weights()
        stamp, most = Provenance(Source.DREAM), self.config.dream.max_turns
        begin = time.perf_counter()
        played = asyncio.run(play_all(queue, lambda: DreamEnv(self.model, self.starts), self.agent, stamp, most))
        seconds = time.perf_counter() - begin
        turns = sum(len(t.own_turns) for t in played)
        return turns / seconds, turns


def play_side(spec: dict[str, Any]) -> dict[str, Any]:
    """Plays as ``spec`` says: ``overrides``, ``engine``, ``eager``, ``episodes``, ``seed``, ``limit`` (seconds)."""
    dreams = Dreams(spec["overrides"], spec["engine"], spec["eager"])
    dreams.play(8 if spec["engine"] == "generate" else spec["episodes"], seed=99)  # to warm up
    engines = [e for e in (dreams.policy, dreams.world) if isinstance(e, InProcessEngine)]
    for engine in engines:
        engine.counts = type(engine.counts)()
    rate, turns = dreams.play(spec["episodes"], spec["seed"])
    found: dict[str, Any] = {
        "turns/s": rate,
        "turns": turns,
        "parameters": [sum(p.numel() for p in model.parameters()) for model in dreams.models],
    }
    if engines:
        policy, world = (engine.counts for engine in engines)
        found |= {
            "tokens of an action": policy.generated / turns,
            "tokens of an answer": world.generated / turns,
            "steps": [policy.steps, world.steps],
            "acceptance": world.accepted / world.drafted if world.drafted else None,
            "reused share of prompts": world.reused / (world.reused + world.fed),
        }
    if spec["limit"]:
        spent = 0.0
        for engine in engines:
            per_token, per_logit = token_seconds(engine.model.config, engine.model.dtype, seconds=spec["limit"])
            spent += engine.counts.fed * per_token + engine.counts.generated * per_logit
        found["limit"] = turns / spent
    return found


def main() -> None:
    parser = arguments(__doc__, "vllm")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    overrides = QUICK if options.quick else FULL
    _make_models(overrides)
    folder = options.out / "dreams.work"
    folder.mkdir(parents=True, exist_ok=True)

    def play(engine: str, seed: int, eager: bool = True, limit: float = 0.0) -> dict[str, Any]:
        episodes = 16 if options.quick else 64
        spec = {"overrides": overrides, "engine": engine, "eager": eager, "episodes": episodes, "seed": seed}
        python = options.vllm_python if engine == "vllm" else sys.executable
        return run_worker(python, "dreams", spec | {"limit": limit}, folder, options.threads)

    missing, eager = "", True
    sides = ["drafts", "inprocess", "generate"]
    if not options.vllm_python.exists():
        missing = f"{options.vllm_python} is not there; the Makefile makes it"
    else:
        sides.append("vllm")
        if not options.quick:
            eager = play("vllm", 0)["turns/s"] > play("vllm", 0, eager=False)["turns/s"]
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for seed in range(1 if options.quick else options.rounds):
        for side in sides[:: 1 if seed % 2 == 0 else -1]:
            found[side].append(play(side, seed, eager))
            print(f"{side}: {found[side][-1]['turns/s']:.1f} turns/s", flush=True)
    rates = {side: [one["turns/s"] for one in runs] for side, runs in found.items()}
    plain = play("inprocess", 0, limit=0.1 if options.quick else 1.0)
    limit = Limit(plain["limit"], "what both models read and wrote without drafts costs only its matrix products")

    def row(opponent: str, target: str, side: str) -> dict[str, Any]:
        what = f"dreamed turns/s of trained models, drafts from the log, against {opponent}"
        why = missing if side == "vllm" else ""
        return table_row(what, target, "turns/s", rates["drafts"], rates.get(side, []), limit=limit, not_measured=why)

    rows = [
        row("generate, whole history each turn", ">= 10", "generate"),
        row("vLLM", ">= 1.5", "vllm"),
        row("the same engine without drafts", "report", "inprocess"),
    ]
    kept = ("tokens of an action", "tokens of an answer", "acceptance", "steps", "reused share of prompts")
    write(
        "dreams",
        rows,
        options,
        run=overrides,
        parameters=plain["parameters"],
        acceptance=statistics.median(one["acceptance"] for one in found["drafts"]),
        vllm_eager=eager,
        details={side: [{k: one[k] for k in kept} for one in found[side]] for side in ("drafts", "inprocess")},
    )


def _make_models(overrides: list[str]) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        resolved = resolve(overrides, Config)
        resolved.remember()
        config, folder = resolved.config, resolved.folder
        for made, stage in (("log", collect), ("models/worldmodel", fit_world_model), ("models/policy-clone", clone)):
            if not (folder / made).exists():
                stage(config, folder)


if __name__ == "__main__":
    main_or_worker(main, play_side)
