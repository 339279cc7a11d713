"""If these fail, a model is shown the answer while it learns to give it, and has none to copy when it dreams."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import bm25s
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import NO_ANSWER, Owner, Source, StopReason, Trajectory, Turn
from tests.support.scripted import Says
from worldmodel.formats.edits import EditFormat
from worldmodel.formats.full import episode_tokens
from worldmodel.formats.retrieval import RetrievalFormat, TransitionIndex
from worldmodel.objective import world_model_row
from worldmodel.text import TextWorldModel

CHAT = ChatFormat(train_tokenizer(["HALL"], 270))


def episode(name: str, *turns: tuple[str, str], start: str = "A hall with a lamp") -> Trajectory:
    played = tuple(Turn(action, observation, 0.0, False) for action, observation in turns)
    return Trajectory(name, "t", "g", Source.REAL, "a", 0, start, played, StopReason.TURN_LIMIT)


TAKE = ("take lamp", "Taken: the brass lamp.")
LOG = [
    episode("one", TAKE, ("go east", "A cellar.")),
    episode("two", ("drop coin", "You have no coin.")),
    episode("three", ("take lamp", "It is nailed down."), start="A hall with a lamp on a nail"),
    episode("four", ("sing", "La la la.")),
]


def shown(index: TransitionIndex, apart: list[Trajectory], k: int = 9) -> list[str]:
    found = index.similar(LOG[0].start, LOG[0].start, "take lamp", k, index.hidden_by(apart))
    return [t.turn.observation for t in found]


def test_the_most_similar_transitions_come_first() -> None:
    index = TransitionIndex(LOG)
    assert shown(index, [], 2) == ["Taken: the brass lamp.", "It is nailed down."]
    (found,) = index.similar(LOG[0].start, LOG[0].start, "sing", 1, frozenset())
    assert found.turn.action == "sing"  # one word of the command decides against the same words of the place
    assert index.similar("?", "!", "...", 3, frozenset()) == []  # no word, nothing similar
    assert index.similar("xyzzy", "plugh", "frotz", 3, frozenset()) == []


def test_a_turn_that_nobody_answered_is_no_transition() -> None:
    cut = Turn("sing", "", 1.0, False, {NO_ANSWER: 1.0})
    whole = episode("one", TAKE)
    index = TransitionIndex([replace(whole, turns=(*whole.turns, cut))])
    assert [t.turn.action for t in index.transitions] == ["take lamp"]


def test_an_episode_is_never_shown_its_own_transitions() -> None:
    """By its id, and by its content under another id: the log may have it twice, or the audit an episode of the log."""
    index = TransitionIndex(LOG)
    own = "Taken: the brass lamp."
    assert own not in shown(index, [LOG[0]])
    twin = episode("another name", TAKE, ("go east", "A cellar."))
    assert own not in shown(index, [twin])
    renamed = episode("one", ("look", "different"))
    assert own not in shown(index, [renamed])
    both = TransitionIndex([*LOG, twin])
    assert own not in shown(both, [LOG[0]])
    assert own not in shown(both, [twin])
    # another episode that had the same transition and then went elsewhere: that is what retrieval is for
    other = TransitionIndex([*LOG, episode("five", TAKE, ("go west", "A wall."))])
    assert own in shown(other, [LOG[0]])


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from(["go", "east", "lamp", "door", "?"]), max_size=6).map(" ".join), min_size=1),
    st.integers(1, 4),
)
def test_scores_are_those_of_the_library(texts: list[str], k: int) -> None:
    """Words that most transitions have are added up in another way than rare ones."""
    index = TransitionIndex([episode(f"e{i}", (text, f"answer {i}"), start=text) for i, text in enumerate(texts)])
    library = bm25s.BM25()
    words = [[*2 * said, *4 * [f">{word}" for word in said]] for said in (t.replace("?", "").split() for t in texts)]
    library.index([said or ["\0"] for said in words], show_progress=False)
    for text, said in zip(texts, words, strict=True):
        if said:
            scores = library.get_scores(said)
            order = sorted(range(len(texts)), key=lambda at: (-scores[at], at))
            expected = [f"answer {at}" for at in order if scores[at] > 0][:k]
            assert [t.turn.observation for t in index.similar(text, text, text, k, frozenset())] == expected


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(["go", "take", "look"]), st.sampled_from("ABC")), min_size=1, max_size=3),
        min_size=2,
        max_size=6,
    )
)
def test_leave_one_episode_out(plays: list[list[tuple[str, str]]]) -> None:
    """Against a plain loop over an index without these episodes."""
    log = [episode(f"e{k}", *turns, start="start") for k, turns in enumerate(plays)]
    index = TransitionIndex(log)
    for mine in log:
        others = [t for t in log if t.id != mine.id and t.turns != mine.turns]
        allowed = {
            (seen, u.action, u.observation)
            for t in others
            for seen, u in zip(["start", *(v.observation for v in t.turns)], t.turns, strict=False)
        }
        hidden = index.hidden_by([mine])
        left = [t for at, t in enumerate(index.transitions) if at not in hidden]
        assert {(t.seen, t.turn.action, t.turn.observation) for t in left} == allowed
        found = index.similar("start", "start", "go", 99, hidden)
        assert {(t.seen, t.turn.action, t.turn.observation) for t in found} <= allowed


def test_training_and_dreams_read_the_same_prompt() -> None:
    """For an episode that is not in the log, the prompt of every turn is the beginning of its training row; notes are
    the scaffold's, and only answers are trained."""
    mine = episode("mine", ("take lamp", "Gone."), ("sing", "Silence."), start="A dark hall with a lamp")
    form = RetrievalFormat(TransitionIndex(LOG), 2)
    row = world_model_row(CHAT, mine, [1.0, 1.0], form)
    trained = [i for i, weight in zip(row.ids.tolist(), row.ce_weight.tolist(), strict=True) if weight]
    assert CHAT.decode(trained) == "Gone.\n[reward=0]Silence.\n[reward=0]"
    answers = ["Gone.\n[reward=0]", "Silence.\n[reward=0]"]
    engine = Says(*answers)
    model = TextWorldModel(engine, CHAT, "v", form=form)
    for k, turn in enumerate(mine.turns):
        told = asyncio.run(model.predict(mine.start, mine.turns[:k], turn.action, 0))
        assert told.observation == turn.observation
        whole = [*engine.prompts[k], *CHAT.encode(answers[k]), CHAT.stop]
        assert row.ids[: len(whole)].tolist() == whole
    tokens = episode_tokens(CHAT, mine, form)
    scaffold = CHAT.decode([i for i, o in zip(tokens.ids, tokens.owners, strict=True) if o == Owner.SCAFFOLD])
    assert "[seen] take lamp: Taken: the brass lamp.\n[reward=0]\n" in scaffold
    assert scaffold.count("[now] ") == 2


