"""A new version of the world model: the last one fitted on to real transitions, and whether it takes its place.

A version is judged by how likely it finds real episodes that no version was fitted to, those of before the round and
new ones: a batch of broken transitions may make its own kind likelier, never the old.
"""

from __future__ import annotations

import asyncio
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
from imagination.learning.losses.terms import token_logprobs
from imagination.learning.supervised import SupervisedTrainer
from imagination.loop.acting import POLICY, round_of
from imagination.loop.origin import of_new_tasks
from imagination.rollout.world_models import form_of, member_folder
from imagination.runs.log import rewarded
from imagination.runs.models import adapted, context_of, load_model, weights_version
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from policy.lm.backbone import load_tokenizer, save_checkpoint
from policy.lm.batch import by_length, collate
from policy.lm.forward import hidden_before, token_logits
from policy.lm.render import ChatFormat
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory
from worldmodel.evaluation.dreams import drift_metrics, roll
from worldmodel.formats.full import TransitionFormat
from worldmodel.objective import world_model_rows

NOTHING_NEW = "not fitted again: no new episode to fit to"
FROZEN = "not fitted again: loop.fit_steps=0"
_JUDGED = 64  # held-back episodes of a kind that a version is asked about: twice as many take twice as long
_FEWEST = 10  # episodes that an audited horizon is believed from


