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
    """

    rank: int = 0  #: of the adapters; 0 trains all weights
    alpha: int = 32  #: scale of the adapters, divided by the rank
    dropout: float = 0.0  #: on the input of the adapters
    target_modules: str = "all-linear"  #: layers that get an adapter


@dataclass
class ModelSettings:
    """Which causal LM to use: a checkpoint, or a Llama-shaped model from scratch out of the sizes below."""

    #: a hub id or a folder; base is the model that comes with this package; empty builds one from scratch
    model: str = ""
    hidden: int = 128  #: width
    layers: int = 4  #: depth
    heads: int = 2  #: of attention; fewer and wider ones are faster on CPUs
    kv_heads: int = 2  #: of keys and values
    mlp: int = 384  #: hidden width of the feed-forward layers
    context: int = 2048  #: longest sequence, in tokens
    keep_layers: int = 0  #: of a checkpoint, its first so many layers; 0 keeps all
    trim_vocabulary: bool = False  #: of a checkpoint, only tokens that the log and the chat template need
    chat_template: str = ""  #: a file with a template in Jinja, in place of that of the checkpoint
    dtype: str = "float32"  #: of a loaded checkpoint; of the saved weights of a base model (pretrain.model.dtype)
    lora: LoraSettings = field(default_factory=LoraSettings)  #: low-rank adapters

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "mlp", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")

    @property
    def follows_instructions(self) -> bool:
        """Whether it is a pretrained chat model."""
        return self.model not in ("", AUTO, BASE)


@dataclass
class EngineSettings:
    """Generation of tokens for policy and world model; each model has its own engine."""

    #: inprocess runs the trained model itself; vllm runs both models through vLLM in this process; openai sends the
    #: world model's requests to a server and runs the policy in process
    name: Literal["inprocess", "vllm", "openai"] = "inprocess"
    slots: int = 64  #: concurrent completions
    memory_gib: float = 2.0  #: of the key-value cache of each engine
    #: of the computation; auto is the dtype of the trained model, with which log-probs agree best. In process, models
    #: of other shapes than Llama, Mistral, Qwen2 and Qwen3 support auto only
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: speculative decoding of the world model with drafts from the log (inprocess). Exact in float32; in half precision
    #: some tokens change, as other batches round in another way
    drafts: bool = True
    #: CUDA graphs of steps that read one token a sequence or, with small models, up to 64 (inprocess, on a card)
    graphs: bool = True
    gpu_memory_utilization: float = 0.0  #: share of the GPU for vllm, in place of memory_gib; 0 uses memory_gib
    eager: bool = True  #: vllm runs without compilation and starts in seconds; false is faster on GPUs after the start
    url: str = ""  #: of an OpenAI-compatible server, such as http://localhost:8000/v1 (openai)
    served_model: str = ""  #: name of the world model on that server
    timeout: float = 120.0  #: seconds until an unanswered request is sent again (openai)
    retries: int = 4  #: further attempts before the episode fails (openai)

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
