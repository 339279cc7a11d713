"""Settings of a language model, apart from the code that needs torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

BASE = "base"  # as a name of a model: the one that comes with this package
AUTO = "auto"


@dataclass
class LoraSettings:
    """Low-rank adapters (peft) on a pretrained model.

    Merged into the weights when a checkpoint is saved.

    Attributes:
        rank: of the adapters; 0 trains all weights.
        alpha: scale of the adapters, divided by the rank.
        dropout: on the input of the adapters.
        target_modules: layers that get an adapter.
    """

    rank: int = 0
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str = "all-linear"


@dataclass
class ModelSettings:
    """Which causal LM to use: a checkpoint, or a Llama-shaped model from scratch out of the sizes below.

    Attributes:
        model: a hub id or a folder; base is the model that comes with this package; empty builds one from scratch.
        hidden: width.
        layers: depth.
        heads: of attention; fewer and wider ones are faster on CPUs.
        kv_heads: of keys and values.
        mlp: hidden width of the feed-forward layers.
        context: longest sequence, in tokens.
        dtype: of a loaded checkpoint; of the saved weights of a base model (pretrain.model.dtype).
        lora: low-rank adapters.
    """

    model: str = ""
    hidden: int = 128
    layers: int = 4
    heads: int = 2
    kv_heads: int = 2
    mlp: int = 384
    context: int = 2048
    dtype: str = "float32"
    lora: LoraSettings = field(default_factory=LoraSettings)

    @property
    def follows_instructions(self) -> bool:
        """Whether it is a pretrained chat model."""
        return self.model not in ("", AUTO, BASE)


@dataclass
class EngineSettings:
    """Generation of tokens for policy and world model; each model has its own engine.

    Attributes:
        name: inprocess runs the trained model itself; vllm runs both models through vLLM in this process; openai sends
            the world model's requests to a server and runs the policy in process.
        slots: concurrent completions.
        memory_gib: of the key-value cache of each engine.
        dtype: of the computation; auto is the dtype of the trained model, with which log-probs agree best. In process,
            models of other shapes than Llama, Mistral, Qwen2 and Qwen3 support auto only.
        drafts: speculative decoding of the world model with drafts from the log (inprocess). Exact in float32; in half
            precision some tokens change, as other batches round in another way.
        gpu_memory_utilization: share of the GPU for vllm, in place of memory_gib; 0 uses memory_gib.
        eager: vllm runs without compilation and starts in seconds; false is faster on GPUs after the start.
        url: of an OpenAI-compatible server, such as http://localhost:8000/v1 (openai).
        served_model: name of the world model on that server.
        timeout: seconds until an unanswered request is sent again (openai).
        retries: further attempts before the episode fails (openai).
    """

    name: Literal["inprocess", "vllm", "openai"] = "inprocess"
    slots: int = 64
    memory_gib: float = 2.0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    drafts: bool = True
    gpu_memory_utilization: float = 0.0
    eager: bool = True
    url: str = ""
    served_model: str = ""
    timeout: float = 120.0
    retries: int = 4

    def __post_init__(self) -> None:
        if self.name == "openai" and not (self.url and self.served_model):
            raise ValueError(
                "a server needs an address and a model: set engine.url=http://localhost:8000/v1 and "
                "engine.served_model=<name>, as `vllm serve <folder> --served-model-name <name>` has it"
            )
        if self.slots < 1 or self.memory_gib <= 0:
            raise ValueError("slots must be at least 1 and memory_gib more than 0")
        if not 0 <= self.gpu_memory_utilization < 1:
            raise ValueError(f"gpu_memory_utilization must lie in [0, 1), got {self.gpu_memory_utilization}")
        if self.timeout <= 0 or self.retries < 0:
            raise ValueError("timeout must be more than 0 and retries not negative")
