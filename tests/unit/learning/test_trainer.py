"""If these fail, a training skips or repeats steps, or does not keep the average of its weights."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from imagination.learning.supervised import SupervisedModule
from imagination.learning.trainer import TimeLimit, WeightAverage, make_logger, step_loader
from imagination.runs.run_folder import RunFolder
from imagination.settings import FitSettings
from policy.lm.batch import collate
from tests.support.plain import EXPERTS, fit, make_model


def test_the_average_by_hand() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(0.0)
    average = WeightAverage(model, 0.2)
    model.weight.data.fill_(1.0)
    average.on_train_batch_end()  # the past weighs 2/11
    model.weight.data.fill_(3.0)
    average.on_train_batch_end()  # 3/12 is more than 0.2
    average.on_train_end()
    assert model.weight.item() == pytest.approx(0.2 * (9 / 11) + 0.8 * 3)


def test_what_is_not_trained_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].requires_grad_(False)
    average = WeightAverage(model, 0.5)
    model[0].weight.data.fill_(7.0)
    average.on_train_batch_end()
    average.on_train_end()
    assert model[0].weight.item() == 7.0


def test_half_precision_is_averaged_in_full() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    model.weight.data.fill_(1.0)
    average = WeightAverage(model, 0.999)
    model.weight.data.fill_(1.0078125)  # the next number in bfloat16
    for _ in range(60):
        average.on_train_batch_end()
    state: dict[str, Any] = {}
    average.on_save_checkpoint(None, None, state)
    mean = state["average"]["mean"]
    assert 1.005 < mean["weight"].item() < 1.0078125
    with pytest.raises(ValueError, match="of the weights"):
        average.on_load_checkpoint(None, None, {"average": {"steps": 1, "mean": {"other": mean["weight"]}}})


def test_training_ends_with_the_average_of_its_steps() -> None:
    """Against a plain loop over the weights after each step; the last step's are what is kept without an average."""

    class Watched(SupervisedModule):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append({name: p.detach().clone() for name, p in self.model.named_parameters()})

    def trained(average: float) -> nn.Module:
        seen.clear()
        model = make_model()
        settings = FitSettings(steps=4, warmup=1, lr=1e-2, average=average, precision="fp32")
        module = Watched(model, settings, lambda step, metrics: None)
        fit(module, collate(EXPERTS, pad=0), steps=4, callbacks=[WeightAverage(model, average)])
        return model

    seen: list[dict[str, torch.Tensor]] = []
    mean = {name: p.detach().clone() for name, p in make_model().named_parameters()}
    kept = dict(trained(0.25).named_parameters())
    for t, weights in enumerate(seen, start=1):
        past = min(0.25, (1 + t) / (10 + t))
        mean = {name: past * mean[name] + (1 - past) * weights[name] for name in mean}
    for name, expected in mean.items():
        torch.testing.assert_close(kept[name].data, expected, rtol=1e-6, atol=1e-7)
    last = dict(trained(0.0).named_parameters())
    assert len(seen) == 4
    assert all(torch.equal(last[name], seen[-1][name]) for name in last)
    assert any(not torch.allclose(kept[name], seen[-1][name], rtol=1e-6) for name in kept)


def test_an_average_beyond_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"average .*1.0"):
        FitSettings(average=1.0)


def test_a_stream_fetches_no_item_ahead_and_starts_where_it_is_told() -> None:
    made: list[int] = []
    done = 2

    def item(step: int) -> object:
        made.append(step)
        return step

    loader = step_loader(5, lambda: done, item)  # type: ignore[arg-type]
    assert len(loader) == 5
    iterator = iter(loader)
    assert next(iterator) == 2
    assert made == [2], "an item made ahead would be played with stale weights"
    assert list(iterator) == [3, 4]


def test_a_time_limit_begins_with_the_first_step_and_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("imagination.learning.trainer.time.monotonic", lambda: now)
    limit, shares = TimeLimit(minutes=1.0), list[float]()
    now = 5000.0  # between building and training nothing counts

    def item(step: int) -> object:
        nonlocal now
        shares.append(limit.passed())
        now += 25.0
        return step

    assert list(step_loader(10, lambda: 0, item, limit.over)) == [0, 1, 2]
    assert shares == pytest.approx([0.0, 25 / 60, 50 / 60])
    assert limit.passed() == 1.0


def test_a_resumed_training_has_the_time_that_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("imagination.learning.trainer.time.monotonic", lambda: now)
    limit, resumed = TimeLimit(minutes=1.0), TimeLimit(minutes=1.0)
    assert not limit.over()
    now += 45.0
    assert not limit.over()
    resumed.load_state_dict(limit.state_dict())
    now = 7.0  # another process
    assert (resumed.over(), resumed.passed()) == (False, 0.75)
    now += 15.0
    assert resumed.over()


def test_no_time_limit() -> None:
    limit = TimeLimit(minutes=0.0)
    assert list(step_loader(3, lambda: 0, lambda step: step, limit.over)) == [0, 1, 2]
    assert limit.passed() == 0.0


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As in a terminal, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_waits_for_the_row_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Amid one, TensorBoard's queue stayed locked, and closing it hung for two minutes."""
    logger = make_logger("tensorboard", RunFolder(tmp_path, seed=0), "fit_world_model")
    assert logger
    logger.log_metrics({"loss": 1.0}, 0)
    put = queue.Queue.put
    rows: list[object] = []

    def interrupted(self: queue.Queue, row: object) -> None:
        signal.raise_signal(signal.SIGINT)
        put(self, row)
        rows.append(row)

    monkeypatch.setattr(queue.Queue, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        logger.log_metrics({"loss": 1.0, "accuracy": 0.5}, 1)
    monkeypatch.undo()
    assert len(rows) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    logger.finalize("success")
