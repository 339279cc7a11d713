"""What many pairs say, counted by hand, and what compare.json holds."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from imagination.evaluation.compare import signals
from imagination.evaluation.compare.pairs import consistency, outcome, pair_json, pair_up, statistics
from imagination.evaluation.compare.play import ComparisonPlayer, Ledger
from imagination.report.compare_text import pair_view
from imagination.rollout.dream_env import NO_GUARD
from imagination.rollout.engines import Engines
from imagination.runs.run_folder import RunFolder
from imagination.session import Log
from imagination.settings import Config
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.comparisons import episode
from tests.support.scripted import Answering
from worldmodel.evaluation.proportions import summarise
from worldmodel.rewards import Goal, GoalWorldModel
from worldmodel.rules.world_model import DeclaredAnswers
from worldmodel.world_model import Prediction, PredictionInvalid

HALL, CAT, RAT = (Turn("go", text, 0.0, False, {"confidence": 0.5}) for text in ("A hall.", "A cat.", "A rat."))
THE_CAT = Turn("go", "The cat!", 0.0, False)
WIN = Turn("go", "You win.", 1.0, True)


def pair(dream: list[Turn], real: list[Turn], stop: StopReason | None = None, end: StopReason | None = None):  # type: ignore[no-untyped-def]
    return pair_up("p", "dream", "train", episode("d", dream, stop=stop), episode("r", real, Source.REAL, stop=end))


@pytest.mark.parametrize("reward", [1.0, None])
def test_a_head_is_taught_by_plain_answers_and_judged_by_the_declared_goal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reward: float | None
) -> None:
    """Also where the log has no rewards."""
    asked: list[tuple[Any, list[Trajectory]]] = []

    async def judge(model: Any, log: list[Trajectory]) -> list[Any]:
        asked.append((model, log))
        return []

    monkeypatch.setattr(signals, "judge", judge)
    monkeypatch.setattr(signals, "load_model", lambda *_: (None, None))
    turns = [replace(turn, reward=reward and turn.reward) for turn in (HALL, WIN)]
    config, log = Config(), [episode("r", turns, Source.REAL)]
    config.worldmodel.goal = goal = Goal(observation="win", reward=0.5)
    session: Any = SimpleNamespace(config=config, run=RunFolder(tmp_path, 0), log=Log(log, log))
    plain = Answering(lambda *_: PredictionInvalid("nobody asks"))
    world = GoalWorldModel(DeclaredAnswers(plain, "schema", lambda *_: None), goal)
    asyncio.run(signals.signal_table(session, [], log, world))
    (taught, held), (judged, unseen) = asked
    assert (type(taught), taught.model, judged) == (GoalWorldModel, plain, world)
    assert [[turn.reward for t in some for turn in t.turns] for some in (held, unseen)] == [[0.0, 0.5]] * 2


@pytest.mark.parametrize("pays", [1.0, 0.5])
def test_a_log_is_dreamed_again_by_the_declared_goal(pays: float) -> None:
    """The log pays and ends elsewhere, which is no mistake of a dream that pays by the goal."""
    log = [episode("r", [replace(HALL, reward=1.0), replace(WIN, reward=0.0, terminated=False), RAT], Source.REAL)]
    config = Config()
    config.worldmodel.goal = goal = Goal(observation="win", reward=pays)
    says = Answering(lambda seen, action: Prediction((HALL, WIN)[len(seen)].observation, 0.0, False, 0.9, 0.9))
    world: Any = GoalWorldModel(says, goal)
    session: Any = SimpleNamespace(config=config, solved_at=pays)
    player = ComparisonPlayer(session, world, NO_GUARD, None, None, None, Ledger(Engines(config.engine)))
    counts = statistics(asyncio.run(player.logged("train", log, world)))
    assert (counts["turns"], counts["false_success"], counts["missed_success"]) == ({"same": 2}, 0, 0)


def test_statistics_by_hand() -> None:
    pairs = [
        pair([HALL, WIN], [HALL, WIN]),  # never parts
        pair([HALL, WIN], [HALL, RAT]),  # parts at its second turn, solved only in the dream
        pair([CAT, HALL], [THE_CAT, HALL]),  # wording at once, never in substance
        pair([CAT, CAT], [RAT, RAT]),  # parts at once; its second turn counts no more
        pair([HALL], [HALL, CAT], StopReason.PREDICTION_INVALID),
        pair([HALL, CAT], [HALL, CAT], StopReason.UNSURE),  # the guard cut what was right
        pair([HALL, CAT], [HALL, RAT], StopReason.UNSURE),  # and what was wrong
        pair([HALL], [HALL], end=StopReason.ENV_CRASHED),  # says nothing
    ]
    found = statistics(pairs)
    assert (found["pairs"], found["left_out"]) == (7, 1)
    assert found["first"] == {"never": 2, "state": 3, "wording": 1, "invalid": 1}
    assert found["turns"] == {"same": 7, "state": 3, "wording": 1, "invalid": 1}
    assert found["never_parted"]["share"] == pytest.approx(2 / 7)
    assert found["never_in_substance"]["share"] == pytest.approx(3 / 7)
    assert (found["false_success"], found["missed_success"]) == (1, 0)
    assert found["guard"] == {"cut": 2, "right": 1}
    # seven at risk of which two part at turn 1; five left, of which three part at turn 2
    assert found["still_true"] == [[0, 1.0, 7], [1, pytest.approx(5 / 7), 7], [2, pytest.approx(5 / 7 * 2 / 5), 5]]
    assert found["still_true_in_substance"][1] == [1, pytest.approx(6 / 7), 7]
    assert statistics([])["never_parted"] == {"share": None, "n": 0, "ci95": None}


def test_a_pair_that_began_otherwise_is_left_out() -> None:
    other = pair_up("p", "log", "s", episode("d", [HALL]), episode("r", [HALL], Source.REAL, start="elsewhere"))
    assert not other.comparable
    assert statistics([other])["left_out"] == 1


@pytest.mark.parametrize(
    ("turns", "stop", "name"),
    [
        ([WIN], None, "solved"),
        ([HALL], None, "unsolved"),
        ([HALL], StopReason.UNSURE, "unsure"),
        ([HALL], StopReason.PREDICTION_INVALID, "invalid"),
        ([HALL], StopReason.ENV_TIMEOUT, "failed"),
        ([Turn("go", "A hall.", None, True)], None, "unjudged"),
    ],
)
def test_outcomes(turns: list[Turn], stop: StopReason | None, name: str) -> None:
    assert outcome(episode("e", turns, stop=stop)) == name


def test_consistency_by_hand() -> None:
    pairs = [pair([WIN], [WIN]), pair([WIN], [HALL]), pair([HALL], [HALL]), pair([WIN], [WIN]), pair([WIN], [WIN])]
    free = [episode(f"f{k}", [turn], Source.REAL) for k, turn in enumerate([WIN, WIN, WIN, HALL])]
    free.append(episode("f4", [HALL], Source.REAL, StopReason.ENV_CRASHED))  # says nothing, nor does its pair
    found = consistency(pairs, free)
    assert found["replayed"]["success"] == 0.5  # 2 of 4
    assert found["ratio"] == pytest.approx(2 / 3)
    assert found["pairwise"] == pytest.approx(1 / 3)
    assert consistency(pairs[:1], free[3:4])["ratio"] is None


def test_pairs_of_a_task_are_one_trial() -> None:
    """As in the success of free play, which stands beside them."""
    pairs = [pair([WIN], [WIN]) for _ in range(40)]
    free = summarise([p.real for p in pairs]).success.to_json()
    assert free["ci95"] == [pytest.approx(0.025), 1.0]
    assert statistics(pairs)["never_parted"] == {"share": 1.0, "n": 40, "ci95": free["ci95"]}
    assert consistency(pairs, [p.real for p in pairs])["replayed"] == free


def test_a_pair_as_json() -> None:
    made = pair_json(pair([HALL, CAT], [HALL, RAT], StopReason.UNSURE))
    assert json.loads(json.dumps(made)) == made
    assert (made["first"], made["first_in_substance"], made["comparable"]) == (1, 1, True)
    assert made["dream"] == {"outcome": "unsure", "stop": "unsure", "reward": 0.0, "failure": None, "turns": 2}
    last = made["turns"][1]
    assert (last["kind"], last["differs"], last["unsure"], last["action"]) == ("state", ["state"], True, "go")
    assert last["dream"]["marks"] == [[2, 5]]
    assert last["dream"]["confidence"] == 0.5
    assert last["real"]["observation"][slice(*last["real"]["marks"][0])] == "rat"
    assert made["turns"][0]["dream"]["marks"] == []
    assert last["dream"]["reasoning"] is None


def test_what_the_world_model_thought_is_shown_and_compared_with_nothing() -> None:
    thought = Turn("go", "A hall.", 0.0, False, {"reasoning": "East \x1b[2J is a hall."})
    made = pair_json(pair([thought, CAT], [HALL, CAT]))
    assert made["first"] is None
    assert [turn["dream"]["reasoning"] for turn in made["turns"]] == ["East \x1b[2J is a hall.", None]
    console = Console(width=100, record=True, file=StringIO())
    console.print(pair_view(made, 100))
    text = " ".join(console.export_text().split())
    assert "(thought: East \ufffd[2J is a hall.)" in text
