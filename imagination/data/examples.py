"""Logged episodes as supervised rows: the policy imitates actions, the world model predicts what follows them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from imagination.data.augmentation import with_misspelt, with_renamed
from imagination.rollout.world_models import form_of
from imagination.settings import FitSettings, UserError, WorldModelSettings
from policy.lm.batch import Row
from policy.lm.render import ChatFormat, render_for_policy
from real_envs.seeding import derive_seed
from real_envs.trajectory import Owner, Source, Trajectory
from worldmodel.formats.full import TransitionFormat
from worldmodel.objective import balanced, transition_weights, unchanging, unchanging_share, world_model_rows


def imitation_row(
    chat: ChatFormat,
    episode: Trajectory,
    source: Source | None = None,
    actions: float = 1.0,
    observations: float = 0.0,
    thoughts: bool = False,
) -> Row:
    """The row of a logged episode: cross-entropy on its actions, as there are no log-probs to make a ratio of.

    Args:
        actions: weight of a token of an action, its end included, and of the thought before it.
        observations: weight of a token of an observation after an action (implicit world modelling: Zhang et al.
            2025, arXiv 2510.08558, section 4.2); the start follows no action and has none.
        thoughts: the thought stands before each action, see ``policy_text``.
    """
    tokens = render_for_policy(chat, episode, thoughts, whole=observations > 0)
    weight = {Owner.AGENT: actions, Owner.ENV: observations, Owner.SCAFFOLD: 0.0}
    first = tokens.owners.index(Owner.AGENT)
    return Row(
        tokens.ids,
        [owner == Owner.AGENT for owner in tokens.owners],
        source or episode.source,
        ce_weight=[0.0] * first + [weight[owner] for owner in tokens.owners[first:]],
    )


@dataclass(frozen=True, slots=True)
class WorldModelExamples:
    """Episodes as a world model learns from them.

    Attributes:
        episodes: the log, with refusals of misspelt names, and its renamed copies after it.
        weights: of each turn of each episode.
        forms: how each episode is written: some without facts, so that the model also dreams in unknown tasks.
        unchanged_share: share of the weight on turns that change nothing.
    """

    episodes: list[Trajectory]
    weights: list[list[float]]
    forms: list[TransitionFormat]
    unchanged_share: float | None

    @classmethod
    def of(
        cls,
        log: Sequence[Trajectory],
        form: TransitionFormat,
        settings: WorldModelSettings,
        fit: FitSettings,
        seed: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> WorldModelExamples:
        """``form`` writes all that is known, ``tokenizer`` is for made-up names (``with_renamed``). Raises
        ``UserError``: the log has no turn that should get a share.
        """
        log = with_misspelt(log, settings.misspelt, settings.refusals, seed)
        same = [unchanging(trajectory, settings.refusals) for trajectory in log]
        try:
            weights = balanced(transition_weights(log, settings.rarity), same, settings.unchanged_share)
        except ValueError as error:
            raise UserError(
                f"worldmodel.unchanged_share={settings.unchanged_share}: {error}; declare them in worldmodel.refusals, "
                "or set the share to null"
            ) from error
        episodes = with_renamed(log, fit.renamed, seed, tokenizer)
        forms = [form] * len(episodes)
        if settings.facts:
            bare, rng = form_of(replace(settings, facts=0), episodes), random.Random(derive_seed("facts", seed))
            if settings.kind != "retrieval":  # a copy knows what is true of its own names
                forms[len(log) :] = [form_of(settings, [copy]) for copy in episodes[len(log) :]]
            forms = [known if rng.random() < settings.facts_share else bare for known in forms]
        return cls(episodes, weights * (1 + fit.renamed), forms, unchanging_share(weights, same))

    def rows(self, chat: ChatFormat) -> list[list[Row]]:
        """The rows of each episode."""
        examples = zip(self.episodes, self.weights, self.forms, strict=True)
        return [world_model_rows(chat, episode, weights, form) for episode, weights, form in examples]
