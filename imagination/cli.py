"""The `imagine` command: ``imagine <stage> [key=value ...]``.

A stage is a plain function ``(config, folder) -> None``. This file finds it, composes its typed configuration, and
prints user errors in one line. Nothing heavy is imported before the whole command line is known to be right.

Exit codes: 0 done, 2 user error, 130 stopped with Ctrl-C, 1 (with a traceback) internal error.
"""

from __future__ import annotations

import ast
import errno
import importlib
import os
import re
import shlex
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from imagination.settings import compose
from imagination.settings.schema import explanations, flat_defaults, schema_keys, summary, type_name, unknown
from real_envs.errors import hides_traceback, printable, with_disk_errors_named

OVERVIEW = """\
Train LLM agents in imagination: learn a world model from logged episodes, dream new ones in it, train the policy on
them, and measure it in the real environment.

usage: imagine <stage> [key=value ...]
       imagine <stage> --help     what the stage does, reads and writes, with examples and its keys
       imagine <stage> --dry-run  the settings, and what would be done, done again or skipped; nothing is written
"""

EXAMPLES = """\
examples:
  imagine demo                                          the whole flow, in minutes, without a GPU
  imagine train run=mine preset=tiny train.updates=5    one stage: a run folder, a preset, one key
  imagine train run=mine                                the same run goes on, with the same settings
  imagine import my-log.jsonl run=mine                  logs of your own, in place of `imagine collect`
"""

TRACEBACK = "An error of yours is one line, with exit code 2; IMAGINE_TRACEBACK=1 shows where it was raised."

_FIRST_SAYS = 10.0  # seconds in which others are ended where the first of several processes has the same error
_PROCESSES = ("devices", "num_nodes", "strategy", "activation_checkpointing")
# Keys that apply to one command only: a run does not remember them.
TRANSIENT = ("compare.show", "listing.format", "imports.format", "imports.files", *_PROCESSES)
DRY_RUN = "--dry-run"


_DOCSTRING = re.compile(r"(.+?)\.?\n\n([\s\S]+?)\n\nReads: (.+)\nWrites: (.+)\n\nExamples:\n((?: {4}.+\n?)+)")


class StageDoc(NamedTuple):
    """The parts of the docstring of a stage's function."""

    summary: str  # one line, for ``imagine --help``
    text: str  # what it does and why
    reads: str  # files of the run folder that must be there
    writes: str  # files of the run folder that it makes
    examples: list[str]  # literal command lines


@dataclass(frozen=True)
class Stage:
    """One word of the command line."""

    name: str  # ``fit-world-model``
    function: str  # ``module:name``, imported only when the stage runs
    sections: tuple[str, ...] = ()  # the parts of the configuration that matter to it; its help lists their keys
    run: str = ""  # the run's name where the command line gives neither that nor a preset
    preset: str = ""  # of a new run where the command line gives neither that nor a world
    # two settings that bare words of the command line fill: the name of a format, and a list of files
    places: tuple[str, ...] = ()
    writes_run: bool = True  # whether it works in the folder of a run, which then keeps its settings
    locks: bool = True  # whether no other process may write there meanwhile

    @cached_property
    def doc(self) -> StageDoc:
        module, _, name = self.function.partition(":")
        path = Path(__file__).parents[1] / f"{module.replace('.', '/')}.py"
        functions = (node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef))
        docstring = next(ast.get_docstring(node) or "" for node in functions if node.name == name)
        match = _DOCSTRING.match(docstring)
        assert match is not None, f"{self.function}: its docstring lacks Reads, Writes or Examples"
        summary, text, reads, writes, examples = match.groups()
        return StageDoc(summary[0].lower() + summary[1:], text, reads, writes, textwrap.dedent(examples).splitlines())


def _stage(name: str, place: str, *sections: str, **more: str | bool | tuple[str, ...]) -> Stage:
    return Stage(name, f"imagination.commands.{place}", sections, **more)  # type: ignore[arg-type]


