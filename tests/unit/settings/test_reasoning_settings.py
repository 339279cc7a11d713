"""If these fail, a world model is asked to reason that cannot, or a log that shows how is not read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from imagination.rollout.world_models import check_room, check_thoughts, form_of, thoughts_of, trained_as
from imagination.settings import Config, WorldModelSettings
from imagination.settings.schema import ConfigError
from real_envs.importers.jsonl import import_jsonl
from real_envs.store import StoreError
from tests.support.reasoned import BYTES, EPISODE, HALL, LINE, TURNS
from tests.support.refusal import refused
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
    refused(lambda: config(reasoning_tokens=-1), "reasoning_tokens", error=ConfigError)


def test_what_cannot_work_is_refused_with_a_sentence() -> None:
    bare = replace(EPISODE, turns=TURNS[1:2])
    refused(lambda: thoughts_of(config().worldmodel, [bare]), 'info["reasoning"]')
    assert thoughts_of(config(model="some/checkpoint").worldmodel, [bare]) == []
    assert thoughts_of(config().worldmodel, [EPISODE]) == ["Zounds, it can be taken.", ""]
    assert thoughts_of(config(reasoning_tokens=0).worldmodel, [EPISODE]) == []
    broken = replace(EPISODE, turns=(replace(TURNS[0], info={"reasoning": 1.0}),))
    refused(lambda: thoughts_of(config().worldmodel, [broken]), "take lamp", "not text")
    small = config(context=226)
    refused(lambda: check_room(small.worldmodel, small.dream), "context=226", "dream.max_tokens=192")
    check_room(config(context=226, reasoning_tokens=0).worldmodel, config(context=226, reasoning_tokens=0).dream)
    check_room(config(context=233).worldmodel, config(context=233).dream)


def test_what_needs_the_tokenizer_is_refused_with_a_sentence() -> None:
    form = ReasoningFormat(FullObservation(), 40)
    thoughts = ["x" * (40 - LINE)]
    prompt = len(f"{HALL}\n> take lamp") + 3  # and the tokens of the template
    needed = prompt + 40 + config().dream.max_tokens

    def check(thoughts: list[str], context: int) -> None:
        check_thoughts(config().dream.max_tokens, thoughts, [EPISODE], BYTES, form, context)

    check(thoughts, needed)
    refused(lambda: check(["x" * (41 - LINE)], needed), "1 of 1", "worldmodel.reasoning_tokens=40")
    refused(lambda: check(thoughts, needed - 1), f"{needed} tokens", f"{needed - 1}")


def test_a_log_of_ones_own_may_say_what_was_thought(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    step = '{"action": "go", "observation": "A hall.", "reward": 0, "reasoning": %s}'
    line = '{"task_id": "t", "start": "s", "turns": [%s, %s]}\n'
    path.write_text(line % (step % '"East is a hall."', step % "null"))
    (episode,) = import_jsonl(path)
    assert [dict(turn.info) for turn in episode.turns] == [{"reasoning": "East is a hall."}, {}]
    path.write_text(line % (step % "3", step % "null"))
    refused(lambda: import_jsonl(path), "reasoning", "is 3", error=StoreError)
