"""`policy.model=` and `worldmodel.model=` take a pretrained chat model with its own template, and LoRA on top."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from imagination.commands.clone import clone
from imagination.commands.fit_world_model import fit_world_model
from imagination.commands.train import train
from imagination.settings import Config
from policy.lm.engine import UnsupportedModel
from real_envs.store import TrajectoryStore
from tests.support.worlds import Corridors, plant

CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def chat_model(run: Path, tmp_path: Path) -> Path:
    """A folder as a user would download it: Qwen2's architecture, ChatML, one special token more than we know of."""
    texts = [t.start for t in TrajectoryStore.open(run / "log").read("train")]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=384,  # larger than the tokenizer, as real ones are
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    folder = tmp_path / "qwen2-tiny-chat"
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_chat_checkpoint_runs_through_the_same_code_with_lora(
    run: Path, tiny: Config, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Corridors)  # what so small a model has learned in a few steps is too little to dream in
    tiny.worldmodel.model = tiny.policy.model = str(chat_model)
    tiny.worldmodel.context = tiny.policy.context = 512
    tiny.fit.steps, tiny.fit.lr = 10, 3e-3
    tiny.policy.lora.rank, tiny.policy.lora.alpha, tiny.clone.steps, tiny.clone.lr = 8, 16, 150, 1e-2
    tiny.dream.temperature = 0.0
    fit_world_model(tiny, run)
    clone(tiny, run)
    tiny.train.updates = 2
    train(tiny, run)

    original = AutoModelForCausalLM.from_pretrained(chat_model).state_dict()
    for name in ("worldmodel", "policy-clone", "policy"):
        folder = run / "models" / name
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model.config.model_type == "qwen2"
        assert tokenizer.chat_template == CHATML
        assert model.state_dict().keys() == original.keys(), "adapters must be merged: readers expect a plain model"
        assert any(not torch.equal(v, original[k]) for k, v in model.state_dict().items()), f"{name} learned nothing"
    embedding = "model.embed_tokens.weight"
    after = AutoModelForCausalLM.from_pretrained(run / "models" / "policy").state_dict()
    assert torch.equal(after[embedding], original[embedding]), "LoRA leaves the embedding alone"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["real_steps"] == {"fit_world_model": 0, "clone": 0, "train": 0, "probe": 0}


def test_a_chat_checkpoint_may_be_asked_to_reason_without_a_log_that_shows_it(
    run: Path, tiny: Config, chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its predictions are trained behind the line; the line is not, so a model that writes none is told of."""
    tiny.worldmodel.model, tiny.worldmodel.context, tiny.worldmodel.reasoning_tokens = str(chat_model), 512, 40
    tiny.fit.steps = 5
    fit_world_model(tiny, run)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["world_model_form"] == "text+reasoning"
    assert summary["world_model"]["invalid_reasoning"] == summary["world_model"]["n"] > 0
    assert "within 40 tokens" in capsys.readouterr().err


def test_what_cannot_be_played_is_refused_before_it_is_trained(run: Path, tiny: Config, chat_model: Path) -> None:
    """Its own weights would be trained for hours, and then no engine takes them."""
    AutoModelForCausalLM.from_config(GPT2Config(vocab_size=384, n_embd=16, n_layer=1, n_head=2)).save_pretrained(
        chat_model
    )
    tiny.worldmodel.model = tiny.policy.model = str(chat_model)
    for stage in (fit_world_model, clone):
        with pytest.raises(UnsupportedModel, match="standard attention"):
            stage(tiny, run)
    assert not (run / "models").exists()
