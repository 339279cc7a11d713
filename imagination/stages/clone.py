"""Stage ``clone``: the starting policy imitates the mediocre part of the log."""

from __future__ import annotations

from pathlib import Path

from imagination.learning.experience import imitation_row
from imagination.learning.initial_model import check_texts, initial_model
from imagination.learning.renaming import with_renamed
from imagination.learning.supervise import fitting, supervise
from imagination.runs.lifecycle import finish, need, open_run
from imagination.runs.log import read_log
from imagination.runs.models import context_of
from imagination.settings import Config, UserError
from policy.lm.backbone import load_checkpoint, save_checkpoint
from policy.lm.render import ChatFormat
from real_envs.streams import stream_seed


def clone(config: Config, folder: Path) -> None:
    """Behaviour cloning on the mediocre part of the log. Writes ``models/policy-clone``."""
    run = open_run(config, folder, "clone")
    with run.timed("clone"):
        train, _ = read_log(run, config.collect.validation)
        chosen = [t for t in train if t.agent.startswith(tuple(config.clone.agents))]
        if not chosen:
            agents = sorted({t.agent for t in train})
            raise UserError(f"no episode of the log is by clone.agents={config.clone.agents}; it has {agents}")
        learned = config.clone.from_world_model and not config.policy.model
        if learned:
            model, tokenizer = load_checkpoint(str(need(run.model("worldmodel"), "fit-world-model")))
        else:
            weights = stream_seed("policy weights", config.seed)
            model, tokenizer = initial_model(run, config.worldmodel, config.vocab_size, config.policy, train, weights)
        chat = ChatFormat(tokenizer)
        chosen = with_renamed(chosen, config.clone.renamed, config.seed)
        check_texts("actions", [u.action for t in chosen for u in t.turns], chat, "", config.max_action_tokens)
        rows = fitting([imitation_row(chat, t) for t in chosen], context_of(model, config.policy), "policy.context")
        supervise(
            run,
            config.logger,
            "clone",
            model,
            tokenizer,
            rows,
            config.clone,
            stream_seed("clone", config.seed),
            keep_every=config.clone.keep_every,
            from_scratch=not (learned or config.policy.model),
        )
        save_checkpoint(model, tokenizer, run.model("policy-clone"))
        run.update({"real_steps": {"clone": 0}})
    finish(run, "clone")
