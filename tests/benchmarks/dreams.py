"""How many dreamed turns a second the demo's models give, with and without drafts from the log.

Real text, in contrast to ``rollouts.py``: a world model trained on TextWorld episodes, whose answers can be guessed.
Uses the run ``outputs/demo`` and makes its log and models where they are missing (seven minutes).

    python -m tests.benchmarks.dreams [--run demo] [--quick]

``--quick`` uses models of the preset ``tiny``, in the run ``bench-quick``.
"""

from __future__ import annotations

import asyncio
import random
import time

import torch

from imagination.cli import prepare
from imagination.dream_env import DreamEnv, Start, starts_from_log
from imagination.rollout import Episode, Provenance, play_all
from imagination.run_folder import RunFolder
from imagination.settings import Config
from imagination.stages.collect import collect
from imagination.stages.common import load_model
from imagination.stages.fit import clone, fit_world_model, read_log
from policy.agent import LanguageModelAgent
from policy.lm.drafts import Drafts
from policy.lm.inprocess import InProcessEngine, Turnstile
from policy.lm.render import render_for_world_model
from real_envs.env import Task
from real_envs.trajectory import Source, Trajectory
from tests.benchmarks.limits import token_seconds
from tests.benchmarks.measure import arguments
from tests.benchmarks.result import Limit, table_row, write
from worldmodel.text import TextWorldModel


class Dreams:
    """64 dreams at a time from the starts of a run's log, as in training, with fresh engines."""

    def __init__(self, run: RunFolder, config: Config, log: list[Trajectory], drafts: bool) -> None:
        self.config = config
        turnstile = Turnstile()
        model, chat = load_model(run.model("worldmodel"), "fit-world-model", config.worldmodel)
        found = Drafts([render_for_world_model(chat, t).ids for t in log]) if drafts else None
        self.world = InProcessEngine(model, config.worldmodel.context, drafts=found, turnstile=turnstile)
        model, policy_chat = load_model(run.model("policy-clone"), "clone", config.policy)
        self.policy = InProcessEngine(model, config.policy.context, turnstile=turnstile)
        self.model = TextWorldModel(self.world, chat, "bench", config.dream.max_tokens, config.dream.temperature)
        self.agent = LanguageModelAgent(self.policy, policy_chat, config.max_action_tokens)
        self.starts: dict[str, Start] = starts_from_log(log, branch=False)
        self.turns = 0

    def play(self, episodes: int, seed: int) -> tuple[float, list[str]]:
        """Turns per second, and what was dreamed, to check that drafts change no word."""
        chance = random.Random(seed)
        names = sorted(self.starts)
        queue = []
        for k in range(episodes):
            name = chance.choice(names)
            task = Task(self.starts[name].task_id, {"start": name})
            queue.append(Episode(str(k), task, str(k), seed * 10_007 + k))
        stamp = Provenance(Source.DREAM)
        begin = time.perf_counter()
        played = asyncio.run(
            play_all(queue, lambda: DreamEnv(self.model, self.starts), self.agent, stamp, self.config.dream.max_turns)
        )
        seconds = time.perf_counter() - begin
        turns = sum(len(t.own_turns) for t in played)
        self.turns += turns
        return turns / seconds, [turn.observation for t in played for turn in t.own_turns]

    def limit(self, seconds: float) -> Limit:
        """If tokens cost only their matrix products; each of the rates is measured for ``seconds``."""
        spent = 0.0
        for engine in (self.world, self.policy):
            per_token, per_logit = token_seconds(engine.model.config, engine.model.dtype, seconds=seconds)
            spent += engine.counts.fed * per_token + engine.counts.generated * per_logit
        return Limit(
            self.turns / spent, "what both models read and wrote without drafts costs only its matrix products"
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--run", default="demo", help="whose log and models to use")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config, folder = prepare(["run=bench-quick", "preset=tiny"] if options.quick else [f"run={options.run}"])
    run = RunFolder(folder, config.seed)
    for made, stage in (("log", collect), ("models/worldmodel", fit_world_model), ("models/policy-clone", clone)):
        if not (folder / made).exists():
            stage(config, folder)
    log, _ = read_log(run, config)
    rates: dict[bool, list[float]] = {False: [], True: []}
    both = {drafts: Dreams(run, config, log, drafts) for drafts in rates}
    same = total = 0
    for seed in range(1 if options.quick else 5):
        texts = {}
        for drafts in sorted(both, reverse=seed % 2 == 1):
            rate, texts[drafts] = both[drafts].play(16 if options.quick else 128, seed)
            rates[drafts].append(rate)
        same += sum(a == b for a, b in zip(*texts.values(), strict=False))
        total += max(map(len, texts.values()))
    world = both[True].world
    found = table_row(
        "dreamed turns/s with drafts from the log against without, trained TextWorld models",
        "report",
        "turns/s",
        rates[True],
        rates[False],
        limit=both[False].limit(0.1 if options.quick else 1.0),
        acceptance=world.counts.accepted / world.counts.drafted,
        tokens_a_step_and_episode=world.counts.generated / world.counts.steps,
        steps={"with": world.counts.steps, "without": both[False].world.counts.steps},
        reused_prompt_share=world.counts.reused / (world.counts.reused + world.counts.fed),
        same_observations=[same, total],
    )
    write("dreams", [found], options, run=config.run)


if __name__ == "__main__":
    main()
