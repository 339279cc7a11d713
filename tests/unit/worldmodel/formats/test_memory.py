"""If these fail, a world model reads the answer that it should predict, or nothing of the task that it dreams in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.evaluation.world_model_eval import in_reach, measure
from imagination.rollout.world_models import form_of
from imagination.runs.run_folder import RunFolder
from imagination.session import Log
from imagination.settings import Config, WorldModelSettings
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Owner, Source, StopReason, Trajectory, Turn
from tests.support.scripted import Answering
from worldmodel.formats.edits import EditFormat
from worldmodel.formats.full import episode_tokens, prediction_text, prompt_tokens
from worldmodel.formats.memory import MemoryFormat, TaskMemory
from worldmodel.formats.retrieval import RetrievalFormat, TransitionIndex
from worldmodel.rewards import Goal
from worldmodel.world_model import Prediction

CHAT = ChatFormat(train_tokenizer(["HALL"], 270, ["[known] ", "[now] "]))
EAST, KEY, WON = (
    Turn("go east", "A cellar.", 0.0, False),
    Turn("look", "A key.", 0.0, False),
    Turn("take key", "Yes.", 1.0, True),
)


def episode(name: str, *turns: Turn, start: str = "A hall.") -> Trajectory:
    return Trajectory(name, "t", "g", Source.REAL, "a", 0, start, turns, StopReason.TURN_LIMIT)


LOG = [
    episode("a", EAST, KEY, WON),
    episode("b", KEY, EAST),
    episode("c", EAST),
    *(episode(f"other-{k}", Turn("wait", "Time passes.", 0.0, False), start=f"Room {k}.") for k in range(9)),
    episode("d", Turn("wait", "Time passes.", 0.0, False)),
]


def test_a_task_is_known_by_what_its_episodes_have_shown() -> None:
    """Places by what is seen there; what paid, with the action that it paid for; nothing of other tasks, nothing that
    every task shows; the commonest first where there is not room for all, in the order of an episode."""
    index = TaskMemory(LOG)
    assert index.of("A hall.", 9, frozenset()) == ["A cellar.", "A key.", f"take key: {prediction_text(WON)}"]
    assert index.of("A hall.", 1, frozenset()) == ["A cellar."]
    assert index.of("Room 1.", 9, frozenset()) == []
    assert index.of("A place never seen.", 9, frozenset()) == []


def test_tasks_that_nobody_played_do_not_change_what_is_known_of_others() -> None:
    """Or dreams read other facts than the model was fitted with."""
    with_resets = TaskMemory([*LOG, *(episode(f"reset-{k}", start=f"Hut {k}.") for k in range(200))])
    assert with_resets.of("Room 1.", 9, frozenset()) == TaskMemory(LOG).of("Room 1.", 9, frozenset()) == []


def test_a_held_out_task_with_one_episode_is_known_by_what_it_declares() -> None:
    """Dreams begin with that, so the model is judged with it, and not with what the episode itself has seen."""
    played = replace(LOG[0], id="held", start="A den.", world_facts=("key in box",))
    reach, judged = in_reach([played])
    assert judged == [played]
    memory = TaskMemory([*LOG, *reach])
    assert memory.of("A den.", 9, memory.hidden_by(judged)) == ["key in box"]


@pytest.mark.parametrize("kind", ["text", "retrieval"])
def test_a_dream_reads_of_a_log_without_rewards_what_the_fit_read_of_the_goals(
    kind: Literal["text", "retrieval"],
) -> None:
    config = WorldModelSettings(kind=kind, facts=4, goal=Goal(observation="Yes"))
    plain = [replace(t, turns=tuple(replace(turn, reward=None) for turn in t.turns)) for t in LOG]
    dreamed, fitted = (
        form_of(config, log).contexts("A hall.", [], "look") for log in (plain, config.goal.relabel_log(LOG))
    )
    assert dreamed == fitted
    assert "take key: Yes.\n[reward=1 done]" in dreamed[0]


@pytest.mark.parametrize("kind", ["text", "retrieval"])
def test_what_is_judged_by_a_declared_goal_is_hidden_as_it_was_logged(
    tmp_path: Path, kind: Literal["text", "retrieval"]
) -> None:
    """A copy of a kept-back episode is in the log, and the goal pays for another turn of it."""
    config = Config(worldmodel=WorldModelSettings(kind=kind, facts=4, goal=Goal(observation="cellar", ends=False)))
    shown: list[list[str]] = []

    class Looking(Answering):
        def excluding(self, episodes: Sequence[Trajectory]) -> Looking:
            shown.append(form_of(config.worldmodel, LOG).excluding(episodes).contexts("A hall.", [], "take key"))
            return self

    model = Looking(lambda seen, action: Prediction("Yes.", 1.0, True, 0.9, 0.9))
    session: Any = SimpleNamespace(config=config, run=RunFolder(tmp_path, 0), world_model=lambda *_, **__: model)
    session.log = Log(LOG, [replace(LOG[0], id="held")])
    session.run.update({"world_model": {"heldout_tasks_known": {"n": 9}}})
    session.run.update({"world_model": measure(session)})
    assert session.run.summary["world_model"]["heldout_tasks_known"] is None, "it was of a model before"
    assert len(shown) == 2
    assert not any("take key: Yes." in text for contexts in shown for text in contexts)


def test_a_model_that_nothing_judges_has_no_calibration_of_the_one_before(tmp_path: Path) -> None:
    model = Answering(lambda seen, action: Prediction("Yes.", 1.0, True, 0.9, 0.9))
    session: Any = SimpleNamespace(config=Config(), run=RunFolder(tmp_path, 0), world_model=lambda *_, **__: model)
    for held, there in ((LOG[:1], True), ([], False)):
        session.log = Log(LOG, held)
        measure(session)
        assert (session.run.model("worldmodel") / "calibration.json").exists() == there


def test_what_the_task_declares_comes_first_and_is_hidden_from_no_episode_of_it() -> None:
    """The initial state is no news of any one episode, so nobody has to have seen it."""
    declared = ("key at cellar", "safe closed")
    log = [replace(LOG[0], world_facts=declared), *LOG[1:]]
    index = TaskMemory(log)
    assert index.of("A hall.", 3, frozenset()) == [*declared, "A cellar."]
    assert index.of("A hall.", 1, frozenset()) == ["key at cellar"]
    everything = frozenset(episode.id for episode in log)
    assert index.of("A hall.", 9, everything) == list(declared)
    assert "safe closed" in MemoryFormat(index, 9).excluding(log).contexts("A hall.", [], "look")[0]


def test_an_episode_is_not_shown_what_only_it_has_seen() -> None:
    """By its id, and by its content under another id: the log may have it twice."""
    index = TaskMemory(LOG)
    form = MemoryFormat(index, 9)
    own = form.excluding([LOG[0]]).contexts("A hall.", [], "look")[0]
    assert "A cellar." in own
    assert "A key." in own
    assert "take key" not in own
    twin = episode("another name", EAST, KEY, WON)
    assert form.excluding([twin]).contexts("A hall.", [], "look")[0] == own
    twice = TaskMemory([*LOG, twin])
    assert MemoryFormat(twice, 9).excluding([LOG[0]]).contexts("A hall.", [], "look")[0] == own
    assert form.excluding(LOG).excluding([]).contexts("A hall.", [], "look") == [""]


names = st.sampled_from(["A cellar.", "A key.", "An attic.", "A well."])
walks = st.lists(st.lists(names, min_size=1, max_size=5), min_size=2, max_size=5)


@settings(max_examples=60)
@given(walks)
def test_what_the_training_row_of_an_episode_shows_others_have_seen(walks: list[list[str]]) -> None:
    log = [episode(str(n), *(Turn("go", seen, 0.0, False) for seen in walk)) for n, walk in enumerate(walks)]
    for own in log:
        others = {
            turn.observation
            for e in log
            if [t.observation for t in e.turns] != [t.observation for t in own.turns]
            for turn in e.turns
        }
        note = MemoryFormat(TaskMemory(log), 9).excluding([own]).contexts(own.start, [], "go")[0]
        shown = set(note.removeprefix("[known] ").removesuffix("[now] ").split("\n")) - {""}
        assert shown <= others


def test_facts_stand_once_before_the_first_action_and_train_nobody() -> None:
    """So that a prompt is the prefix of the next one, and the loss is what it is without them."""
    form = MemoryFormat(TaskMemory(LOG), 9).excluding([LOG[1]])
    row, bare = episode_tokens(CHAT, LOG[1], form), episode_tokens(CHAT, LOG[1], EditFormat())
    text = CHAT.decode(row.ids)
    assert text.count("[known] ") == text.count("[now] ") == 1
    assert text.index("A hall.") < text.index("[known] ") < text.index("[now] ") < text.index("look")
    facts = row.ids[: row.ids.index(CHAT.encode("[now] ")[0])]
    assert not {Owner.ENV, Owner.AGENT} & set(row.owners[: len(facts)])
    own = [i for i, owner in zip(row.ids, row.owners, strict=True) if owner == Owner.ENV]
    plain = episode_tokens(CHAT, LOG[1], MemoryFormat(TaskMemory([]), 1))
    assert own == [i for i, owner in zip(plain.ids, plain.owners, strict=True) if owner == Owner.ENV]
    assert len(plain.ids) < len(row.ids)
    assert bare.ids
    first = prompt_tokens(CHAT, form, "A hall.", [], "look").ids
    second = prompt_tokens(CHAT, form, "A hall.", [KEY], "go east").ids
    assert second[: len(first)] == first


def test_it_goes_around_the_other_forms() -> None:
    """Around edits, whose answers stay edits; around retrieval, whose notes follow the facts."""
    edits = MemoryFormat(TaskMemory(LOG), 9, EditFormat())
    assert edits.answers("A hall.", [EAST]) == EditFormat().answers("A hall.", [EAST])
    retrieval = MemoryFormat(TaskMemory(LOG), 9, RetrievalFormat(TransitionIndex(LOG), 1))
    first, second = retrieval.contexts("A hall.", [EAST], "look")
    assert first.startswith("[known] ")
    assert first.count("[now] ") == 2
    assert "[seen] go east" in first
    assert second.startswith("[seen] look")
    assert "[known] " not in second
    assert sorted(retrieval.phrases(LOG)) == ["[known] ", "[now] ", "[seen] "]
