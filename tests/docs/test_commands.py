"""Every command and every Python block of the pages works, and the notebook. If these fail, what a newcomer types
first fails."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from imagination.cli import STAGES, main, placed
from imagination.settings import Config
from imagination.settings.compose import load_config
from tests.support.subprocess_server import free_port

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
# Settings and stage of every command are checked; those of these pages run, in order.
RUN = {"docs/quickstart.md", "docs/your-api.md"}


def blocks(page: Path, language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The words of each ``imagine`` command of the page's shell blocks."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("imagine ")]


ALL = [(page.relative_to(ROOT).as_posix(), words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(("page", "words"), ALL, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_every_command_names_a_stage_and_settings_that_exist(page: str, words: list[str]) -> None:
    stage, *settings = words
    if stage == "list":
        return
    assert stage in STAGES
    words = placed(STAGES[stage], [word for word in settings if not word.startswith("--")])
    load_config(words, Config)


def test_there_are_commands_to_check() -> None:
    assert len(ALL) > 20
    assert {page for page, _ in ALL} >= RUN


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory, give_games: Callable[[Path], None]) -> Path:
    """Where the commands of the page were run, each in its place; with a smaller run than the page's."""
    there = tmp_path_factory.mktemp("quickstart")
    models = there / "outputs" / "first" / "models"
    for run in ("first", "tiny"):
        give_games(there / "outputs" / run)
    few = ["collect.episodes=40", "collect.workers=1", "fit.steps=200", "train.updates=1", "tripwires.enabled=false"]
    few += ["evaluate.episodes=4", "evaluate.heldout_episodes=2"]
    # the whole flow comes last here, and goes on from the models of the stages: its own would be as good as these
    little = [*few, "fit.steps=2", "clone.steps=2", "fit.lr=1e-5", "clone.lr=1e-5", "collect.episodes=12"]
    little += [f"worldmodel.model={models / 'worldmodel'}", f"policy.model={models / 'policy-clone'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(there)
        for words in sorted(commands(ROOT / "docs/quickstart.md"), key=lambda words: words[0] == "demo"):
            smaller = few if "preset=tiny" in words else ["audit.judged=8"] if words[0] == "audit" else []
            smaller = little if words[0] == "demo" else smaller
            assert main([*words, *smaller]) == 0, words
    return there


@pytest.fixture
def like_it(
    quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, give_games: Callable[[Path], None]
) -> str:
    """Settings of a small run that begins with the quickstart's models; ``outputs/mine`` has their games."""
    monkeypatch.chdir(tmp_path)
    give_games(tmp_path / "outputs" / "mine")
    models = quickstart / "outputs" / "first" / "models"
    small = {"evaluate.episodes": 4, "evaluate.heldout_episodes": 2, "train.updates": 1, "tripwires.enabled": False}
    small |= {"collect.episodes": 12, "collect.workers": 1, "fit.steps": 2, "clone.steps": 2, "clone.lr": 1e-5}
    small |= {"worldmodel.model": str(models / "worldmodel"), "policy.model": str(models / "policy-clone")}
    return str(small | {"fit.lr": 1e-5})


def test_the_quickstart_runs_from_top_to_bottom(quickstart: Path) -> None:
    for page in ("report.html", "audit.html", "compare.html"):
        assert (quickstart / "outputs/first" / page).exists()


def test_an_api_becomes_a_dream_with_the_same_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp", reason="pip install 'imagination[mcp]'")
    pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    page, port = ROOT / "docs/your-api.md", free_port()
    few = {"collect": "games.train=2 games.heldout=1 collect.episodes=20 collect.heldout_episodes=2 collect.workers=1"}
    few["collect"] += (
        " fit.steps=200 dream.min_confidence=0 train.updates=1 tripwires.enabled=false evaluate.episodes=4"
    )
    few["collect"] += " evaluate.heldout_episodes=2"
    few |= {"audit": "audit.judged=8 audit.pairs=4", "serve": "serve.port=0"}
    (server,) = re.findall(r"^python (examples\S+) 8765 &$", page.read_text(), flags=re.MULTILINE)
    with running([server, str(port)], subprocess.DEVNULL), pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "127.0.0.1")
        wait_for(port)
        for words in commands(page):
            stage = [word.replace(":8765/", f":{port}/") for word in words] + few.get(words[0], "").split()
            if words[0] != "serve":
                assert main(stage) == 0, words
    serve = ["-c", "import sys; from imagination.cli import main; sys.exit(main())", *stage]
    with running(serve, subprocess.PIPE) as process:
        assert process.stdout is not None
        address = next(found[1] for line in process.stdout if (found := re.match(r"MCP:\s+(http\S+)", line)))
        names, first = asyncio.run(dreamed(address))
        assert names == {"add_note", "list_notes", "delete_note", "done", "reset"}
        assert "say done()" in first[0]
        assert asyncio.run(dreamed(address)) == (names, first), "the same seed and calls, the same answers"


