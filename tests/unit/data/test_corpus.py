"""The corpus of a base model. If this fails, a base has read what it is judged by, or a resumed one reads others."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagination.data import corpus
from imagination.data.corpus import (
    CorpusBatches,
    Played,
    Shard,
    count_read,
    drawn,
    known_worlds,
    make_shard,
    play_shard,
)
from imagination.settings import UserError
from imagination.settings.models import CorpusWorld, Option, PretrainSettings
from policy.lm.backbone import load_tokenizer
from policy.lm.batch import Row
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Source, StopReason, Trajectory
from real_envs.world import World
from real_envs.worlds.gymnasium_text import GymnasiumText, is_heldout
from real_envs.worlds.textworld_express import TextWorldExpress

pytest.importorskip("minigrid", reason="pip install 'imagination[gymnasium]'")
BABY = CorpusWorld("gymnasium", 1.0, {"id": ["BabyAI-GoToObj-v0", "BabyAI-GoToRedBall-v0"]}, tasks=4, episodes=2)


def play(
    worlds: Mapping[str, CorpusWorld], characters: int, renamed_share: float, seed: int, number: int
) -> dict[str, Played]:
    settings = PretrainSettings(shard_characters=characters, renamed_share=renamed_share)
    return play_shard(settings, worlds, seed, number)


def test_options_are_drawn_from_lists_and_ranges() -> None:
    found = [
        drawn({"id": ["a", "b"], "rooms": "2..4", "params": "x=1..2,y=7", "n": 3}, random.Random(k)) for k in range(60)
    ]
    assert {one["id"] for one in found} == {"a", "b"}
    assert {one["rooms"] for one in found} == {2, 3, 4}
    assert {one["params"] for one in found} == {"x=1,y=7", "x=2,y=7"}
    assert {one["n"] for one in found} == {3}


def test_a_shard_is_a_function_of_seed_and_number_alone() -> None:
    first = play({"baby": BABY}, 4000, 0.5, 3, 0)
    assert play({"baby": BABY}, 4000, 0.5, 3, 0) == first
    for seed, number in ((3, 1), (4, 0)):
        other = play({"baby": BABY}, 4000, 0.5, seed, number)
        assert {t.start for t in other["baby"].episodes} != {t.start for t in first["baby"].episodes}
    ids = [t.id for t in first["baby"].episodes]
    assert len(set(ids)) == len(ids)


def starts(world: World, folder: Path, settings: Any, count: int) -> set[str]:
    """The first texts of held-out tasks, as a run that is judged by them draws and plays them."""
    world.generate(folder, {"train": 0, "heldout": count}, 0, settings, lambda *_: None, 1)
    tasks = world.open(folder, False, 1)

    async def all_of_them() -> set[str]:
        env = tasks.make_env()
        try:
            return {(await env.reset(task, 0)).text for task in tasks.tasks("heldout")}
        finally:
            await env.close()
            await tasks.close()

    return asyncio.run(all_of_them())


def test_no_babyai_task_by_which_anybody_is_judged_is_read(tmp_path: Path) -> None:
    """Its starts are few, so that a corpus without a fold would hold some of them."""
    world = CorpusWorld("gymnasium", options={"id": "BabyAI-GoToObj-v0"}, tasks=60, episodes=1, max_turns=1)
    read = {t.start for t in play({"baby": world}, 1, 0.0, 0, 0)["baby"].episodes}
    judged = starts(GymnasiumText(), tmp_path, GymnasiumText.settings(id="BabyAI-GoToObj-v0"), 60)
    assert (len(read), len(judged)) == (60, 60)
    assert not read & judged
    assert all(map(is_heldout, judged))
    assert not any(map(is_heldout, read))


def test_no_game_by_which_anybody_is_judged_is_read(tmp_path: Path) -> None:
    pytest.importorskip("textworld_express", reason="pip install 'imagination[textworld-express]'")
    params = "numLocations=3,maxDistanceApart=2,includeDoors=0,maxDistractorItemsPerLocation=0"
    options: dict[str, Option] = {"game": "mapreader", "params": params}
    world = CorpusWorld("textworld_express", options=options, tasks=60, episodes=1, max_turns=1)
    read = play({"map": world}, 1, 0.0, 0, 0)["map"].episodes
    assert len({t.start for t in read}) == 60
    assert all("-train-" in t.task_id for t in read)
    for fold in ("dev", "test"):
        settings = TextWorldExpress.settings(game="mapreader", params=params, heldout_fold=fold)
        judged = starts(TextWorldExpress(), tmp_path / fold, settings, 60)
        assert len(judged) == 60
        assert not judged & {t.start for t in read}


def test_shares_are_of_text() -> None:
    small = CorpusWorld("gymnasium", 1.0, {"id": "BabyAI-GoToObj-v0"}, tasks=10)
    large = CorpusWorld("gymnasium", 3.0, {"id": "BabyAI-GoToObj-v0"}, tasks=10)
    shard = play({"small": small, "large": large}, 40_000, 0.0, 0, 0)
    text = {name: sum(len(u.observation) for t in played.episodes for u in t.turns) for name, played in shard.items()}
    assert 2 < text["large"] / text["small"] < 4


def test_worlds_that_are_not_here_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    here, missing = known_worlds({"baby": BABY, "x": CorpusWorld("nowhere")})
    assert list(here) == ["baby"]
    assert len(missing) == 1
    assert missing[0].startswith("pretrain.worlds.x is left out: there is no environment 'nowhere'")
    with pytest.raises(UserError, match=r"no world of pretrain\.worlds can be played; pretrain\.worlds\.x is left out"):
        known_worlds({"x": CorpusWorld("nowhere")})
    monkeypatch.setattr(corpus, "_play_tasks", lambda *_: [])
    with pytest.raises(UserError, match="env=gymnasium gave no episode in 3 draws"):
        play({"baby": BABY}, 100, 0.0, 0, 0)


def test_an_impossible_option_is_one_clear_line() -> None:
    wrong = CorpusWorld("gymnasium", options={"idd": "BabyAI-GoToObj-v0"})
    with pytest.raises(UserError, match=r"gave no episode in 3 draws: unknown key 'pretrain\.worlds\.options\.idd'"):
        play({"baby": wrong}, 100, 0.0, 0, 0)


def test_rows_have_both_views_and_only_what_belongs_to_a_view_is_trained(tmp_path: Path) -> None:
    episodes = play({"baby": BABY}, 4000, 0.0, 0, 0)["baby"].episodes
    train_tokenizer([u.observation for t in episodes for u in t.turns], 400).save_pretrained(tmp_path)
    settings = PretrainSettings(shard_characters=4000, renamed_share=0.0, copying_share=0.0, agents=["noisy"])
    shard = make_shard(settings, {"baby": BABY}, tmp_path, 0, 0)
    again = make_shard(settings, {"baby": BABY}, tmp_path, 0, 0)
    assert shard == again
    imitated = [t for t in episodes if t.agent.startswith("noisy")]
    assert shard.counts["episodes"] == {"baby": len(episodes)}
    assert len(shard.rows) == len(episodes) + len(imitated)
    assert shard.counts["tokens"] == {"baby": sum(len(row.ids) for row in shard.rows)}
    assert shard.counts["real_steps"] == {"baby": sum(len(t.turns) for t in episodes)}
    assert shard.counts["broken"] == {"baby": 0}
    assert Shard.from_json(shard.to_json()) == replace(shard, rows=[replace(r, ids=list(r.ids)) for r in shard.rows])
    chat = ChatFormat(load_tokenizer(tmp_path))
    for row in shard.rows:
        assert all(made or not weight for made, weight in zip(row.action_mask, row.ce_weight, strict=True))
    says = ["".join(chat.decode([i]) for i, w in zip(r.ids, r.ce_weight, strict=True) if w) for r in shard.rows]
    assert sum("[reward=" in said for said in says) == len(episodes)


def shards(number: int) -> Shard:
    rows = [Row([number * 100 + k] * 10, [False] * 10, Source.REAL, ce_weight=[1.0] * 10) for k in range(5 + number)]
    return Shard(rows, Shard().counts | {"episodes": {"w": 5 + number}, "tokens": {"w": len(rows) * 10}})


def batches_of(make: Callable[[int], Shard], makers: Executor, path: Path, passes: int = 1) -> CorpusBatches:
    return CorpusBatches(make, makers, PretrainSettings(batch_tokens=20, passes=passes), path, 0, 0)


def read(batches: CorpusBatches, steps: range) -> list[list[int]]:
    return [sorted(batches(step).input_ids[:, 0].tolist()) for step in steps]


def test_every_row_is_read_once_and_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as makers:

        def batches() -> CorpusBatches:
            return batches_of(shards, makers, tmp_path / "corpus.json")

        whole = read(batches(), range(10))
        first = [i for batch in whole for i in batch]
        assert sorted(first)[:11] == [*range(5), *range(100, 106)]
        assert len(set(first)) == len(first)
        noted = json.loads((tmp_path / "corpus.json").read_text())
        assert [note["first_step"] for note in noted] == [0, 3, 6, 10][: len(noted)]
        for start in (0, 2, 3, 5, 9):
            assert read(batches(), range(start, 10)) == whole[start:]


def test_what_was_read_is_counted_to_the_step(tmp_path: Path) -> None:
    """By hand: shards of 5, 6 and 7 rows of ten tokens, two rows a batch; four steps are one shard and a third."""
    with ThreadPoolExecutor(1) as makers:
        read(batches_of(shards, makers, tmp_path / "corpus.json"), range(7))
    assert count_read(tmp_path / "corpus.json", 4)["tokens"] == {"w": 50 + 20}
    assert count_read(tmp_path / "corpus.json")["episodes"] == {"w": 5 + 6 + 7}
    assert count_read(tmp_path / "none.json", 4)["tokens"] == {}


def test_what_a_world_breaks_is_counted_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = play({"baby": BABY}, 2000, 0.0, 0, 0)["baby"].episodes
    broken = replace(whole[0], stop=StopReason.ENV_CRASHED)
    answers = iter([[whole[0], broken], ValueError("too few tasks"), [broken], whole])

    def play_tasks(*_: object) -> list[Trajectory]:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    monkeypatch.setattr(corpus, "_play_tasks", play_tasks)
    length = len(whole[0].start) + sum(len(u.action) + len(u.observation) for u in whole[0].turns)
    played = play({"baby": BABY}, length + 1, 0.0, 0, 0)["baby"]
    assert [t.start for t in played.episodes] == [whole[0].start, *(t.start for t in whole)]
    assert (played.broken, played.fruitless) == (2, 2)
    assert played.real_steps == 3 * len(whole[0].turns) + sum(len(t.turns) for t in whole)


def test_a_corpus_that_has_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as makers:
        path = tmp_path / "corpus.json"
        read(batches_of(shards, makers, path), range(2))
        (tmp_path / "corpus-0.json").unlink()
        other = batches_of(lambda number: shards(number + 1), makers, path)
        with pytest.raises(UserError, match=r"shard 0 was .* the worlds have changed since this run was stopped"):
            other(1)


def test_a_shard_is_passed_over_as_often_as_asked(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as makers:
        found = read(batches_of(shards, makers, tmp_path / "corpus.json", passes=2), range(6))
    assert sorted(i for batch in found for i in batch) == sorted([*range(5), *range(5)])
    assert found[:3] != found[3:]


def test_a_stopped_run_goes_on_in_the_shard_it_was_in_even_if_the_world_would_play_another(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as makers:
        path = tmp_path / "corpus.json"
        whole = read(batches_of(shards, makers, path), range(5))
        changed = batches_of(lambda number: shards(number + 1), makers, path)
        assert read(changed, range(1, 5)) == whole[1:]


def test_shards_that_no_training_state_needs_any_more_are_not_kept(tmp_path: Path) -> None:
    settings = PretrainSettings(batch_tokens=20, save_every=3)
    with ThreadPoolExecutor(1) as makers:
        batches = CorpusBatches(shards, makers, settings, tmp_path / "corpus.json", 0, 0)
        read(batches, range(7))  # shards begin at steps 0, 3 and 6; the last training state is that of step 6
    assert sorted(path.name for path in tmp_path.glob("corpus-*")) == ["corpus-1.json", "corpus-2.json"]
