"""Checkpoints of models that fill in: folders of transformers like any other, with a mask token and the length of the
canvas in ``config.json``."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from policy.lm.engine import UnsupportedModel
from policy.lm.forward import attention_window, decoder, evaluating
from policy.lm.tokenizer import MASK
from real_envs.errors import UserError
from worldmodel.diffusion.objective import Canvas, canvas_states, lay_out
from worldmodel.diffusion.settings import DiffusionSettings

_BLOCK = "diffusion_block"  # in the config


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


def check_trained(model: Any, where: object, block: int) -> None:
    """Raises ``UserError`` for a model of next tokens, or of canvases of another length."""
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


@torch.no_grad()
def check_canvases(model: Any, context: int) -> None:
    """Checks that canvases can stand beside a text in this model, by a pass over a few tokens.

    The text must not depend on them, and they must see all of themselves.

    Raises:
        UnsupportedModel: they cannot.
    """
    window = attention_window(model.config)
    if window is not None and window < context:
        raise UnsupportedModel(
            f"{model.config.model_type} attends to {window} tokens: lower worldmodel.context to that for diffusion"
        )
    text = torch.arange(1, 5, device=model.device)[None]
    layout = lay_out(text, [Canvas(0, 2, (3, 4), 1.0)])
    other = layout.ids.clone()
    other[0, -1] = 1
    with evaluating(model):
        alone = decoder(model)(input_ids=text, use_cache=False).last_hidden_state[0].float()
        beside, changed = (canvas_states(model, layout, ids)[0].float() for ids in (layout.ids, other))
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 5e-2
    text_same = (beside[:4] - alone).norm() <= tolerance * alone.norm()
    canvas_seen = (changed[4] - beside[4]).norm() > 0
    if not (text_same and canvas_seen and torch.equal(beside[:4], changed[:4])):
        raise UnsupportedModel(
            f"{model.config.model_type} does not follow the attention mask, which worldmodel.kind=diffusion needs: "
            "choose a model with standard attention"
        )
