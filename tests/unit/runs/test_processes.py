"""If these fail, processes that train together do not compute what one process computes."""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from imagination.learning.algorithms import build_algorithm
from imagination.learning.optimizers import clip_gradients, drop_if_not_finite
from imagination.learning.policy_module import Update
from imagination.learning.sharding import own_part, shard
from imagination.learning.supervised import SupervisedModule
from imagination.learning.trainer import make_trainer, step_loader
from imagination.runs.processes import check, from_first, joined, rank
from imagination.runs.progress_bar import Bar
from imagination.runs.run_folder import RunFolder
from imagination.settings import AlgorithmSettings, FitSettings, Strategy
from policy.lm.batch import collate
from tests.support.plain import DEFAULTS, EXPERTS, Noted, Notes, assert_same, make_model, rl_row
from tests.support.processes import two_train
from tests.support.refusal import refused


class NotedSupervised(SupervisedModule):
    def configure_optimizers(self) -> Any:
        self.notes = Notes(self)
        constant = torch.optim.lr_scheduler.LambdaLR(self.notes, lambda step: 1.0)
        return {"optimizer": self.notes, "lr_scheduler": constant}


def gradients(folder: Path, strategy: Strategy = "ddp") -> dict[str, Any]:
    """Of two supervised steps, the second of a single row, and of an update of five rollouts and two experts: one row
    a pass, so that two processes have unequal parts, and one has none of the single row."""
    run, model, lines = RunFolder(folder, 0, strategy=strategy), make_model(), list[dict[str, float]]()
    trained, compute = shard(run, model)

    def fit(module: Any, steps: int, item: Any) -> list[Any]:
        done = lambda: len(module.notes.seen) if hasattr(module, "notes") else 0  # noqa: E731
        trainer = make_trainer(run, "train", Bar("train", steps, "rows"), done, every=1)
        module.compute = compute
        trainer.fit(module, step_loader(steps, lambda: 0, item))
        return list(module.notes.seen)

    def record(step: int, metrics: Any) -> None:
        lines.append({key: value for key, value in metrics.items() if isinstance(value, int | float)})

    batches = [collate(EXPERTS, pad=0), collate(EXPERTS[:1], pad=0)]
    fits = fit(NotedSupervised(trained, FitSettings(precision="fp32", micro_tokens=1), record), 2, lambda k: batches[k])
    train = replace(DEFAULTS, micro_tokens=1, minibatches=2)
    module = Noted(trained, build_algorithm(AlgorithmSettings(tis_cap=0.0)), train, record)
    episodes = ((".AA..AAA", 1.0), ("..A.A....AAAA.A", 0.0), (".A", 0.0), (".......AAAAA......", 1.0), (".AAAA.", 0.0))
    rows = [*(rl_row(model, mask, 0.0, k, reward) for k, (mask, reward) in enumerate(episodes)), *EXPERTS]
    played = from_first(lambda k: Update(k, rows, {"played_by": float(rank())}, exact=True))
    return {"steps": [*fits, *fit(module, 1, played)], "metrics": lines}


def main(folder: Path) -> None:
    with joined(folder, 5.0) as place:
        for strategy in ("ddp", "fsdp2"):
            torch.save(gradients(place / strategy, strategy), folder / f"{strategy}-{rank()}.pt")
        model, _ = shard(RunFolder(place, 0, strategy="fsdp2"), make_model())
        weights, here = list(model.parameters()), [own_part(p) for p in model.parameters()]
        for p in weights:
            p.grad = torch.ones_like(p)
        gradient = weights[0].grad
        assert gradient is not None
        assert 0 < sum(p.numel() for p in here) < 0.6 * sum(p.numel() for p in weights)
        norms = [clip_gradients(weights, 2.0) for _ in range(2)]
        assert norms == pytest.approx([math.sqrt(sum(p.numel() for p in weights)), 2.0], rel=1e-5)
        assert not drop_if_not_finite(weights)
        if rank():  # a NaN in the part of one process
            own_part(gradient).fill_(math.nan)
        assert drop_if_not_finite(weights)
        assert all(p.grad is None for p in weights)


def test_two_processes_have_the_gradients_and_the_metrics_of_one(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = gradients(tmp_path / "one")
    two_train("tests.unit.runs.test_processes", tmp_path / "two")
    for name in ("ddp-0", "ddp-1", "fsdp2-0", "fsdp2-1"):
        together = torch.load(tmp_path / "two" / f"{name}.pt", weights_only=True)
        assert len(together["steps"]) == len(alone["steps"]) == 4
        for got, expected in zip(together["steps"], alone["steps"], strict=True):
            assert_same(got, expected)
        assert together["metrics"][-1]["played_by"] == 0.0
        for got, expected in zip(together["metrics"], alone["metrics"], strict=True):
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert (tmp_path / "two" / "ddp" / "checkpoints" / "train.ckpt").exists()


def test_a_command_whose_work_is_not_shared_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(lambda: check("evaluate", 0, 1), "torchrun", "2 processes", "fit-world-model, clone, train")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