_DREAMED = ("dream", "train", "algorithm")
_ALL = (
    _stage("demo", "experiments.demo:demo", run="demo", preset="demo"),
    _stage("demo-seeds", "experiments.demo:demo_seeds", run="demo-seeds", preset="demo"),
    _stage("pretrain", "pretrain:pretrain", "pretrain", run="base", preset="base"),
    _stage("collect", "collect:collect", "env", "games", "collect"),
    _stage("panel", "panel:panel", "env", "games", writes_run=False),
    _stage("import", "import_logs:import_logs", "imports", places=("imports.format", "imports.files")),
    _stage("fit-world-model", "fit_world_model:fit_world_model", "worldmodel", "fit", "engine"),
    _stage("rules", "rules:rules", "rules", "worldmodel"),
    _stage("refine-world-model", "refine_world_model:refine_world_model", "refine", "worldmodel", "engine"),
    _stage("reflect", "reflect:reflect", "reflect", "worldmodel", "dream", "engine"),
    _stage("relabel", "relabel:relabel", "hindsight"),
    _stage("clone", "clone:clone", "policy", "clone"),
    _stage("fit-critic", "fit_critic:fit_critic", "critic", "algorithm", "policy"),
    _stage("digi-q", "digi_q:digi_q", "digi_q", "clone", "policy", "engine"),
    _stage("learn-experience", "learn_experience:learn_experience", "learn_experience", "dream", "engine"),
    _stage("train", "train:train", "train", "algorithm", "dream", "tripwires", "engine", "scale"),
    _stage("loop", "loop:loop", "loop", "collect", *_DREAMED, "tripwires", "fit", "worldmodel", "engine"),
    _stage("evaluate", "evaluate:evaluate", "evaluate", "engine"),
    _stage("audit", "audit:audit", "audit", "evaluate", "dream", "engine"),
    _stage("audit-table", "experiments.audit_table:audit_table", "audit", run="demo-seeds", preset="demo"),
    _stage("ablate", "experiments.ablate:ablate", "ablation", run="demo-seeds"),
    _stage("few-shot", "experiments.few_shot:few_shot", "few_shot", *_DREAMED, "evaluate", "engine"),
    _stage("scale-sim", "experiments.scale_sim:scale_sim", "scale_sim", run="scale-sim"),
    _stage("compare", "compare:compare", "compare"),
    _stage("serve", "serve:serve", "serve", "dream", "engine", "scale", writes_run=False),
    _stage("report", "report:report", locks=False),
    _stage("list", "list_runs:list_runs", "listing", writes_run=False),
    _stage("doctor", "doctor:doctor", "env", writes_run=False),
)
STAGES: Mapping[str, Stage] = {stage.name: stage for stage in _ALL}


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    threading.excepthook = _thread_failed
    try:
        with with_disk_errors_named():
            return _command(words)
    except BrokenPipeError:  # `imagine train --help | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"\nstopped; to go on: imagine {shlex.join(words)}", file=sys.stderr)
        return 130
    except Exception as error:
        if not hides_traceback(error):
            raise
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_FIRST_SAYS)
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2


def _thread_failed(thread: threading.ExceptHookArgs) -> None:
    """Shows the traceback, but not of a disk that is full for a logger's thread: the stage meets it, too."""
    if getattr(thread.exc_value, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
        threading.__excepthook__(thread)


def _command(words: Sequence[str]) -> int:
    if not words:
        print(overview(), file=sys.stderr)
        return 2
    name, *overrides = words
    if name in ("-h", "--help", "help"):
        print(overview())
        return 0
    if name == "--version":
        here = _load("imagination.commands.doctor:installed")("imagination")
        print(f"imagination {here or '(not installed, run from its folder)'}")
        return 0
    if name not in STAGES:
        raise unknown("stage", name, list(STAGES))
    stage = STAGES[name]
    if {"-h", "--help"} & set(overrides):
        print(stage_help(stage))
        return 0

    if name == "doctor" and not overrides:  # which must run even where what reads settings is not installed
        _load(stage.function)(None, Path())
        return 0
    overrides = _completed(stage, placed(stage, overrides))
    # oneDNN keeps a compiled kernel with its scratch memory for each of the last 1024 shapes; batches of text have ever
    # new shapes, so that cache grows to gigabytes and is never hit. It is read when torch is first used.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    run = compose.resolve([word for word in overrides if word != DRY_RUN], _load("imagination.settings:Config"))
    config, folder = run.config, run.folder
    if any(word.startswith(("env=", "env.name=")) for word in overrides):
        worlds = _load("real_envs.world:world_names")()
        if config.env.name not in worlds:
            raise unknown("env", config.env.name, worlds)
    sharing = [getattr(config, key) for key in _PROCESSES]
    shared = int(os.environ.get("WORLD_SIZE", "1")) > 1 or not {0, 1, "ddp"}.issuperset(sharing)
    if shared:
        _load("imagination.runs.processes:check")(name, config.devices, config.num_nodes)
    if DRY_RUN in overrides:
        print(
            compose.to_yaml(config), f"in {folder}:", *(f"  {line}" for line in plan(config, folder, stage)), sep="\n"
        )
        return 0
    if shared and "WORLD_SIZE" not in os.environ:
        return int(_load("imagination.runs.processes:start")(words, config.devices, config.num_nodes))
    try:
        with prepared(run, stage):
            function: Callable[[Any, Path], None] = _load(stage.function)
            joined = _load("imagination.runs.processes:joined") if shared else None
            with nullcontext(folder) if joined is None else joined(folder, config.wait_minutes) as place:
                function(config, place)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, KeyboardInterrupt):
            raise  # Lightning makes a plain exit(1) of Ctrl-C, after it has shut down
        # the rest is remembered, but for files to import, and by a stage that writes nothing
        transient = [
            word for word in words if (key := word.partition("=")[0]) in _PROCESSES or key.endswith(compose.CONSENT)
        ]
        whole = stage.places or not stage.writes_run
        again = shlex.join(["imagine", *words]) if whole else compose.command(name, config, *transient)
        if os.environ.get("RANK", "0") == "0":
            print(f"\nstopped; to go on: {again}", file=sys.stderr)
        return 130
    return 0


