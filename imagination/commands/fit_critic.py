from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from imagination.commands.check_train import longest_episode
from imagination.learning import critic
from imagination.learning.algorithms import Algorithm, build_algorithm
from imagination.learning.reward_shaping import RewardShaping, check_tiers
from imagination.runs.lifecycle import run_stage
from imagination.runs.log import read_log
from imagination.runs.models import context_of, load_model, weights_version
from imagination.runs.run_folder import RunFolder
from imagination.settings import Config, UserError
from policy.lm.render import ChatFormat
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory
from worldmodel.extras import need_diffusers
from worldmodel.extras.synther.transitions import Transitions

SYNTHER = "synther"  # of the folder under models/


def fit_critic(config: Config, folder: Path) -> None:
    """Optional: pre-train the value head on logged returns, for algorithms with a critic.

    Fits the value head, on the clone's hidden states, to the returns of logged episodes. `train` then starts
    from it instead of from values of 0. With critic.synther.ratio=0.5, half of each batch is synthetic:
    transitions of a diffusion model that is fitted to the log first (SynthER; needs
    pip install 'imagination[diffusion]').

    Reads: log/, models/policy-clone/
    Writes: models/critic/; models/synther/ with critic.synther.ratio

    Examples:
        imagine fit-critic run=mine algorithm=ppo
        imagine fit-critic run=mine algorithm=turn_ppo critic.synther.ratio=0.5

    Raises:
        UserError: the algorithm has no critic, no episode can be learned from, or an earlier stage is missing.
    """
    settings, algorithm = config.critic, build_algorithm(config.algorithm, longest_episode(config))
    if algorithm.critic is None:
        raise UserError(f"algorithm={algorithm.name} has no critic to fit: choose ppo, turn_ppo, st_ppo or bilevel_ppo")
    if wrong := check_tiers(config.train.reward_tiers):
        raise UserError(wrong)
    if settings.synther.ratio:
        need_diffusers("critic.synther.ratio")
    with run_stage(config, folder, "fit_critic") as run:
        model, chat = load_model(run.model("policy-clone"), "clone", config.policy)
        named = tuple(settings.agents) or ""  # all begin with nothing
        log = read_log(run, config.collect.validation)
        train, held = ([t for t in part if t.agent.startswith(named)] for part in log)
        if not train:
            raise UserError(f"no episode of the log is by critic.agents={settings.agents}")
        logged = transitions_of(config, algorithm, model, chat, train)
        if logged is None:
            raise UserError(
                f"no episode has a reward and fits policy.context={config.policy.context} tokens: raise that, or "
                "declare worldmodel.goal.observation"
            )
        real, kept_back = logged[0], transitions_of(config, algorithm, model, chat, held)
        measured: dict[str, Any] = {"transitions": len(real), "mean_return": float(real.returns.mean())}
        synthetic, seed = None, config.seed
        if settings.synther.ratio:
            synthetic, made = _upsample(run, config, real, None if kept_back is None else kept_back[0])
            measured["synther"] = made
        head = critic.fit_value_head(real, settings, seed, synthetic)
        critic.save_critic(
            head,
            run.model(critic.NAME),
            critic.made_for(weights_version(model), algorithm, config.train, config.worldmodel.goal),
        )
        measured["error"] = float(critic.squared_errors(head, real).mean())
        if kept_back is not None:
            other = kept_back[0]
            measured["kept_back_error"] = float(critic.squared_errors(head, other).mean())
            measured["kept_back_error_of_the_mean"] = float((other.returns - real.returns.mean()).square().mean())
        run.update({"critic": measured, "real_steps": {"fit_critic": 0}})
    print(f"critic: {_line(measured)}", file=sys.stderr)


def transitions_of(
    config: Config, algorithm: Algorithm, model: Any, chat: ChatFormat, episodes: Sequence[Trajectory]
) -> tuple[Transitions, Tensor] | None:
    """What these episodes teach a critic, see ``logged_transitions``; ``None`` where no episode fits the context."""
    relabelled = config.worldmodel.goal.relabel_log(episodes)
    rows = critic.logged_rows(
        chat, relabelled, RewardShaping(config.train.reward_tiers), context_of(model, config.policy)
    )
    if len(rows) < len(episodes):
        print(
            f"note: {len(episodes) - len(rows)} of {len(episodes)} episodes were left out: they have no reward, or are "
            f"longer than policy.context={config.policy.context} tokens",
            file=sys.stderr,
        )
    return (
        critic.logged_transitions(critic.with_returns(rows, algorithm), model, config.train.micro_tokens)
        if rows
        else None
    )


def _upsample(
    run: RunFolder, config: Config, real: Transitions, held: Transitions | None
) -> tuple[Transitions, dict[str, Any]]:
    """Synthetic transitions, and how like those kept back they and the logged ones are."""
    from worldmodel.extras.synther.model import Upsampler
    from worldmodel.extras.synther.transitions import similarity

    settings = config.critic.synther
    upsampler = Upsampler.fit(real, settings, config.seed)
    upsampler.save(run.model(SYNTHER))
    seed = derive_seed("synthetic transitions", config.seed)
    synthetic = upsampler.sample(settings.samples, settings.denoising_steps, seed)
    measured: dict[str, Any] = {"samples": len(synthetic), "kept_variance": upsampler.kept_variance}
    if held is not None and len(held) > 1:
        measured["synthetic"] = similarity(upsampler.denoiser, held, synthetic).to_json()
        measured["logged"] = similarity(upsampler.denoiser, held, real).to_json()
    return synthetic, measured


def _line(measured: dict[str, Any]) -> str:
    numbers = {key: value for key, value in measured.items() if key != "synther"}
    return ", ".join(
        f"{key.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{value} {key}"
        for key, value in numbers.items()
    )
