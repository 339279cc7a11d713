"""The words that people act on. If these fail, a world model is called good, or bad, for reasons that are not there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from imagination.commands.audit import _candidates, _settings, audited_before
from imagination.commands.experiments.audit_table import audit_table, config_of, render_table, row_of
from imagination.evaluation.audit import VERSION, find_candidates
from imagination.evaluation.verdict import targets, verdict
from imagination.report.audit_page import render_audit, terminal_audit
from imagination.runs.run_folder import RunFolder
from imagination.settings import AuditSettings, Config
from imagination.settings.compose import remember_overrides
from real_envs.files import write_json
from tests.support.audits import e, finished, good


def words(found: dict[str, Any]) -> str:
    return " ".join(verdict(found, AuditSettings())["sentences"])


def test_a_good_model_is_called_good() -> None:
    found = good()
    assert all(row["met"] for row in targets(found, AuditSettings()))
    said = verdict(found, AuditSettings())
    assert said["trust"] == "yes"
    assert "every target" in said["sentences"][0]
    for number in (
        "up to 2 turns",
        "above 0.8 until turn 2 (0.85 [0.84, 0.86], n=60)",
        "turn 3 it is 0.70 [0.69, 0.71], n=50",
    ):
        assert number in words(found)
    assert "Do not trust" not in words(found)


def test_a_bound_is_met_where_it_is_reached() -> None:
    found = good()
    found["sets"]["held_out"]["new"]["text"] = e(0.9)
    found["agreement"]["plain"]["mean_absolute_gap"] = e(0.05)
    assert all(row["met"] for row in targets(found, AuditSettings()))


def test_edits_have_a_target_of_their_own() -> None:
    found = good()
    found["sets"]["held_out"]["text"] = found["sets"]["held_out"]["new"]["text"] = e(0.92)
    for kind, met in (("text", True), ("delta", False)):
        found["world_model"]["kind"] = kind
        assert [row["met"] for row in targets(found, AuditSettings())[:2]] == [met, met]


def _agreement(**few: int) -> dict[str, Any]:
    return good()["agreement"]["plain"] | few


@pytest.mark.parametrize(("low", "met"), [(0.3, False), (0.01, None)])
def test_of_few_episodes_each_only_a_sure_miss_counts(low: float, met: bool | None) -> None:
    found = good()
    gap = {"value": 0.5, "n": 10, "ci95": [low, 0.7]}
    found["agreement"]["plain"] = _agreement(episodes_each=12, planned=12) | {"mean_absolute_gap": gap}
    assert {row["key"]: row["met"] for row in targets(found, AuditSettings())}["gap"] is met


@pytest.mark.parametrize(
    ("where", "value", "undecided"),
    [
        (("sets", "on_policy", "reward", "precision"), e(1.0, 19), {"reward_precision"}),
        (("sets", "held_out", "text"), e(0.2, 19), {"text"}),
        (("sets", "held_out", "new", "text"), e(0.2, 19), {"text_new"}),
        (("agreement", "plain", "policies"), 9, {"gap", "spearman", "cr_pairwise"}),
        (("agreement", "plain", "episodes_each"), 47, {"gap", "spearman", "cr_pairwise"}),  # of 60
        (("agreement", "plain", "episodes_each"), 48, set()),
        (("agreement", "plain"), _agreement(episodes_each=19, planned=19), {"gap", "spearman", "cr_pairwise"}),
        (("agreement", "plain"), _agreement(episodes_each=20, planned=20), set()),
    ],
)
def test_too_little_decides_nothing(where: tuple[str, ...], value: Any, undecided: set[str]) -> None:
    """One reward rightly told is no precision of 1, two checkpoints have no ranks, and episodes that all policies
    finished are the easy ones if few did."""
    found = good()
    *path, last = where
    inner: Any = found
    for key in path:
        inner = inner[key]
    inner[last] = value
    assert {row["key"] for row in targets(found, AuditSettings()) if row["met"] is None} == undecided
    assert verdict(found, AuditSettings())["trust"] == ("partly" if undecided else "yes")


def test_a_task_whose_rewards_are_wrong_is_named() -> None:
    found = good()
    wrong = {"precision": e(0.61, 31, 0.43, 0.76), "recall": e(1.0, 19), "accuracy": e(0.9)}
    found["sets"]["on_policies"]["reward"]["by_task"]["tw-7"] = wrong
    assert "rewards for task tw-7: " in words(found)
    assert "(precision 0.61 [0.43, 0.76], n=31)" in words(found)
    wrong["precision"] = e(0.61, 19)  # too few to say so
    assert "tw-7" not in words(found)


def test_missed_targets_make_it_worse() -> None:
    found = good()
    found["sets"]["on_policy"]["reward"]["precision"] = e(0.9, 60, 0.8, 0.96)
    said = verdict(found, AuditSettings())
    assert said["trust"] == "partly"
    assert "1 of 8 targets" in said["sentences"][0]
    for part in ("Reward precision, own actions: 0.90 [0.80, 0.96], n=60, ", "at least 0.95 (chance"):
        assert part in " ".join(said["sentences"])
    found["sets"]["on_policy"]["reward"]["precision"] = e(0.6, 60, 0.5, 0.7)
    assert "wanted at least 0.95." in words(found)
    found["agreement"]["plain"]["spearman"] = e(0.2, 10)
    assert verdict(found, AuditSettings())["trust"] == "no"  # who ranks wrongly cannot teach


def test_a_dream_in_which_all_fare_alike_ranks_nobody() -> None:
    """No rank correlation is defined then, and that is a failure, not a gap in what was measured."""
    found = good()
    found["agreement"]["plain"]["spearman"] = e(None, 10)
    assert {row["key"]: row["met"] for row in targets(found, AuditSettings())}["spearman"] is None  # real is alike too
    for k, policy in enumerate(found["policies"]):
        policy["real"] = e(0.2 + 0.5 * k)
    said = verdict(found, AuditSettings())
    assert said["trust"] == "no"
    assert "Rank agreement (Spearman): none, n=10, wanted at least 0.9." in " ".join(said["sentences"])


@pytest.mark.parametrize(
    ("change", "words_said"),
    [
        (("sensitivity", {"states": 9, "sensitivity": e(0.5), "specificity": e(1.0)}), "not listen well"),
        (("sensitivity", {"states": 9, "sensitivity": e(1.0), "specificity": e(0.5)}), "where it does not"),
    ],
)
def test_reasons_follow_the_numbers(change: tuple[str, Any], words_said: str) -> None:
    found = good()
    assert words_said not in words(found)
    found[change[0]] = change[1]
    assert words_said in words(found)


def test_overconfidence_and_willingness_are_said() -> None:
    found = good()
    own = found["sets"]["on_policies"]
    own["calibration"]["whole"] |= {"ece": e(0.11), "confidence": 0.95, "right": 0.84}
    own["refusals"]["refused_too"] = e(0.5)
    assert "says 0.95 on average" in words(found)
    assert "too willing" in words(found)


def test_of_a_handful_of_turns_neither_calibration_nor_horizon_is_told() -> None:
    audit = good()
    assert "can be used as a guard" in words(audit)
    audit["sets"]["on_policies"]["calibration"]["whole"]["ece"] = e(0.01, 1)
    audit["sets"]["on_policy"]["drift"]["n"] = 3
    assert "can be used as a guard" not in words(audit)
    assert "own actions no horizon is known: there are fewer than 20 episodes" in words(audit)


def test_what_was_not_measured_is_not_met() -> None:
    """Without a real environment nothing says that dreams come true: never "yes"."""
    found = good()
    del found["sets"]["on_policy"], found["sets"]["on_policies"]
    found |= {"policies": [], "agreement": {}}
    rows = {row["key"]: row["met"] for row in targets(found, AuditSettings())}
    assert rows == {"text": True, "text_new": True, **dict.fromkeys(list(rows)[2:])}
    said = verdict(found, AuditSettings())
    assert said["trust"] == "partly"
    assert "not everything was" in said["sentences"][0]
    assert "Reward precision, own actions;" in said["sentences"][-1]
    found["sets"] = {}
    assert verdict(found, AuditSettings())["trust"] == "unknown"
    assert "–" in render_audit(finished(found))


def test_the_page_stands_alone_and_escapes_what_worlds_say() -> None:
    page = render_audit(finished(good()))
    assert not re.search(r"""(src|href)="(?!#)|<script|https?:|url\((?!#)""", page)
    assert "&lt;script&gt;" in page
    assert "go &lt;b&gt;east&lt;/b&gt;" in page
    assert page.count("<svg") == 6
    for section in (
        "What was asked of it",
        "How it dreams",
        "One turn ahead",
        "believes of policies",
        "Where it fails",
    ):
        assert section in page
    assert terminal_audit(finished(good())).row_count == 8


