"""What a world model is fitted to: a weight for each logged turn, and the form of each logged episode."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from imagination.learning.objectives import NextToken, Objective
from imagination.rollout.world_models import form_of
from imagination.settings import UserError, WorldModelSettings
from policy.lm.render import ChatFormat
from real_envs.streams import stream_seed
from real_envs.trajectory import Trajectory
from worldmodel.diffusion.canvas import check_canvases
from worldmodel.diffusion.checkpoint import make_inverse, mask_of
from worldmodel.diffusion.objective import MaskedDiffusion
from worldmodel.formats.full import TransitionFormat
from worldmodel.objective import balanced, transition_weights, unchanging, unchanging_share


def forms_of(
    settings: WorldModelSettings, form: TransitionFormat, log: Sequence[Trajectory], seed: int
) -> list[TransitionFormat]:
    """The form of each episode: some without facts, so that the model also dreams in tasks that nothing is known of."""
    if not settings.facts:
        return [form] * len(log)
    bare = form_of(replace(settings, facts=0), log)
    rng = random.Random(stream_seed("facts", seed))
    return [form if rng.random() < settings.facts_share else bare for _ in log]


def objective_of(settings: WorldModelSettings, model: Any, chat: ChatFormat, context: int) -> Objective:
    """What the world model is trained by.

    Raises:
        UserError: the model cannot be trained that way.
    """
    if settings.kind != "diffusion":
        return NextToken()
    diffusion, block = settings.diffusion, settings.diffusion.block
    if block >= context:
        raise UserError(
            f"worldmodel.diffusion.block={block} leaves no room for a history in worldmodel.context={context}"
        )
    check_canvases(model, context)
    inverse = make_inverse(diffusion.inverse_tokens, diffusion.inverse_told, chat) if diffusion.inverse_share else None
    if inverse is not None and settings.facts:
        raise UserError("worldmodel.diffusion.inverse_share needs worldmodel.facts=0: facts stand before actions")
    mask = mask_of(chat.tokenizer)
    return MaskedDiffusion(block, mask, chat.stop, context, diffusion.causal_weight, inverse, diffusion.inverse_share)


def weights_of(settings: WorldModelSettings, log: Sequence[Trajectory]) -> tuple[list[list[float]], float | None]:
    """A training weight for each turn of each episode, and the share of it on turns that change nothing.

    Raises:
        UserError: the log has no turn of a kind that should get a share.
    """
    same = [unchanging(trajectory, settings.refusals) for trajectory in log]
    try:
        weights = balanced(transition_weights(log, settings.rarity), same, settings.unchanged_share)
    except ValueError as error:
        raise UserError(
            f"worldmodel.unchanged_share={settings.unchanged_share}: {error}; declare them in worldmodel.refusals, or "
            "set the share to null"
        ) from error
    return weights, unchanging_share(weights, same)
