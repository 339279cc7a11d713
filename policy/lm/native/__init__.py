"""What is compiled, or multiplied by another library than torch's default. Read through ``policy.lm.compiled``."""

from policy.lm.native.decoding import native_attention, native_layers
from policy.lm.native.products import linear, linear_onto
from policy.lm.native.training import NativeTraining, native_training

__all__ = ["NativeTraining", "linear", "linear_onto", "native_attention", "native_layers", "native_training"]