def test_the_table_says_what_was_missed_and_why() -> None:
    missed = good()
    missed["sets"]["on_policy"]["reward"]["precision"] = e(0.6, 60)
    rows = [row_of(finished(good()), Path("a.html")), row_of(finished(missed) | {"run": "bad"}, Path("b.html"))]
    table = render_table(rows)
    assert "| bad | worldmodel | 2 |" in table
    assert "**0.60 [0.59, 0.61], n=60**" in table
    assert "| **mean of 2** | worldmodel | | 0.940 | 0.940 | 0.790 |" in table
    assert "**bad, worldmodel**: 7 of 100 predictions wrong" in table
    assert "**demo, worldmodel**" not in table  # nothing to explain
    assert "predicted “&lt;script>” (reward 1, end); real “Hall” (reward 0)" in table


def test_each_run_of_the_table_keeps_its_own_settings(tmp_path: Path) -> None:
    """A world model that writes edits, read as one that writes whole texts, would be called worthless."""
    (tmp_path / "summary.json").write_text('{"seed": 7}')
    remember_overrides(["run=a", "worldmodel.kind=delta", "audit.pairs=5"], tmp_path)
    config = Config()
    config.audit.pairs = 9
    mine = config_of(tmp_path, config)
    assert (mine.worldmodel.kind, mine.audit.pairs, mine.seed) == ("delta", 9, 7)
    (tmp_path / "overrides.json").unlink()  # made by the table itself
    assert config_of(tmp_path, config).worldmodel.kind == "text"


