"""A log of web pages without a browser: models are fitted to it, and compared with its screenshots."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import tests
from imagination.cli import main

RECORDED = Path(tests.__file__).parent / "recorded" / "miniwob"


def test_a_log_of_pages_is_learned_as_edits_and_compared_beside_its_screenshots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RECORDED, tmp_path / "web" / "log")
    words = ["run=web", f"output={tmp_path}", "preset=tiny", "env=miniwob", "worldmodel.kind=delta", "fit.steps=30"]
    words += ["worldmodel.context=1024", "policy.context=1024"]
    assert main(["fit-world-model", *words]) == 0
    report = json.loads((tmp_path / "web" / "summary.json").read_text())
    language = report["language"]
    assert language["tokens_per_prediction"] < 0.5 * language["tokens_per_observation"]
    assert main(["compare", *words, "compare.policy=", "compare.logged=1"]) == 0
    pairs = json.loads((tmp_path / "web" / "compare.json").read_text())["pairs"]
    named = {pair["screenshot"] for pair in pairs}
    named |= {turn["real"]["screenshot"] for pair in pairs for turn in pair["turns"] if turn["real"]}
    page = (tmp_path / "web" / "compare.html").read_text()
    assert len(named - {None}) > 3
    assert len(set(re.findall(r"data:image/png;base64,[\w+/=]+", page))) == len(named - {None})
    assert "Traceback" not in capsys.readouterr().err
