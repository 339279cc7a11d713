"""Which policy `imagine compare` plays. If this fails, it takes for a model what only has its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagination.commands.compare import _policy
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError


def test_a_folder_of_the_same_name_in_the_working_directory_is_no_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").mkdir()  # such as that of the sources, where `imagine` is called
    config = Config()
    with pytest.raises(UserError, match=r"models/policy is not there yet; run `imagine train`"):
        _policy(Session(config, RunFolder(tmp_path / "run", 0)))
