"""What an audit says of dreams like its own, from planted runs. If these fail, people train where nobody learned."""

from __future__ import annotations

from typing import Any

import pytest

from imagination.evaluation.forecast import MEASURES, forecast, measures_of, shipped
from imagination.report.audit_page import render_audit
from tests.support.audits import e, finished, good


def runs(many: int) -> list[dict[str, Any]]:
    """Precision 0.00, 0.05, ...: those below 0.5 lose 0.1, those from there on gain as much as their precision."""
    found = []
    for k in range(many):
        x = k / 20
        told = {measure.key: None for measure in MEASURES} | {"reward_precision": x}
        found.append(
            {
                "world": "babyai",
                "variant": "v",
                "seed": k,
                "gain": -0.1 if k < 10 else x,
                "clone": told,
                "trained": told,
            }
        )
    return found


def known(many: int = 21, measure: str = "reward_precision") -> dict[str, Any]:
    best = {"measure": measure, "worlds": {"babyai": {"spearman": 0.62, "ci95": [0.4, 0.8]}}}
    return {"command": "make fidelity", "best": {"clone": best, "trained": best}, "runs": runs(many)}


def audited(precision: float | None) -> dict[str, Any]:
    found = good()
    found["sets"]["on_policy"]["reward"]["precision"] = e(precision)
    return found


def test_the_measures_are_read_where_the_audit_has_them() -> None:
    found = good()
    found["policies"][-1] = {**found["policies"][-1], "gap": e(0.25), "cr_pairwise": e(0.875)}
    assert measures_of(found) == {
        "exact_own": 0.93,
        "reward_precision": 0.98,
        "reward_precision_sampled": None,  # its dreams are greedy
        "reward_recall": 0.97,
        "gap": 0.25,
        "cr_pairwise": 0.875,
        "contradictions": None,
        "confidence": 0.95,
    }
    found["sets"]["on_policy"]["sampled"] = {"reward": {"precision": e(0.5)}}
    assert measures_of(found)["reward_precision_sampled"] == 0.5
    assert set(measures_of({"sets": {}, "policies": []}).values()) == {None}  # no world to play in


def test_the_nearest_fifteen_speak() -> None:
    # 0.99: the nearest are 1.00, 0.95, ..., 0.30; of these 1.00 to 0.50 gained, which are eleven, and four lost
    found = forecast(audited(0.99), known())
    assert found is not None
    assert (found["runs"], found["raised"], found["gain"]) == (15, 11, [0.5, 1.0])
    ranks = "0.62 [0.40, 0.80] in babyai"
    for part in ("0.50 to 1.00 in 11 of 15 runs of babyai", "0.99, there 0.30 to 1.00;", ranks):
        assert part in found["sentence"]


def test_it_says_where_it_can_only_guess() -> None:
    # -0.5 is below all: the nearest are 0.00 to 0.70, of which 0.50, 0.55, ..., 0.70 gained
    found = forecast(audited(-0.5), known())
    assert found is not None
    assert (found["raised"], found["gain"]) == (5, [0.5, 0.7])
    assert "-0.50, there 0.00 to 0.70, none like it;" in found["sentence"]


def test_runs_that_never_gained_are_called_so() -> None:
    lost = known()
    lost["runs"] = [{**run, "gain": 0.0} for run in lost["runs"]]
    found = forecast(audited(0.5), lost)
    assert found is not None
    assert (found["raised"], found["gain"]) == (0, None)
    assert "any of 15 runs" in found["sentence"]


@pytest.mark.parametrize("which", ["clone", "trained"])
def test_a_policy_that_has_not_learned_yet_is_compared_with_clones(which: str) -> None:
    told = known()
    for run in told["runs"]:
        run["trained" if which == "clone" else "clone"] = dict.fromkeys(run[which])
    found = audited(0.9)
    assert (forecast(found, told) is None) == (which == "clone")  # its last policy is "policy"
    found["policies"] = found["policies"][:1]  # "policy-clone"
    assert (forecast(found, told) is None) == (which == "trained")
    found["policies"] = [found["policies"][0] | {"name": "outputs/b/models/policy-clone"}]
    assert (forecast(found, told) is None) == (which == "trained")


def test_without_numbers_nothing_is_said() -> None:
    assert forecast(audited(None), known()) is None
    assert forecast(audited(0.9), known(14)) is None
    turns = audited(0.9)["sets"]["on_policy"]["reward"]["precision"]["n"]
    assert forecast(audited(0.9), known(), least_n=turns) is not None
    assert forecast(audited(0.9), known(), least_n=turns + 1) is None
    assert forecast(audited(0.9), known(measure="gap")) is None  # no run has it
    assert forecast(audited(0.9), {**known(), "best": {}}) is None


def test_a_mean_confidence_is_of_the_turns_that_it_was_taken_on() -> None:
    forecasts = known(measure="confidence")
    for run in forecasts["runs"]:
        run["trained"] = run["trained"] | {"confidence": run["trained"]["reward_precision"]}
    turns = good()["sets"]["on_policy"]["calibration"]["whole"]["ece"]["n"]
    assert forecast(audited(0.9), forecasts, least_n=turns) is not None
    assert forecast(audited(0.9), forecasts, least_n=turns + 1) is None


def test_the_file_of_the_package_is_whole() -> None:
    found = shipped()
    assert set(found) == {"command", "best", "runs"}
    keys = {measure.key for measure in MEASURES}
    assert all(set(run["clone"]) == set(run["trained"]) == keys and -1 <= run["gain"] <= 1 for run in found["runs"])
    assert all(best["measure"] in keys for best in found["best"].values())


def test_the_page_shows_it_and_does_without() -> None:
    found = finished(audited(0.99))
    said = forecast(found, known())
    assert said is not None
    assert said["sentence"] in render_audit({**found, "forecast": said})
    for without in (found, {**found, "forecast": None}):
        assert "Dreams like these" not in render_audit(without)
