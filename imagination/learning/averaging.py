"""An average of the weights over the steps of a training, which predicts better than the last weights do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """Exponential moving average of the trained weights, in fp32 (Polyak and Juditsky 1992; Tarvainen and Valpola 2017,
    arXiv 1703.01780, section 2).

    The weight of the past begins small, ``min(decay, (1 + t) / (10 + t))`` at step ``t``, so that the random start is
    soon forgotten (as in TensorFlow's ``ExponentialMovingAverage``).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._decay, self._steps = decay, 0
        self._mean = {name: p.detach().float().clone() for name, p in self._trained.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the weights as they are after a step."""
        self._steps += 1
        past = min(self._decay, (1 + self._steps) / (10 + self._steps))
        for name, p in self._trained.items():
            self._mean[name] = self._mean[name].to(p.device).lerp_(p.float(), 1 - past)

    @torch.no_grad()
    def into_model(self) -> None:
        """Puts the average in place of the weights."""
        for name, p in self._trained.items():
            p.copy_(self._mean[name])

    def state_dict(self) -> dict[str, object]:
        return {"steps": self._steps, "mean": self._mean}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """
        Raises:
            ValueError: the state is of another model.
        """
        steps, mean = state["steps"], state["mean"]
        if not isinstance(steps, int) or not isinstance(mean, dict) or mean.keys() != self._mean.keys():
            raise ValueError("this average is not one of the weights of this model")
        self._steps = steps
        for name, tensor in mean.items():
            assert isinstance(tensor, Tensor)
            self._mean[name] = tensor.clone()


class Averaging:
    """Hooks of a ``LightningModule`` at whose end the model has the average of its weights. Call ``average`` after each
    optimiser step, in the step itself: callbacks that save the step come before one for that would."""

    _average: WeightAverage | None

    def keep_average(self, model: nn.Module, decay: float) -> None:
        """
        Args:
            decay: of the average; 0 keeps the last weights.
        """
        self._average = WeightAverage(model, decay) if decay else None

    def average(self) -> None:
        """Takes in the weights as they are after a step."""
        if self._average is not None:
            self._average.update()

    def on_train_end(self) -> None:
        if self._average is not None:
            self._average.into_model()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._average is not None:
            checkpoint["average"] = self._average.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._average is not None:
            self._average.load_state_dict(checkpoint["average"])


__all__ = ["Averaging", "WeightAverage"]
