"""Checkpoints of models that fill in: folders of transformers like any other, with a mask token and the length of the
canvas in ``config.json``."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from policy.lm.tokenizer import MASK
from real_envs.errors import UserError
from worldmodel.diffusion.settings import DiffusionSettings

_BLOCK = "diffusion_block"  # in the config
_INVERSE = "diffusion_inverse_tokens"


def with_mask(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a pretrained model a mask token where it has none; its embedding starts as the mean of all others."""
    if tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": MASK})
    rows = model.get_input_embeddings().weight
    if len(tokenizer) > len(rows):
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        weight = model.get_input_embeddings().weight.data
        weight[len(rows) :] = weight[: len(rows)].mean(0)


def mask_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the mask token.

    Raises:
        UserError: there is none.
    """
    mask = tokenizer.mask_token_id
    if not isinstance(mask, int):
        raise UserError(f"the tokenizer of {tokenizer.name_or_path!r} has no mask token, which diffusion needs")
    return mask


def mark(model: Any, settings: DiffusionSettings) -> None:
    """Writes into the model's config which canvases it was trained to fill in."""
    setattr(model.config, _BLOCK, settings.block)
    setattr(model.config, _INVERSE, settings.inverse_tokens if settings.inverse_share else 0)


def inverse_tokens(model: Any) -> int:
    """Places for an action that the model was trained to be asked for; 0 where it was not."""
    return getattr(model.config, _INVERSE, 0)


def check_trained(model: Any, where: object, block: int) -> None:
    """
    Raises:
        UserError: the model was trained to predict next tokens, or for another length of the canvas.
    """
    trained = getattr(model.config, _BLOCK, None)
    if trained is None:
        raise UserError(
            f"{where}: this model was trained to predict the next token and cannot fill in a canvas; run "
            "`imagine fit-world-model` with worldmodel.kind=diffusion"
        )
    if trained != block:
        raise UserError(
            f"{where}: this model was trained with worldmodel.diffusion.block={trained}, not {block}; set it back, or "
            "run `imagine fit-world-model`"
        )


__all__ = ["check_trained", "inverse_tokens", "mark", "mask_of", "with_mask"]
