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


def build(tmp_path: Path, added: str = "") -> subprocess.CompletedProcess[str]:
    """What ``make docs`` runs, on a copy of the pages whose FAQ has one line more."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "faq.md").open("a") as page:
        page.write(f"\n{added}\n")
    (words,) = re.findall(r"-m (mkdocs build .*) \$\(ARGS\)", (ROOT / "Makefile").read_text())
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", *shlex.split(words)]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)


def test_the_site_builds_with_the_help_of_stages_and_the_docstrings(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "train.group_size" in (tmp_path / "site/commands/index.html").read_text()
    assert "import_jsonl" in (tmp_path / "site/api/index.html").read_text()


def test_a_dead_link_or_anchor_fails(tmp_path: Path) -> None:
    done = build(tmp_path, "[x](nowhere.md) [y](trust.md#nothing)")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
    assert "#nothing" in done.stderr
