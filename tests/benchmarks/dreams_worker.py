"""One competitor of ``dreams``, in a process of its own: trained models that dream in the games of their log."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from typing import Any

from imagination.cli import prepare
from imagination.rollout.dream_env import DreamEnv, starts_from_log
from imagination.rollout.engines import drafts_from
from imagination.rollout.play import Episode, Provenance, play_all
from imagination.rollout.world_models import form_of
from imagination.runs.log import read_log
from imagination.runs.models import load_model
from imagination.runs.run_folder import RunFolder
from policy.agent import LanguageModelAgent
from policy.lm.engine import Engine
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.engines.inprocess.slot_engine import DeviceScheduler
from policy.lm.engines.vllm import VllmEngine
from policy.lm.settings import EngineSettings
from real_envs.env import Task
from real_envs.trajectory import Source, Trajectory
from tests.benchmarks.dreaming import GenerateEngine, token_seconds
from tests.benchmarks.measure import worker_files
from worldmodel.text import TextWorldModel

SLOTS = 64


class Dreams:
    """64 dreams at a time from the starts of a run's log, as in training.

    Args:
        overrides: that name the run and its settings.
        engine: drafts, inprocess (without drafts), generate or vllm.
        eager: vLLM does not compile.
    """

    def __init__(self, overrides: list[str], engine: str, eager: bool = True) -> None:
        self.config, folder = prepare(overrides)
        run = RunFolder(folder, self.config.seed)
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

    def play(self, episodes: int, seed: int) -> tuple[float, list[str]]:
        """Turns per second, and what was dreamed."""
        chance, names = random.Random(seed), sorted(self.starts)
        queue = []
        for k in range(episodes):
            name = chance.choice(names)
            task = Task(self.starts[name].task_id, {"start": name})
            queue.append(Episode(str(k), task, str(k), seed * 10_007 + k))
        for engine in (self.policy, self.world):
            engine.update_weights()
        stamp, turns = Provenance(Source.DREAM), self.config.dream.max_turns
        begin = time.perf_counter()
        played = asyncio.run(play_all(queue, lambda: DreamEnv(self.model, self.starts), self.agent, stamp, turns))
        seconds = time.perf_counter() - begin
        seen = [turn.observation for t in played for turn in t.own_turns]
        return len(seen) / seconds, seen


def work(spec: dict[str, Any]) -> dict[str, Any]:
    """Plays as ``spec`` says: ``overrides``, ``engine``, ``eager``, ``episodes``, ``seed``, ``limit`` (seconds)."""
    dreams = Dreams(spec["overrides"], spec["engine"], spec["eager"])
    dreams.play(8 if spec["engine"] == "generate" else spec["episodes"], seed=99)  # to warm up
    engines = [e for e in (dreams.policy, dreams.world) if isinstance(e, InProcessEngine)]
    for engine in engines:
        engine.counts = type(engine.counts)()
    rate, seen = dreams.play(spec["episodes"], spec["seed"])
    found: dict[str, Any] = {
        "turns/s": rate,
        "turns": len(seen),
        "digests": [hashlib.sha256(text.encode()).hexdigest()[:12] for text in seen],
        "parameters": [sum(p.numel() for p in model.parameters()) for model in dreams.models],
    }
    if engines:
        policy, world = (engine.counts for engine in engines)
        found |= {
            "tokens of an action": policy.generated / len(seen),
            "tokens of an answer": world.generated / len(seen),
            "steps": [policy.steps, world.steps],
            "acceptance": world.accepted / world.drafted if world.drafted else None,
            "reused share of prompts": world.reused / (world.reused + world.fed),
        }
    if spec["limit"]:
        spent = 0.0
        for engine in engines:
            per_token, per_logit = token_seconds(engine.model.config, engine.model.dtype, seconds=spec["limit"])
            spent += engine.counts.fed * per_token + engine.counts.generated * per_logit
        found["limit"] = len(seen) / spent
    return found


def main() -> None:
    spec, out = worker_files()
    out.write_text(json.dumps(work(spec)))


if __name__ == "__main__":
    main()
