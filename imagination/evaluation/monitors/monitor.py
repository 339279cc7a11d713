"""The monitor at work: recent policies are kept, training stops where a rule is broken, and the run says why."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from imagination.evaluation.costs import real_costs, spent_before
from imagination.evaluation.monitors.rollout_stats import LogReference, measure
from imagination.evaluation.monitors.rules import Alert, RolloutStats, check, first_trip, stopped_sentence
from imagination.rollout.play import Episode, Provenance, play_all
from imagination.session import Session
from imagination.settings import TripwireSettings, UserError
from policy.agent import LanguageModelAgent
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source, Trajectory
from real_envs.worker_pool import PoolStats, real_interaction
from worldmodel.evaluation.proportions import summarise
from worldmodel.rules.rule_set import RuleSet


class Probe:
    """A declared budget of real episodes: a few, every few updates; its steps are counted as ``real_steps.probe``."""

    def __init__(self, session: Session, seed: int) -> None:
        self._session, self._settings, self._seed = session, session.config.tripwires, seed
        self._earlier = spent_before(session.run, "probe")
        self.spent = PoolStats()  # by this process

    def due(self, update: int) -> bool:
        settings = self._settings
        return settings.real_episodes > 0 and (update + 1) % settings.every == 0

    def play(self, update: int, agent: LanguageModelAgent) -> tuple[int, int]:
        """Solved and played episodes, dealt to the games that are trained in. Episodes that broke count as neither."""
        before = real_interaction()
        tasks, config = self._session.tasks(), self._session.config
        known = tasks.tasks(config.train.tasks)
        episodes = [
            Episode(f"probe/{update}/{k}", known[k % len(known)], "probe", derive_seed("probe", self._seed, update, k))
            for k in range(self._settings.real_episodes)
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
            self.spent += real_interaction() - before
            self._session.run.update(real_costs("probe", self._earlier + self.spent, config.env.price))
        return success.successes, success.n


class TripwireMonitor(Callback):
    """Looks at each update's rollouts before anything is learned from them.

    The evidence for a rule may add up over several updates, and a policy that has learned from the first of them is not
    to be trusted. So the trained weights with which each of the last ``max(memory, window)`` updates was played are
    kept here, and with the training state of a stopped run: evidence reaches no farther back.
    """

    def __init__(
        self,
        settings: TripwireSettings,
        updates: int,
        model: Any,
        log: LogReference,
        probe: Probe,
        rules: RuleSet | None = None,
    ) -> None:
        self._settings, self._updates, self._model = settings, updates, model
        self._reference, self.probe, self._rules = log, probe, rules
        self.history: list[RolloutStats] = []
        self.tripped: Alert | None = None
        self._example = ""
        self._kept: dict[int, dict[str, torch.Tensor]] = {}  # by update: of the policy that played it

    def look(
        self, update: int, played: Sequence[Trajectory], agent: LanguageModelAgent | None = None
    ) -> dict[str, float]:
        """Measures the rollouts, for ``metrics.jsonl``; afterwards ``tripped`` says whether to go on.

        Args:
            update: which; the number of updates for the rollouts of the policy that training ended with.
            agent: plays a probe where one is due; ``None`` plays none.
        """
        trained = ((name, p) for name, p in self._model.named_parameters() if p.requires_grad)
        self._kept[update] = {name: p.detach().to("cpu", copy=True) for name, p in trained}
        self._kept.pop(update - max(self._settings.memory, self._settings.window), None)
        real = self.probe.play(update, agent) if agent is not None and self.probe.due(update) else (0, 0)
        stats, examples = measure(
            update, played, self._reference, short=self._settings.short, real=real, rules=self._rules
        )
        self.history.append(stats)
        self.tripped = check(self.history, self._settings)
        if self.tripped is not None:
            self._example = examples.get(self.tripped.wire, "")
        return stats.to_metrics()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.tripped is not None:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._kept, "history": [asdict(stats) for stats in self.history], "example": self._example}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept = dict(state_dict["kept"])
        self.history = [RolloutStats(**stats) for stats in state_dict["history"]]
        self._example = state_dict["example"]
        self.tripped = first_trip(self.history, self._settings)

    def resume(self, state: str) -> None:
        """Goes on from a saved training state; the run may have been killed just after a rule was broken. Raises
        ``UserError``: it is of a version that kept the policy of one update only.
        """
        saved = torch.load(state, map_location="cpu", weights_only=True)["callbacks"][self.state_key]
        if "kept" not in saved:
            raise UserError(
                f"{state} was saved by an earlier version, whose tripwires kept too few policies to go back to: "
                "delete it, and training starts again from the clone"
            )
        self.load_state_dict(saved)

    @torch.no_grad()
    def roll_back(self) -> None:
        """The policy before it learned from any of the evidence; nothing if no rule was broken."""
        if self.tripped is None:
            return
        trusted = self._kept[self.tripped.since]
        for name, parameter in self._model.named_parameters():
            if name in trusted:
                parameter.copy_(trusted[name])
        print(stopped_sentence(self._stopped(self.tripped)), file=sys.stderr, flush=True)

    def _stopped(self, tripped: Alert) -> dict[str, Any]:
        return {
            "wire": tripped.wire,
            "update": tripped.update,
            "since": tripped.since,
            "after_training": tripped.update >= self._updates,
            "sentence": tripped.sentence,
            "example": self._example,
            "policy_of_update": tripped.since,
        }

    def summary(self) -> dict[str, Any]:
        """For ``summary.json``."""
        return {
            "enabled": True,
            "updates": min(len(self.history), self._updates),
            "last_look": len(self.history) > self._updates,
            "blind": self._reference.blind,
            "stopped_by": None if self.tripped is None else self._stopped(self.tripped),
        }
