"""Every command and every Python block of the pages works. If these fail, what a newcomer types first fails."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imagination.cli import main, placed
from imagination.commands.catalogue import STAGES
from imagination.settings import Config
from imagination.settings.compose import load_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
# Settings and stage of every command are checked; those of this page run, in order.
RUN = {"docs/quickstart.md"}
BETWEEN = "-- between two programs --"


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


def test_the_quickstart_runs_from_top_to_bottom(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    give_games: Callable[[Path], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    give_games(tmp_path / "outputs" / "first")  # the demo has compiled the same ones before
    few = ["collect.episodes=40", "collect.workers=1", "fit.steps=200", "train.updates=1", "tripwires.enabled=false"]
    few += ["evaluate.episodes=4", "evaluate.heldout_episodes=2"]
    for words in commands(ROOT / "docs/quickstart.md"):
        smaller = few if "preset=tiny" in words else []
        assert main([*words, *smaller]) == 0, (words, capsys.readouterr().err)
    for page in ("report.html", "audit.html", "compare.html"):
        assert (tmp_path / "outputs/first" / page).exists()
    assert "first" in capsys.readouterr().out


def test_the_python_of_the_readme_runs(tmp_path: Path, give_games: Callable[[Path], None]) -> None:
    give_games(tmp_path / "outputs" / "mine")
    episode = {
        "task_id": "shop-1", "agent": "gpt", "start": "Buy red shoes. [search]",
        "turns": [{"action": "buy[red shoes]", "observation": "Red shoes are yours.", "reward": 1, "terminated": True}],
    }  # fmt: skip
    (tmp_path / "my-log.jsonl").write_text("\n".join(json.dumps(episode | {"id": str(k)}) for k in range(60)))
    own, other = blocks(ROOT / "README.md", "python")
    small = '{"evaluate.episodes": 4, "evaluate.heldout_episodes": 2, "tripwires.enabled": False, "train.updates": 1, '
    small += '"collect.episodes": 40, "collect.workers": 1}'
    own = own.replace('{"train.updates": 5}', small)
    other = other.replace('preset="tiny")', 'preset="tiny", overrides={"fit.steps": 30})')
    assert small in own
    assert "fit.steps" in other
    # one process for both, as each would import torch anew
    program = f"{own}\nprint({BETWEEN!r})\n{other}"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(said.strip() for said in done.stdout.split(BETWEEN)), done.stdout
    assert done.stdout.count(BETWEEN) == 1


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
