"""The one door to ``policy/lm/native``: compiled steps where there are any, ``None`` and torch's own where not.

Without the folder everything works, slower (docs/engines.md says by how much): a test deletes it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or find_spec("policy.lm.native") is not None:
    from policy.lm.native import NativeTraining, linear, linear_onto, native_attention, native_layers, native_training
else:
    import torch
    from torch.nn.functional import linear

    NativeTraining = None

    def linear_onto(onto: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.addmm(onto, x, weight.T)

    def native_attention(*_: object) -> None: ...

    native_layers = native_training = native_attention

__all__ = ["NativeTraining", "linear", "linear_onto", "native_attention", "native_layers", "native_training"]
