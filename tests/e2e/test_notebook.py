"""The notebook runs from top to bottom, as Jupyter runs it: cell by cell inside one event loop that goes on."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def cells() -> list[dict[str, Any]]:
    return list(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"])


async def run_all(sources: list[str]) -> dict[str, Any]:
    """What the cells defined. A cell may await, as in Jupyter."""
    names: dict[str, Any] = {}
    for source in sources:
        value = eval(compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.isawaitable(value):
            await value
    return names


def test_the_quickstart_runs_and_trains_without_a_real_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, give_games: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    give_games(tmp_path / "outputs" / "quickstart")
    first, *rest = ["".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"]
    few = '{"evaluate.episodes": 20, "collect.episodes": 60, "collect.workers": 1, "train.updates": 2'
    smaller = first.replace('{"evaluate.episodes": 20', few)
    assert smaller != first
    names = asyncio.run(run_all([smaller, *rest]))
    assert (tmp_path / "outputs" / "quickstart" / "report.html").exists()
    assert names["trained"].real_steps == 0
    assert names["trained"].updates
    assert names["verdict"].after.train_tasks.n == 20
    assert names["dream"].turns


def test_the_notebook_is_kept_without_outputs() -> None:
    kept = [cell for cell in cells() if cell["cell_type"] == "code" and (cell["outputs"] or cell["execution_count"])]
    assert kept == []
