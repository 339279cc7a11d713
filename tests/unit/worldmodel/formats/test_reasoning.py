"""If these fail, a thought is taken for an observation, reaches a later turn, or changes how sure a prediction is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from policy.lm.batch import Row
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.env import EnvFailure
from real_envs.trajectory import StopReason
from tests.support.dreamed import steps
from tests.support.reasoned import BYTES, EPISODE, HALL, LINE, TURNS
from tests.support.scripted import Says
from worldmodel.formats.edits import EditFormat
from worldmodel.formats.full import DELIMITER, FullObservation, TransitionFormat, prompt_tokens
from worldmodel.formats.reasoning import (
    INSTRUCTION,
    ReasoningFormat,
    Split,
    answers_with_reasoning,
    reasoning_of,
    split_reasoning,
)
from worldmodel.formats.retrieval import RetrievalFormat, TransitionIndex
from worldmodel.objective import world_model_row, world_model_rows
from worldmodel.rewards import Goal, GoalWorldModel
from worldmodel.text import TextWorldModel
from worldmodel.world_model import InvalidReason, PredictionInvalid

# --- parsing


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("why\n[prediction]\nHALL", Split("why", "HALL", 3 + LINE)),
        ("\n[prediction]\nHALL", Split("", "HALL", LINE)),
        ("a\nb\n\n[prediction]\n\nHALL", Split("a\nb\n", "\nHALL", 4 + LINE)),
        ("x\n[prediction]\ny\n[prediction]\nz", Split("x", "y\n[prediction]\nz", 1 + LINE)),  # the first one ends it
        ("é\n[prediction]\né", Split("é", "é", 2 + LINE)),
        ("why\n[prediction]\n", Split("why", "", 3 + LINE)),
    ],
)
def test_the_first_line_ends_the_reasoning(text: str, cut: Split) -> None:
    assert split_reasoning(BYTES, BYTES.encode(text), 40) == cut


@pytest.mark.parametrize("text", ["", "why", "[prediction]", "why [prediction]\nHALL", "why\n[prediction] HALL"])
def test_no_line_is_no_prediction(text: str) -> None:
    with pytest.raises(PredictionInvalid) as told:
        split_reasoning(BYTES, BYTES.encode(text), 100)
    assert told.value.reason is InvalidReason.REASONING


def test_the_limit_counts_the_line() -> None:
    ids = BYTES.encode("why\n[prediction]\nHALL")
    assert split_reasoning(BYTES, ids, 3 + LINE).begin == 3 + LINE
    with pytest.raises(PredictionInvalid, match=f"within {2 + LINE} tokens"):
        split_reasoning(BYTES, ids, 2 + LINE)


def test_a_token_that_ends_the_line_and_goes_on_belongs_to_the_prediction() -> None:
    chat = ChatFormat(train_tokenizer([], 263, ["]\nHALL"]))
    ids = chat.encode("why\n[prediction]\nHALL\n")
    assert len(ids) == 3 + (LINE - 2) + 1 + 1
    assert split_reasoning(chat, ids, 40) == Split("why", "HALL\n", 3 + LINE - 2)


def test_a_logged_thought_is_text_without_the_line_and_none_is_not_an_empty_one() -> None:
    assert [reasoning_of(turn) for turn in TURNS] == ["Zounds, it can be taken.", None, ""]
    for wrong, said in (
        (3.0, "not text"),
        ("a\n[prediction]\nb", "holds the line"),
        ("a\n[prediction]", "holds the line"),
    ):
        with pytest.raises(ValueError, match=said):
            reasoning_of(replace(TURNS[0], info={"reasoning": wrong}))


# --- what is read and trained


def test_a_row_for_each_thought_and_one_for_the_turns_without() -> None:
    weights = [2.0, 3.0, 4.0]
    episode, first, last = world_model_rows(BYTES, EPISODE, weights, ReasoningFormat(FullObservation(), 60))

    def trained(row: Row) -> dict[float, str]:
        weighed = list(zip(row.ids.tolist(), row.ce_weight.tolist(), strict=True))
        return {w: BYTES.tokenizer.decode([id for id, v in weighed if v == w]) for _, w in weighed if w}

    assert trained(episode) == {3.0: "-= Hall =-\n[reward=0]<|end|>"}  # the line before it is not taught
    assert trained(first) == {2.0: "Zounds, it can be taken.\n[prediction]\nTaken.\n[reward=0]<|end|>"}
    assert trained(last) == {4.0: "\n[prediction]\nThe End\n[reward=1 done]<|end|>"}
    whole = BYTES.tokenizer.decode(last.ids)
    assert whole == (
        f"<|user|>{HALL}\n> take lamp<|end|><|assistant|>\n[prediction]\nTaken.\n[reward=0]<|end|>"
        "<|user|>look<|end|><|assistant|>\n[prediction]\n-= Hall =-\n[reward=0]<|end|>"
        "<|user|>go east<|end|><|assistant|>\n[prediction]\nThe End\n[reward=1 done]<|end|>"
    )
    assert BYTES.tokenizer.decode(episode.ids) == whole


def test_turns_that_weigh_nothing_have_no_row_and_without_reasoning_all_is_as_before() -> None:
    assert len(world_model_rows(BYTES, EPISODE, [0.0, 1.0, 0.0], ReasoningFormat(FullObservation(), 60))) == 1
    (row,) = world_model_rows(BYTES, EPISODE, [1.0, 2.0, 3.0])
    alone = world_model_row(BYTES, EPISODE, [1.0, 2.0, 3.0])
    assert (row.ids.tolist(), row.ce_weight.tolist()) == (alone.ids.tolist(), alone.ce_weight.tolist())
    assert DELIMITER not in BYTES.tokenizer.decode(row.ids)
    assert answers_with_reasoning(FullObservation(), HALL, TURNS) == FullObservation().answers(HALL, TURNS)


def test_an_instruction_stands_before_the_first_action_and_stays() -> None:
    index = TransitionIndex([EPISODE])
    for form in (FullObservation(), EditFormat(), RetrievalFormat(index, 1)):
        asked = ReasoningFormat(form, 60, INSTRUCTION)
        texts = [
            BYTES.tokenizer.decode(prompt_tokens(BYTES, asked, HALL, TURNS[:k], TURNS[k].action).ids) for k in (0, 1, 2)
        ]
        assert all(b.startswith(a) for a, b in pairwise(texts))
        assert all(text.count("[prediction], and after it") == 1 for text in texts)
        assert texts[0].startswith(f"<|user|>{HALL}\n> {INSTRUCTION}")
        assert "Zounds" not in texts[2]


# --- dreams


FORMS: dict[str, tuple[TransitionFormat, list[str]]] = {
    "text": (FullObservation(), ["Taken.\n[reward=0]", "-= Hall =-\n[reward=0]"]),
    "delta": (EditFormat(), ["Taken.\n[reward=0]", "=-= Hall =-\n-2\n[reward=0]"]),
    "retrieval": (RetrievalFormat(TransitionIndex([EPISODE]), 1), ["Taken.\n[reward=0]", "-= Hall =-\n[reward=0]"]),
}


@pytest.mark.parametrize("kind", FORMS)
def test_a_thought_is_kept_in_the_record_and_nowhere_else(kind: str) -> None:
    form, answers = FORMS[kind]
    said = [f"Zounds {k}\n[prediction]\n{answer}" for k, answer in enumerate(answers)]
    engine = Says(*said, chat=BYTES)
    results = steps(TextWorldModel(engine, BYTES, "w", 50, 1.0, ReasoningFormat(form, 40)), ["take lamp", "look"], HALL)
    assert [r.observation.text for r in results] == ["Taken.", "-= Hall =-"]
    assert [r.info["reasoning"] for r in results] == ["Zounds 0", "Zounds 1"]
    assert engine.limits == {90}
    prompts = [BYTES.tokenizer.decode(ids) for ids in engine.prompts]
    assert not [prompt for prompt in prompts if "Zounds" in prompt]
    assert f"<|assistant|>\n[prediction]\n{answers[0]}<|end|>" in prompts[1]
    for result, answer in zip(results, answers, strict=True):  # a token a byte, and the one that ends it
        assert result.info["confidence"] == pytest.approx(0.5 ** (len(answer) + 1))
        assert result.info["outcome_confidence"] == pytest.approx(0.5 ** len("\n[reward=0]!"))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Taken.\n[reward=0]", "reasoning"),  # a whole prediction is none without the line
        ("Zounds" * 9 + "\n[prediction]\nTaken.\n[reward=0]", "reasoning"),  # too long a thought
        ("Zounds" * 90, "reasoning"),
        ("Zounds\n[prediction]\n" + "Taken. " * 5 + "\n[reward=0]", "unfinished"),  # within the sum of both limits
        ("Zounds\n[prediction]\n" + "Taken. " * 50, "unfinished"),
        ("Zounds\n[prediction]\nTaken.", "no_status"),
        ("Zounds [reward=0]\n[prediction]\nTaken.", "no_status"),
    ],
)
def test_what_is_no_prediction_is_typed_and_never_an_observation(said: str, reason: str) -> None:
    model = TextWorldModel(Says(said, chat=BYTES), BYTES, "w", 30, 1.0, ReasoningFormat(FullObservation(), 40))
    with pytest.raises(EnvFailure) as failed:
        steps(model, ["take lamp"], HALL)
    assert failed.value.reason is StopReason.PREDICTION_INVALID
    assert model.rejected == {InvalidReason(reason): 1}


def test_the_model_stays_what_it_is_at_another_temperature_and_under_a_goal() -> None:
    engine = Says("Zounds\n[prediction]\nTaken.\n[reward=0]", chat=BYTES)
    model = TextWorldModel(engine, BYTES, "w", 30, 1.0, ReasoningFormat(FullObservation(), 40)).at_temperature(0.0)
    (result,) = steps(GoalWorldModel(model.excluding([EPISODE]), Goal("Taken", reward=0.5)), ["take lamp"], HALL)
    assert (result.reward, result.info["reasoning"]) == (0.5, "Zounds")
    assert engine.limits == {70}
