"""The models of a run: loaded, adapted, and told apart by their weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from imagination.runs.lifecycle import need
from policy.lm.backbone import load_checkpoint, with_lora
from policy.lm.render import ChatFormat
from policy.lm.settings import ModelSettings


def weights_version(model: torch.nn.Module) -> str:
    """A short hash of all weights, the provenance of what the model makes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def load_model(folder: Path, stage: str, settings: ModelSettings) -> tuple[Any, ChatFormat]:
    """A model of this run with its chat format; adapters are put on where the settings ask for them."""
    model: Any
    model, tokenizer = load_checkpoint(str(need(folder, stage)), settings.dtype)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), ChatFormat(tokenizer)


def adapted(model: Any, settings: ModelSettings) -> Any:
    """The model as it is trained: with LoRA where ``lora.rank`` is not 0."""
    return with_lora(model, settings.lora) if settings.lora.rank else model


def context_of(model: Any, settings: ModelSettings) -> int:
    """The longest sequence to use: what the settings say, within what the model can."""
    return min(settings.context, int(model.config.max_position_embeddings))
