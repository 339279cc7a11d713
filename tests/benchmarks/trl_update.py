"""Policy update: tokens per second of ``PolicyModule`` against TRL's ``GRPOTrainer`` on the same rows and weights.

A batch of groups of multi-turn episodes (see ``Shape``), with log-probs of the policy itself, as on-policy
rollouts have them. One update is one pass and one optimiser step, AdamW with the same numbers, gradient clipping
included; the learning rate is so small that every repetition is the same on-policy update. A token counts once per row
that contains it, whatever a side computes for it. Both sides run in turns, several times.

Before that, both make two steps on the batch with a real learning rate and hand in their gradients, so that the result
can say how equal the work is: at the second step, ratios differ from 1 and some are clipped.
"""

from __future__ import annotations

import json
import logging
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from transformers import AutoModelForCausalLM

from imagination.learning.advantages.group import group_relative
from imagination.learning.algorithms import ALGORITHMS
from imagination.learning.losses.terms import token_logprobs
from imagination.learning.policy_module import PolicyModule, Update
from imagination.learning.trainer import step_loader
from imagination.settings import TrainSettings
from policy.lm.backbone import build_model, save_checkpoint
from policy.lm.batch import Row, RowBatch
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Source
from tests.benchmarks.machine import matmul_rate, synchronize
from tests.benchmarks.measure import arguments, forward_operations, main_or_worker, run_worker
from tests.benchmarks.table import Limit, table_row, write

MODEL = ModelSettings(hidden=192, layers=6, heads=3, kv_heads=3, mlp=512, context=1024)
OURS, THEIRS = "trl_update", "trl_side"  # modules that a side's process runs
SAME_WORK = 1e-3  # largest relative difference of gradients; rounding is far below


FIRST_ID = 5  # below are the special tokens


@dataclass(frozen=True)
class Shape:
    """What a batch looks like.

    Attributes:
        groups, size: how many groups of how many rows.
        turns: shortest and longest episode.
        action, observation: fewest and most tokens; an action's last one ends it.
        start: tokens of the first observation.
        spread: 0 repeats one episode; near 1, no two rows agree in more than their start.
    """

    groups: int = 4
    size: int = 12
    turns: tuple[int, int] = (8, 12)
    action: tuple[int, int] = (6, 10)
    observation: tuple[int, int] = (36, 60)
    start: int = 48
    spread: float = 0.3
    vocabulary: int = 2048


def make_rows(shape: Shape, seed: int = 0) -> list[dict[str, object]]:
    """Rows with ``ids``, ``made`` (1 on action tokens), ``prompt`` (length of the start), ``group`` and ``reward``."""
    rows: list[dict[str, object]] = []
    for group in range(shape.groups):
        for k in range(shape.size):
            chance = random.Random(f"{seed}/{group}/{k}")
            ids = list(_tokens(f"{seed}/{group}", (shape.start, shape.start), shape.vocabulary))
            made = [0] * len(ids)
            state = f"{seed}/{group}"
            turns = chance.randint(*shape.turns)
            for turn in range(turns):
                favourite = 0
                while chance.random() < shape.spread:
                    favourite += 1
                state = f"{state}/{favourite}"  # the whole history, so the world never comes back to a state
                action = list(_tokens(f"{state}/action", shape.action, shape.vocabulary))
                ids += action
                made += [1] * len(action)
                if turn < turns - 1:  # what follows the last action trains nothing, so neither side gets it
                    observation = list(_tokens(f"{state}/observation", shape.observation, shape.vocabulary))
                    ids += observation
                    made += [0] * len(observation)
            rows.append(
                {"ids": ids, "made": made, "prompt": shape.start, "group": group, "reward": round(chance.random(), 6)}
            )
    return rows


def _tokens(name: str, length: tuple[int, int], vocabulary: int) -> Iterator[int]:
    chance = random.Random(name)
    return (chance.randrange(FIRST_ID, vocabulary) for _ in range(chance.randint(*length)))


class Clock(Callback):
    """Seconds of each update, and the gradient of each optimiser step as the optimiser gets it."""

    def __init__(self, keep_gradients: bool) -> None:
        self.seconds: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self._keep, self._start = keep_gradients, 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        synchronize()
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        synchronize()
        self.seconds.append(time.perf_counter() - self._start)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self._keep:
            found = module.model.named_parameters()
            self.gradients.append({name: p.grad.float().clone() for name, p in found if p.grad is not None})


