"""Pages that the site makes from the code, so that they cannot go out of date."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from imagination.cli import STAGES, overview, stage_help
from imagination.learning.algorithms import ALGORITHMS


def on_files(files: Files, config: Any) -> Files:
    """Adds the reference of the command line: what ``imagine <stage> --help`` says."""
    parts = ["# Commands", "", "What `imagine --help` and `imagine <stage> --help` say.", "", fenced(overview()), ""]
    for stage in STAGES.values():
        parts += [f"## {stage.name}", "", fenced(stage_help(stage)), ""]
    files.append(File.generated(config, "commands.md", content="\n".join(parts)))
    files.append(File.generated(config, "algorithm-defaults.md", content=algorithm_defaults()))
    return files


def algorithm_defaults() -> str:
    """A table of every algorithm of the registry with its own keys and their defaults."""
    parts = ["# Defaults of each algorithm", "", "Read from the registry. `null` switches a part off.", ""]
    parts += ["| `algorithm=` | keys under `algorithm.` and their defaults |", "|---|---|"]
    for name, member in ALGORITHMS.items():
        keys = ", ".join(f"`{key}={'null' if value is None else value}`" for key, value in member.settings.items())
        parts.append(f"| `{name}` | {keys} |")
    return "\n".join(parts)


def fenced(text: str) -> str:
    return f"```text\n{text.strip()}\n```"
