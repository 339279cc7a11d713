from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from imagination.data.batches import fit_batches
from imagination.learning.algorithms import ALGORITHMS
from imagination.learning.critic import logged_rows, logged_transitions, with_returns
from imagination.learning.policy_module import turn_states
from imagination.learning.q_learning import best_actions, fit_q
from imagination.learning.reward_shaping import RewardShaping
from imagination.learning.supervised import SupervisedTrainer
from imagination.runs.lifecycle import run_stage
from imagination.runs.models import adapted, context_of
from imagination.session import Session
from imagination.settings import Config, UserError
from policy.lm.backbone import save_checkpoint
from policy.lm.batch import Row, collate
from policy.lm.engine import Completion, Engine, EngineFailure, Sampling
from real_envs.seeding import derive_seed
from real_envs.trajectory import Source


def digi_q(config: Config, folder: Path) -> None:
    """Train the policy offline, by Q-values of the log, without dreams or real steps.

    Digi-Q: fits Q and V heads, on the clone's frozen hidden states, to logged turns by TD learning. Then the clone
    samples actions in logged states, and the policy imitates the one of the highest Q where that is above V. What is
    imitated is learned with the settings of clone.*, for digi_q.steps. Replaces the policy of `train`.

    Reads: log/, models/policy-clone/
    Writes: models/policy/

    Examples:
        imagine digi-q run=mine
        imagine digi-q run=mine digi_q.candidates=32 digi_q.gamma=0.99

    Raises:
        UserError: no episode can be learned from, no sampled action is better than V, or an earlier stage is missing.
    """
    settings, seed = config.digi_q, derive_seed("digi-q", config.seed)
    with run_stage(config, folder, "digi_q") as run:
        session = Session(config, run)
        policy = session.policy("policy-clone")
        model, chat = policy.model, policy.chat
        log = [t for t in session.log.train if t.agent.startswith(tuple(settings.agents) or "")]
        context, micro = context_of(model, config.policy), config.clone.micro_tokens
        relabelled = config.worldmodel.goal.relabel_log(log)
        rows = logged_rows(chat, relabelled, RewardShaping(), context - config.max_action_tokens)
        if not rows:
            raise UserError(
                f"none of {len(log)} logged episodes of digi_q.agents={settings.agents} has a reward and fits "
                f"policy.context={config.policy.context} tokens, an action more included"
            )

        # of each turn: the state before its action, the state after it, and what came next
        batch = with_returns(rows, ALGORITHMS["turn_ppo"])
        turns, _ = logged_transitions(batch, model, micro)
        states, exists = turn_states(batch, model, micro)
        heads = fit_q(turns, states[exists].cpu(), settings, seed)

        prompts = [batch.ids[i, :t].tolist() for i, t in batch.learned.nonzero().tolist()]
        count = min(settings.states or len(prompts), len(prompts))
        chosen = sorted(random.Random(derive_seed("states", seed)).sample(range(len(prompts)), count))
        sampling = Sampling(config.max_action_tokens, chat.stop)
        engine = session.engines.make(model, chat, context)
        played = asyncio.run(_sample(engine, [prompts[k] for k in chosen], sampling, settings.candidates, seed))
        imitated, failed = list[Row](), 0
        for k, completions in zip(chosen, played, strict=True):
            failed += settings.candidates - len(completions)
            actions = dict.fromkeys(completion.ids for completion in completions if completion.stopped)
            if candidates := [_candidate(prompts[k], action) for action in actions]:
                after = turn_states(collate(candidates, pad=0), model, micro)[0][:, 0].cpu()
                best = int(best_actions(heads.q(after)[None], heads.v(turns.states[k : k + 1])))
                if best >= 0:
                    imitated.append(candidates[best])
        if not imitated:
            raise UserError(
                f"no action that was sampled in {count} logged states is better than their values: raise "
                "digi_q.candidates or digi_q.td_steps, or log agents that do better now and then"
            )
        run.update({"digi_q": {"turns": len(turns), "states": count, "imitated": len(imitated), "failed": failed}})
        print(f"digi-q: of {count} logged states {len(imitated)} have an action above V", flush=True)

        model = adapted(model, config.policy)
        fit = replace(config.clone.decided(from_scratch=False), steps=settings.steps)
        batches, fit = fit_batches(imitated, chat.tokenizer, fit, seed)
        SupervisedTrainer(run, "digi_q", fit, seed).train(model, chat.tokenizer, batches)
        save_checkpoint(model, chat.tokenizer, run.model("policy"))
        run.update({"real_steps": {"digi_q": 0}, "trained_tasks": "train"})


async def _sample(
    engine: Engine, prompts: Sequence[list[int]], sampling: Sampling, count: int, seed: int
) -> list[list[Completion]]:
    """So many actions after each prompt, one after the other, as they share what the engine caches of it; fewer where
    generation broke.
    """

    async def of(k: int) -> list[Completion]:
        seeds = [derive_seed("candidate", seed, k, j) for j in range(count)]
        sampled: list[Completion] = []
        for s in seeds:
            with suppress(EngineFailure):
                sampled.append(await engine.complete(prompts[k], sampling, s, session=k))
        engine.release(k)
        return sampled

    return await asyncio.gather(*map(of, range(len(prompts))))


def _candidate(prompt: list[int], action: tuple[int, ...]) -> Row:
    """An action as it would stand in the log; only its tokens are imitated."""
    sampled = torch.tensor([False] * len(prompt) + [True] * len(action))
    return Row([*prompt, *action], sampled, Source.REAL, ce_weight=sampled.float(), turns=torch.where(sampled, 0, -1))