@torch.inference_mode()
def add_own_logprobs(model: Any, data: list[dict[str, Any]]) -> None:
    """Gives each row ``old``: the model's own log-probs of its tokens, as on-policy rollouts bring them."""
    for row in data:
        ids = torch.tensor([row["ids"]], device=model.device)
        row["old"] = [0.0, *token_logprobs(model(input_ids=ids).logits[:, :-1], ids[:, 1:])[0].tolist()]


def rows_to_learn_from(data: list[dict[str, Any]]) -> list[Row]:
    """The rows as our experience has them, advantages included."""
    advantages, _ = group_relative(
        torch.tensor([row["reward"] for row in data]),
        torch.tensor([row["group"] for row in data]),
        torch.ones(len(data), dtype=torch.bool),
    )
    return [
        Row(
            ids=row["ids"],
            action_mask=[bool(mine) for mine in row["made"]],
            source=Source.DREAM,
            behavior_logprobs=[x if mine else float("nan") for x, mine in zip(row["old"], row["made"], strict=True)],
            advantages=[advantage * mine for mine in row["made"]],
            rl_weight=[float(mine) for mine in row["made"]],
        )
        for row, advantage in zip(data, advantages.tolist(), strict=True)
    ]


class GivenAdvantages(PolicyModule):
    """Rows keep the advantages that they came with."""

    def _assign_credit(self, batch: RowBatch) -> dict[str, float]:
        return {}


def learn(
    model: Any, rows: list[Row], settings: TrainSettings, updates: int, keep_gradients: bool = False
) -> tuple[Clock, list[dict[str, float]]]:
    """Learns ``updates`` times from the same rows, on the model's device; returns times and metrics of the updates."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = Clock(keep_gradients)
    records: list[dict[str, float]] = []
    module = GivenAdvantages(model, ALGORITHMS["grpo"], settings, lambda _, metrics: records.append(dict(metrics)))
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="gpu" if model.device.type == "cuda" else "cpu",
        devices=1,
        logger=False,
        callbacks=[clock],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    # the rows' log-probs are the model's own
    stream = step_loader(updates, lambda: module.updates_done, lambda i: Update(i, rows, exact=True))
    trainer.fit(module, stream)
    return clock, records


def learn_from_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """Our side, in a process of its own."""
    model: Any = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    rows = rows_to_learn_from(json.loads(Path(spec["rows"]).read_text()))
    settings = TrainSettings(epochs=spec["epochs"], minibatches=1, lr=spec["lr"])
    clock, records = learn(model, rows, settings, spec["updates"], bool(spec.get("gradients")))
    if spec.get("gradients"):
        torch.save(clock.gradients, spec["gradients"])
    losses = [record["policy_loss"] for record in records]
    advantages = [max(row.advantages.tolist(), key=abs) for row in rows]
    return {"seconds": clock.seconds, "losses": losses, "advantages": advantages}


def main() -> None:
    parser = arguments(__doc__, "trl")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--updates", type=int, default=2, help="timed in each run, after one that is not")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    what = "policy-update tokens/s against TRL's GRPOTrainer"
    if not options.trl_python.exists():
        missing = f"{options.trl_python} is not there; `make bench` makes it"
        write("trl_update", [table_row(what, ">= 2", "tokens/s", [], not_measured=missing)], options)
        return
    if options.quick:
        options.rounds, options.updates = 1, 1
    folder = options.out / "trl_update.work"
    folder.mkdir(parents=True, exist_ok=True)
    _make_model(folder / "model")
    shape = Shape(groups=1, size=6) if options.quick else Shape()
    data = _write_rows(folder, shape)
    agreement = _agreement(folder, shape, options)
    best, tried = _fastest(folder, shape, len(data), options)
    ours, theirs = _race(folder, shape, data, best, options)
    row = table_row(what, ">= 2", "tokens/s", ours, theirs, limit=_limit(folder, data), agreement=agreement)
    write(
        "trl_update",
        [row],
        options,
        model=asdict(MODEL),
        batch=asdict(shape),
        updates_per_round=options.updates,
        trl_micro_batch=best,
        trl_seconds_by_micro_batch=tried,
    )


def _make_model(folder: Path) -> None:
    """A Llama with 2048 tokens; those beyond bytes and special tokens are fillers, as no text is ever read."""
    fillers = [f"<filler {i}>" for i in range(2048 - 256 - FIRST_ID)]
    tokenizer = train_tokenizer(["no text"], vocab_size=2048, phrases=fillers)
    if len(tokenizer) != Shape().vocabulary:
        raise RuntimeError(f"the tokenizer has {len(tokenizer)} tokens, not {Shape().vocabulary}")
    save_checkpoint(build_model(MODEL, tokenizer, seed=0), tokenizer, folder)


def _write_rows(folder: Path, shape: Shape) -> list[dict[str, Any]]:
    """The rows with the policy's own log-probs of their tokens."""
    rows: list[dict[str, Any]] = make_rows(shape)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    add_own_logprobs(model, rows)
    (folder / "rows.json").write_text(json.dumps(rows))
    return rows


