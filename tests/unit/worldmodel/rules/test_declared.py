"""If these fail, a dream spends tokens on what a world's schemas answer, or they answer more than is theirs."""

from __future__ import annotations

import pytest

from imagination.rollout.world_models import declared_of
from real_envs.errors import UserError
from tests.support.dreamed import steps
from tests.support.scripted import Answering
from worldmodel.rules.world_model import DeclaredAnswers
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
