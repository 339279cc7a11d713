"""A GGUF file (llama.cpp's format) as a model that can be trained: weights unpacked, its own tokenizer and template.

transformers unpacks the file, but what it returns calls itself quantised and refuses to be saved. So the unpacked
weights go into a fresh model of the same shape.
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from policy.lm.backbone import CheckpointError


def load_gguf(file: Path, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a GGUF file, its quantised weights unpacked to ``dtype``, and its tokenizer.

    Raises:
        CheckpointError: the file is no GGUF, is torn, holds no causal LM that transformers knows, or the package that
            reads it is not installed.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise CheckpointError(f"{file}: GGUF files need a package: pip install 'imagination[gguf]'") from error
    try:
        with file.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise CheckpointError(f"{file}: not a GGUF file: it does not begin with GGUF")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        unpacked = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    # A reader of a torn file fails wherever it happens to look: past the end, at a length that is no length, at a name
    # that is no text.
    except (OSError, ValueError, IndexError, KeyError, RuntimeError, OverflowError, MemoryError, struct.error) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{file}: torn, or not of a known causal LM; fetch it again: {reason}") from error
    model = AutoModelForCausalLM.from_config(_plain(unpacked.config), dtype=dtype)
    model.load_state_dict(unpacked.state_dict())
    return model, tokenizer


def _plain(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration without what says that the weights are packed."""
    values = config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        values.pop(key, None)
    return AutoConfig.for_model(**values)
