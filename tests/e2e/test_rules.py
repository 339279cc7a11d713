"""If this fails, a run's dreams are not answered by the rules of its log, or the log's rules are wrong on new tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imagination.cli import main
from imagination.evaluation.world_model_eval import heldout_tasks
from imagination.rollout.world_models import rules_of
from imagination.runs.run_folder import RunFolder
from imagination.settings import UserError
from worldmodel.rules.rule_set import FILE, RuleSet, check_rules

pytest.importorskip("textworld_express", reason="pip install 'imagination[textworld-express]'")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the demo's log, with episodes of tasks of another fold."""
    output = tmp_path_factory.mktemp("rules")
    few = ["games.train=450", "games.heldout=40", "collect.heldout_episodes=4", "collect.workers=1"]
    assert main(["collect", "preset=demo", "run=rules", *few, f"output={output}"]) == 0
    assert main(["rules", "run=rules", f"output={output}"]) == 0
    return output / "rules"


def test_the_laws_of_map_reader_are_mined_and_hold_on_new_tasks(run: Path) -> None:
    """What people wrote by hand for this world: no move where no exit is, a room comes back as it was seen, no taking
    of what is not there. Nothing in the miner is of this world."""
    rules = RuleSet.load(run / "models")
    assert rules is not None
    refusing = {rule.template for rule in rules.rules if rule.refuses}
    assert refusing >= {"move {1}", "take {1}", "*"}
    assert any(rule.template == "move {1}" and rule.copy.kind in ("way", "link") for rule in rules.rules)
    found = check_rules(rules, heldout_tasks(RunFolder(run, 0)))
    assert found["turns"] > 500
    assert found["wrong"] <= 0.005 * found["turns"]
    assert found["refused_by_rule"] >= 0.8 * found["refused"]
    assert found["answered"] >= 0.6 * found["turns"]
    assert json.loads((run / "summary.json").read_text())["rules"]["rules"] == len(rules.rules)


def test_a_dream_keeps_to_what_it_said(run: Path) -> None:
    """There and back again, without any world model: the first room as it was, and no way through its walls."""
    rules = RuleSet.load(run / "models")
    assert rules is not None
    episode = heldout_tasks(RunFolder(run, 0))[0]
    room = episode.start.split("\n", 1)[1]
    exits = [way for way in ("north", "east", "south", "west") if f"To the {way.capitalize()}" in room]
    walls = {"north", "east", "south", "west"} - set(exits)
    for wall in walls:
        answer = rules.answer(episode.start, (), f"move {wall}")
        assert answer is not None
        assert answer.rule.refuses
    look = rules.answer(episode.start, (), "look around")
    assert look is not None
    assert look.observation == room
    assert rules.opening(episode.start, (), f"move {exits[0]}").startswith("You are in the ")


def test_a_broken_file_of_rules_is_named_in_a_line(run: Path) -> None:
    path = run / "models" / FILE
    kept = path.read_text()
    path.write_text(kept[:100])
    try:
        with pytest.raises(UserError, match=r"rules\.json.*imagine rules"):
            rules_of(RunFolder(run, 0))
    finally:
        path.write_text(kept)
