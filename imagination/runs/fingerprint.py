"""Which settings decide what a stage makes: the same work has the same short hash. What of a run is done with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from imagination.settings import Config, EnvSettings
from imagination.settings.compose import saved_config
from imagination.settings.schema import ConfigError
from real_envs.files import read_json

# Names of folders, which processes work where, where losses are logged, what an hour costs, and what only looks at a
# run or starts others from it, decide nothing that is made.
_ASIDE = (
    *("run", "output", "jobs", "logger", "machine_price"),
    *("devices", "num_nodes", "strategy", "activation_checkpointing", "wait_minutes", "scale", "scale_sim"),
    *("imports", "rules", "loop", "few_shot", "audit", "compare", "ablation", "listing", "serve", "pretrain", "digi_q"),
    "learn_experience",
)
_WHOLE = tuple(f.name for f in fields(Config) if f.name not in _ASIDE)
_LOG = ("seed", "env", "games", "collect")
_WORLD = (*_LOG, "vocab_size", "worldmodel", "fit", "engine", "dream.max_tokens", "dream.temperature")
_CLONE = (*_WORLD, "policy", "max_action_tokens", "clone", "reflect", "hindsight")
_PROMPT = ("summary_tokens", "experience")
_TRAIN = tuple(name for name in _WHOLE if name != "evaluate")

# What a stage's result depends on, the settings of the stages before it included; other stages depend on all.
READS = {
    "collect": _LOG,
    "fit_world_model": _WORLD,
    "reflect": (*_WORLD, "policy", "max_action_tokens", "dream", "reflect", "experience"),
    "relabel": (*_LOG, "worldmodel.refusals", "hindsight"),
    "clone": _CLONE,
    "fit_critic": (*_CLONE, "algorithm", "dream.max_turns", "train.reward_tiers", "critic", *_PROMPT),
    "digi_q": (*_CLONE, *_PROMPT, "digi_q"),
    "train": _TRAIN,
    "loop": (*_TRAIN, "loop"),
    "learn_experience": (*_CLONE, *_PROMPT, "dream", "learn_experience"),
    "pretrain": ("seed", "vocab_size", "pretrain"),
}
# Settings that runs from before there were any are known without, where they are empty.
_SINCE = (
    *("chat_template", "keep_layers", "trim_vocabulary", "prm_beta", "prm_lr", "questions", "hindsight", "focus"),
    "misspelt",
)
# Stages that make the same whether rules answer in dreams or not.
_FITS = ("fit_world_model", "clone", "fit_critic", "digi_q")


def fingerprint(config: Config, stage: str = "") -> str:
    """A short hash of all settings that decide what ``stage`` makes; by default, what a whole run does."""
    chosen: dict[str, Any] = {}
    for name in READS.get(stage, _WHOLE):
        if name == "env" and config.env == EnvSettings(price=config.env.price):
            continue  # runs from before there were other worlds are known by that
        if name in _PROMPT and not getattr(config, name):
            continue  # as above
        value = reduce(getattr, name.split("."), config)
        chosen[name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        if name == "worldmodel" and stage in _FITS:
            # they answer beside the model, and are mined whatever it is fitted to
            del chosen[name]["rules"], chosen[name]["resamples"]
        if name == "worldmodel" and (stage in _FITS or config.worldmodel.exact == "off"):
            del chosen[name]["exact"]  # as above, and runs from before there was one are known without
        if name == "worldmodel":
            code = chosen[name].pop("code")  # as above
            if config.worldmodel.kind == "code":
                aside = ("url", "key_env", "timeout", "retries", "trust")
                chosen[name]["code"] = {key: value for key, value in code.items() if key not in aside}
        if name == "collect" and not config.collect.tasks:
            del chosen[name]["tasks"]  # as above
        if name == "train" and not config.train.max_staleness:
            del chosen[name]["max_staleness"]  # as above
        if name == "dream" and not config.dream.noise:
            for key in ("noise", "noise_base", "noise_actions"):
                del chosen[name][key]  # as above
        if name == "env":
            del chosen[name]["price"]  # what a step costs decides nothing that is made
        for model in (chosen[name], chosen[name].get("model")) if isinstance(chosen[name], dict) else ():
            for key in _SINCE:
                if isinstance(model, dict) and not model.get(key, True):
                    del model[key]
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]


STEPS = (
    *("collect", "fit_world_model", "refine_world_model", "reflect", "relabel", "clone", "fit_critic"),
    *("digi_q", "train", "evaluate"),
)
State = Literal["done", "other settings", "stopped", "not done"]


def summary(folder: Path) -> dict[str, Any]:
    """What the stages of a run noted; nothing for a new run."""
    path = folder / "summary.json"
    return read_json(path) if path.exists() else {}


def state(config: Config, folder: Path, stage: str) -> State:
    """Whether a stage was finished with these settings or with others, or was stopped on the way."""
    done = summary(folder).get("done", {}).get(stage)
    if done == fingerprint(config, stage):
        return "done"
    if (folder / "checkpoints" / f"{stage}.ckpt").exists():
        return "stopped"
    return "other settings" if done else "not done"


def outdated(folder: Path, stages: Iterable[str]) -> list[str]:
    """Those of the stages that were done with other settings than those that the run has now."""
    try:
        config = saved_config(folder, Config)
    except ConfigError:  # a run within another one has none
        return []
    return [stage for stage in stages if state(config, folder, stage) == "other settings"]
