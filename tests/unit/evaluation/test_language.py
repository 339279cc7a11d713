"""If these fail, the report says of a table that it is a language, or that other tasks have no new words."""

from __future__ import annotations

from imagination.evaluation.world_model_eval import language_metrics
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from worldmodel.formats.edits import EditFormat
from worldmodel.formats.full import status_line

CHAT = ChatFormat(train_tokenizer(["take the lamp"] * 9 + ["A hall."] * 9, 400))
STATUS = len(CHAT.encode(status_line(0.0, False)))  # how a prediction tells reward and end


def episode(start: str, *turns: tuple[str, str]) -> Trajectory:
    played = tuple(Turn(action, observation, 0.0, False) for action, observation in turns)
    return Trajectory("e", "t", "g", Source.REAL, "a", 0, start, played, StopReason.TURN_LIMIT)


def test_by_hand() -> None:
    log = [episode("A hall.", ("take the lamp", "A hall."), ("take the", "A hall"))]
    elsewhere = [episode("x", ("look", "The LAMP."), ("look", "A cellar."), ("look", "hall lamp take"), ("look", "12"))]
    assert language_metrics(CHAT, log, elsewhere) == {
        "tokens_per_action": 2.5,  # take| the| lamp and take| the
        "tokens_per_observation": 2.5,  # A| hall|. and A| hall
        "tokens_per_prediction": 2.5 + STATUS,
        "unread_words": 0.5,  # cellar and 12; case and punctuation are no words
        "n": 4,
    }


def test_edits_are_what_a_model_of_edits_writes() -> None:
    page = "[1] checkbox 'a'\n[2] button 'Submit'"
    log = [episode(page, ("click('1')", page.replace("'a'", "'a' checked")), ("click('9')", page))]
    written = ["=\n~[1] checkbox 'a' checked", "=[1] checkbox 'a'"]  # the second goes back to an earlier page
    assert EditFormat().answers(page, log[0].turns) == [text + status_line(0.0, False) for text in written]
    tokens = [len(CHAT.encode(text + status_line(0.0, False))) for text in written]
    assert language_metrics(CHAT, log, [], EditFormat())["tokens_per_prediction"] == sum(tokens) / 2


def test_nothing_to_measure_is_none() -> None:
    assert language_metrics(CHAT, [], []) == {
        "tokens_per_action": None,
        "tokens_per_observation": None,
        "tokens_per_prediction": None,
        "unread_words": None,
        "n": 0,
    }
