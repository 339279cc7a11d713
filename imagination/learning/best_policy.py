"""The best policy of a training by dreams that it does not learn from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from imagination.rollout.dream_env import Start
from imagination.rollout.play import Episode
from real_envs.env import Task
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory


def split_starts(starts: Mapping[str, Start], tasks: int, seed: int) -> tuple[dict[str, Start], list[str]]:
    """Start states to learn from, and one of each of ``tasks`` other tasks to validate by.

    Half of the tasks are learned from at least.

    Returns:
        The states to learn from by name, and the names of the others: each the beginning of its task.
    """
    names: dict[str, list[str]] = {}
    for name, start in starts.items():
        names.setdefault(start.task_id, []).append(name)
    ranked = sorted(names, key=lambda task: hashlib.sha256(f"{seed}/{task}".encode()).digest())
    kept = set(ranked[: min(tasks, len(ranked) // 2)])
    first = [min(names[task], key=lambda name: (len(starts[name].history), name)) for task in sorted(kept)]
    return {name: start for name, start in starts.items() if start.task_id not in kept}, first


class BestPolicy(Callback):
    """Keeps the policy that did best in validation dreams, which begin in tasks that no update dreams of.

    Args:
        model: the policy that is trained.
        starts: names of start states, see ``split_starts``.
        every: updates between two validations.
        seed: of the dreams, which are the same each time.

    Attributes:
        best: update and success of the best policy; ``None`` before the first validation.
    """

    def __init__(self, model: Any, starts: Sequence[str], tasks: Sequence[str], every: int, seed: int) -> None:
        self._model, self._every = model, every
        self.episodes = [
            Episode(
                f"validation/{k}", Task(task, {"start": name}), f"validation/{k}", derive_seed("validation", seed, k)
            )
            for k, (name, task) in enumerate(zip(starts, tasks, strict=True))
        ]
        self.best: tuple[int, float] | None = None
        self._weights: dict[str, torch.Tensor] = {}

    def due(self, update: int, last: bool = False) -> bool:
        return last or update % self._every == 0

    def consider(self, update: int, played: Sequence[Trajectory]) -> dict[str, float]:
        """Keeps the policy as it is now if it did at least as well as the best one; what is to be logged."""
        valid = [t for t in played if not t.stop.is_outage]
        if not valid:
            return {}
        success = sum(t.solved for t in valid) / len(valid)
        if self.best is None or success >= self.best[1]:
            self.best = update, success
            self._weights = {
                name: p.detach().to("cpu", copy=True) for name, p in self._model.named_parameters() if p.requires_grad
            }
        return {"validation_success": success, "validation_dreams": float(len(valid))}

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the best policy in place of the last one."""
        for name, p in self._model.named_parameters():
            if name in self._weights:
                p.copy_(self._weights[name])

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "weights": self._weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = state_dict["best"]
        self.best = None if best is None else (int(best[0]), float(best[1]))
        self._weights = dict(state_dict["weights"])