def placed(stage: Stage, words: list[str]) -> list[str]:
    """Files among the words, and a format before them, as the two settings of the stage's ``places``.

    A word that is a file is a file, whatever its name; the first word may also be the name of a format.
    """
    if not stage.places:
        return words
    keys = schema_keys(_load("imagination.settings:Config"))
    bare = [word for word in words if word != DRY_RUN and _is_bare(word, keys)]
    chosen, files = stage.places
    settings = [word for word in words if word not in bare]
    formats = {"auto", *_load("real_envs.importers.formats:FORMATS")}
    first, is_chosen = bare[0] if bare else "", any(word.startswith(f"{chosen}=") for word in settings)
    if first and not is_chosen and (first in formats or not (os.path.exists(first) or set("./\\") & set(first))):
        settings.insert(0, f"{chosen}={bare.pop(0)}")
    if bare:
        literal = [compose.literal(f"./{word}" if word[0] == "~" and os.path.exists(word) else word) for word in bare]
        settings.insert(0, f"{files}=[{','.join(literal)}]")
    return settings


def _is_bare(word: str, keys: Mapping[str, Any]) -> bool:
    """Whether a word is no ``key=value``, or is a file; a folder ``run=mine`` is a setting, as there is that key."""
    key, equals, _ = word.partition("=")
    is_setting = bool(equals) and re.fullmatch(r"[\w.]+", key) is not None
    return not is_setting or os.path.isfile(word) or (os.path.isdir(word) and key not in keys)


def _completed(stage: Stage, overrides: list[str]) -> list[str]:
    """With the name and the preset that the stage's runs have where the command line chooses none.

    A run that is there keeps what was chosen for it, and another world has sizes of its own.
    """
    given = {word.partition("=")[0] for word in overrides}
    if stage.run and not given & {"run", "preset"}:
        overrides = [f"run={stage.run}", *overrides]
    if stage.preset and not given & {"preset", "env"}:
        # which run it is, alone: what else is overridden may be a part of what the preset declares
        words = [word for word in overrides if word.partition("=")[0] in ("run", "output")]
        if not compose.resolve(words, _load("imagination.settings:Config")).earlier:
            overrides = [f"preset={stage.preset}", *overrides]
    return overrides


