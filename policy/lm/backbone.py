"""A causal LM from a small configuration (from scratch) or from a checkpoint (hub id or folder), optionally with LoRA.

Checkpoints are plain Hugging Face folders: safetensors, config, tokenizer, chat template. Anything that reads those
(``AutoModelForCausalLM.from_pretrained``, vLLM) reads ours.
"""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from policy.lm.settings import BASE, LoraSettings, ModelSettings
from real_envs.errors import UserError
from real_envs.files import check_checksums, write_checksums

BASE_FOLDER = Path(__file__).with_name("base")


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names the folder and the reason."""


def build_model(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A model with random weights in the shape of Llama (Touvron et al. 2023, arXiv 2302.13971).

    Not Qwen2's: for that model type transformers loads Qwen's own tokenizer, whatever lies in the folder.

    Raises:
        UserError: the width cannot be shared among the heads.
    """
    if settings.hidden % (2 * settings.heads) or settings.heads % settings.kv_heads:
        raise UserError(
            f"hidden={settings.hidden} must be a multiple of twice heads={settings.heads}, and these of "
            f"kv_heads={settings.kv_heads}"
        )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        intermediate_size=settings.mlp,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def load_checkpoint(
    name: str, dtype: str = "float32", chat_template: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model and its tokenizer from a hub id, a folder, or a ``.gguf`` file, whose weights are unpacked.

    ``base`` is the model that comes with this package; a folder of that name is ``./base``.

    Args:
        chat_template: a file with a template that takes the place of the tokenizer's own.

    Raises:
        CheckpointError: it cannot be read, tensors are missing, the tokenizer knows more tokens than the model has
            embeddings for, or there is no template in the file.
        UserError: a file is not as ``save_checkpoint`` wrote it.
    """
    template = _read_template(Path(chat_template)) if chat_template else None
    model, tokenizer = _load(name, dtype)
    if template is not None:
        tokenizer.chat_template = template
    return model, tokenizer


def _read_template(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"chat_template={file} cannot be read: {reason}") from error
    if not text.strip():
        raise CheckpointError(f"chat_template={file} is empty")
    return text


def _load(name: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    where = str(BASE_FOLDER) if name == BASE else name
    path = Path(where)
    if path.suffix == ".gguf":
        return _load_gguf(path, getattr(torch, dtype))
    if name == BASE and not has_base():
        raise CheckpointError("base: this installation came without the base model; `imagine pretrain` makes one")
    if path.is_dir() and not (path / "config.json").exists():
        raise CheckpointError(f"{name}: no config.json; this folder is not a Hugging Face checkpoint")
    check_checksums(path)
    try:
        _refuse_code(AutoConfig.from_pretrained(where, trust_remote_code=False))
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where, dtype=getattr(torch, dtype), output_loading_info=True, trust_remote_code=False
        )
    # SafetensorError: torn weights; UnpicklingError: a pickle that holds more than weights
    except (OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{name}: not a loadable causal LM with a tokenizer: {reason}") from error
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise CheckpointError(f"{name}: {len(missing)} tensors are missing, such as {missing[0]}")
    rows = int(model.get_input_embeddings().weight.size(0))
    if len(tokenizer) > rows:
        raise CheckpointError(
            f"{name}: wrong vocabulary: the tokenizer has {len(tokenizer)} tokens but the model embeds only {rows}"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _refuse_code(config: PretrainedConfig) -> None:
    """Raises ``ValueError``: the attention of a ``config.json`` is code of a repository (``owner/kernels``), which
    transformers would fetch and run.
    """
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if "/" in (attention := str(getattr(part, "_attn_implementation", ""))):
            raise ValueError(f"attn_implementation={attention} is code from elsewhere, which is not run")


def _load_gguf(file: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a GGUF file, its quantised weights unpacked to ``dtype``, and its tokenizer.

    transformers unpacks the file, but its model calls itself quantised and refuses to be saved: the unpacked weights go
    into a fresh model of the same shape.

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
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        unpacked = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=dtype, trust_remote_code=False
        )
    # A reader of a torn file fails wherever it happens to look: past the end, at a length that is no length, at a name
    # that is no text.
    except (OSError, ValueError, IndexError, KeyError, RuntimeError, OverflowError, MemoryError, struct.error) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{file}: torn, or not of a known causal LM; fetch it again: {reason}") from error
    model = AutoModelForCausalLM.from_config(_unquantised(unpacked.config), dtype=dtype)
    model.load_state_dict(unpacked.state_dict())
    return model, tokenizer


def _unquantised(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration without what says that the weights are packed."""
    values = config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        values.pop(key, None)
    return AutoConfig.for_model(**values)


def has_base() -> bool:
    """Whether this installation came with the base model."""
    return (BASE_FOLDER / "config.json").exists()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder that holds one. Raises ``UserError``: a file there is not as it was written."""
    check_checksums(folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return tokenizer


def with_lora(model: PreTrainedModel, settings: LoraSettings) -> Any:
    """Wraps the model with trainable low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model,
        LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=settings.target_modules,
            task_type="CAUSAL_LM",
        ),
    )


@torch.no_grad()
def plain_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under the name it has in a checkpoint, without changing ``model``; tied ones under both names.

    Adapters are merged layer by layer into a copy of that layer, so that no second model is ever in memory.
    """
    if not hasattr(model, "merge_and_unload"):
        yield from model.state_dict().items()
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = model.get_base_model()
    adapted = {name: module for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, module in adapted.items():
        merged: Any = copy.deepcopy(module)
        merged.merge()
        yield from ((f"{name}.{key}", tensor) for key, tensor in merged.get_base_layer().state_dict().items())
    for key, tensor in base.state_dict().items():
        if not any(key.startswith(f"{name}.") for name in adapted):
            yield key, tensor


def save_checkpoint(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a plain Hugging Face folder; adapters are merged into a copy of the weights first, and lie beside them in
    ``adapter/``, a folder of peft for the checkpoint that they were trained on.

    What was there is replaced once all is written, so that a full disk leaves the checkpoint before.
    """
    draft = folder.with_name(f".{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        if hasattr(model, "merge_and_unload"):
            # of a checkpoint that is no folder here, peft would ask the hub whether embeddings were resized
            known = Path(str(model.get_base_model().config._name_or_path)).is_dir()
            model.save_pretrained(draft / "adapter", save_embedding_layers="auto" if known else False)
            model = copy.deepcopy(model).merge_and_unload()
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        write_checksums(draft)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / "adapter", ignore_errors=True)  # also where this model has none
        for path in draft.iterdir():
            if path.is_dir():  # adapters, further chat templates of a tokenizer
                shutil.rmtree(folder / path.name, ignore_errors=True)
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
