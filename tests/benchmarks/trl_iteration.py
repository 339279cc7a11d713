"""Whole GRPO iteration: environment turns per second against TRL's ``GRPOTrainer`` with a ``rollout_func``.

Both sides start from one checkpoint per seed, play the same worlds (``zoo``) in groups of one size, sample at
temperature 1 and make one optimiser step per update with the same AdamW, clipping and normalised advantages, for five
seeds. An iteration is all of it: rollout, rewards, advantages, update. The first one of each run is not timed. The two
take their iterations in turns, one of ours and one of TRL's, so that a machine that others disturb disturbs both.
TRL's ``rollout_func`` reads the whole history at each turn, as its documented loops do; ``--with-cache`` hands each
turn the keys and values of the one before, which a user has to write, at the micro-batches that TRL is fastest with.

Speed counts only if the policy learns as well as TRL's, so the result compares the learning curves: the mean reward
over all updates and over the last ones, seed by seed, with a 95 % interval of the difference.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch

from imagination.learning.algorithms import ALGORITHMS
from imagination.learning.experience import assign_credit, policy_rows, trained_rows
from imagination.learning.policy_module import PolicyModule, Update
from imagination.learning.trainer import step_loader
from imagination.rollout.play import Episode, Provenance, play_all
from imagination.settings import TrainSettings
from policy.agent import LanguageModelAgent
from policy.lm.backbone import build_model, load_checkpoint, save_checkpoint
from policy.lm.batch import collate
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.render import ChatFormat
from policy.lm.settings import EngineSettings, ModelSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.env import StepResult, Task
from real_envs.trajectory import Observation, Source
from tests.benchmarks.machine import matmul_rate
from tests.benchmarks.measure import Stopwatch, arguments, forward_operations, main_or_worker, run_in_turns, run_worker
from tests.benchmarks.table import Limit, table_row, write
from tests.benchmarks.zoo import FOODS, MAX_ACTION_TOKENS, TURNS, Zoo, answer, task_seed

# The policy that both sides start from clones a keeper who sometimes knows the right food, in plain PyTorch.
MODEL = ModelSettings(hidden=192, layers=6, heads=3, kv_heads=3, mlp=512, context=512)
CLONE_VOCABULARY = 352  # few merges, or whole sentences would be one token each
TEACHER_SKILL = 0.3  # how often the teacher knows


def teacher_episode(seed: int) -> list[tuple[str, str]]:
    """Pairs of an observation and the teacher's answer."""
    zoo, chance = Zoo(), random.Random(f"teacher/{seed}")
    observation, done, found = zoo.reset(-1 - seed), False, []
    while not done:
        action = answer(zoo.animal) if chance.random() < TEACHER_SKILL else chance.choice(FOODS)
        found.append((observation, action))
        observation, _, done = zoo.step(action)
    return found