def _spec(folder: Path, shape: Shape, options: Any, **changed: Any) -> dict[str, Any]:
    return {
        "model": str((folder / "model").resolve()),
        "rows": str((folder / "rows.json").resolve()),
        "scratch": str((folder / "scratch").resolve()),
        "group_size": shape.size,
        "epochs": 1,
        "updates": options.updates + 1,
        "lr": 1e-9,
        **changed,
    }


def _agreement(folder: Path, shape: Shape, options: Any) -> dict[str, Any]:
    """How far the two sides' losses, advantages and gradients are apart.

    Raises:
        RuntimeError: so far that they do not do the same work.
    """
    common = {"epochs": 2, "updates": 1, "lr": 1e-3}
    found, gradients = {}, {}
    for side, python in ((OURS, sys.executable), (THEIRS, options.trl_python)):
        path = folder / f"{side}.gradients.pt"
        spec = _spec(folder, shape, options, gradients=str(path.resolve()), per_device=[shape.size // 3], **common)
        found[side] = run_worker(python, side, spec, folder, options.threads)
        gradients[side] = [_flat(step) for step in torch.load(path)]
        path.unlink()
    apart = [float((a - b).norm() / b.norm()) for a, b in zip(gradients[OURS], gradients[THEIRS], strict=True)]
    theirs = found[THEIRS]["runs"][str(shape.size // 3)]["losses"]
    worst = max(abs(a - b) for a, b in zip(found[OURS]["advantages"], found[THEIRS]["advantages"], strict=True))
    if max(apart) > SAME_WORK or worst > 1e-3:
        raise RuntimeError(f"the sides do not do the same work: gradients differ by {apart}, advantages by {worst}")
    return {
        "relative difference of the gradient at steps 1 and 2": apart,
        "largest difference of an advantage": worst,
        "mean loss of both steps, ours": found[OURS]["losses"][0],
        "mean loss of both steps, TRL": sum(theirs) / len(theirs),
    }


def _flat(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient[name].flatten().double() for name in sorted(gradient)])


def _fastest(folder: Path, shape: Shape, rows: int, options: Any) -> tuple[int, dict[int, float]]:
    """The size of micro-batches that TRL is fastest with here, and the seconds of all that were tried."""
    sizes = [s for s in (2, 4, 8, 12, 24) if rows % s == 0]
    if options.quick:
        return sizes[0], {}
    spec = _spec(folder, shape, options, per_device=sizes, updates=2)
    runs = run_worker(options.trl_python, THEIRS, spec, folder, options.threads)["runs"]
    seconds = {int(size): run["seconds"][-1] for size, run in runs.items()}
    return min(seconds, key=lambda size: seconds[size]), seconds


def _race(
    folder: Path, shape: Shape, data: list[dict[str, Any]], best: int, options: Any
) -> tuple[list[float], list[float]]:
    """Tokens per second of both sides, in turns."""
    tokens = sum(len(row["ids"]) for row in data)
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(options.rounds):
        spec = _spec(folder, shape, options, per_device=[best])
        ours = run_worker(sys.executable, OURS, spec, folder, options.threads)
        theirs = run_worker(options.trl_python, THEIRS, spec, folder, options.threads)
        rates[0].append(tokens / statistics.median(ours["seconds"][1:]))
        rates[1].append(tokens / statistics.median(theirs["runs"][str(best)]["seconds"][1:]))
    return rates


def _limit(folder: Path, data: list[dict[str, Any]]) -> Limit:
    """What the update would run at if this machine did nothing but its matrix products, at full rate."""
    config = AutoModelForCausalLM.from_pretrained(folder / "model").config
    rate = matmul_rate()
    made = sum(sum(row["made"]) for row in data)
    operations = 3 * forward_operations(config, [row["ids"] for row in data], made)
    return Limit(
        sum(len(row["ids"]) for row in data) / (operations / rate),
        f"{operations / 1e9:.0f} GFLOP an update (3 forward passes over distinct tokens, logits of trained tokens "
        f"only) at {rate / 1e9:.0f} GFLOP/s, the rate of a large matrix product",
    )


if __name__ == "__main__":
    main_or_worker(main, learn_from_spec)
