"""The corpus of a base model. If this fails, a base has read what it is judged by, or a resumed one reads others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from imagination.data import corpus
from imagination.data.corpus import (
    Corpus,
    CorpusShard,
    Played,
    drawn,
    held_out_starts,
    known_worlds,
    load_corpus,
)
from imagination.settings.models import CorpusWorld, Option, PretrainSettings
from policy.lm.backbone import load_tokenizer
from policy.lm.batch import Row, collate
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.store import TrajectoryStore
from real_envs.trajectory import Source, StopReason, Trajectory
from real_envs.world import World
from real_envs.worlds.gymnasium_text import GymnasiumText, is_heldout
from real_envs.worlds.textworld_express import TextWorldExpress
from tests.support.refusal import in_a_line, refused

pytest.importorskip("minigrid", reason="pip install 'imagination[gymnasium]'")
BABY = CorpusWorld("gymnasium", 1.0, {"id": ["BabyAI-GoToObj-v0", "BabyAI-GoToRedBall-v0"]}, tasks=4, episodes=2)


def play(
    worlds: Mapping[str, CorpusWorld], characters: int, renamed_share: float, seed: int, number: int
) -> dict[str, Played]:
    settings = PretrainSettings(shard_characters=characters, renamed_share=renamed_share)
    played = Corpus(settings, worlds, Path(), seed)
    return {name: played.play(name, number) for name in worlds}


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
    """By fold. Of few tasks: first texts can be equal by chance, as 5 of 100 test tasks had beside a whole corpus."""
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


def test_worlds_that_are_not_here_are_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(known_worlds({"baby": BABY, "x": CorpusWorld("nowhere")})) == ["baby"]
    in_a_line(capsys.readouterr().err, "pretrain.worlds.x", "'nowhere'")
    refused(lambda: known_worlds({"x": CorpusWorld("nowhere")}), "pretrain.worlds.x", "no world")
    monkeypatch.setattr(corpus, "_play_tasks", lambda *_: [])
    refused(lambda: play({"baby": BABY}, 100, 0.0, 0, 0), "env=gymnasium", "10 draws")


def test_an_impossible_option_is_one_clear_line() -> None:
    wrong = CorpusWorld("gymnasium", options={"idd": "BabyAI-GoToObj-v0"})
    refused(lambda: play({"baby": wrong}, 100, 0.0, 0, 0), "10 draws", "'pretrain.worlds.options.idd'")


def make(settings: PretrainSettings, folder: Path) -> None:
    with ThreadPoolExecutor(1) as makers:
        Corpus(settings, {"baby": BABY}, folder, 0).make(makers)


@pytest.fixture
def small(tmp_path: Path) -> PretrainSettings:
    """Settings of a small corpus, whose tokenizer is in ``tmp_path / "tokenizer"``."""
    episodes = play({"baby": BABY}, 4000, 0.0, 0, 0)["baby"].episodes
    train_tokenizer([u.observation for t in episodes for u in t.turns], 400).save_pretrained(tmp_path / "tokenizer")
    return PretrainSettings(shards=2, shard_characters=4000, renamed_share=0.0, agents=["noisy"])


def test_rows_have_both_views_and_only_what_belongs_to_a_view_is_trained(
    small: PretrainSettings, tmp_path: Path
) -> None:
    make(small, tmp_path / "corpus")
    rows, counts = load_corpus(tmp_path / "corpus", {"baby": BABY})
    episodes = [t for number in (0, 1) for t in play({"baby": BABY}, 4000, 0.0, 0, number)["baby"].episodes]
    imitated = [t for t in episodes if t.agent.startswith("noisy")]
    assert len(rows) == len(episodes) + len(imitated)
    tokens, steps = sum(len(row.ids) for row in rows), sum(len(t.turns) for t in episodes)
    counted = {"episodes": len(episodes), "tokens": tokens, "real_steps": steps}
    assert counts == {k: {"baby": n} for k, n in {**counted, "broken": 0, "left_out": 0, "fruitless": 0}.items()}
    chat = ChatFormat(load_tokenizer(tmp_path / "tokenizer"))
    says = ["".join(chat.decode([int(i)]) for i, w in zip(r.ids, r.ce_weight, strict=True) if w) for r in rows]
    assert sum("[reward=" in said for said in says) == len(episodes)
    assert sum(said.count("[reward=") for said in says) == sum(len(t.turns) for t in episodes)


def test_only_shards_that_are_missing_are_made_and_they_are_the_same(small: PretrainSettings, tmp_path: Path) -> None:
    make(small, tmp_path / "corpus")
    files = sorted((tmp_path / "corpus" / "baby").iterdir())
    assert [file.name for file in files] == ["00000.npz", "00001.npz"]
    before, first = load_corpus(tmp_path / "corpus", {"baby": BABY}), files[0].stat().st_mtime_ns
    files[1].unlink()
    make(small, tmp_path / "corpus")
    assert files[0].stat().st_mtime_ns == first
    after = load_corpus(tmp_path / "corpus", {"baby": BABY})
    assert [row.ids.tolist() for row in after[0]] == [row.ids.tolist() for row in before[0]]
    assert after[1] == before[1]
    make(replace(small, shards=3), tmp_path / "corpus")  # a corpus may grow
    assert len(load_corpus(tmp_path / "corpus", {"baby": BABY})[0]) > len(before[0])


def test_rows_are_what_was_saved(tmp_path: Path) -> None:
    """By hand, with a token beyond 16 bits."""
    rows = [Row([1, 70_000, 3], (), Source.REAL, ce_weight=[0.0, 1.0, 1.0]), Row([4], (), Source.REAL, ce_weight=[0.0])]
    counted = {"episodes": 2, "real_steps": 7, "broken": 1, "left_out": 3, "fruitless": 0}
    CorpusShard.of(rows, counted).save(tmp_path / "w" / "00000.npz")
    loaded, counts = load_corpus(tmp_path, {"w": BABY})
    for read, row in zip(loaded, rows, strict=True):
        assert (read.ids.tolist(), read.ce_weight.tolist()) == (row.ids.tolist(), row.ce_weight.tolist())
    assert {what: of["w"] for what, of in counts.items()} == {**counted, "tokens": 4}
    batch = collate(loaded, pad=9)
    assert batch.ids.tolist() == [[1, 70_000, 3], [4, 9, 9]]
    assert batch.ce_weight.tolist() == [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_a_corpus_of_other_settings_or_a_torn_one_is_one_clear_line(small: PretrainSettings, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    Corpus(small, {"baby": BABY}, folder, 0).declare(512)
    Corpus(replace(small, shards=9, lr=1.0), {"baby": BABY}, folder, 0).declare(512)
    for other, world, seed, vocab_size, named in (
        (small, BABY, 1, 512, "seed"),
        (small, BABY, 0, 99, "vocab_size"),
        (replace(small, agents=["expert"]), BABY, 0, 512, "agents"),
        (small, replace(BABY, tasks=9), 0, 512, "worlds"),
    ):
        refused(partial(Corpus(other, {"baby": world}, folder, seed).declare, vocab_size), f"({named})", "run=")
    make(small, folder)
    torn = tmp_path / "corpus" / "baby" / "00001.npz"
    torn.write_bytes(torn.read_bytes()[:100])
    refused(lambda: load_corpus(folder, {"baby": BABY}), "00001.npz", "delete it")
    refused(lambda: load_corpus(folder, {"other": BABY}), str(folder), "no shard of other")


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


def test_no_episode_begins_as_a_held_out_task_of_a_run(small: PretrainSettings, tmp_path: Path) -> None:
    """Other seeds and options may draw the same task: first observations are compared, before names are made up."""
    everything = play({"baby": BABY}, 4000, 0.0, 0, 0)["baby"].episodes
    held_out = {t.start for t in everything[::2]}
    held = [t for t in everything if t.start in held_out]
    _log(tmp_path / "run", [t for t in everything if t.start not in held_out], held)
    left_out = held_out_starts([str(tmp_path / "run")])
    assert left_out == held_out
    played = Corpus(replace(small, renamed_share=0.0), {"baby": BABY}, tmp_path, 0, left_out).play("baby", 0)
    starts = [t.start for t in played.episodes]
    first = [t.start for t in everything if t.start not in held_out]
    assert starts[: len(first)] == first
    assert not held_out & set(starts)
    assert played.left_out >= len(everything) - len(first) > 0
    _log(tmp_path / "other", everything, [])
    runs = [str(tmp_path / name) for name in ("run", "other")]
    refused(lambda: held_out_starts(runs), "pretrain.leave_out", runs[1])


def _log(run: Path, train: list[Trajectory], held_out: list[Trajectory]) -> None:
    split = {"train": [*{t.start: t.start for t in train}], "heldout": [*{t.start: t.start for t in held_out}]}
    store = TrajectoryStore.create(run / "log", split)
    store.append([replace(t, id=str(k), task_id=t.start) for k, t in enumerate([*train, *held_out])])