@pytest.mark.parametrize(
    ("others", "wrong"),
    [
        ({"d": "worldmodel.kind=delt"}, "delta"),
        ({"d": "worldmodel.kin=delta"}, "worldmodel.kind"),
        ({"a b": "", "A-B": ""}, "names that differ"),
    ],
)
def test_what_cannot_be_fitted_is_said_before_anything_runs(tmp_path: Path, others: dict[str, str], wrong: str) -> None:
    config = Config()
    config.audit.others = others
    with pytest.raises(ValueError, match=wrong):
        audit_table(config, tmp_path)
    assert not list(tmp_path.iterdir())


def test_checkpoints_come_before_temperatures(tmp_path: Path) -> None:
    """Policies of one folder at several temperatures differ little; they only fill up what checkpoints leave."""
    names = ["kept/clone-00050", "policy-clone", "kept/train-00004", "kept/train-00008", "policy"]
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    own = [c.name for c in find_candidates(tmp_path, 1.0, 5, [0.5])]
    assert own == ["clone-00050", "policy-clone", "train-00004", "train-00008", "policy"]
    more = find_candidates(tmp_path, 1.0, 8, [0.5, 1.0, 2.0])
    assert [c.name for c in more] == ["policy@0.5", "policy-clone@0.5", "policy@2", *own]
    assert more[-1].temperature == 1.0
    assert find_candidates(tmp_path / "nowhere", 1.0, 5, [0.5]) == []


@pytest.mark.parametrize("name", ["policy/config.json", "worldmodel/world.py", "rules.json"])
def test_an_audit_is_of_the_models_and_rules_that_are_there(tmp_path: Path, name: str) -> None:
    config, written = Config(), tmp_path / "models" / name
    write_json(tmp_path / "audit.json", {"version": VERSION, "settings": _settings(config)})
    written.parent.mkdir(parents=True)
    written.touch()
    for age, known in ((-10.0, True), (10.0, False)):
        at = (tmp_path / "audit.json").stat().st_mtime + age
        os.utime(written, (at, at))
        assert (audited_before(config, tmp_path) is not None) is known


def test_folders_of_one_name_are_told_apart_at_every_temperature(tmp_path: Path) -> None:
    """Policies are kept by name: of two with the same one, one would be lost."""
    folders = [tmp_path / run / "models" / "policy" for run in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    config = Config()
    config.audit.policies = list(map(str, folders))
    names = [c.name for c in _candidates(config, RunFolder(tmp_path / "run", 0))]
    assert len(names) == len(set(names)) == config.audit.min_policies
