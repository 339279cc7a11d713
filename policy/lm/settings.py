"""Settings of a language model, apart from the code that needs torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LoraSettings:
    """Low-rank adapters (peft) on a pretrained model.

    Merged into the weights when the checkpoint is saved, so that every reader sees a plain model.

    Attributes:
        rank: 0 trains all weights.
        alpha: scale of the adapters, divided by the rank.
        dropout: on their input.
        target_modules: which layers get one.
    """

    rank: int = 0
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str = "all-linear"


@dataclass
class ModelSettings:
    """Which causal LM to use: a checkpoint, or a Llama-shaped model from scratch out of the sizes below.

    Attributes:
        model: a hub id or a folder; empty builds one from scratch.
        hidden: width.
        layers: depth.
        heads: of attention; fewer and wider ones are faster on CPUs.
        kv_heads: of keys and values.
        mlp: width inside the feed-forward layers.
        context: longest sequence, in tokens.
        dtype: that a checkpoint is loaded in.
    """

    model: str = ""
    hidden: int = 128
    layers: int = 4
    heads: int = 2
    kv_heads: int = 2
    mlp: int = 384
    context: int = 1024
    dtype: str = "float32"
    lora: LoraSettings = field(default_factory=LoraSettings)
