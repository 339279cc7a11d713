"""If these fail, processes that train together come to other models or numbers than one process does.

All of it is computed in fp64: in fp32 the order of a sum is noise that AdamW and Muon, which divide by the size of a
gradient, blow up in 20 steps beyond any bound that would still show an error.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from imagination.commands.clone import clone
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.train import train
from imagination.data import initial_model
from imagination.runs.processes import joined, rank
from imagination.settings import Config
from policy.lm.backbone import build_model, load_checkpoint
from tests.support.killing import Killed, kill_at, metrics_of, weights
from tests.support.processes import two_train
from tests.support.refusal import refused
from tests.support.tiny import tiny_settings, write_log

STAGES = (clone, train, fit_world_model)
MODELS = {"clone": "policy-clone", "train": "policy", "fit_world_model": "worldmodel"}


def settings(**changes: Any) -> Config:
    config = tiny_settings()
    config.fit.steps = 12
    config.clone.steps, config.clone.micro_tokens, config.clone.average = 14, 300, 0.9
    config.clone.optimizer, config.clone.keep_every = "muon", 10
    config.algorithm.name, config.train.max_kl, config.train.micro_tokens = "ppo", 0.01, 100
    config.train.updates, config.train.epochs, config.train.expert_share = 3, 4, 0.2
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def _norm(self: LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:  # that of transformers computes in fp32
    return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


@contextmanager
def in_fp64() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_checkpoint, "__defaults__", ("float64", ""))
        patch.setattr(LlamaRMSNorm, "forward", _norm)
        patch.setattr(initial_model, "build_model", lambda *rest: build_model(*rest).double())
        yield


def share(stage: Callable[[Config, Path], None], config: Config, folder: Path) -> None:
    """Runs a stage as the command does, among processes that are connected already."""
    with tempfile.TemporaryDirectory() as place:
        distributed.barrier()
        here = Path(shutil.copytree(folder, Path(place) / folder.name)) if rank() else folder
        distributed.barrier()
        with suppress(SystemExit, Killed):  # of what is not shared; of ``stopped``
            stage(config, here)


def stopped(stage: Callable[[Config, Path], None], config: Config, folder: Path, step: int) -> None:
    """Runs a stage until a step before which a training state was saved."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, stage.__name__, step)
        share(stage, config, folder)
    assert (folder / "checkpoints" / f"{stage.__name__}.ckpt").exists()


def main(home: Path) -> None:
    """What two processes do: all stages under both strategies; cloning that is stopped, and that goes on."""
    with in_fp64(), joined(home / "ddp", 5.0):
        for name, changes in (("ddp", {}), ("fsdp2", {"strategy": "fsdp2", "activation_checkpointing": True})):
            for stage in STAGES:
                if stage is train and name == "fsdp2":
                    stopped(stage, settings(**changes), home / name, 2)
                share(stage, settings(**changes), home / name)
        stopped(clone, settings(strategy="fsdp2"), home / "two-then-one", 10)
        share(clone, settings(strategy="fsdp2"), home / "one-then-two")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A single process, as torchrun starts it."""
    with socket.socket() as free, pytest.MonkeyPatch.context() as patch:
        free.bind(("", 0))
        port = free.getsockname()[1]
        for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)):
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "localhost")
        patch.setenv("MASTER_PORT", str(port))
        free.close()
        with joined(folder, 5.0):
            yield


def assert_same(one: Path, other: Path, stages: Sequence[str] = tuple(MODELS)) -> None:
    for stage in stages:
        models = [run / "models" / MODELS[stage] for run in (one, other)]
        assert len({tuple(sorted(path.name for path in model.iterdir())) for model in models}) == 1
        expected, got = map(weights, models)
        assert expected.keys() == got.keys()
        for name, weight in expected.items():
            assert (got[name] - weight).norm() <= 1e-5 * weight.norm(), (stage, name)
        lines = [metrics_of(run, stage) for run in (one, other)]
        assert len(lines[0]) == len(lines[1]) > 0
        for left, right in zip(*lines, strict=True):
            assert left.pop("stage") == right.pop("stage")
            assert right == pytest.approx(left, rel=1e-5, abs=1e-6, nan_ok=True)


def test_two_processes_come_to_what_one_comes_to(tmp_path: Path) -> None:
    write_log(tmp_path / "one")
    with in_fp64():
        fit_world_model(tiny_settings(), tmp_path / "one")  # its dreams end
        for name in ("ddp", "fsdp2", "two-then-one", "one-then-two"):
            shutil.copytree(tmp_path / "one", tmp_path / name)
        for stage in STAGES:
            stage(settings(), tmp_path / "one")
        with alone(tmp_path / "ddp"):
            stopped(clone, settings(strategy="fsdp2"), tmp_path / "one-then-two", 10)
        refused(lambda: clone(settings(), tmp_path / "one-then-two"), "clone.ckpt", "strategy=fsdp2")
    two_train("tests.e2e.test_sharding", tmp_path)
    with in_fp64(), alone(tmp_path / "ddp"):
        share(clone, settings(strategy="fsdp2"), tmp_path / "two-then-one")
    for name in ("ddp", "fsdp2"):
        assert_same(tmp_path / "one", tmp_path / name)
    kept = "models/kept/clone-00010/model.safetensors"
    torch.testing.assert_close(*(load_file(tmp_path / name / kept) for name in ("fsdp2", "one")), rtol=1e-5, atol=1e-6)
    for name in ("two-then-one", "one-then-two"):
        assert_same(tmp_path / "one", tmp_path / name, ["clone"])
        assert not list((tmp_path / name / "checkpoints").iterdir())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
