"""The model code meets a real pretrained chat model: its own template, tokens and quantised file.

If these fail, what works for the small models of the other tests does not for one that a user brings. Skipped where the
model cannot be fetched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from imagination.data.examples import imitation_row
from imagination.runs.models import adapted
from policy.lm.backbone import CheckpointError, load_checkpoint, save_checkpoint
from policy.lm.engine import Completion, Sampling
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.render import ChatFormat
from policy.lm.settings import LoraSettings, ModelSettings
from tests.support.asking import together
from tests.support.engines import NEVER, generate, teacher_forced
from tests.support.smollm2 import NotFetched, fetched, gguf_file
from tests.support.tiny import logged_episode
from worldmodel.formats.full import prediction_text

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CONTEXT = 512


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        pytest.importorskip("gguf", reason="pip install 'imagination[gguf]'")
        return fetched()
    except NotFetched as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    model, tokenizer = load_checkpoint(str(folder))
    return model.eval(), tokenizer


def asked(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_the_unpacked_model_answers_in_words(loaded: tuple[Any, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = loaded
    assert "Paris" in tokenizer.decode(generate(model, asked(tokenizer), 12, NEVER))


def test_greedy_tokens_are_those_of_generate(loaded: tuple[Any, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = loaded
    stop = ChatFormat(tokenizer).stop
    engine = InProcessEngine(model, CONTEXT)
    (answer,) = together(engine.complete(asked(tokenizer), Sampling(16, stop, temperature=0.0), seed=0))
    assert isinstance(answer, Completion), answer
    assert answer.ids == generate(model, asked(tokenizer), 16, stop)


def test_sampled_logprobs_are_the_trainers(loaded: tuple[Any, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = loaded
    ids, stop = asked(tokenizer), ChatFormat(tokenizer).stop
    engine = InProcessEngine(model, CONTEXT)
    answers = together(*(engine.complete(ids, Sampling(12, stop), seed=seed) for seed in range(3)))
    assert len({answer.ids for answer in answers}) > 1
    for answer in answers:
        assert answer.logprobs == pytest.approx(teacher_forced(model, ids, answer, 1.0), abs=1e-3)


def test_an_episode_is_rendered_as_its_own_template_does(loaded: tuple[Any, PreTrainedTokenizerBase]) -> None:
    """What it was trained on is what it reads: opening, roles and ends are the template's, tokens by our parts."""
    _, tokenizer = loaded
    chat = ChatFormat(tokenizer)
    episode = logged_episode("corridor-a", 0)
    row = imitation_row(chat, episode)
    read = tokenizer.decode(row.ids)
    messages = [{"role": "user", "content": episode.start}]
    for turn in episode.turns:
        messages.append({"role": "assistant", "content": turn.action})
        messages.append({"role": "user", "content": turn.observation})
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert isinstance(whole, str)
    assert whole.startswith(read)
    made = [tokenizer.decode([i for i, m in zip(row.ids.tolist(), row.action_mask.tolist(), strict=True) if m])]
    assert made == ["".join(turn.action + "<|im_end|>" for turn in episode.turns)]
    texts = [episode.start, *(prediction_text(turn) for turn in episode.turns), "Ünïcode → 12.50 €, two  spaces ."]
    assert [chat.decode(chat.encode(text)) for text in texts] == texts


def test_adapters_train_and_are_saved_merged(loaded: tuple[Any, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    """The folder is a plain model: what reads it (vLLM) needs to know nothing of adapters."""
    model, tokenizer = loaded
    ids = torch.tensor([asked(tokenizer)])
    with torch.no_grad():
        before = model(ids).logits
    wrapped = adapted(model, ModelSettings(model="smollm2", lora=LoraSettings(rank=4, alpha=8)))
    trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    wrapped(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in trained.values():
            parameter.sub_(10 * parameter.grad if parameter.grad is not None else 0.0)
        after = wrapped(ids).logits
    save_checkpoint(wrapped, tokenizer, tmp_path)
    again, _ = load_checkpoint(str(tmp_path))
    with torch.no_grad():
        # merging rounds the weights anew, so logits of some tens may differ by more than a fixed small amount
        error = (again(ids).logits - after).abs().max()
        assert error < 0.01 * (after - before).abs().max()
        assert error < 1e-3 * after.abs().max()
    wrapped.unload()


@pytest.mark.parametrize("share", [0.01, 0.6])
def test_a_download_that_was_cut_off_is_one_line(folder: Path, tmp_path: Path, share: float) -> None:
    whole = gguf_file()
    torn = tmp_path / "torn.gguf"
    with whole.open("rb") as file:
        torn.write_bytes(file.read(int(share * whole.stat().st_size)))
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(str(torn))
    assert str(error.value).startswith(f"{torn}: torn")
    assert "\n" not in str(error.value)
