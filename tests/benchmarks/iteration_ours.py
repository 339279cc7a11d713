"""Our side of ``trl_iteration``: ``play_all``, ``InProcessEngine`` and ``PolicyModule``, as in the stage ``train``."""

from __future__ import annotations

import asyncio
import json
import logging
import warnings
from typing import Any

import lightning as L

from imagination.learning.algorithms import ALGORITHMS
from imagination.learning.experience import assign_credit, policy_rows, trained_rows
from imagination.learning.policy_module import PolicyModule, Update
from imagination.learning.trainer import StepStream
from imagination.rollout.play import Episode, Provenance, play_all
from imagination.settings import TrainSettings
from policy.agent import LanguageModelAgent
from policy.lm.backbone import load_checkpoint
from policy.lm.batch import collate
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.render import ChatFormat
from policy.lm.settings import EngineSettings
from real_envs.env import StepResult, Task
from real_envs.trajectory import Observation, Source
from tests.benchmarks.measure import Stopwatch, forward_operations, worker_files
from tests.benchmarks.zoo import MAX_ACTION_TOKENS, TURNS, Zoo, task_seed


class ZooEnv:
    """The zoo behind our protocol of environments."""

    def __init__(self) -> None:
        self._zoo = Zoo()

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation(self._zoo.reset(int(task.spec["seed"])))

    async def step(self, action: str) -> StepResult:
        text, reward, done = self._zoo.step(action)
        return StepResult(Observation(text), reward, terminated=done, truncated=False)

    async def close(self) -> None:
        pass


class Player:
    """Plays the episodes of an update and makes rows of them."""

    def __init__(self, spec: dict[str, Any], agent: LanguageModelAgent) -> None:
        self.spec, self.agent = spec, agent
        self.updates: list[dict[str, Any]] = []

    def update(self, index: int) -> Update:
        seed, size = self.spec["seed"], self.spec["group_size"]
        self.agent.engine.update_weights()
        episodes = []
        for g in range(self.spec["groups"]):
            world = task_seed(seed, index, g)
            task = Task(f"zoo/{world}", {"seed": str(world)})
            episodes += [Episode(f"{index}/{g}/{k}", task, f"{index}/{g}", world * 101 + k) for k in range(size)]
        played = asyncio.run(play_all(episodes, ZooEnv, self.agent, Provenance(Source.REAL), TURNS, len(episodes)))
        rows = policy_rows(played)
        batch = collate(rows, pad=0)
        assign_credit(batch, ALGORITHMS["grpo"])
        rows = [rows[i] for i in trained_rows(batch)]  # without an advantage: no gradient
        self.updates.append(
            {
                "turns": sum(len(e.turns) for e in played),
                "reward": sum(e.total_reward for e in played) / len(played),
                "played": [e.trace.ids for e in played if e.trace],
                "learned": [row.ids for row in rows],
            }
        )
        return Update(index, rows, exact=True)


def main() -> None:
    spec, out = worker_files()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(spec["seed"], verbose=False)
    loaded, tokenizer = load_checkpoint(spec["model"])
    model: Any = loaded
    chat = ChatFormat(tokenizer)
    engine = InProcessEngine(
        model,
        model.config.max_position_embeddings,
        EngineSettings(slots=spec["groups"] * spec["group_size"], memory_gib=4.0),
    )
    player = Player(spec, LanguageModelAgent(engine, chat, MAX_ACTION_TOKENS))
    clock = Stopwatch()
    settings = TrainSettings(epochs=1, minibatches=1, lr=spec["lr"], expert_share=0.0)
    module = PolicyModule(model, ALGORITHMS["grpo"], settings, lambda *_: clock.lap(), seed=spec["seed"])
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    stream = StepStream(spec["updates"], lambda: module.updates_done, player.update)
    clock.start()
    trainer.fit(module, stream)
    found = {
        "seconds": clock.seconds,
        "turns": [u["turns"] for u in player.updates],
        "rewards": [u["reward"] for u in player.updates],
        "generated tokens": engine.counts.generated,
        "operations": sum(_operations(model.config, u, engine, len(player.updates)) for u in player.updates[1:]),
    }
    out.write_text(json.dumps(found))


def _operations(config: Any, update: dict[str, Any], engine: InProcessEngine, updates: int) -> float:
    """What an iteration cannot do without: one forward pass to play, three to learn, each distinct prefix once."""
    made = engine.counts.generated // updates
    return forward_operations(config, update["played"], made) + 3 * forward_operations(config, update["learned"], made)


if __name__ == "__main__":
    main()