def _clone_tokens(chat: ChatFormat, episode: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """Ids, and labels that are -100 on all but the actions."""
    ids, labels = list(chat.opening), [-100] * len(chat.opening)
    for turn, (observation, action) in enumerate(episode):
        seen = [*(chat.to_user if turn else ()), *chat.encode(observation), *chat.to_assistant]
        said = [*chat.encode(action), chat.stop]
        ids += seen + said
        labels += [-100] * len(seen) + said
    return ids, labels


def make_clone(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """Writes a checkpoint and returns the last loss."""
    episodes = [teacher_episode(seed * 1000 + i) for i in range(600)]
    texts = [text for episode in episodes for pair in episode for text in pair]
    tokenizer = train_tokenizer(texts + 1000 * FOODS, CLONE_VOCABULARY)  # answers of a few tokens each
    chat = ChatFormat(tokenizer)
    data = [_clone_tokens(chat, episode) for episode in episodes]
    model: Any = build_model(MODEL, tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    chance, loss = random.Random(seed), torch.zeros(())
    for _ in range(steps):
        batch = chance.sample(data, 8)
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([[*x, *[0] * (width - len(x))] for x, _ in batch])
        labels = torch.tensor([[*y, *[-100] * (width - len(y))] for _, y in batch])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    save_checkpoint(model, tokenizer, folder)
    lengths = [len(ids) for ids, _ in data]
    return {
        "loss": float(loss),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens per episode": sum(lengths) / len(lengths),
    }


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


def train_ours(spec: dict[str, Any]) -> dict[str, Any]:
    """Our side, in a process of its own."""
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
    stream = step_loader(spec["updates"], lambda: module.updates_done, player.update)
    clock.start()
    trainer.fit(module, stream)
    return {
        "seconds": clock.seconds,
        "turns": [u["turns"] for u in player.updates],
        "rewards": [u["reward"] for u in player.updates],
        "generated tokens": engine.counts.generated,
        "operations": sum(_operations(model.config, u, engine, len(player.updates)) for u in player.updates[1:]),
    }


def _operations(config: Any, update: dict[str, Any], engine: InProcessEngine, updates: int) -> float:
    """What an iteration cannot do without: one forward pass to play, three to learn, each distinct prefix once."""
    made = engine.counts.generated // updates
    return forward_operations(config, update["played"], made) + 3 * forward_operations(config, update["learned"], made)


LAST = 5  # updates whose mean reward is the final one
MARGIN = 0.05  # of reward, which is between 0 and 1
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # Student's t


def main() -> None:
    parser = arguments(__doc__, "trl")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--first-seed", type=int, default=0, help="settings are chosen on other seeds than those of the result"
    )
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument(
        "--lr", type=float, default=1e-4, help="at 3e-4 and above, some runs of either side learn nothing for long"
    )
    parser.add_argument("--with-cache", action="store_true", help="TRL's rollout keeps keys and values, by hand")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    what = "whole GRPO iteration, environment turns/s against TRL with rollout_func"
    target = ">= 3 at an equal or better learning curve"
    if not options.trl_python.exists():
        missing = f"{options.trl_python} is not there; `make bench` makes it"
        write("trl_iteration", [table_row(what, target, "turns/s", [], not_measured=missing)], options)
        return
    if options.quick:
        options.seeds, options.updates, options.groups = 1, 3, 2
    folder, size = options.out / "trl_iteration.work", 12
    way, tried = _fastest(folder, size, options)
    runs: list[dict[str, Any]] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        runs.append(_run(folder, seed, size, way, options))
        ours, theirs = runs[-1]["ours"], runs[-1]["trl"]
        print(f"seed {seed}: {_rate(ours):.0f} against {_rate(theirs):.0f} turns/s", flush=True)
    rates = {side: [_rate(run[side]) for run in runs] for side in ("ours", "trl")}
    curves = {side: [run[side]["rewards"] for run in runs] for side in ("ours", "trl")}
    learning = _learning(curves["ours"], curves["trl"])
    write(
        "trl_iteration",
        [table_row(what, target, "turns/s", rates["ours"], rates["trl"], limit=_limit(runs), learning=learning)],
        options,
        model=asdict(MODEL),
        clone=runs[0]["clone"],
        updates=options.updates,
        first_seed=options.first_seed,
        groups=options.groups,
        group_size=size,
        turns_per_episode=TURNS,
        lr=options.lr,
        trl_way=way,
        trl_turns_per_second_by_way=tried,
        curves=curves,
        seconds={side: [run[side]["seconds"] for run in runs] for side in ("ours", "trl")},
    )
    print(f"learning: {learning}")


def _spec(folder: Path, seed: int, size: int, options: Any) -> dict[str, Any]:
    return {
        "model": str((folder / f"clone-{seed}").resolve()),
        "scratch": str((folder / "scratch").resolve()),
        "seed": seed,
        "groups": options.groups,
        "group_size": size,
        "updates": options.updates,
        "lr": options.lr,
    }


def _clone(folder: Path, seed: int, options: Any) -> dict[str, Any]:
    spec = {"model": str((folder / f"clone-{seed}").resolve()), "seed": seed, "steps": 20 if options.quick else 200}
    return run_worker(sys.executable, "trl_iteration", spec, folder, options.threads)


def _fastest(folder: Path, size: int, options: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """How TRL is fastest here, and the turns per second of all that was tried, on a few updates each."""
    tried = [{"per_device": n, "reuse_cache": True} for n in (size, 2 * size, options.groups * size)]
    if options.quick:
        return tried[0] | {"reuse_cache": options.with_cache}, {}
    _clone(folder, options.first_seed, options)
    rates: list[float] = []

    def measure(way: dict[str, Any]) -> None:
        spec = {**_spec(folder, options.first_seed, size, options), **way, "updates": 4}
        rates.append(_rate(run_worker(options.trl_python, "trl_side", spec, folder, options.threads)))

    for way in tried:
        measure(way)
    best = tried[rates.index(max(rates))]
    if not options.with_cache:
        best = best | {"reuse_cache": False}
        tried.append(best)
        measure(best)
    return best, {str(way): rate for way, rate in zip(tried, rates, strict=True)}


def _run(folder: Path, seed: int, size: int, way: dict[str, Any], options: Any) -> dict[str, Any]:
    """One seed: the clone, then both sides, which take their updates in turns."""
    clone = _clone(folder, seed, options)
    spec = {**_spec(folder, seed, size, options), **way}
    sides = [(sys.executable, "trl_iteration"), (options.trl_python, "trl_side")]
    ours, trl = run_in_turns(sides, spec, folder, options.threads)
    return {"clone": clone, "ours": ours, "trl": trl}


def _rate(run: dict[str, Any]) -> float:
    """Turns per second of all updates but the first."""
    return sum(run["turns"][1:]) / sum(run["seconds"][1:])


def _learning(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Area under the curve and final reward of both, and whether ours are surely not worse by more than ``MARGIN``."""
    found: dict[str, Any] = {}
    for name, part in (("mean reward of all updates", slice(None)), ("final reward", slice(-LAST, None))):
        a, b = ([statistics.fmean(curve[part]) for curve in curves] for curves in (ours, theirs))
        low, high = _interval([x - y for x, y in zip(a, b, strict=True)])
        found[name] = {
            "ours": statistics.fmean(a),
            "theirs": statistics.fmean(b),
            "difference, 95 %": [low, high],
            "not worse": None if low is None else low >= -MARGIN,
        }
    return found


def _interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Student's interval of the mean; ``None`` where one seed tells nothing."""
    if len(values) - 1 not in _T95:
        return None, None
    half = _T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def _limit(runs: Sequence[dict[str, Any]]) -> Limit:
    """What our iterations would run at if this machine did nothing but their matrix products, at full rate."""
    rate = matmul_rate()
    operations = sum(run["ours"]["operations"] for run in runs)
    turns = sum(sum(run["ours"]["turns"][1:]) for run in runs)
    return Limit(
        turns / (operations / rate),
        f"{operations / turns / 1e9:.2f} GFLOP a turn (1 forward pass to play and 3 to learn over distinct tokens, "
        f"logits of sampled tokens only) at {rate / 1e9:.0f} GFLOP/s, the rate of a large matrix product",
    )


def work(spec: dict[str, Any]) -> dict[str, Any]:
    return make_clone(Path(spec["model"]), spec["seed"], spec["steps"]) if "steps" in spec else train_ours(spec)


if __name__ == "__main__":
    main_or_worker(main, work)
