"""If these fail, a world that a language model writes as code is not tested, repaired, kept and dreamed in."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from imagination.commands.audit import run_audit
from imagination.commands.clone import clone
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.loop import loop
from imagination.commands.refine_world_model import refine_world_model
from imagination.commands.report import report
from imagination.commands.serve import open_world
from imagination.commands.train import train
from imagination.runs.fingerprint import fingerprint
from imagination.runs.run_folder import RunFolder
from imagination.session import Session
from imagination.settings import Config, UserError, WorldModelSettings
from imagination.settings.compose import resolve
from tests.support.judging import Judge, judge, says
from tests.support.killing import summary_of
from tests.support.refusal import refused

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code is run where Linux confines it")

# The corridors of tests.support.tiny. The first version knows one of the two, and stumbles in the other.
WORLD = """
import re

def step(start, history, action):
    way = re.search(r"way (\\w+)", start)[1]
    thing = re.search(r"Find the (lamp|book)", start)[1]
    inside = any(turn["action"] == f"go {way}" for turn in history)
    if action == f"go {way}" and not inside:
        return {"observation": f"You walk {way}. Here is a {thing}.", "reward": 0, "terminated": False}
    if action == f"take {thing}" and inside:
        return {"observation": f"You take the {thing}.", "reward": 1, "terminated": True}
    return {"observation": "Nothing new.", "reward": 0, "terminated": False}
"""
BUGGY = WORLD.replace("(lamp|book)", "(lamp)")


def answers(asked: str) -> tuple[int, object]:
    """The right program is known to who is shown the failures of the wrong one."""
    shown = "TypeError" in asked and "Expected: " in asked and BUGGY.strip() in asked
    return says(f"Here it is:\n```python\n{WORLD if shown else BUGGY}```\n")


@pytest.fixture
def coded(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Config, Judge]]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    tiny.worldmodel.kind = "code"
    with judge(answers) as server:
        tiny.worldmodel.code.url, tiny.worldmodel.code.model = server.url, "coder"
        yield tiny, server


def test_a_world_is_written_repaired_and_dreamed_in(coded: tuple[Config, Judge], run: Path) -> None:
    config, server = coded
    RunFolder(run, 0).update({"language": {"tokens_per_action": 3.0}})
    fit_world_model(config, run)
    assert summary_of(run)["language"] is None, "it was of a model of text"
    assert len(server.asked) == 2
    assert "You stand in a corridor" in server.asked[0]
    assert "Your program" not in server.asked[0]
    found = summary_of(run)
    assert found["world_model"]["exact_match"] == 1.0
    assert found["world_model"]["n"] > 0
    assert found["world_model_form"] == "code"
    score = json.loads((run / "models/worldmodel/world.json").read_text())
    assert (score["exact"], score["tested"], score["version"], score["model"]) == (1.0, 1.0, 2, "coder")
    assert (run / "models/worldmodel/world.py").read_text() == WORLD

    clone(config, run)  # from nothing, as there are no weights of a world model
    config.train.updates = 2
    config.dream.min_probability = 0.5  # its calibration is there
    train(config, run)
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    turns = [turn for row in rows for turn in row["turns"][row["prefix_turns"] :]]
    assert turns
    assert all(turn["info"]["confidence"] == 1.0 or turn["info"]["outcome_by"] == "rule" for turn in turns)
    assert {row["stop"] for row in rows} <= {"terminated", "turn_limit"}
    audited = run_audit(config, run)
    assert audited["sets"]["held_out"]["exact"]["value"] == 1.0
    assert open_world(config, run).version.startswith(Session(config, RunFolder(run, 0))._code(
        run / "models/worldmodel").version)  # fmt: skip

    report(config, run)
    assert (run / "report.html").exists()

    with (run / "models/worldmodel/world.py").open("a") as file:
        file.write("# edited\n")
    refused(lambda: train(config, run), "world.py", "worldmodel.code.trust=true")
    config.worldmodel.code.trust = True
    Session(config, RunFolder(run, 0)).world_model()


def test_the_best_version_is_kept_where_repairs_make_it_worse(coded: tuple[Config, Judge], run: Path) -> None:
    config, _ = coded
    versions = iter([BUGGY, "def step(start, history, action): 1 / 0", "this is no program"])
    config.worldmodel.code.rounds, config.worldmodel.rules = 2, "off"
    with judge(lambda asked: says(next(versions))) as server:
        config.worldmodel.code.url = server.url
        fit_world_model(config, run)
        assert len(server.asked) == 3
        assert "ZeroDivisionError" in server.asked[2]
    assert (run / "models/rules.json").exists(), "a later worldmodel.rules=repair fits nothing anew, and needs them"
    assert summary_of(run)["code_world"]["version"] == 1
    assert 0 < summary_of(run)["world_model"]["exact_match"] < 1


def test_what_cannot_work_is_refused_in_a_line(coded: tuple[Config, Judge], run: Path) -> None:
    config, _ = coded
    with judge(lambda asked: (400, {"error": "no"})) as server:
        config.worldmodel.code.url = server.url
        refused(lambda: fit_world_model(config, run), "worldmodel.code.url", "no question was answered")
    config.worldmodel.code.url = ""
    refused(lambda: fit_world_model(config, run), "worldmodel.code.url", "worldmodel.code.model")
    refused(lambda: refine_world_model(config, run), "worldmodel.kind=code", "no weights")
    refused(lambda: loop(config, run), "worldmodel.kind=code", "worldmodel.kind=text")
    for wrong in ({"members": 2}, {"reasoning_tokens": 8}, {"facts": 3}):
        refused(lambda w=wrong: WorldModelSettings(kind="code", **w), "worldmodel.kind=code", error=ValueError)


def test_consent_is_not_taken_from_a_folder(tmp_path: Path) -> None:
    """Who sends code in a run folder could send the consent in it."""
    words = ["run=theirs", f"output={tmp_path}", "worldmodel.kind=code"]
    given = resolve([*words, "worldmodel.code.trust=true"], Config)
    assert given.config.worldmodel.code.trust
    given.folder.mkdir()
    given.remember()
    again = resolve(words[:2], Config).config
    assert (again.worldmodel.kind, again.worldmodel.code.trust) == ("code", False)
    path = tmp_path / "theirs/overrides.json"
    keys = ("+worldmodel.code.trust=true", "++worldmodel.code.trust=true", "worldmodel.code.trust =true")
    for word in (*keys, "worldmodel.code={trust:true}", "worldmodel={code:{trust:true}}"):
        path.write_text(json.dumps([word]))
        for typed in ([], ["worldmodel.code={rounds:3}"]):
            with suppress(UserError):
                assert not resolve([*words, *typed], Config).config.worldmodel.code.trust


def test_whom_and_how_long_one_asks_decides_nothing_that_is_made() -> None:
    plain, other = Config(), Config()
    other.worldmodel.code.turns = 5
    assert fingerprint(plain) == fingerprint(other)  # another kind reads none of it
    plain.worldmodel.kind = other.worldmodel.kind = "code"
    assert fingerprint(plain) != fingerprint(other)
    other.worldmodel.code.turns = plain.worldmodel.code.turns
    other.worldmodel.code.url, other.worldmodel.code.trust = "http://localhost:1/v1", True
    assert fingerprint(plain) == fingerprint(other)
