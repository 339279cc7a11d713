from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from imagination.data.augmentation import read_supplements, with_renamed
from imagination.data.batches import fit_batches, fitting
from imagination.data.examples import imitation_row
from imagination.data.initial_model import check_texts, initial_model
from imagination.learning.supervised import SupervisedTrainer
from imagination.runs.lifecycle import need, run_stage
from imagination.runs.log import read_log
from imagination.runs.models import context_of
from imagination.runs.processes import leave
from imagination.settings import CloneSettings, Config, UserError
from policy.lm.backbone import load_checkpoint, save_checkpoint
from policy.lm.engines.inprocess.decode import check_attention
from policy.lm.induction import plant_induction
from policy.lm.render import ChatFormat, policy_text
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory


def clone(config: Config, folder: Path) -> None:
    """Clone the initial policy from agents of the log, the mediocre ones by default.

    Behaviour cloning: cross-entropy on the agent's tokens of the episodes by clone.agents, or only of those that
    solved their task (clone.solved_only). A policy without a checkpoint of its own starts from the world model's
    weights. clone.world_steps also learns what the world answers, clone.supplements imitates what `reflect` and
    `relabel` have written.

    Reads: log/, models/worldmodel/
    Writes: models/policy-clone/

    Examples:
        imagine clone run=mine
        imagine clone run=mine clone.agents=[expert,noisy] clone.steps=100
    """
    with run_stage(config, folder, "clone") as run:
        train, _ = read_log(run, config.collect.validation)
        extra = read_supplements(run, config.clone.supplements)
        chosen = imitated(train, config.clone, needed=not extra)
        has_weights = config.worldmodel.kind != "code"
        from_world_model = config.clone.from_world_model and has_weights and not config.policy.model
        if from_world_model:
            folder = need(run.model("worldmodel"), "fit-world-model")
            model, tokenizer = load_checkpoint(str(folder), chat_template=config.policy.chat_template)
        else:
            weights = derive_seed("policy weights", config.seed)
            model, tokenizer = initial_model(run, config.worldmodel, config.vocab_size, config.policy, train, weights)
        chat = ChatFormat(tokenizer)
        logged, with_thoughts = [*chosen, *extra], {episode.id for episode in extra}
        texts = [text for t in logged for text in _actions(t, with_thoughts)]
        check_texts("actions", texts, chat, "", config.max_action_tokens)
        copies = with_renamed(logged, config.clone.renamed, config.seed, tokenizer)[len(logged) :]
        episodes = [*logged, *with_short_actions(copies, chat, config.max_action_tokens, with_thoughts)]
        context, weight = context_of(model, config.policy), config.clone.observation_weight
        if config.engine.name != "vllm":
            check_attention(model.config, context)
        rows = [
            imitation_row(chat, t, thoughts=True)
            if t.id in with_thoughts
            else imitation_row(chat, t, observations=weight)
            for t in episodes
        ]
        rows = fitting(rows, context, "policy.context")
        of_all_agents = (
            with_renamed(train, config.clone.renamed, config.seed, tokenizer) if config.clone.world_steps else []
        )
        first = [imitation_row(chat, t, actions=0.0, observations=1.0) for t in of_all_agents]
        settings = config.clone.decided(from_scratch=not (from_world_model or config.policy.model))
        seed = derive_seed("clone", config.seed)
        if settings.copying_steps:
            plant_induction(model, seed)
        batches, settings = fit_batches(
            rows,
            tokenizer,
            settings,
            seed,
            first=fitting(first, context, "policy.context") if first else (),
            first_steps=config.clone.world_steps,
        )
        trainer = SupervisedTrainer(run, "clone", settings, seed, keep_every=config.clone.keep_every)
        trainer.train(model, tokenizer, batches)
        leave()
        save_checkpoint(model, tokenizer, run.model("policy-clone"))
        run.update({"real_steps": {"clone": 0}})


def with_short_actions(
    copies: Sequence[Trajectory], chat: ChatFormat, limit: int, with_thoughts: Collection[str] = ()
) -> list[Trajectory]:
    """Those of the renamed copies whose actions have at most ``limit`` tokens; made-up names can be longer than those
    that they stand for. How many are left out is printed. ``with_thoughts`` are ids of episodes whose reasoning counts.
    """
    short = [t for t in copies if all(len(chat.encode(text)) < limit for text in _actions(t, with_thoughts))]
    if len(short) < len(copies):
        left_out = f"{len(copies) - len(short)} of {len(copies)} renamed copies"
        print(f"note: {left_out} have actions longer than max_action_tokens={limit}: left out", file=sys.stderr)
    return short


def _actions(episode: Trajectory, with_thoughts: Collection[str]) -> list[str]:
    return [policy_text(turn, episode.id in with_thoughts) for turn in episode.turns]


def imitated(log: Sequence[Trajectory], settings: CloneSettings, needed: bool = True) -> list[Trajectory]:
    """The episodes of the log that ``clone.agents`` and ``clone.solved_only`` choose. Raises ``UserError``: there is
    none, although it is ``needed``.
    """
    chosen = [t for t in log if t.agent.startswith(tuple(settings.agents))]
    if needed and not chosen:
        raise UserError(
            f"no episode of the log is by clone.agents={settings.agents}; it has {sorted({t.agent for t in log})}"
        )
    if not settings.solved_only:
        return chosen
    solved = [t for t in chosen if t.solved]
    if needed and not solved:
        raise UserError(f"clone.solved_only: none of the {len(chosen)} episodes by clone.agents solved its task")
    return solved
