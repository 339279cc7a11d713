"""How many threads a run takes. If this fails, a container with a share of a large machine starts one for each core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from imagination.runs.machine import cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "6400000 100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000\n"}, 64),
        ({"cpu.max": "torn"}, 64),
        ({}, 64),
    ],
)
def test_a_container_has_the_cores_that_its_quota_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores(tmp_path) == expected


@pytest.mark.parametrize(("given", "found"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_sleep_unless_the_user_says_otherwise(given: str | None, found: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    env |= {"OMP_WAIT_POLICY": given} if given else {}
    told = [sys.executable, "-c", "import imagination, os; print(os.environ['OMP_WAIT_POLICY'])"]
    assert subprocess.run(told, env=env, capture_output=True, text=True, check=True).stdout.strip() == found


def test_the_package_is_the_command() -> None:
    told = subprocess.run([sys.executable, "-m", "imagination", "--help"], capture_output=True, text=True, check=True)
    assert "usage: imagine <stage>" in told.stdout
