"""If these fail, what a model writes as an edit is not what it is shown to have said, or not what it was trained on."""

from __future__ import annotations

import asyncio

import pytest

from imagination.rollout.dream_env import DreamEnv, Start
from real_envs.env import EnvFailure, Task
from real_envs.trajectory import Owner, Source, StopReason, Trajectory, Turn
from tests.support.scripted import CHAT, Says
from worldmodel.evaluation.transitions import audit_metrics, judge
from worldmodel.formats.edits import EditFormat
from worldmodel.formats.full import prompt_tokens
from worldmodel.objective import world_model_row
from worldmodel.text import TextWorldModel
from worldmodel.world_model import InvalidReason, PredictionInvalid

HALL = "-= Hall =-\nA lamp is here.\nGo east."
TURNS = (
    Turn("take lamp", "Taken.", 0.0, False),
    Turn("look", "-= Hall =-\nGo east.", 0.0, False),
    Turn("wait", "-= Hall =-\nGo east.", 0.0, False),
    Turn("go east", "The End", 1.0, True),
)
ANSWERS = ["Taken.\n[reward=0]", "=-= Hall =-\n-2\n[reward=0]", "=\n[reward=0]", "The End\n[reward=1 done]"]
EPISODE = Trajectory(
    "e", "t", "g", Source.REAL, "a", 0, "Find it.\n" + HALL, TURNS, StopReason.TERMINATED, prefix_turns=0
)


def test_the_env_owned_tokens_of_a_row_are_the_edits() -> None:
    row = world_model_row(CHAT, EPISODE, [1.0, 2.0, 0.0, 4.0], EditFormat())
    trained = row.ids[row.ce_weight != 0].tolist()
    assert CHAT.decode(trained) == "".join(ANSWERS[:2] + ANSWERS[3:])
    by_weight = {
        w: CHAT.decode([i for i, x in zip(row.ids.tolist(), row.ce_weight.tolist(), strict=True) if x == w])
        for w in (2.0, 4.0)
    }
    assert by_weight == {2.0: ANSWERS[1], 4.0: ANSWERS[3]}
    assert EditFormat().answers(EPISODE.start, TURNS) == ANSWERS


def test_a_dream_reads_what_a_row_trained_on() -> None:
    """The prompt of each turn, and the answer behind it, are the beginning of the training row."""
    row = world_model_row(CHAT, EPISODE, [1.0] * 4, EditFormat())
    engine = Says(*ANSWERS)
    model = TextWorldModel(engine, CHAT, "v", form=EditFormat())

    async def play() -> None:
        for k, turn in enumerate(TURNS):
            told = await model.predict(EPISODE.start, TURNS[:k], turn.action, seed=0)
            assert (told.observation, told.reward, told.terminated) == (turn.observation, turn.reward, turn.terminated)

    asyncio.run(play())
    for asked, answer in zip(engine.prompts, ANSWERS, strict=True):
        whole = [*asked, *CHAT.encode(answer), CHAT.stop]
        assert row.ids[: len(whole)].tolist() == whole


def test_what_an_edit_made_stands_in_the_prompt_in_full_and_is_trained_by_nobody() -> None:
    """The lamp is gone from the hall: the model reads the hall without it before it is asked about the next action."""
    asked = prompt_tokens(CHAT, EditFormat(), EPISODE.start, TURNS[:3], "go east")
    text = CHAT.decode(asked.ids)
    assert text.count("-= Hall =-\nGo east.\n> ") == 1  # once: where nothing changed it stands there already
    assert text.index(ANSWERS[1]) < text.index("-= Hall =-\nGo east.\n> wait") < text.index(ANSWERS[2])
    brief = CHAT.decode(prompt_tokens(CHAT, EditFormat(in_full=False), EPISODE.start, TURNS[:3], "go east").ids)
    assert "Go east.\n> " not in brief.replace(HALL, "")
    full, short = (world_model_row(CHAT, EPISODE, [1.0] * 4, EditFormat(kind)) for kind in (True, False))
    trained = [
        [i for i, weight in zip(row.ids.tolist(), row.ce_weight.tolist(), strict=True) if weight]
        for row in (full, short)
    ]
    assert trained[0] == trained[1]


def test_confidence_is_that_of_the_edit_that_was_written() -> None:
    model = TextWorldModel(Says("=\n[reward=0]"), CHAT, "v", form=EditFormat())
    told = asyncio.run(model.predict("HALL", [], "wait", 0))
    n = len(CHAT.encode("=\n[reward=0]")) + 1
    assert told.observation == "HALL"
    assert told.confidence == pytest.approx(0.5**n)
    assert told.outcome_confidence == pytest.approx(0.5 ** (n - 1))
    assert told.disagreement is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("=\n-9\n[reward=0]", InvalidReason.EDIT),
        ("=-= Cellar =-\n[reward=0]", InvalidReason.EDIT),
        ("=\n-1", InvalidReason.NO_STATUS),
        ("x" * 200 + "\n[reward=0]", InvalidReason.UNFINISHED),
    ],
)
def test_what_cannot_be_applied_is_typed_counted_and_never_shown(text: str, reason: InvalidReason) -> None:
    model = TextWorldModel(Says(text, text, text), CHAT, "v", form=EditFormat())
    with pytest.raises(PredictionInvalid) as caught:
        asyncio.run(model.predict(HALL, [], "wait", 0))
    assert caught.value.reason is reason
    assert dict(model.rejected) == {reason: 1}
    env = DreamEnv(model, {"s": Start("t", HALL)})
    asyncio.run(env.reset(Task("t", {"start": "s"}), 0))
    with pytest.raises(EnvFailure) as failed:
        asyncio.run(env.step("wait"))
    assert failed.value.reason is StopReason.PREDICTION_INVALID
    once = Trajectory("f", "t", "g", Source.REAL, "a", 0, HALL, TURNS[:1], StopReason.TURN_LIMIT)
    card = audit_metrics(asyncio.run(judge(model, [once])))
    assert (card["invalid"], card["invalid_edit"]) == (1, int(reason is InvalidReason.EDIT))
    assert model.rejected[reason] == 3


def test_another_edit_for_the_same_text_leads_to_the_same_prompt() -> None:
    """A model may write the whole room where the canonical edit is shorter: what follows reads what it trained on."""
    engine = Says("-= Hall =-\nGo east.\n[reward=0]", "=\n[reward=0]")
    model = TextWorldModel(engine, CHAT, "v", form=EditFormat())
    told = asyncio.run(model.predict(EPISODE.start, TURNS[:1], "look", 0))
    turns = [TURNS[0], Turn("look", told.observation, 0.0, False)]
    asyncio.run(model.predict(EPISODE.start, turns, "wait", 0))
    expected = prompt_tokens(CHAT, EditFormat(), EPISODE.start, TURNS[:2], "wait")
    assert engine.prompts[1] == expected.ids
    assert {expected.owners[k] for k, t in enumerate(expected.turns) if t == 2} == {Owner.AGENT}
