"""If these fail, a world model is asked to reason that cannot, or a log that shows how is not read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagination.rollout.world_models import check_room, check_thoughts, form_of, thoughts_of, trained_as
from imagination.settings import Config, UserError, WorldModelSettings
from real_envs.importers.jsonl import import_jsonl
from real_envs.store import StoreError
from tests.support.reasoned import BYTES, EPISODE, HALL, LINE, TURNS
from worldmodel.formats.full import DELIMITER, FullObservation
from worldmodel.formats.reasoning import INSTRUCTION, ReasoningFormat


def config(**changed: Any) -> Config:
    return Config(worldmodel=WorldModelSettings(**{"reasoning_tokens": 40, "context": 512} | changed))


def test_the_form_follows_the_settings() -> None:
    assert form_of(config(reasoning_tokens=0).worldmodel, []).reasoning_tokens == 0
    assert trained_as(config(reasoning_tokens=0).worldmodel) == "text"
    edits = [config(reasoning_tokens=0, kind="delta", edited_in_full=full).worldmodel for full in (True, False)]
    assert [trained_as(settings) for settings in edits] == ["delta-full", "delta-brief"]
    for kind in ("text", "delta", "retrieval"):
        settings = config(kind=kind).worldmodel
        form = form_of(settings, [EPISODE])
        assert isinstance(form, ReasoningFormat)
        assert (form.reasoning_tokens, form.instruction) == (40, "")
        assert trained_as(settings).endswith("+reasoning")
        assert DELIMITER in form.phrases([EPISODE])
    pretrained = form_of(config(model="some/checkpoint").worldmodel, [])
    assert isinstance(pretrained, ReasoningFormat)
    assert pretrained.instruction == INSTRUCTION
    with pytest.raises(ValueError, match="reasoning_tokens"):
        WorldModelSettings(reasoning_tokens=-1)


def test_what_cannot_work_is_refused_with_a_sentence() -> None:
    bare = replace(EPISODE, turns=TURNS[1:2])
    with pytest.raises(UserError, match=r'from scratch has nothing to learn reasoning from.*info\["reasoning"\]'):
        thoughts_of(config().worldmodel, [bare])
    assert thoughts_of(config(model="some/checkpoint").worldmodel, [bare]) == []
    assert thoughts_of(config().worldmodel, [EPISODE]) == ["Zounds, it can be taken.", ""]
    assert thoughts_of(config(reasoning_tokens=0).worldmodel, [EPISODE]) == []
    broken = replace(EPISODE, turns=(replace(TURNS[0], info={"reasoning": 1.0}),))
    with pytest.raises(UserError, match=r"take lamp.*not text.*mend the log"):
        thoughts_of(config().worldmodel, [broken])
    with pytest.raises(UserError, match=r"context=226 has no room.*dream\.max_tokens=192"):
        check_room(config(context=226).worldmodel, config(context=226).dream)
    check_room(config(context=226, reasoning_tokens=0).worldmodel, config(context=226, reasoning_tokens=0).dream)
    check_room(config(context=233).worldmodel, config(context=233).dream)


def test_what_needs_the_tokenizer_is_refused_with_a_sentence() -> None:
    form = ReasoningFormat(FullObservation(), 40)
    thoughts = ["x" * (40 - LINE)]
    prompt = len(f"{HALL}\n> take lamp") + 3  # and the tokens of the template
    needed = prompt + 40 + config().dream.max_tokens
    check_thoughts(config().dream.max_tokens, thoughts, [EPISODE], BYTES, form, needed)
    with pytest.raises(UserError, match=r"1 of 1 logged thoughts are longer than worldmodel\.reasoning_tokens=40"):
        check_thoughts(config().dream.max_tokens, ["x" * (41 - LINE)], [EPISODE], BYTES, form, needed)
    with pytest.raises(UserError, match=f"up to {needed} tokens .* context has {needed - 1}"):
        check_thoughts(config().dream.max_tokens, thoughts, [EPISODE], BYTES, form, needed - 1)


def test_a_log_of_ones_own_may_say_what_was_thought(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    step = '{"action": "go", "observation": "A hall.", "reward": 0, "reasoning": %s}'
    line = '{"task_id": "t", "start": "s", "turns": [%s, %s]}\n'
    path.write_text(line % (step % '"East is a hall."', step % "null"))
    (episode,) = import_jsonl(path)
    assert [dict(turn.info) for turn in episode.turns] == [{"reasoning": "East is a hall."}, {}]
    path.write_text(line % (step % "3", step % "null"))
    with pytest.raises(StoreError, match=r"reasoning.*is 3, not text"):
        import_jsonl(path)
