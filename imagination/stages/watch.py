"""Tripwires at work: the last trusted policy is kept, training stops where a wire trips, and the run says why."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from imagination.evaluation import summarise
from imagination.reporting.text import stopped_sentence
from imagination.rollout import Episode, Provenance, play_all
from imagination.run_folder import RunFolder
from imagination.settings import Config
from imagination.stages.common import need
from imagination.tripwires.measures import LogReference, measure
from imagination.tripwires.wires import Measured, Tripped, check, first_trip
from policy.agent import LanguageModelAgent
from real_envs.env import Task
from real_envs.isolation import real_steps_taken
from real_envs.textworld import TextWorldTasks
from real_envs.trajectory import Source, Trajectory


class Probe:
    """A declared budget of real episodes: a few, every few updates; its steps are counted as ``real_steps.probe``."""

    def __init__(self, run: RunFolder, config: Config, earlier: int) -> None:
        self._run, self._config, self._earlier = run, config, earlier
        self.steps = 0  # real steps of this process

    def due(self, update: int) -> bool:
        settings = self._config.tripwires
        return settings.real_episodes > 0 and (update + 1) % settings.every == 0

    def play(self, update: int, agent: LanguageModelAgent) -> tuple[int, int]:
        """Solved and played episodes, dealt to the training games in turn. Episodes that broke count as neither."""
        config = self._config
        before = real_steps_taken()
        tasks = TextWorldTasks.load(
            need(self._run.games / "games.json", "collect").parent, workers=config.collect.workers
        )
        known: Sequence[Task] = tasks.tasks("train")
        episodes = [
            Episode(f"probe/{update}/{k}", known[k % len(known)], "probe", ((config.seed * 10_007 + update) * 1009) + k)
            for k in range(config.tripwires.real_episodes)
        ]

        async def play_and_close() -> list[Trajectory]:
            try:
                stamp = Provenance(Source.REAL)
                return await play_all(episodes, tasks.make_env, agent, stamp, config.dream.max_turns, concurrency=64)
            finally:
                await tasks.close()

        try:
            success = summarise(asyncio.run(play_and_close())).success
        finally:
            self.steps += real_steps_taken() - before
            self._run.update({"real_steps": {"probe": self._earlier + self.steps}})
        return success.successes, success.n


class Watch(Callback):
    """Looks at each update's rollouts before anything is learned from them.

    A policy is trusted once its own rollouts left all wires quiet. Its trained weights are kept here, and with the
    training state of a stopped run, until a later policy is trusted.

    Args:
        model: the policy that is trained, now as it starts.
        log: the training episodes of the log.
    """

    def __init__(self, run: RunFolder, config: Config, model: Any, log: Sequence[Trajectory], probe: Probe) -> None:
        self._run, self._settings, self._model, self.probe = run, config.tripwires, model, probe
        self._reference = LogReference(log)
        self.history: list[Measured] = []
        self.tripped: Tripped | None = None
        self._example = ""
        self._trusted_update: int | None = None  # None: the policy before the first update
        self._trusted = self._weights()

    def _weights(self) -> dict[str, torch.Tensor]:
        found = self._model.named_parameters()
        return {name: p.detach().to("cpu", copy=True) for name, p in found if p.requires_grad}

    def look(self, update: int, played: Sequence[Trajectory], agent: LanguageModelAgent) -> dict[str, float]:
        """Measures the rollouts, for ``metrics.jsonl``; afterwards ``tripped`` says whether to go on."""
        real = self.probe.play(update, agent) if self.probe.due(update) else (0, 0)
        measured, examples = measure(update, played, self._reference, short=self._settings.short, real=real)
        self.history.append(measured)
        self.tripped = check(self.history, self._settings)
        if self.tripped is None:
            self._trusted, self._trusted_update = self._weights(), update
        else:
            self._example = examples.get(self.tripped.wire, "")
        return measured.to_metrics()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.tripped is not None:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {
            "trusted": self._trusted,
            "update": self._trusted_update,
            "history": [measured.to_json() for measured in self.history],
            "example": self._example,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trusted, self._trusted_update = state_dict["trusted"], state_dict["update"]
        self.history = [Measured.from_json(measured) for measured in state_dict["history"]]
        self._example = state_dict["example"]
        self.tripped = first_trip(self.history, self._settings)

    def resume(self, state: str) -> None:
        """Goes on from a saved training state; the run may have been killed just after a wire had tripped."""
        self.load_state_dict(torch.load(state, map_location="cpu", weights_only=True)["callbacks"][self.state_key])

    @torch.no_grad()
    def roll_back(self) -> None:
        """The policy as it was last trusted; nothing if no wire tripped."""
        if self.tripped is None:
            return
        for name, parameter in self._model.named_parameters():
            if name in self._trusted:
                parameter.copy_(self._trusted[name])
        print(stopped_sentence(self._stopped(self.tripped)), file=sys.stderr, flush=True)

    def _stopped(self, tripped: Tripped) -> dict[str, Any]:
        return {
            "wire": tripped.wire,
            "update": tripped.update,
            "sentence": tripped.sentence,
            "example": self._example,
            "policy_of_update": self._trusted_update,
        }

    def summary(self) -> dict[str, Any]:
        """For ``summary.json``."""
        return {
            "enabled": True,
            "updates": len(self.history),
            "blind": self._reference.blind,
            "stopped_by": None if self.tripped is None else self._stopped(self.tripped),
        }