def test_a_row_of_an_episode_of_the_log_shows_nothing_of_it() -> None:
    form = RetrievalFormat(TransitionIndex(LOG), 9)
    for mine in LOG:
        row = world_model_row(CHAT, mine, [1.0] * len(mine.turns), form)
        text = CHAT.decode(row.ids)
        for turn in mine.turns:
            assert f"[seen] {turn.action}: {turn.observation}" not in text
            assert text.count(turn.observation) == 1  # its own answer


def test_a_judged_model_is_apart_from_what_it_is_judged_by() -> None:
    model = TextWorldModel(Says(), CHAT, "v", form=RetrievalFormat(TransitionIndex(LOG), 3))
    apart = model.excluding([LOG[0]])
    for asked, there in ((model, True), (apart, False), (apart.at_temperature(1.0), False)):
        contexts = asked.form.contexts(LOG[0].start, [], "take lamp")
        assert ("brass" in contexts[0]) is there


def test_it_carries_another_form() -> None:
    form = RetrievalFormat(TransitionIndex(LOG), 1, EditFormat())
    assert form.answers("HALL\nx", [Turn("wait", "HALL\nx", 0.0, False)]) == ["=\n[reward=0]"]
    assert form.read("=\n[reward=1 done]", "HALL\nx", []) == ("HALL\nx", 1.0, True)
    assert form.phrases(LOG)[:2] == ["[seen] ", "[now] "]


def test_nothing_to_retrieve_from_is_refused() -> None:
    blind = Trajectory("e", "t", "g", Source.REAL, "a", 0, "s", (Turn("a", "b", None, False),), StopReason.TURN_LIMIT)
    for log in ([], [blind]):
        with pytest.raises(ValueError, match="nothing to retrieve"):
            TransitionIndex(log)
    with pytest.raises(ValueError, match="neighbours"):
        RetrievalFormat(TransitionIndex(LOG), 0)
