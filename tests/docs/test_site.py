"""`make docs` builds the site and fails on a dead link. With ``--quiet`` MkDocs counts no warning and never fails."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocs")


DEAD = "[x](nowhere.md) [y](trust.md#nothing)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """What ``make docs`` runs, on a copy of the pages whose FAQ has a line with two dead links, and where."""
    there = tmp_path_factory.mktemp("docs")
    for folder in ("docs", "examples"):
        shutil.copytree(ROOT / folder, there / folder)
    shutil.copy(ROOT / "mkdocs.yml", there)
    with (there / "docs" / "faq.md").open("a") as page:
        page.write(f"\n{DEAD}\n")
    (words,) = re.findall(r"-m (mkdocs build .*) \$\(ARGS\)", (ROOT / "Makefile").read_text())
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", *shlex.split(words)]
    return there, subprocess.run(command, cwd=there, env=env, capture_output=True, text=True)


def test_the_site_builds_with_the_help_of_stages_and_the_docstrings(
    built: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """Whole, and with nothing to complain of but what was planted: a site without it builds."""
    there, done = built
    assert "2 warnings" in done.stdout, done.stderr[-2000:]
    assert "train.group_size" in (there / "site/commands/index.html").read_text()
    assert "import_jsonl" in (there / "site/api/index.html").read_text()


def test_a_dead_link_or_anchor_fails(built: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, done = built
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
    assert "#nothing" in done.stderr
