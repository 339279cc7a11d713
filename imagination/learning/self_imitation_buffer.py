"""Self-imitation at work: the policy's own good episodes are kept, saved with the training state, and replayed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch.callbacks import Callback

from imagination.learning.advantages import SelfImitationBuffer
from imagination.settings import SelfImitationSettings
from policy.lm.batch import Row
from real_envs.streams import stream_seed
from real_envs.trajectory import Source

# What a row is in a checkpoint: plain lists of the tokens, who made them, with which log-probs, and what each counts.
_SAVED = ("ids", "action_mask", "behavior_logprobs", "replay_weight")


def replay_row(row: Row) -> Row:
    """A played row as it is learned from again: nothing of it enters the algorithm's own loss, mean or count.

    It keeps the log-probs that were recorded when it was sampled, and a weight for each token that it had then.
    """
    return Row(
        ids=list(row.ids),
        action_mask=list(row.action_mask),
        source=Source.REPLAY,
        behavior_logprobs=list(row.behavior_logprobs),
        replay_weight=list(row.rl_weight),
    )


class Replays(Callback):
    """The buffer of SPEAR between the updates; see ``SelfImitationBuffer`` for what is kept.

    Args:
        seed: of the run; which episodes are drawn depends on it, on the update and on the buffer alone.
    """

    def __init__(self, settings: SelfImitationSettings, seed: int) -> None:
        self._seed = seed
        self._buffer: SelfImitationBuffer[Row] = SelfImitationBuffer(settings.capacity, settings.max_age)

    def draw(self, update: int, count: int) -> list[Row]:
        """At most ``count`` rows of earlier updates, each with its advantage over the median on all of its tokens.

        Call it before ``add``: what this update played is learned from once already.
        """
        rng = random.Random(stream_seed("replay", self._seed, update))
        return [
            replace(row, advantages=[advantage if w else 0.0 for w in row.replay_weight])
            for row, advantage in self._buffer.draw(count, update, rng)
        ]

    def add(self, update: int, rows: Sequence[Row]) -> dict[str, float]:
        """Takes in the played rows of an update, none of an outage; returns what is to be logged."""
        self._buffer.add([replay_row(row) for row in rows], [sum(row.rewards) for row in rows], update)
        baseline = self._buffer.baseline
        return {"replays_kept": len(self._buffer)} | ({} if baseline is None else {"replay_baseline": baseline})

    def state_dict(self) -> dict[str, Any]:
        kept, returns = self._buffer.state()
        rows = [({name: getattr(row, name) for name in _SAVED}, total, step) for row, total, step in kept]
        return {"kept": rows, "returns": returns}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept = [(Row(source=Source.REPLAY, **saved), total, step) for saved, total, step in state_dict["kept"]]
        self._buffer.restore(kept, state_dict["returns"])
