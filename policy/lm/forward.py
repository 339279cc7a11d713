"""Teacher-forced log-probs, computed only where a token is trained."""

from __future__ import annotations

from typing import Any

import torch


def decoder(model: Any) -> Any:
    """The part of a causal LM below its output head; adapters of peft stay in place inside it."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model.base_model


def hidden_before(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Final hidden states that predict the masked tokens.

    Args:
        model: a causal LM of transformers.
        input_ids, attention_mask: ``[batch, time]``, padded on the right.
        mask: ``[batch, time]``; true on tokens to be predicted, at their own position. Position 0 has no past.

    Returns:
        ``[n, hidden]`` in row-major order of the mask's true entries.

    Raises:
        ValueError: the mask asks for position 0, or for padding.
    """
    if mask[:, 0].any():
        raise ValueError("the first token of a sequence has no past to be predicted from")
    if (mask & ~attention_mask.bool()).any():
        raise ValueError("the mask asks for tokens that are padding")
    # Causal attention: right padding is never seen by real tokens, so no attention mask is needed.
    hidden: torch.Tensor = decoder(model)(input_ids=input_ids, use_cache=False).last_hidden_state
    selected: torch.Tensor = hidden[:, :-1][mask[:, 1:]]
    return selected


def token_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits ``[n, vocab]`` in fp32 of hidden states ``[n, hidden]``."""
    logits: torch.Tensor = model.get_output_embeddings()(hidden)
    return logits.float()
