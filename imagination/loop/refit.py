"""A new version of the world model: the last one fitted on to real transitions, and whether it takes its place.

A version is judged by how likely it finds real episodes that no version was fitted to, those of before the round and
new ones: a batch of broken transitions may make its own kind likelier, never the old.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from imagination.data.batches import fit_batches, fitting, truncate
from imagination.data.examples import WorldModelExamples
from imagination.learning.losses import token_logprobs
from imagination.learning.supervised import SupervisedTrainer
from imagination.rollout.world_models import form_of, member_folder
from imagination.runs.models import adapted, context_of, load_model
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import WorldModelSettings
from policy.lm.backbone import save_checkpoint
from policy.lm.batch import by_length, collate
from policy.lm.forward import hidden_before, token_logits
from policy.lm.render import ChatFormat
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory
from worldmodel.formats.full import TransitionFormat
from worldmodel.objective import world_model_rows


def refit(session: Session, log: Sequence[Trajectory], own: Collection[str], number: int, candidates: Path) -> None:
    """Fits each member on and writes it to ``candidates``/<member>; what is there is done, half of one is gone on with.

    Length and rate are those of the loop; all else is as the first version was fitted.

    Args:
        log: real episodes, none of them held back and none of them dreamed.
        own: ids of those that the policy has played in the loop; ``loop.own_share`` of what is read are of them.
        number: of the round.
    """
    config, run, seed = session.config, session.run, session.config.seed
    settings, fit, loop = config.worldmodel, config.fit, config.loop
    examples = WorldModelExamples.of(log, form_of(settings, log), settings, fit, seed)
    is_own = [t.id in own for t in examples.episodes]
    steps = loop.fit_steps
    fit = replace(fit, steps=steps, lr=loop.fit_lr, warmup=min(fit.warmup, steps // 10)).decided(from_scratch=False)
    for member in range(settings.members):
        folder, name = candidates / str(member), f"loop_fit-{number}-{member}"
        if folder.exists():
            continue
        model, chat = load_model(member_folder(run, member), "fit-world-model", settings)
        noise = derive_seed("loop fit", seed, number, member)
        torch.manual_seed(noise)  # adapters start at random
        model = adapted(model, settings)
        by_episode = examples.rows(chat)
        length = sum(len(row.ids) for rows in by_episode for row in rows) / len(by_episode)
        draws = random.Random(derive_seed("loop refit", seed, number))
        order = shares(is_own, loop.own_share, math.ceil(steps * fit.batch_tokens / length), draws)
        rows = [row for i in order for row in by_episode[i]]
        rows = fitting(rows, context_of(model, settings), "worldmodel.context")
        batches, fit_settings = fit_batches(rows, chat.tokenizer, fit, derive_seed("loop fit", seed, number))
        SupervisedTrainer(run, name, fit_settings, noise).train(model, chat.tokenizer, batches)
        draft = folder.with_suffix(".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        save_checkpoint(model, chat.tokenizer, draft)
        draft.rename(folder)
        run.training_state(name).unlink(missing_ok=True)


def shares(own: Sequence[bool], share: float, read: int, rng: random.Random) -> list[int]:
    """Which episodes a refit reads ``read`` of: own ones make up ``share``, others are drawn without replacement.

    Args:
        own: of each episode, whether it is one of those.

    Returns:
        indices; those of own ones as often as their share asks for.

    Example::

        shares([False] * 90 + [True] * 4, share=0.5, read=16, rng=rng)  # 8 of the 90, and each of the 4 twice
    """
    mine, others = [i for i, is_own in enumerate(own) if is_own], [i for i, is_own in enumerate(own) if not is_own]
    if not mine or not others:
        return [*mine, *others]
    drawn = rng.sample(others, min(len(others), max(1, round(read * (1 - share)))))
    times = max(1, round(len(drawn) * share / (1 - share) / len(mine)))
    return sorted(drawn) + mine * times


def scores_of(
    folders: Sequence[Path],
    settings: WorldModelSettings,
    log: Sequence[Trajectory],
    held: dict[str, list[Trajectory]],
    micro_tokens: int,
) -> Scores:
    """Log-likelihood of a turn by kind of held-back episode, the mean over the members of a version."""
    form, likelihoods = form_of(settings, log), list[dict[str, float | None]]()
    for folder in folders:
        model, chat = load_model(folder, "fit-world-model", settings)
        context = context_of(model, settings)
        likelihoods.append({k: log_likelihood(model, chat, form, ts, context, micro_tokens) for k, ts in held.items()})
    means: dict[str, float | None] = {}
    for kind in held:
        known = [score for scores in likelihoods if (score := scores[kind]) is not None]
        means[kind] = sum(known) / len(known) if known else None
    return means


def promote(run: RunFolder, members: int, candidates: Path) -> None:
    """The candidates take the place of the run's world model; cut off anywhere, it can be done again."""
    for member in range(members):
        candidate, folder = candidates / str(member), member_folder(run, member)
        if candidate.exists():
            shutil.rmtree(folder, ignore_errors=True)
            candidate.rename(folder)


Scores = Mapping[str, float | None]


@torch.no_grad()
def log_likelihood(
    model: Any,
    chat: ChatFormat,
    form: TransitionFormat,
    episodes: Sequence[Trajectory],
    context: int,
    micro_tokens: int,
) -> float | None:
    """Mean log-probability of a real turn, in nats: of the next observation, reward and end, given what was before.

    Args:
        context: beyond it a turn is not asked about; it still counts, for every version alike.
        micro_tokens: of a forward pass.

    Returns:
        ``None`` where no turn has a measured reward.
    """
    turns, total = 0, 0.0
    rows = []
    for episode in episodes:
        weights = [0.0 if turn.reward is None else 1.0 for turn in episode.turns]
        turns += int(sum(weights))
        rows += [truncate(row, context) for row in world_model_rows(chat, episode, weights, form)]
    rows = [row for row in rows if any(row.ce_weight)]
    if not turns:
        return None
    model.eval()
    for batch in by_length([len(row.ids) for row in rows], micro_tokens):
        tokens = collate([rows[i] for i in batch], pad=0).to(model.device)
        mask = tokens.ce_weight != 0
        predictors = hidden_before(model, tokens.input_ids, tokens.attention_mask, mask)
        logits = token_logits(model, predictors.states)
        total += float(token_logprobs(logits, tokens.input_ids[mask], which=predictors.which).double().sum())
    return total / turns


def no_worse(before: Scores, after: Scores, tolerance: float) -> bool:
    """Whether each kind of held-back episodes is as likely as before, up to ``tolerance`` in nats a turn.

    Where nothing was held back, nothing is known of a version, and it is not trusted.

    Example::

        no_worse({"old": -0.50, "new": -2.0}, {"old": -0.505, "new": -0.9}, tolerance=0.01)  # True
        no_worse({"old": -0.50, "new": -2.0}, {"old": -0.60, "new": -0.9}, tolerance=0.01)  # False
    """
    judged = [(before[kind], after[kind]) for kind in before]
    pairs = [(b, a) for b, a in judged if b is not None and a is not None]
    return bool(pairs) and all(a >= b - tolerance for b, a in pairs)
