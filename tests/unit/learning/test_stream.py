"""If these fail, a resumed run would train on other data than the uninterrupted one, or on some of it twice."""

from __future__ import annotations

from collections import Counter

import pytest

from imagination.learning.stream import StepStream, SupervisedBatches
from imagination.rollout.schedules import added_episodes, realised_shares
from policy.lm.batch import Row
from real_envs.trajectory import Source


def rows(n: int) -> list[Row]:
    """Row k holds the id k + 1 in each of its 2 to 9 places, so that it can be told apart in a batch."""
    return [Row([k + 1] * (2 + k % 8), [True] * (2 + k % 8), Source.REAL) for k in range(n)]


def batch_ids(batches: SupervisedBatches, step: int) -> list[int]:
    return [int(row[0]) for row in batches(step).input_ids]


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    straight = SupervisedBatches(rows(40), batch_tokens=30, seed=3, pad=0)
    expected = [straight(step).input_ids for step in range(30)]
    resumed = SupervisedBatches(rows(40), batch_tokens=30, seed=3, pad=0)
    for step in (29, 7, 0, 18):
        assert resumed(step).input_ids.tolist() == expected[step].tolist()
    other = SupervisedBatches(rows(40), batch_tokens=30, seed=4, pad=0)
    assert [other(s).input_ids.tolist() for s in range(5)] != [e.tolist() for e in expected[:5]]


def test_an_epoch_holds_every_row_once_and_the_next_one_in_another_order() -> None:
    batches = SupervisedBatches(rows(40), batch_tokens=30, seed=0, pad=0)
    seen: Counter[int] = Counter()
    step = 0
    while sum(seen.values()) < 40:
        batch = batches(step)
        assert batch.input_ids.numel() <= 30, "more padded tokens than the budget"
        seen.update(batch_ids(batches, step))
        step += 1
    assert seen == Counter(range(1, 41))
    first = [batch_ids(batches, s) for s in range(step)]
    second = [batch_ids(batches, s) for s in range(step, 2 * step)]
    assert first != second


def test_nothing_to_train_on_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to train on"):
        SupervisedBatches([], 10, 0, 0)


def test_a_stream_fetches_no_item_ahead_and_starts_where_it_is_told() -> None:
    made: list[int] = []
    done = 2

    def item(step: int) -> object:
        made.append(step)
        return step

    loader = StepStream(5, lambda: done, item).train_dataloader()  # type: ignore[arg-type]
    assert len(loader) == 5
    iterator = iter(loader)
    assert next(iterator) == 2
    assert made == [2], "an item made ahead would be played with stale weights"
    assert list(iterator) == [3, 4]


def test_added_episodes_make_up_their_share() -> None:
    assert added_episodes(72, 0.1) == 8
    assert added_episodes(60, 0.4) == 40
    assert added_episodes(10, 0.0) == 0
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match="shares of added episodes"):
            added_episodes(10, share)


def test_realised_shares_count_trained_tokens() -> None:
    mixed = [
        Row([1] * 5, [True, False, True, True, False], Source.DREAM),
        Row([1] * 2, [False, True], Source.EXPERT),
    ]
    assert realised_shares(mixed) == {"tokens_dream": 0.75, "tokens_expert": 0.25}