def refit(session: Session, own: Collection[str]) -> None:
    """Fits each member on, into ``loop/candidate/<member>``; what is there is done, half of one is gone on with.

    Length and rate are those of the loop; all else is as the first version was fitted. ``loop.own_share`` of what is
    read are episodes with ids in ``own``, which the policy has played in the loop.
    """
    config, run, seed = session.config, session.run, session.config.seed
    settings, fit, loop, number = config.worldmodel, config.fit, config.loop, run.summary["loop"]["round"]
    log = rewarded(run, session.log.train, settings.goal)
    tokenizer = load_tokenizer(member_folder(run, 0))
    examples = WorldModelExamples.of(log, form_of(settings, log), settings, fit, seed, tokenizer)
    is_own = [t.id in own for t in examples.episodes]
    steps = loop.fit_steps
    fit = replace(fit, steps=steps, lr=loop.fit_lr, warmup=min(fit.warmup, steps // 10)).decided(from_scratch=False)
    for member in range(settings.members):
        folder, name = candidate_folder(run, member), f"loop_fit-{number}-{member}"
        if folder.exists():
            continue
        model, chat = load_model(member_folder(run, member), "fit-world-model", settings)
        noise = derive_seed("loop fit", seed, number, member)
        torch.manual_seed(noise)  # adapters start at random
        model = adapted(model, settings)
        by_episode = examples.rows(chat)
        length = sum(len(row) for rows in by_episode for row in rows) / len(by_episode)
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
    """Indices of the episodes of which a refit reads ``read``: own ones, repeated up to ``share`` of all, and others.

    Example: ``shares([False] * 90 + [True] * 4, share=0.5, read=16, rng=rng)`` is 8 of the 90, and each of the 4 twice.
    """
    repeated, others = ([i for i, is_own in enumerate(own) if is_own is wanted] for wanted in (True, False))
    if not repeated or not others:
        return [*repeated, *others]
    drawn = rng.sample(others, min(len(others), max(1, round(read * (1 - share)))))
    times = max(1, round(len(drawn) * share / (1 - share) / len(repeated)))
    return sorted(drawn) + repeated * times


def candidate_folder(run: RunFolder, member: int) -> Path:
    return run.path / "loop" / "candidate" / str(member)


def scores_of(session: Session, folders: Sequence[Path], held: dict[str, list[Trajectory]]) -> Scores:
    """Log-likelihood of a turn by kind of held-back episode, the mean over the members of a version."""
    settings, micro_tokens = session.config.worldmodel, session.config.fit.micro_tokens
    form, likelihoods = form_of(settings, session.log.train), list[dict[str, float | None]]()
    for folder in folders:
        model, chat = load_model(folder, "fit-world-model", settings)
        context = context_of(model, settings)
        likelihoods.append({k: log_likelihood(model, chat, form, ts, context, micro_tokens) for k, ts in held.items()})
    means: dict[str, float | None] = {}
    for kind in held:
        known = [score for scores in likelihoods if (score := scores[kind]) is not None]
        means[kind] = sum(known) / len(known) if known else None
    return means


def promote(run: RunFolder, members: int) -> None:
    """The candidates take the place of the run's world model; cut off anywhere, it can be done again."""
    for member in range(members):
        candidate, folder = candidate_folder(run, member), member_folder(run, member)
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

    ``None`` where no turn is known. Turns beyond the context are not asked about, but count.
    """
    turns, total = 0, 0.0
    rows = []
    for episode in episodes:
        weights = [float(turn.known) for turn in episode.turns]
        turns += int(sum(weights))
        rows += [truncate(row, context) for row in world_model_rows(chat, episode, weights, form)]
    rows = [row for row in rows if row.ce_weight.any()]
    if not turns:
        return None
    model.eval()
    for batch in by_length([len(row) for row in rows], micro_tokens):
        tokens = collate([rows[i] for i in batch], pad=0).to(model.device)
        mask = tokens.ce_weight != 0
        predictors = hidden_before(model, tokens.ids, tokens.attention_mask, mask)
        logits = token_logits(model, predictors.states)
        total += float(token_logprobs(logits, tokens.ids[mask], which=predictors.which).double().sum())
    return total / turns


def no_worse(before: Scores, after: Scores, tolerance: float) -> bool:
    """Whether each kind of held-back episodes is as likely as before, up to ``tolerance`` in nats a turn.

    Where nothing was held back, nothing is known of a version, and it is not trusted.

    Example: ``no_worse({"old": -0.50, "new": -2.0}, {"old": -0.60, "new": -0.9}, tolerance=0.01)`` is False.
    """
    judged = [(before[kind], after[kind]) for kind in before]
    pairs = [(b, a) for b, a in judged if b is not None and a is not None]
    return bool(pairs) and all(a >= b - tolerance for b, a in pairs)


def refit_round(session: Session) -> dict[str, Any]:
    """Fits a new version into ``loop/candidate`` and judges it; what ``summary.json`` says of it."""
    config, run, (train, held) = session.config, session.run, session.log
    number, versions = (run.summary["loop"][key] for key in ("round", "versions"))
    last = max(v["round"] for v in versions if v["promoted"])

    def is_new(episode: Trajectory) -> bool:
        played = round_of(episode)
        return played is not None and played > last

    version: dict[str, Any] = {
        "version": versions[-1]["version"] + 1,
        "round": number,
        "episodes": len(train),
        "new_episodes": sum(map(is_new, train)),
        "turns": sum(len(t.turns) for t in train),
    }
    if not config.loop.fit_steps:
        return {**version, "promoted": False, "why": FROZEN}
    if not any(round_of(t) == number for t in train):
        return {**version, "promoted": False, "why": NOTHING_NEW}
    own = {t.id for t in train if round_of(t) is not None and t.agent == POLICY}
    refit(session, own)
    held = list(rewarded(run, [*train, *held], config.worldmodel.goal)[len(train) :])
    kinds = {
        "old": _some([t for t in held if not is_new(t)], config.seed),
        "new": _some([t for t in held if is_new(t)], config.seed),
    }
    candidates = [candidate_folder(run, member) for member in range(config.worldmodel.members)]
    before = scores_of(session, [member_folder(run, member) for member in range(len(candidates))], kinds)
    after = scores_of(session, candidates, kinds)
    promoted = no_worse(before, after, config.loop.tolerance)
    why = "no worse on held-back episodes" if promoted else "not promoted: worse on held-back episodes"
    if not held:
        why = "not promoted: no episode is held back (collect.validation)"
    weights = [weights_version(load_model(folder, "loop", config.worldmodel)[0]) for folder in candidates]
    return {
        **version,
        "held": {kind: len(episodes) for kind, episodes in kinds.items()},
        "weights": "+".join(weights),
        "before": before,
        "after": after,
        "promoted": promoted,
        "why": why,
    }


def _some(episodes: Sequence[Trajectory], seed: int) -> list[Trajectory]:
    """At most ``_JUDGED`` of them."""
    rng = random.Random(derive_seed("loop judged", seed))
    return list(episodes) if len(episodes) <= _JUDGED else rng.sample(list(episodes), _JUDGED)


def true_turns(session: Session) -> int | None:
    """For how many turns at least half of the held-back episodes stay true in the run's world model.

    Each is dreamed open-loop along its own actions: the model reads what it has predicted. Episodes of the tasks that
    the loop plays are asked about where there are enough.

    Returns:
        ``None`` where fewer than ten episodes are held back.
    """
    config, held = session.config, session.config.worldmodel.goal.relabel_log(session.log.held)
    new = [t for t in held if t.id in {own.id for own in of_new_tasks(held)} and not t.prefix_turns]
    episodes = _some(new if len(new) >= _FEWEST else held, config.seed)
    if len(episodes) < _FEWEST:
        return None
    model = session.world_model(temperature=0.0)
    still = drift_metrics(asyncio.run(roll(model, episodes, config.dream.max_turns)))["true_until"]
    return max((int(k) for k, share in still.items() if share["n"] >= _FEWEST and share["value"] >= 0.5), default=0)
