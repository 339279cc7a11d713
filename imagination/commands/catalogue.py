"""The stages of the command line. What each does, reads and writes is read from the docstring of its function.

Nothing heavy is imported here, and no stage: help and a mistyped command must not wait for torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_DOCSTRING = re.compile(r"(.+?)\.?\n\n([\s\S]+?)\n\nReads: (.+)\nWrites: (.+)\n\nExamples:\n((?: {4}.+\n?)+)")


@dataclass(frozen=True)
class Stage:
    """One word of the command line."""

    name: str  # ``fit-world-model``
    function: str  # ``module:name``, imported only when the stage runs
    sections: tuple[str, ...] = ()  # the parts of the configuration that matter to it; its help lists their keys
    run: str = ""  # the run's name where the command line gives neither that nor a preset
    preset: str = ""  # of a new run where the command line gives neither that nor a world
    # settings that bare words of the command line fill in order; the last is a list and takes the rest
    places: tuple[str, ...] = ()
    writes_run: bool = True  # whether it works in the folder of a run, which then keeps its settings

    @cached_property
    def _parts(self) -> tuple[str, ...]:
        module, _, name = self.function.partition(":")
        path = Path(__file__).parents[2] / f"{module.replace('.', '/')}.py"
        functions = (node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef))
        docstring = next(ast.get_docstring(node) or "" for node in functions if node.name == name)
        found = _DOCSTRING.match(docstring)
        assert found is not None, f"{self.function}: its docstring lacks Reads, Writes or Examples"
        return found.groups()

    @property
    def summary(self) -> str:
        """One line for ``imagine --help``."""
        return self._parts[0][0].lower() + self._parts[0][1:]

    @property
    def help(self) -> str:
        """What it does and why, for ``imagine <stage> --help``."""
        return self._parts[1]

    @property
    def reads(self) -> str:
        """Files of the run folder that must be there."""
        return self._parts[2]

    @property
    def writes(self) -> str:
        """Files of the run folder that it makes."""
        return self._parts[3]

    @property
    def examples(self) -> tuple[str, ...]:
        """Two or three literal command lines."""
        return tuple(line.strip() for line in self._parts[4].splitlines())


def _stage(name: str, place: str, *sections: str, **more: str | bool | tuple[str, ...]) -> Stage:
    return Stage(name, f"imagination.commands.{place}", sections, **more)  # type: ignore[arg-type]


_DREAMED = ("dream", "train", "algorithm")
_ALL = (
    _stage("demo", "experiments.demo:demo", run="demo", preset="demo"),
    _stage("demo-seeds", "experiments.demo:demo_seeds", run="demo-seeds", preset="demo"),
    _stage("pretrain", "pretrain:pretrain", "pretrain", run="base", preset="base"),
    _stage("collect", "collect:collect", "env", "games", "collect"),
    _stage("import", "import_logs:import_logs", "imports", places=("imports.format", "imports.files")),
    _stage("fit-world-model", "fit_world_model:fit_world_model", "worldmodel", "fit", "engine"),
    _stage("rules", "rules:rules", "rules", "worldmodel"),
    _stage("refine-world-model", "refine_world_model:refine_world_model", "refine", "worldmodel", "engine"),
    _stage("reflect", "reflect:reflect", "reflect", "worldmodel", "dream", "engine"),
    _stage("relabel", "relabel:relabel", "hindsight"),
    _stage("clone", "clone:clone", "policy", "clone"),
    _stage("fit-critic", "fit_critic:fit_critic", "critic", "algorithm", "policy"),
    _stage("train", "train:train", "train", "algorithm", "dream", "tripwires", "engine"),
    _stage("loop", "loop:loop", "loop", "collect", *_DREAMED, "tripwires", "fit", "worldmodel", "engine"),
    _stage("evaluate", "evaluate:evaluate", "evaluate", "engine"),
    _stage("audit", "audit:audit", "audit", "evaluate", "dream", "engine"),
    _stage("audit-table", "experiments.audit_table:audit_table", "audit", run="demo-seeds", preset="demo"),
    _stage("ablate", "experiments.ablate:ablate", "ablation", run="demo-seeds"),
    _stage("few-shot", "experiments.few_shot:few_shot", "few_shot", *_DREAMED, "evaluate", "engine"),
    _stage("compare", "compare:compare", "compare"),
    _stage("serve", "serve:serve", "serve", "dream", "engine", writes_run=False),
    _stage("report", "report:report"),
    _stage("list", "list_runs:list_runs", "listing", writes_run=False),
)
STAGES: Mapping[str, Stage] = {stage.name: stage for stage in _ALL}
