"""Pages that the site makes from the code, so that they cannot go out of date."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from imagination.cli import overview, stage_help
from imagination.stages.catalogue import STAGES


def on_files(files: Files, config: Any) -> Files:
    """Adds the reference of the command line: what ``imagine <stage> --help`` says."""
    parts = ["# Commands", "", "What `imagine --help` and `imagine <stage> --help` say.", "", fenced(overview()), ""]
    for stage in STAGES.values():
        parts += [f"## {stage.name}", "", fenced(stage_help(stage)), ""]
    files.append(File.generated(config, "commands.md", content="\n".join(parts)))
    return files


def fenced(text: str) -> str:
    return f"```text\n{text.strip()}\n```"
