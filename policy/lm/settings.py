"""Settings of a language model, apart from the code that needs torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

BASE = "base"  # as a name of a model: the one that comes with this package
AUTO = "auto"


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
        model: a hub id or a folder; base is the model that comes with this package; empty builds one from scratch.
        hidden: width.
        layers: depth.
        heads: of attention; fewer and wider ones are faster on CPUs.
        kv_heads: of keys and values.
        mlp: width inside the feed-forward layers.
        context: longest sequence, in tokens.
        dtype: that a checkpoint is loaded in; that the weights of a base are saved in (pretrain.model.dtype).
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
        """It is somebody's chat model."""
        return self.model not in ("", AUTO, BASE)


@dataclass
class EngineSettings:
    """What samples the tokens of policy and world model; each model has an engine of its own.

    Attributes:
        name: inprocess runs the trained model itself; vllm runs both models through vLLM in this process; openai asks
            a server for the world model's tokens and runs the policy in process.
        slots: how many completions run at the same time.
        memory_gib: for cached keys and values, of each engine.
        dtype: to compute in; auto is the dtype of the trained model, with which log-probs agree best. In process, no
            other is possible for models that are not shaped like Llama, Mistral, Qwen2 or Qwen3.
        drafts: guess what the world model will write from the log, which is faster (inprocess). In float32 they change
            no word; in half precision some, as other batches round in another way.
        gpu_memory_utilization: share of the GPU that vllm may take in all, in place of memory_gib; 0 leaves it to that.
        eager: vllm runs without compiling: starts in seconds; false is faster on GPUs once it has started.
        url: of an OpenAI-compatible server, such as http://localhost:8000/v1 (openai).
        served_model: the name under which that server has the world model.
        timeout: seconds until an unanswered request is sent again (openai).
        retries: how often, before its episode fails (openai).
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
