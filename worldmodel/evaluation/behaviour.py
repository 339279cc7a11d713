"""Would an agent notice? How a predicted state changes what a frozen policy does next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from policy.lm.batch import by_length, padded
from policy.lm.forward import encode, hidden_before, token_logits
from policy.lm.render import ChatFormat, policy_prompt
from real_envs.trajectory import Owner, Trajectory, Turn
from worldmodel.evaluation.intervals import clusters, estimate, ratio
from worldmodel.evaluation.transitions import Judged

Question = tuple[str, Sequence[Turn], str]  # start, history, action


@torch.no_grad()
def action_logprobs(
    model: Any, chat: ChatFormat, questions: Sequence[Question], context: int, max_tokens: int = 4096
) -> list[float | None]:
    """log pi(action | start, history) of a causal LM at temperature 1, the token that ends the action included.

    ``None`` for a sequence longer than ``context``; a forward pass has at most ``max_tokens``.
    """
    rows: list[list[int]] = []
    sizes: list[int] = []
    for start, history, action in questions:
        tokens = policy_prompt(chat, start, history, Owner.SCAFFOLD)
        wanted = (*chat.encode(action), chat.stop)
        rows.append([*tokens.ids, *wanted])
        sizes.append(len(wanted))
    logprobs_of: list[float | None] = [None] * len(rows)
    fitting = [i for i, row in enumerate(rows) if len(row) <= context]
    device = next(model.parameters()).device
    for batch in by_length([len(rows[i]) for i in fitting], max_tokens):
        chosen = [fitting[i] for i in batch]
        own = [sizes[i] for i in chosen]
        ids = padded([rows[i] for i in chosen], 0, torch.long).to(device)
        ends = torch.tensor([len(rows[i]) for i in chosen], device=device)[:, None]
        places = torch.arange(ids.shape[1], device=device)
        real = places < ends
        asked = real & (places >= ends - torch.tensor(own, device=device)[:, None])
        predictors = hidden_before(model, ids, real, asked)
        table = token_logits(model, predictors.states).log_softmax(-1)
        logprobs = table[predictors.which, ids[asked]]
        for i, of_action in zip(chosen, logprobs.split(own), strict=True):
            logprobs_of[i] = sum(of_action.tolist())
    return logprobs_of


def behaviour_similarity(
    model: Any, chat: ChatFormat, asked: Sequence[tuple[Question, str, str]], context: int
) -> list[float]:
    """``exp(-|log pi(a | predicted state) - log pi(a | true state)|)`` of a frozen policy, in [0, 1]: how little its
    next action changes (BehR, arXiv 2604.13824, there a difference without the exponent).

    Args:
        asked: start, history and next logged action; the observation that was predicted in place of the history's last;
            and the true one. What does not fit ``context`` has 0.
    """
    questions: list[Question] = []
    for (start, history, action), *texts in asked:
        questions += [(start, (*history[:-1], replace(history[-1], observation=text)), action) for text in texts]
    found = iter(action_logprobs(model, chat, questions, context))
    pairs = list(zip(found, found, strict=True))
    return [0.0 if a is None or b is None else math.exp(-abs(a - b)) for a, b in pairs]


@torch.no_grad()
def embedding_distances(model: Any, chat: ChatFormat, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """``1 - cos`` of two texts' mean last hidden states under a frozen causal LM, in [0, 2] (RWML, arXiv 2602.05842,
    which takes a model of embeddings)."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    means: dict[str, torch.Tensor] = {}
    for text in texts:
        ids = torch.tensor([chat.encode(text) or [chat.stop]], device=next(model.parameters()).device)
        means[text] = encode(model, ids, torch.ones_like(ids)).states.float().mean(0)
    return [1 - float(torch.cosine_similarity(means[a], means[b], dim=0)) for a, b in pairs]


def behaviour_metrics(
    judged: Sequence[Judged], episodes: Sequence[Trajectory], model: Any, chat: ChatFormat, context: int, seed: int
) -> dict[str, Any]:
    """BehR: mean log pi(a | predicted state) - mean log pi(a | true state) under a frozen policy.

    a is the next action of the episode, and the state is its history, in which the last observation is the predicted
    or the true one ("Beyond State Consistency", arXiv 2604.13824). 0 is best; below 0 the policy would rather have done
    something else in the dream. ``absolute`` is the mean size of the change, in which opposite signs do not cancel.
    Malformed predictions have no state and are left out, as are last turns.
    """
    by_id = {t.id: t for t in episodes}
    asked: list[Judged] = []
    questions: list[Question] = []
    for j in judged:
        turns = by_id[j.trajectory_id].turns
        if j.predicted is None or j.index + 1 >= len(turns):
            continue
        asked.append(j)
        if not j.text_right:
            past, turn, action = turns[: j.index], turns[j.index], turns[j.index + 1].action
            start = by_id[j.trajectory_id].start
            for text in (j.predicted.observation, turn.observation):
                questions.append((start, (*past, replace(turn, observation=text)), action))
    answers = iter(action_logprobs(model, chat, questions, context))
    rows, tasks, names = [], [], []
    for j in asked:
        difference = 0.0
        if not j.text_right:
            predicted, true = next(answers), next(answers)
            if predicted is None or true is None:
                continue
            difference = predicted - true
        rows.append((difference, 1.0))
        tasks.append(j.task_id)
        names.append(j.trajectory_id)
    cluster = clusters(tasks, names)
    return {
        "behr": estimate(rows, cluster, ratio, seed).to_json(),
        "absolute": estimate(
            [(abs(d), one) for d, one in rows], cluster, ratio, seed, bounds=(0.0, math.inf)
        ).to_json(),
        "differing": sum(not j.text_right for j in asked),
    }
