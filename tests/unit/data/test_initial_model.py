"""What training starts from. If these fail, a newcomer is refused and not told which limit would do, or a log starts
from a base model that cannot read it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from imagination.commands.fit_world_model import share_of_rate
from imagination.data import initial_model
from imagination.data.initial_model import check_texts, chosen_model
from imagination.runs.run_folder import RunFolder
from imagination.settings import WorldModelSettings
from policy.lm import backbone
from policy.lm.backbone import CheckpointError, build_model, load_checkpoint, save_checkpoint
from policy.lm.batch import Row, collate
from policy.lm.render import ChatFormat
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Source
from tests.support.plain import VOCAB, make_model, random_ids
from tests.support.refusal import refused
from tests.support.tiny import TASKS, logged_episode

LOG = [logged_episode(task, number) for task in TASKS for number in range(4)]


def test_the_limit_that_would_do_is_named() -> None:
    """Of 200 answers two may be longer, as one in a hundred is let through: 195 of 1 word, then 6, 7, 8, 20 and 30."""
    chat = ChatFormat(train_tokenizer(["a " * 30], 300))
    words = [1] * 195 + [6, 7, 8, 20, 30]
    texts = [" ".join("a" * count) for count in words]
    sizes = [len(chat.encode(text)) + 1 for text in texts]
    error = refused(lambda: check_texts("answers", texts, chat, "dream", 2), "answers", "dream.max_tokens=2;")
    named = int(str(error).rpartition("dream.max_tokens=")[2].partition(" ")[0])
    assert named == sizes[-3]
    check_texts("answers", texts, chat, "dream", named)
    refused(lambda: check_texts("answers", texts, chat, "dream", named - 1))


def test_a_template_that_would_cut_answers_is_told() -> None:
    """Of one that ends answers with a line feed, an action of two lines would be its first, and no page an answer."""
    tokenizer = train_tokenizer(["a " * 30], 300)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + m['content'] }}\n{% endfor %}assistant"
    chat = ChatFormat(tokenizer)
    check_texts("actions", ["take lamp"], chat, "", 20)
    refused(lambda: check_texts("actions", ["take lamp\nlook"], chat, "", 20), "comes back as 'take lamp';")


def with_base(monkeypatch: pytest.MonkeyPatch, folder: Path, texts: list[str]) -> None:
    """A base model whose tokenizer has read ``texts``."""
    tokenizer = train_tokenizer(texts, 400)
    save_checkpoint(
        build_model(ModelSettings(hidden=16, layers=1, heads=1, kv_heads=1, mlp=16), tokenizer, 0), tokenizer, folder
    )
    for module in (backbone, initial_model):
        monkeypatch.setattr(module, "BASE_FOLDER", folder)


def test_a_log_starts_from_the_base_that_can_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, settings = RunFolder(tmp_path / "run", 0), WorldModelSettings()
    with_base(monkeypatch, tmp_path / "near", [t.start for t in LOG] + [u.observation for t in LOG for u in t.turns])
    assert chosen_model(run, settings, 400, LOG) == "base"
    assert "base model" in capsys.readouterr().err
    assert load_checkpoint("base")[0].config.hidden_size == 16
    for own in (replace(settings, layers=3), replace(settings, members=2), replace(settings, kind="diffusion")):
        assert chosen_model(run, own, 400, LOG) == ""
    assert chosen_model(run, replace(settings, model="./there"), 400, LOG) == "./there"

    with_base(monkeypatch, tmp_path / "far", ["0123456789"])
    assert chosen_model(run, settings, 400, LOG) == ""
    assert "from nothing, not" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "context"), [(4096, 4096), (64, 2048)])
def test_the_base_learns_contexts_that_are_longer_than_its_own(
    asked: int, context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_base(monkeypatch, tmp_path / "base", [t.start for t in LOG])
    settings = WorldModelSettings(model="base", context=asked)
    model, _ = initial_model.initial_model(RunFolder(tmp_path, 0), settings, 400, settings, LOG, 0)
    assert model.config.max_position_embeddings == context


def test_an_installation_without_a_base_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backbone, initial_model):
        monkeypatch.setattr(module, "BASE_FOLDER", tmp_path / "nowhere")
    assert chosen_model(RunFolder(tmp_path, 0), WorldModelSettings(), 400, LOG) == ""
    refused(lambda: load_checkpoint("base"), "base model", error=CheckpointError)


@pytest.mark.parametrize(("known", "share"), [(10, 0.1), (9, 0.1), (8, 1.0), (0, 1.0)])
def test_a_base_that_knows_the_log_is_tuned_at_a_tenth_of_the_rate(known: int, share: float) -> None:
    """By hand: rows of one trained token, of which the model says ``known`` of ten."""
    model = make_model()
    rows = []
    for k in range(10):
        ids = random_ids(5, k)
        likeliest = int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        answer = likeliest if k < known else (likeliest + 1) % VOCAB
        rows.append(Row([*ids, answer], (), Source.REAL, ce_weight=[0.0] * 5 + [1.0]))
    assert share_of_rate(model, lambda step: collate(rows, pad=0)) == share
