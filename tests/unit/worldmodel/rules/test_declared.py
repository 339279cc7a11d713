"""If these fail, a dream spends tokens on what a world's schemas answer, or they answer more than is theirs."""

from __future__ import annotations

from collections import Counter

import pytest

from imagination.rollout.world_models import declared_of
from real_envs.errors import UserError
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.dreamed import steps
from tests.support.scripted import Answering
from worldmodel.formats.memory import TaskMemory
from worldmodel.rules.world_model import AnsweredActions, DeclaredAnswers
from worldmodel.world_model import Prediction

TOOLS = "Tools.\nmv(source: str, destination: str)\nrate(day?: str, scale: int = 1)\nUser: Move a."


def test_only_what_schemas_refuse_is_answered_without_the_model() -> None:
    asked: list[str] = []

    def answer(seen: object, action: str) -> Prediction:
        asked.append(action)
        return Prediction("{}", 0.5, False, confidence=0.3, outcome_confidence=0.4)

    schema = declared_of("bfcl", "schema", [])["schema"]
    model = DeclaredAnswers(Answering(answer), "schema", schema)  # type: ignore[arg-type]
    wrong = ["mv(source='a')", "cp(source='a')", "mv(source='a', destination=b)", "rate('Mon', 2, 3)"]
    right = [
        "mv('a', destination='b')",
        "rate()",
        '{"name": "rate", "arguments": {"scale": 2}}',
        "done()",
        "I am done.",
    ]
    refused = steps(model, wrong, TOOLS)
    for result, named in zip(refused, ("'destination'", "'cp'", "literals", "rate"), strict=True):
        assert result.observation.text.startswith("Error: ")
        assert named in result.observation.text
        assert (result.reward, result.terminated, result.info["confidence"]) == (0.0, False, 1.0)
    assert asked == []
    assert [result.reward for result in steps(model, right, TOOLS)] == [0.5] * len(right)
    assert asked == right
    # a tool that a turn of the user brings along
    brought = "sort(file: str)\nUser: And now?"
    history = DeclaredAnswers(
        Answering(lambda seen, action: Prediction(brought, 0.0, False, 1.0, 1.0)),  # type: ignore[arg-type]
        "schema",
        schema,
    )
    texts = [result.observation.text for result in steps(history, ["sort('a')", "done()", "sort('a')"], TOOLS)]
    assert texts[0].startswith("Error: ")
    assert texts[1:] == [brought, brought]


def test_a_world_that_declares_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="textworld"):
        declared_of("textworld", "schema", [])
    assert declared_of("textworld", "off", []) == {}


def test_facts_are_of_the_one_task_that_begins_so() -> None:
    """Of two tasks that begin alike, neither is told by the other's facts; an episode without any takes none away."""
    start = "ls()\ncd(folder: str)\nUser: First."
    moves = ("calls 1: cd(folder='a')",)
    going_on = (*moves, "request 2: Second.", "calls 2: ls()")
    history = [Turn("cd(folder='a')", "None", 0.0, False)]

    def answer(*facts: tuple[str, ...]) -> object:
        log = [
            Trajectory(f"e{k}", f"t{k}", "g", Source.REAL, "a", 0, start, (), StopReason.TURN_LIMIT, world_facts=some)
            for k, some in enumerate(facts)
        ]
        answer = declared_of("bfcl", "user", log)["user"](start, history, "done()")
        return answer, TaskMemory(log).of(start, 9, frozenset())

    expected = ("User: Second.", 0.5, False), [*going_on]
    assert answer(going_on) == answer(going_on, (), going_on) == expected
    assert answer(going_on, moves) == answer(moves, going_on) == (None, [])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_refuses_what_is_answered_for_sure_is_asked_again(temperature: float) -> None:
    tried: Counter[str] = Counter()

    def answer(seen: object, action: str) -> Prediction:
        tried[action] += 1
        refuses = tried[action] < 3
        return Prediction("Error: no" if refuses else "{}", 0.0, False, confidence=0.3, outcome_confidence=0.4)

    model = Answering(answer)
    model.temperature = temperature
    sure = AnsweredActions(model, lambda start, history, action: action == "a", "Error", 8)  # type: ignore[arg-type]
    assert [result.observation.text for result in steps(sure, ["a", "b"], TOOLS)] == ["{}", "Error: no"]
    assert tried == {"a": 3, "b": 1}
    never = Answering(lambda seen, action: Prediction("Error: no", 0.0, False, 1.0, 1.0))
    given_up = steps(AnsweredActions(never, lambda *_: True, "Error", 2), ["a"], TOOLS)  # type: ignore[arg-type]
    assert (given_up[0].observation.text, given_up[0].info["resampled"]) == ("Error: no", 2)
