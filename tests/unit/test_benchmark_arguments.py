"""Settings of ours between the options of a benchmark. If this fails, `make loop-table ARGS=...` runs with others."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest

from tests.benchmarks.arguments import options_and_settings


def parser() -> ArgumentParser:
    made = ArgumentParser()
    made.add_argument("--seeds", type=int, nargs="+", default=[0])
    return made


def test_settings_may_stand_anywhere_even_behind_a_list() -> None:
    words = ["--seeds", "1", "2", "fit.steps=600", "--seeds=3", "clone.agents=[a,b]"]
    options, settings = options_and_settings(parser(), "all parts", words)
    assert options.seeds == [3]
    assert settings == ["fit.steps=600", "clone.agents=[a,b]"]
    options, settings = options_and_settings(parser(), "all parts", ["fit.steps=600", "--seeds", "1", "2"])
    assert (options.seeds, settings) == ([1, 2], ["fit.steps=600"])


def test_a_word_that_is_no_setting_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_and_settings(parser(), "all parts", ["fit.steps"])
    assert "fit.steps is no setting: write KEY=VALUE" in capsys.readouterr().err
