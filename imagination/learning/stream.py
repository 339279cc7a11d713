"""Data for Lightning. Every batch is a pure function of seed, step and (for rollouts) the policy's weights.

So a resumed run continues with the batches that the uninterrupted one would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import lightning as L
from torch.utils.data import DataLoader, IterableDataset

from policy.lm.batch import Row, TokenBatch, by_length, collate
from real_envs.streams import stream_seed


class _Steps(IterableDataset):
    """Items ``first() .. steps - 1``. It has a length, or Lightning would fetch (and play) one item ahead."""

    def __init__(
        self, steps: int, first: Callable[[], int], item: Callable[[int], object], over: Callable[[], bool]
    ) -> None:
        self._steps, self._first, self._item, self._over = steps, first, item, over

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[object]:
        for step in range(self._first(), self._steps):
            if self._over():
                return
            yield self._item(step)


class StepStream(L.LightningDataModule):
    """Serves ``item(step)`` for the steps that are left.

    Args:
        steps: of the whole run.
        first: asks where to start; after a resume the trainer knows.
        item: makes the batch of a step.
        over: whether there is no time for another one.
    """

    def __init__(
        self,
        steps: int,
        first: Callable[[], int],
        item: Callable[[int], object],
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._dataset = _Steps(steps, first, item, over)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self._dataset, batch_size=None, num_workers=0)


class SupervisedBatches:
    """Batches of rows of similar length with about ``batch_tokens`` tokens, in an order drawn anew each epoch."""

    def __init__(self, rows: Sequence[Row], batch_tokens: int, seed: int, pad: int) -> None:
        if not rows:
            raise ValueError("there is nothing to train on: no episode of the log was selected")
        self._rows, self._batch_tokens, self._seed, self._pad = rows, batch_tokens, seed, pad
        self._epochs: list[list[list[Row]]] = []
        self._first_step = [0]

    def __call__(self, step: int) -> TokenBatch:
        while self._first_step[-1] <= step:
            epoch = self._make_epoch(len(self._epochs))
            self._epochs.append(epoch)
            self._first_step.append(self._first_step[-1] + len(epoch))
        epoch_index = next(i for i in range(len(self._epochs)) if step < self._first_step[i + 1])
        return collate(self._epochs[epoch_index][step - self._first_step[epoch_index]], self._pad)

    def _make_epoch(self, epoch: int) -> list[list[Row]]:
        return epoch_of(self._rows, self._batch_tokens, random.Random(stream_seed("batches", self._seed, epoch)))


def epoch_of(rows: Sequence[Row], batch_tokens: int, rng: random.Random) -> list[list[Row]]:
    """All rows once, in batches of similar length with about ``batch_tokens`` tokens, in random order."""
    shuffled = list(rows)
    rng.shuffle(shuffled)
    batches: list[list[Row]] = []
    for start in range(0, len(shuffled), 512):  # sorted by length within a window only, so that epochs differ
        window = shuffled[start : start + 512]
        batches.extend([window[i] for i in b] for b in by_length([len(r.ids) for r in window], batch_tokens))
    rng.shuffle(batches)
    return batches
