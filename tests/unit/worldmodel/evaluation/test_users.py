"""Simulated users that are easier than people teach a policy for nobody. If these fail, an audit does not see it."""

from __future__ import annotations

from collections.abc import Sequence

from imagination.evaluation.verdict import verdict
from imagination.settings import AuditSettings
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.audits import finished, good
from worldmodel.evaluation.transitions import Judged
from worldmodel.evaluation.users import user_metrics
from worldmodel.world_model import Prediction

FACTS = ("You are mia_li_3668.", "You want to fly to Seattle on May 20.")
TURNS = (
    Turn("Who are you?", "I am mia_li_3668.", 0.0, False),
    Turn("get_user(id='mia_li_3668')", '{"name": "Mia"}', 0.0, False),
    Turn("Where to?", "I would go to Seattle.", 0.0, False),
)


def episodes(turns: tuple[Turn, ...] = TURNS, many: int = 6) -> list[Trajectory]:
    return [
        Trajectory(
            f"e{k}", f"t{k}", f"g{k}", Source.REAL, "log", 0, "Hi", turns, StopReason.TURN_LIMIT, world_facts=FACTS
        )
        for k in range(many)
    ]


def judged(log: list[Trajectory], dreamed: Sequence[str | None], ends: bool = False) -> list[Judged]:
    return [
        Judged(t.id, i, turn, None if text is None else Prediction(text, 0.0, ends, 1.0, 1.0), t.task_id)
        for t in log
        for i, (turn, text) in enumerate(zip(t.turns, dreamed, strict=True))
    ]


def test_measures_by_hand() -> None:
    log = episodes()
    # says at once where to and when, knows a flight that nobody told it, and agrees
    dreamed = ["Yes, mia_li_3668, on May 20 to Seattle.", "{}", "Sure, take HAT136."]
    found = user_metrics(judged(log, dreamed), log, seed=0)
    assert found["turns"] == 12  # the call is answered by no user
    value = {key: {of: found[key][of]["value"] for of in found[key]} for key in found if key != "turns"}
    assert value["words"] == {"logged": 4.0, "dreamed": 5.0, "difference": 1.0}
    assert value["agrees"] == {"logged": 0.0, "dreamed": 1.0, "difference": 1.0}
    assert value["told"] == {"logged": 1.0, "dreamed": 2.0, "difference": 1.0}  # 4 and 0: who, May, 20, where
    assert value["invented"] == {"logged": 0.0, "dreamed": 0.5, "difference": 0.5}
    assert value["ends"] == {"logged": 0.0, "dreamed": 0.0, "difference": 0.0}


def test_a_perfect_dream_differs_in_nothing() -> None:
    log = episodes()
    found = user_metrics(judged(log, [turn.observation for turn in TURNS]), log, seed=0)
    assert all(found[key]["difference"]["value"] == 0 for key in found if key != "turns")


def test_logs_without_calls_have_no_users() -> None:
    log = episodes(TURNS[:1])
    assert user_metrics(judged(log, ["Yes."]), log, seed=0) == {}
    log = episodes()
    assert user_metrics(judged(log, [None, "{}", None]), log, seed=0) == {}  # malformed


def test_the_verdict_says_what_is_sure() -> None:
    log, audit = episodes(), good()
    for dreamed, said in (
        (["Yes, mia_li_3668.", "{}", "Sure."], "1.00 of messages that agree (logged 0.00)"),
        ([turn.observation for turn in TURNS], "in nothing that is sure (n=12 messages)"),
    ):
        audit["sets"]["held_out"]["users"] = user_metrics(judged(log, dreamed), log, seed=0)
        assert said in " ".join(verdict(finished(audit), AuditSettings())["sentences"])
