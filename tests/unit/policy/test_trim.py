"""If these fail, a pretrained model that is cut down to a log reads or writes something else than before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from policy.lm.backbone import CheckpointError, build_model, load_checkpoint, save_checkpoint
from policy.lm.render import ChatFormat
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import END, train_tokenizer
from policy.lm.trim import keep_layers, trim_vocabulary

READ = [
    "You take the lamp.",
    "The north door is closed.",
    "the other lantern",
    "nothing happens",
    "12 apples",
    "the end",
]
LOG = ["take the lamp", "You take the lamp.", "north"]


def pretrained(layers: int = 3) -> tuple[Any, PreTrainedTokenizerFast]:
    tokenizer = train_tokenizer(READ * 3, 400)
    return build_model(ModelSettings(hidden=32, layers=layers, mlp=48, context=64), tokenizer, 0), tokenizer


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def test_the_tokens_that_are_left_have_the_logits_that_they_had(tmp_path: Path) -> None:
    model, tokenizer = pretrained()
    texts = [f"{text}{END}" for text in LOG]
    before = [logits(model, tokenizer.encode(text)) for text in texts]
    trimmed = trim_vocabulary(model, tokenizer, LOG)
    assert len(trimmed) < len(tokenizer) - 20
    save_checkpoint(model, trimmed, tmp_path / "trimmed")
    loaded, again = load_checkpoint(str(tmp_path / "trimmed"))
    former = [tokenizer.convert_tokens_to_ids(token) for token in again.convert_ids_to_tokens(range(len(again)))]
    for text, expected in zip(texts, before, strict=True):
        ids = again.encode(text)
        assert [former[i] for i in ids] == tokenizer.encode(text)
        torch.testing.assert_close(logits(loaded, ids), expected[:, former])
    assert loaded.config.vocab_size == len(again) == len(loaded.get_input_embeddings().weight)
    assert again.decode(ChatFormat(again).stop) == END
    assert again.convert_ids_to_tokens(loaded.config.eos_token_id) == END


@pytest.mark.parametrize("text", ["The other door", "zebra", "Ärger, 今日", "a\tb\n\n c  "])
def test_what_the_log_has_not_can_still_be_written(text: str) -> None:
    trimmed = trim_vocabulary(*pretrained(), LOG)
    assert trimmed.decode(trimmed.encode(text)) == text


def test_heads_that_are_not_tied_and_tokens_around_texts_are_cut_alike() -> None:
    model, tokenizer = pretrained()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.lm_head.bias = torch.nn.Parameter(torch.randn(len(tokenizer)))  # as Phi has one
    backend, eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    backend.post_processor = TemplateProcessing(single=f"$A {END}", special_tokens=[(END, eos)])
    expected = logits(model, tokenizer.encode(LOG[0]))
    trimmed = trim_vocabulary(model, tokenizer, LOG)
    ids = trimmed.encode(LOG[0])
    assert ids[-1] == trimmed.eos_token_id != eos or trimmed.decode(ids).endswith(END)
    former = [tokenizer.convert_tokens_to_ids(token) for token in trimmed.convert_ids_to_tokens(range(len(trimmed)))]
    torch.testing.assert_close(logits(model, ids), expected[:, former])


def test_other_tokenizers_are_refused() -> None:
    model, tokenizer = pretrained()
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")), eos_token="a")
    words.chat_template = tokenizer.chat_template
    with pytest.raises(CheckpointError, match="trim_vocabulary"):
        trim_vocabulary(model, words, LOG)


def test_the_first_layers_are_those_that_stay() -> None:
    model, tokenizer = pretrained()
    expected = pretrained()[0].model.layers[:2].state_dict()
    keep_layers(model, 2)
    torch.testing.assert_close(model.model.layers.state_dict(), expected)
    assert model.config.num_hidden_layers == 2
    assert logits(model, tokenizer.encode(LOG[0])).isfinite().all()
    with pytest.raises(CheckpointError, match="keep_layers=3"):
        keep_layers(model, 3)
