"""Checkpoints of models that fill in: folders of transformers like any other, with a mask token and the length of the
canvas in ``config.json``."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from policy.lm.render import ChatFormat
from policy.lm.tokenizer import MASK
from real_envs.errors import UserError
from worldmodel.diffusion.canvas import Inverse
from worldmodel.diffusion.settings import DiffusionSettings

_BLOCK = "diffusion_block"  # in the config
_INVERSE = "diffusion_inverse"  # places for an action, and tokens of what came of it


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
    asked = [settings.inverse_tokens, settings.inverse_told] if settings.inverse_share else None
    setattr(model.config, _INVERSE, asked)


def make_inverse(places: int, told: int, chat: ChatFormat) -> Inverse:
    """How actions are asked for in chats of this format."""
    return Inverse(places, told, chat.to_assistant, chat.to_user)


def inverse_of(model: Any, chat: ChatFormat) -> Inverse | None:
    """How the model was trained to be asked for actions; ``None`` where it was not."""
    asked = getattr(model.config, _INVERSE, None)
    if not asked:
        return None
    places, told = asked
    return make_inverse(places, told, chat)


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


__all__ = ["check_trained", "inverse_of", "make_inverse", "mark", "mask_of", "with_mask"]
