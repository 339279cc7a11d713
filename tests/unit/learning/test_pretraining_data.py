"""The corpus of a base model. If this fails, a base has read what it is judged by, or a resumed one reads others."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from imagination.learning import corpus
from imagination.learning.corpus import drawn, known_worlds, play_shard
from imagination.learning.pretraining_data import CorpusBatches, Shard, make_shard
from imagination.settings import UserError
from imagination.settings.pretraining import CorpusWorld, PretrainSettings
from policy.lm.backbone import load_tokenizer
from policy.lm.batch import Row
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.gymnasium_text import is_heldout
from real_envs.textworld_express import TextWorldExpress
from real_envs.trajectory import Source

pytest.importorskip("minigrid", reason="pip install 'imagination[gymnasium]'")
BABY = CorpusWorld("gymnasium", 1.0, {"id": ["BabyAI-GoToObj-v0", "BabyAI-GoToRedBall-v0"]}, tasks=4, episodes=2)


def test_options_are_drawn_from_lists_and_ranges() -> None:
    found = [
        drawn({"id": ["a", "b"], "rooms": "2..4", "params": "x=1..2,y=7", "n": 3}, random.Random(k)) for k in range(60)
    ]
    assert {one["id"] for one in found} == {"a", "b"}
    assert {one["rooms"] for one in found} == {2, 3, 4}
    assert {one["params"] for one in found} == {"x=1,y=7", "x=2,y=7"}
    assert {one["n"] for one in found} == {3}


def test_a_shard_is_a_function_of_seed_and_number_alone() -> None:
    first = play_shard({"baby": BABY}, 4000, 0.5, 3, 0)
    assert play_shard({"baby": BABY}, 4000, 0.5, 3, 0) == first
    for seed, number in ((3, 1), (4, 0)):
        other = play_shard({"baby": BABY}, 4000, 0.5, seed, number)
        assert {t.start for t in other["baby"]} != {t.start for t in first["baby"]}
    ids = [t.id for t in first["baby"]]
    assert len(set(ids)) == len(ids)


def test_no_task_of_the_fold_that_judges_is_read() -> None:
    read = play_shard({"baby": BABY}, 20_000, 0.0, 0, 0)["baby"]
    assert len({t.start for t in read}) > 8
    assert not any(is_heldout(t.start) for t in read)


def test_no_game_of_another_fold_is_read(tmp_path: Path) -> None:
    pytest.importorskip("textworld_express", reason="pip install 'imagination[textworld-express]'")
    params = "numLocations=3,maxDistanceApart=2,includeDoors=0,maxDistractorItemsPerLocation=0"
    options = {"game": "mapreader", "params": params}
    world = CorpusWorld("textworld_express", options=dict(options), tasks=60, episodes=1, max_turns=2)
    read = play_shard({"map": world}, 1, 0.0, 0, 0)["map"]
    for fold in ("dev", "test"):
        settings = TextWorldExpress.settings(game="mapreader", params=params, heldout_fold=fold)
        TextWorldExpress().generate(tmp_path / fold, {"train": 0, "heldout": 60}, 0, settings, lambda *_: None, 1)
        judged = json.loads((tmp_path / fold / "games.json").read_text())["splits"]["heldout"]
        assert {task["spec"]["fold"] for task in judged} == {fold}
    assert len(read) == 60
    assert all("-train-" in t.task_id for t in read)


def test_shares_are_of_text() -> None:
    small = CorpusWorld("gymnasium", 1.0, {"id": "BabyAI-GoToObj-v0"}, tasks=2, episodes=1)
    large = CorpusWorld("gymnasium", 3.0, {"id": "BabyAI-GoToObj-v0"}, tasks=2, episodes=1)
    shard = play_shard({"small": small, "large": large}, 40_000, 0.0, 0, 0)
    text = {name: sum(len(u.observation) for t in played for u in t.turns) for name, played in shard.items()}
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
        play_shard({"baby": BABY}, 100, 0.0, 0, 0)


def test_an_impossible_option_is_one_clear_line() -> None:
    wrong = CorpusWorld("gymnasium", options={"idd": "BabyAI-GoToObj-v0"})
    with pytest.raises(UserError, match=r"gave no episode in 3 draws: unknown key 'pretrain\.worlds\.options\.idd'"):
        play_shard({"baby": wrong}, 100, 0.0, 0, 0)


def test_rows_have_both_views_and_only_what_belongs_to_a_view_is_trained(tmp_path: Path) -> None:
    episodes = play_shard({"baby": BABY}, 4000, 0.0, 0, 0)["baby"]
    train_tokenizer([u.observation for t in episodes for u in t.turns], 400).save_pretrained(tmp_path)
    settings = PretrainSettings(shard_characters=4000, renamed_share=0.0, copying_share=0.0, agents=["noisy"])
    shard = make_shard(settings, {"baby": BABY}, tmp_path, 0, 0)
    again = make_shard(settings, {"baby": BABY}, tmp_path, 0, 0)
    assert shard == again
    imitated = [t for t in episodes if t.agent.startswith("noisy")]
    assert shard.episodes == {"baby": len(episodes)}
    assert len(shard.rows) == len(episodes) + len(imitated)
    assert shard.tokens == {"baby": sum(len(row.ids) for row in shard.rows)}
    chat = ChatFormat(load_tokenizer(tmp_path))
    for row in shard.rows:
        assert all(made or not weight for made, weight in zip(row.action_mask, row.ce_weight, strict=True))
    says = ["".join(chat.decode([i]) for i, w in zip(r.ids, r.ce_weight, strict=True) if w) for r in shard.rows]
    assert sum("[reward=" in said for said in says) == len(episodes)


def shards(number: int) -> Shard:
    rows = [Row([number * 100 + k] * 10, [False] * 10, Source.REAL, ce_weight=[1.0] * 10) for k in range(5 + number)]
    return Shard(rows, {"w": 5 + number}, {"w": len(rows) * 10})


def read(batches: CorpusBatches, steps: range) -> list[list[int]]:
    return [sorted(batches(step).input_ids[:, 0].tolist()) for step in steps]


def test_every_row_is_read_once_and_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as makers:

        def batches() -> CorpusBatches:
            return CorpusBatches(shards, makers, 1, 1, tmp_path / "corpus.json", 20, 0, 0)

        whole = read(batches(), range(10))
        first = [i for batch in whole for i in batch]
        assert sorted(first)[:11] == [*range(5), *range(100, 106)]
        assert len(set(first)) == len(first)
        noted = json.loads((tmp_path / "corpus.json").read_text())
        assert [note["first_step"] for note in noted] == [0, 3, 6, 10][: len(noted)]
        for start in (0, 2, 3, 5, 9):
            assert read(batches(), range(start, 10)) == whole[start:]


def test_a_corpus_that_has_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as makers:
        path = tmp_path / "corpus.json"
        read(CorpusBatches(shards, makers, 1, 1, path, 20, 0, 0), range(2))
        other = CorpusBatches(lambda number: shards(number + 1), makers, 1, 1, path, 20, 0, 0)
        with pytest.raises(UserError, match=r"shard 0 was .* the worlds have changed since this run was stopped"):
            other(1)


def test_a_shard_is_passed_over_as_often_as_asked(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as makers:
        found = read(CorpusBatches(shards, makers, 1, 2, tmp_path / "corpus.json", 20, 0, 0), range(6))
    assert sorted(i for batch in found for i in batch) == sorted([*range(5), *range(5)])
    assert found[:3] != found[3:]