async def dreamed(address: str) -> tuple[set[str], list[str]]:
    """The tools of the dream at the address, and what it answers to a few calls."""
    from mcp import Client

    async with Client(address, read_timeout_seconds=60) as dream:
        names = {tool.name for tool in (await dream.list_tools()).tools}
        calls: list[tuple[str, dict[str, object]]] = [("reset", {"seed": 3}), ("add_note", {"title": "milk"})]
        return names, [str((await dream.call_tool(*call)).content[0]) for call in calls]


@contextmanager
def running(words: list[str], output: int) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *words], stdout=output, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(port: int, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert time.monotonic() < deadline, "nothing listens there"
        time.sleep(0.1)


def test_the_python_of_the_readme_runs(like_it: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    episode = {
        "task_id": "shop-1", "agent": "gpt", "start": "Buy red shoes. [search]",
        "turns": [{"action": "buy[red shoes]", "observation": "Red shoes are yours.", "reward": 1, "terminated": True}],
    }  # fmt: skip
    (tmp_path / "my-log.jsonl").write_text("\n".join(json.dumps(episode | {"id": str(k)}) for k in range(60)))
    own, other = blocks(ROOT / "README.md", "python")
    for program, given, settings in (
        (own, '{"train.updates": 5}', like_it),
        (other, 'preset="tiny")', 'preset="tiny", overrides={"fit.steps": 30})'),
    ):
        assert given in program
        exec(program.replace(given, settings), {})
        assert capsys.readouterr().out.strip()
    assert (tmp_path / "outputs" / "mine" / "models" / "policy").exists()


def test_the_notebook_runs_and_trains_without_a_real_step(like_it: str, tmp_path: Path) -> None:
    """From top to bottom, as Jupyter runs it: cell by cell inside one event loop that goes on."""
    first, *rest = ["".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"]
    smaller = first.replace('{"evaluate.episodes": 20}', like_it).replace("outputs/quickstart", "outputs/mine")
    assert smaller.count("mine") == 1
    assert like_it in smaller

    async def run_all() -> dict[str, Any]:
        names: dict[str, Any] = {}
        for source in (smaller, *rest):
            value = eval(compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            if inspect.isawaitable(value):
                await value
        return names

    names = asyncio.run(run_all())
    assert (tmp_path / "outputs" / "mine" / "report.html").exists()
    assert names["trained"].real_steps == 0
    assert names["trained"].updates
    assert names["verdict"].after.train_tasks.n == 4
    assert names["dream"].turns


def test_the_notebook_is_kept_without_outputs() -> None:
    kept = [cell for cell in cells() if cell["cell_type"] == "code" and (cell["outputs"] or cell["execution_count"])]
    assert kept == []


def cells() -> list[dict[str, Any]]:
    notebook = ROOT / "examples" / "quickstart.ipynb"
    return list(json.loads(notebook.read_text(encoding="utf-8"))["cells"])


def test_the_tutorial_trains_in_dreams_and_plays_for_real(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "train_in_dreams.py"
    pytest.importorskip("textworld_express", reason="pip install 'imagination[textworld-express]'")
    names = runpy.run_path(str(path))
    names["train"].__defaults__ = (4, 4)  # groups of an update, and dreams of a group
    rates = names["main"](games=4, unseen=2, imitation_steps=3, updates=2)
    assert all(0 <= rate <= 1 for rate in rates)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[1:-1]] == ["update 1", "update 2"]
    assert len(path.read_text().splitlines()) <= 120


def test_links_between_pages_and_to_files_lead_somewhere() -> None:
    """The site checks its own; these are those of the README and CONTRIBUTING, which are read where they lie."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_that_the_pages_name_exist() -> None:
    named = re.compile(r"`((?:real_envs|policy|worldmodel|imagination|tests|configs|docs)/[\w./-]+)`")
    for page in PAGES:
        for name in named.findall(page.read_text()):
            assert (ROOT / name).exists(), f"{page.relative_to(ROOT)}: {name}"
