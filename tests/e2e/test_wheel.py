"""What `pip install .` installs works from any folder, without the source tree: settings, page assets, kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Not `demo`: models of so few steps would have nothing to dream with. One process, as each loads torch anew.
STAGES = """
from imagination.cli import main
for words in ("collect preset=tiny collect.episodes=12 collect.workers=1", "fit-world-model fit.steps=2", "report"):
    assert main([*words.split(), "run=mine"]) == 0
"""
PACKAGES = ("real_envs", "policy", "worldmodel", "imagination", "configs")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, installed into a folder of its own."""
    tmp = tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:  # a copy, because setuptools builds inside the tree
        shutil.copytree(ROOT / package, tmp / "tree" / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [ROOT / "pyproject.toml", ROOT / "README.md", *ROOT.glob("LICENSE*")]:
        shutil.copy(path, tmp / "tree")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp), str(tmp / "tree")]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    (wheel,) = tmp.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp / "site"), str(wheel)], check=True)
    return tmp / "site"


def test_every_file_that_is_no_module_is_in_the_wheel(installed: Path) -> None:
    data = {
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".md", ".so")
    }
    assert {".yaml", ".html", ".cpp", ".h"} <= {path.suffix for path in data}
    assert sorted(path for path in data if not (installed / path).exists()) == []


def test_the_command_runs_from_another_folder(
    installed: Path, tmp_path: Path, give_games: Callable[[Path], None]
) -> None:
    give_games(tmp_path / "outputs" / "mine")
    env = {**os.environ, "PYTHONPATH": str(installed)}

    where = [sys.executable, "-c", "import imagination; print(imagination.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout
    assert Path(found.strip()).is_relative_to(installed)
    command = [sys.executable, str(installed / "bin" / "imagine"), "train", "--help"]
    helped = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "preset=agent_r1|alfworld|base|bfcl|" in helped.stdout
    done = subprocess.run([sys.executable, "-c", STAGES], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<html" in (tmp_path / "outputs" / "mine" / "report.html").read_text().lower()