@contextmanager
def prepared(run: compose.Resolved[Any], stage: Stage) -> Iterator[None]:
    """The run's folder, locked where the stage writes into it, with configuration and overrides now written down.

    A stage that only looks at what is there writes them where no other process is at work. A command that is refused
    before it has made anything leaves the run's own as they were.
    """
    from imagination.runs.lock import is_locked, locked, made

    writes = stage.writes_run and os.environ.get("RANK", "0") == "0"  # of those that torchrun starts, the first
    with locked(run.folder, stage.name) if writes and stage.locks else nullcontext():
        if run.earlier and os.environ.get("RANK", "0") == "0":
            print(printable(f"run '{run.config.run}' goes on with: {shlex.join(run.overrides)}"), file=sys.stderr)
        saves = writes and (stage.locks or ((run.folder / "summary.json").exists() and not is_locked(run.folder)))
        before, there = (run.remembered(), made(run.folder)) if saves and run.earlier else ({}, {})
        if saves:
            run.remember(TRANSIENT)
        try:
            yield
        except Exception:
            if before and made(run.folder) == there:
                run.remember_again(before)
            raise


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def plan(config: Any, folder: Path, stage: Stage) -> list[str]:
    """What a stage would do, such as ``["collect: would be skipped, done before"]``."""
    from imagination.runs import fingerprint

    if stage.name != "demo":
        named = [name for name in stage.doc.reads.split(", ") if re.fullmatch(r"[\w./-]+(/|\.\w+)", name)]
        missing = [f"missing: {name}, which an earlier stage makes" for name in named if not (folder / name).exists()]
        step = stage.name.replace("-", "_")
        how = _step(config, folder, step) if step in fingerprint.STEPS else "would be done"
        return [f"{stage.name}: {how}", *missing]
    lines, redo = [], False
    for step in ("collect", "fit_world_model", "clone", "train", "evaluate"):  # the demo skips what is done
        is_done = fingerprint.state(config, folder, step) == "done"
        how = "would be done again, after an earlier stage" if redo and is_done else _step(config, folder, step)
        redo = redo or not is_done
        lines.append(f"{step.replace('_', ' ')}: {how if redo else 'would be skipped, done before'}")
    return [*lines, "report: would be done"]


def _step(config: Any, folder: Path, step: str) -> str:
    from imagination.runs.fingerprint import fingerprint, state

    how = state(config, folder, step)
    if how == "stopped":  # how far is in the saved training state, for which torch is loaded
        from imagination.runs.lifecycle import resume_from
        from imagination.runs.run_folder import RunFolder

        run = RunFolder(folder, config.seed, fingerprint(config, step), strategy=config.strategy)
        if steps := resume_from(run, step)[1]:
            return f"would go on after step {steps}"
    if how == "done" and step == "collect":
        return "would be skipped as far as its episodes are logged"
    again = {"done": "with the same settings", "other settings": "as settings have changed"}
    return f"would be done again, {again[how]}" if how in again else "would be done"


def overview() -> str:
    """``imagine --help``."""
    width = max(map(len, STAGES)) + 2
    stages = "\n".join(f"  {stage.name:<{width}}{stage.doc.summary}" for stage in STAGES.values())
    return f"{OVERVIEW}\nstages:\n{stages}\n\n{EXAMPLES}\n{_groups_help()}\n{TRACEBACK}"


def stage_help(stage: Stage) -> str:
    """``imagine <stage> --help``; its keys and defaults are read from the dataclasses and never out of date."""
    doc = stage.doc
    examples = "\n".join(f"  {example}" for example in doc.examples)
    return (
        f"imagine {stage.name}: {doc.summary}\n\n{doc.text}\n\n"
        f"in <output>/<run>/, by default outputs/default/\n"
        f"  reads   {doc.reads}\n  writes  {doc.writes}, config.yaml\n\n"
        f"examples:\n{examples}\n\n{_groups_help()}\n{_keys_help(stage.sections)}"
    )


def _groups_help() -> str:
    schema = _load("imagination.settings:Config")
    choices = {**compose.named_sections(schema_keys(schema)), **compose.groups(compose.config_folder())}
    lines = [_wrapped(f"  {group}=", "| ".join(names)).replace("| ", "|") for group, names in choices.items()]
    return "choices (engine=, env=, preset=, ablation= are files in configs/):\n" + "\n".join(lines) + "\n"


def _keys_help(sections: Sequence[str]) -> str:
    """A block per section: the summary of its dataclass and its keys, ``train.updates=24    an int; number of ...``."""
    schema = _load("imagination.settings:Config")
    keys, defaults, texts = schema_keys(schema), flat_defaults(schema), explanations(schema)
    blocks = ["keys and their defaults (files in configs/ may choose others):"]
    for section in ("", *sections):
        lines = [f"{section}: {summary(keys[section])}" if section else "for every stage"]
        for key, default in defaults.items():
            if (key.partition(".")[0] if "." in key else "") == section:
                about = "; ".join(filter(None, (type_name(keys[key]), texts.get(key))))
                lines.append(_wrapped(f"  {f'{key}={default}':<36} ", about, 39))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _wrapped(label: str, text: str, indent: int = 0) -> str:
    """``label`` and ``text`` in lines of 120 characters, the text in one column."""
    column = " " * (indent or len(label))
    return textwrap.fill(text, 120, initial_indent=label, subsequent_indent=column, break_on_hyphens=False)
