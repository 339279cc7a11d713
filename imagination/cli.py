"""The `imagine` command: ``imagine <stage> [key=value ...]``.

A stage is a plain function ``(config, folder) -> None``. This file finds it, makes its typed configuration, owns the
run folder ``<output>/<run>`` and turns the user's mistakes into one clear line and exit code 2. Nothing heavy is
imported before the whole command line is known to be right.

Exit codes: 0 done, 2 the user's mistake, 130 stopped with Ctrl-C, 1 (with a traceback) a mistake of ours.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagination import compose
from imagination.schema import ConfigError, docstring, explanations, flat_defaults, schema_keys, type_name, unknown

OVERVIEW = """\
Train LLM agents in imagination: learn a world model from logged episodes, dream new ones in it, train the policy on
them, and measure it in the real environment.

usage: imagine <stage> [key=value ...]
       imagine <stage> --help     what the stage does, reads and writes, with examples and its keys
"""

EXAMPLES = """\
examples:
  imagine demo                                          the whole flow, in minutes, without a GPU
  imagine train run=mine preset=tiny train.updates=5    one stage: a run folder, a preset, one key
  imagine train run=mine                                the same run goes on, with the same settings
"""

TRACEBACK = "A mistake is told in one line, with exit code 2; IMAGINE_TRACEBACK=1 shows where it was raised."

# The errors whose message is written for the user. They are named, not imported: most live in heavy modules.
USER_ERRORS = (
    ("imagination.settings.errors", "UserError"),
    ("imagination.reporting.report", "ReportError"),
    ("policy.lm.backbone", "CheckpointError"),
    ("policy.lm.engine", "EngineUnavailable"),
    ("policy.lm.engine", "UnsupportedModel"),
    ("policy.lm.render", "ChatTemplateError"),
    ("real_envs.manifest", "StoreError"),
)

# What is asked for once: a run does not remember it.
PASSING = ("compare.show",)


@dataclass(frozen=True)
class Stage:
    """One word of the command line.

    Attributes:
        name: ``fit-world-model``.
        summary: one line for ``imagine --help``.
        help: what it does and why, for ``imagine <stage> --help``.
        reads: files of the run folder that must be there.
        writes: files of the run folder that it makes.
        examples: two or three literal command lines.
        sections: the parts of the configuration that matter to it; its help lists their keys.
        function: ``module:name``, imported only when the stage runs.
        run: the run's name where the command line gives neither that nor a preset.
    """

    name: str
    summary: str
    help: str
    reads: str
    writes: str
    examples: tuple[str, ...]
    sections: tuple[str, ...]
    function: str
    run: str = ""


_STAGES = (
    Stage(
        name="demo",
        summary="the whole flow at once: collect, fit, clone, dream, evaluate, report",
        help=(
            "Runs every stage below in about ten minutes on two CPU cores, then prints a table and where the page is.\n"
            "Stopped, it goes on where it was; finished, it only reports again."
        ),
        reads="nothing",
        writes="everything that the stages below write",
        examples=("imagine demo", "imagine demo preset=tiny", "imagine demo run=demo-7 seed=7"),
        sections=(),
        function="imagination.stages.demo:demo",
        run="demo",
    ),
    Stage(
        name="demo-seeds",
        summary="the demo for seeds 0, 1 and 2, each beside a control that trains in the real games",
        help=(
            "One seed proves little. Runs the demo once a seed, then trains the same clone by the same updates in\n"
            "the real games: the upper bound that costs real steps. About 40 minutes on two CPU cores."
        ),
        reads="nothing",
        writes="seed-0/ seed-1/ seed-2/ (each a run, with its control/), table.md, table.json",
        examples=("imagine demo-seeds", "imagine demo-seeds preset=tiny run=tiny-seeds"),
        sections=(),
        function="imagination.stages.demo:demo_seeds",
        run="demo-seeds",
    ),
    Stage(
        name="collect",
        summary="generate the games and log scripted agents of many skills in them",
        help=(
            "Makes real TextWorld games, a training and a held-out set, and plays them with an expert, noisy,\n"
            "careless and random agents. Every episode goes into the log; all later training starts from it."
        ),
        reads="nothing",
        writes="games/, log/",
        examples=("imagine collect run=mine", "imagine collect run=mine preset=tiny seed=3"),
        sections=("games", "collect"),
        function="imagination.stages.collect:collect",
    ),
    Stage(
        name="fit-world-model",
        summary="learn from the log what the world answers to an action",
        help=(
            "Trains the world model on what the environment said in real episodes, never on its own dreams, and\n"
            "measures it on episodes it has not seen."
        ),
        reads="log/",
        writes="tokenizer/, models/worldmodel/ (worldmodel-1/, ... for further members)",
        examples=(
            "imagine fit-world-model run=mine",
            "imagine fit-world-model run=mine worldmodel.kind=delta worldmodel.members=3",
            "imagine fit-world-model run=mine worldmodel.model=Qwen/Qwen2.5-0.5B-Instruct worldmodel.lora.rank=16",
        ),
        sections=("worldmodel", "fit", "engine"),
        function="imagination.stages.fit:fit_world_model",
    ),
    Stage(
        name="refine-world-model",
        summary="optional: RL of the world model on how right its answers to logged actions are",
        help=(
            "Answers logged actions several times, checks each answer against the log, and makes the right ones\n"
            "likelier (GRPO). The result takes the model's place only if it is no worse on held-out episodes. Run it\n"
            "before `clone`, whose policy starts from the world model."
        ),
        reads="log/, models/worldmodel/",
        writes="models/worldmodel/, models/worldmodel-before/, or models/worldmodel-refined/ where it is worse",
        examples=(
            "imagine refine-world-model run=mine",
            "imagine refine-world-model run=mine refine.metric=diff_f1 refine.lr=2e-5",
        ),
        sections=("refine", "worldmodel", "engine"),
        function="imagination.stages.refine:refine_world_model",
    ),
    Stage(
        name="clone",
        summary="make the starting policy: imitate the mediocre agents of the log",
        help=(
            "Behaviour cloning: cross-entropy on the agent's tokens of the episodes by clone.agents. A policy without\n"
            "a checkpoint of its own starts from the world model's weights."
        ),
        reads="log/, models/worldmodel/",
        writes="models/policy-clone/",
        examples=("imagine clone run=mine", "imagine clone run=mine clone.agents=[expert,noisy] clone.steps=100"),
        sections=("policy", "clone"),
        function="imagination.stages.fit:clone",
    ),
    Stage(
        name="train",
        summary="improve the policy in dreams, without a real step",
        help=(
            "Plays groups of episodes inside the world model with the current policy, judges them by the chosen\n"
            "algorithm and updates the policy; expert episodes of the log are mixed in. Stopped, the same command\n"
            "goes on from the last checkpoint. train.world=real plays the same updates in the real games, as a control."
        ),
        reads="log/, models/worldmodel/, models/policy-clone/",
        writes="models/policy/, checkpoints/, metrics.jsonl, rollouts.jsonl",
        examples=(
            "imagine train run=mine",
            "imagine train run=mine algorithm=ppo algorithm.gamma=0.99",
            "imagine train run=mine train.updates=5 dream.min_confidence=0.9 engine=vllm",
        ),
        sections=("train", "algorithm", "dream", "tripwires", "engine"),
        function="imagination.stages.train:train",
    ),
    Stage(
        name="evaluate",
        summary="the verdict: the policy before and after, in the real games and in the dream",
        help=(
            "Plays training and held-out games for real and in dreams, replays dreams in the real games, and measures\n"
            "the world model on the policy's own actions."
        ),
        reads="games/, models/",
        writes="rollouts.jsonl, summary.json",
        examples=("imagine evaluate run=mine", "imagine evaluate run=mine evaluate.episodes=100"),
        sections=("evaluate", "engine"),
        function="imagination.stages.evaluate:evaluate",
    ),
    Stage(
        name="audit",
        summary="is the world model good enough to dream in? with reasons, intervals and examples",
        help=(
            "Measures a world model: exact match by turn and by size of the change, rewards, calibration, refusals,\n"
            "action sensitivity and drift; in the real games also whether it ranks policies as they really rank, and\n"
            "how it judges the policy's own actions. Where no real game is there, the log alone is judged."
        ),
        reads="log/, models/, games/ where it is there",
        writes="audit.json, audit.html",
        examples=(
            "imagine audit run=mine",
            "imagine audit run=mine audit.episodes=40",
            "imagine audit run=mine audit.policies=[outputs/a/models/policy,outputs/b/models/policy]",
        ),
        sections=("audit", "evaluate", "dream", "engine"),
        function="imagination.stages.audit:audit",
    ),
    Stage(
        name="audit-table",
        summary="the targets of the audit for seeds 0, 1 and 2, or for runs that you name",
        help=(
            "Audits every world model of several runs. Runs that are there are used; missing ones of seeds 0, 1 and 2\n"
            "are made as far as an audit needs them, with checkpoints of the policy kept on the way. Their clones are\n"
            "also trained in dreams alone, with guard and tripwires and without (ablation=gating)."
        ),
        reads="nothing, or the runs of audit.runs",
        writes="audit-table.md, audit-table.json, gating.json; audit.json and audit.html in each run",
        examples=(
            "imagine audit-table",
            "imagine audit-table audit.runs=[outputs/a,outputs/b] audit.world_models=[worldmodel]",
        ),
        sections=("audit",),
        function="imagination.stages.audit_table:audit_table",
        run="demo-seeds",
    ),
    Stage(
        name="ablate",
        summary="what is a setting worth? the same clones trained with and without it, and played for real",
        help=(
            "Starts from the clones and world models of several runs, trains each arm in a folder of its own, and\n"
            "plays every result in the same real games. Missing runs of seeds 0, 1 and 2 are made. An arm that was\n"
            "finished is not done again; about two minutes an arm and a seed."
        ),
        reads="nothing, or the runs of ablation.runs",
        writes="arms/, ablation.md, ablation.json",
        examples=(
            "imagine ablate ablation=gating",
            "imagine ablate ablation=masks ablation.runs=[outputs/demo] run=masks",
            "imagine ablate ablation.arms.grpo=algorithm=grpo ablation.arms.rloo=algorithm=rloo",
        ),
        sections=("ablation",),
        function="imagination.stages.ablate:ablate",
        run="demo-seeds",
    ),
    Stage(
        name="compare",
        summary="put dreams beside reality, turn by turn, and show where they part",
        help=(
            "Lets the policy dream, replays its dreamed actions in the real games, dreams logged episodes again with\n"
            "their own actions, and aligns both sides turn by turn: where do they part first, and in what? Then the\n"
            "same policy free in both worlds: success, length, actions, tokens and cost. Logs of worlds that this\n"
            "program cannot play are compared as far as they go. compare.html is one file to search, filter and\n"
            "share; compare.show=<id> prints one pair and plays nothing."
        ),
        reads="models/, and games/ or log/ (compare.show: compare.json)",
        writes="compare.html, compare.json",
        examples=(
            "imagine compare run=mine",
            "imagine compare run=mine compare.policy=policy-clone compare.episodes=50",
            "imagine compare run=mine compare.show=dream/train/tw-r3-o5-q5-s1/0",
        ),
        sections=("compare",),
        function="imagination.stages.compare:compare",
    ),
    Stage(
        name="report",
        summary="put the results of a run on one page: imagined against real",
        help="Reads what the other stages wrote and draws the curves. It trains nothing and may be run at any time.",
        reads="summary.json, metrics.jsonl, rollouts.jsonl",
        writes="report.html, report.md, report.json",
        examples=("imagine report run=mine", "imagine report run=demo"),
        sections=(),
        function="imagination.stages.report:report",
    ),
)
STAGES: Mapping[str, Stage] = {stage.name: stage for stage in _STAGES}


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(words)
    except BrokenPipeError:  # `imagine train --help | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"\nstopped; to go on: imagine {shlex.join(words)}", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("IMAGINE_TRACEBACK") == "1" or not _is_users(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _command(words: Sequence[str]) -> int:
    if not words:
        print(overview(), file=sys.stderr)
        return 2
    name, *overrides = words
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name not in STAGES:
        raise unknown("stage", name, list(STAGES))
    stage = STAGES[name]
    if {"-h", "--help"} & set(overrides):
        print(stage_help(stage))
        return 0

    if stage.run and not any(word.startswith(("run=", "preset=")) for word in overrides):
        overrides = [f"run={stage.run}", *overrides]
    # oneDNN keeps a compiled kernel with its scratch memory for each of the last 1024 shapes; batches of text have ever
    # new shapes, so that cache grows to gigabytes and is never hit. It is read when torch is first used.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    config, folder = prepare(overrides)
    function: Callable[[Any, Path], None] = _load(stage.function)
    try:
        function(config, folder)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, KeyboardInterrupt):
            raise  # Lightning makes a plain exit(1) of Ctrl-C, after it has shut down
        where = [word for word in overrides if word.startswith("output=")]  # the rest is remembered in the folder
        again = shlex.join([stage.name, f"run={config.run}", *where])
        print(f"\nstopped; to go on: imagine {again}", file=sys.stderr)
        return 130
    return 0


def prepare(overrides: Sequence[str]) -> tuple[Any, Path]:
    """The configuration of a run and its folder, in which both it and the overrides are now written down.

    A run keeps the settings that it was started with: what is given now comes on top of what was given before. So
    ``imagine train run=mine`` goes on after ``imagine train run=mine preset=tiny`` with the preset still in force.
    """
    schema = _load("imagination.settings:Config")
    config = compose.load_config(overrides, schema)
    folder = compose.run_folder(config.run, Path(config.output))
    if earlier := compose.remembered_overrides(folder):
        overrides = compose.merge_overrides(earlier, overrides)
        config = compose.load_config(overrides, schema)
        print(f"run '{config.run}' goes on with: {shlex.join(overrides)}", file=sys.stderr)
    compose.save_config(config, folder)
    compose.remember_overrides([o for o in overrides if o.partition("=")[0] not in PASSING], folder)
    return config, folder


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _is_users(error: Exception) -> bool:
    """Whether the error says what the user can do. A type that was never imported cannot have been raised."""
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in USER_ERRORS]
    return isinstance(error, (ConfigError, *(kind for kind in kinds if kind)))


def overview() -> str:
    """``imagine --help``."""
    stages = "\n".join(f"  {stage.name:<17}{stage.summary}" for stage in STAGES.values())
    return f"{OVERVIEW}\nstages:\n{stages}\n\n{EXAMPLES}\n{_groups_help()}\n{TRACEBACK}"


def stage_help(stage: Stage) -> str:
    """``imagine <stage> --help``; its keys and defaults are read from the dataclasses and never out of date."""
    examples = "\n".join(f"  {example}" for example in stage.examples)
    return (
        f"imagine {stage.name}: {stage.summary}\n\n{stage.help}\n\n"
        f"in <output>/<run>/, by default outputs/default/\n"
        f"  reads   {stage.reads}\n  writes  {stage.writes}, config.yaml\n\n"
        f"examples:\n{examples}\n\n{_groups_help()}\n{_keys_help(stage.sections)}"
    )


def _groups_help() -> str:
    lines = []
    for group, names in compose.groups(compose.config_folder()).items():
        line = f"  {group}="
        for name in (*(f"{name}|" for name in names[:-1]), names[-1]):
            if len(line) + len(name) > 118:
                lines.append(line)
                line = " " * len(f"  {group}=")
            line += name
        lines.append(line)
    return "groups of settings (files in configs/):\n" + "\n".join(lines) + "\n"


def _keys_help(sections: Sequence[str]) -> str:
    """A block a section: its dataclass's docstring, then a line a key, ``train.updates=100    an int; how often``."""
    schema = _load("imagination.settings:Config")
    keys, defaults, words = schema_keys(schema), flat_defaults(schema), explanations(schema)
    blocks = ["keys and their defaults (files in configs/ may choose others):"]
    for section in ("", *sections):
        about = f"{section}: {docstring(keys[section])}" if section else "for every stage"
        lines = [
            f"  {f'{key}={default}':<36} {type_name(keys[key])}" + (f"; {words[key]}" if key in words else "")
            for key, default in defaults.items()
            if (key.partition(".")[0] if "." in key else "") == section
        ]
        blocks.append("\n".join([about, *lines]))
    return "\n\n".join(blocks)
