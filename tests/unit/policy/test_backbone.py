"""If these fail, what a run saved is not what it trained, or a wrong checkpoint is noticed only by its nonsense."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from policy.lm.backbone import CheckpointError, build_model, load_checkpoint, save_checkpoint, with_lora
from policy.lm.forward import decoder, hidden_before, token_logits
from policy.lm.settings import LoraSettings, ModelSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.errors import UserError
from real_envs.files import CHECKSUMS

TOKENIZER = train_tokenizer(["You see a lamp."], 280)
SIZES = ModelSettings(hidden=16, layers=2, heads=4, kv_heads=2, mlp=32, context=64)
IDS = torch.tensor([[5, 77, 9, 200, 31, 8]])


def make_model(seed: int = 0) -> PreTrainedModel:
    return build_model(SIZES, TOKENIZER, seed).eval()


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model(IDS).logits


def test_a_model_has_the_shape_that_was_asked_for() -> None:
    model = make_model()
    config = model.config
    assert model.get_input_embeddings().weight.shape == (len(TOKENIZER), 16)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 2)
    assert (config.intermediate_size, config.max_position_embeddings) == (32, 64)
    assert (config.pad_token_id, config.eos_token_id) == (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id)


@pytest.mark.parametrize("sizes", [{"heads": 3}, {"hidden": 6, "heads": 2}, {"heads": 2, "kv_heads": 3}])
def test_heads_that_cannot_share_the_width_are_refused(sizes: dict[str, int]) -> None:
    settings = ModelSettings(**{"hidden": 32, "layers": 1, "kv_heads": 1, **sizes})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"multiple of twice heads="):
        build_model(settings, train_tokenizer(["a"]), seed=0)


def test_weights_come_from_the_seed_and_leave_the_global_generator_alone() -> None:
    """Else two runs of one seed differ, or building one more model changes every later random number."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = logits_of(make_model(seed=1))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, logits_of(make_model(seed=1)))
    assert not torch.equal(first, logits_of(make_model(seed=2)))


# --- folders ---


def test_a_saved_model_is_the_model(tmp_path: Path) -> None:
    """Through our loader and through plain transformers, which is how everybody else reads it."""
    model = make_model()
    save_checkpoint(model, TOKENIZER, tmp_path / "deep" / "model")
    ours, tokenizer = load_checkpoint(str(tmp_path / "deep" / "model"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "model")
    assert torch.equal(logits_of(ours.eval()), logits_of(model))
    assert torch.equal(logits_of(plain.eval()), logits_of(model))
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer.chat_template == TOKENIZER.chat_template


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "model"
    save_checkpoint(make_model(seed=1), TOKENIZER, folder)
    other = train_tokenizer(["Another text."], 280)
    monkeypatch.setattr(other, "save_pretrained", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(make_model(seed=2), other, folder)
    assert torch.equal(logits_of(load_checkpoint(str(folder))[0].eval()), logits_of(make_model(seed=1)))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_checkpoint_is_loaded_in_the_dtype_asked_for(tmp_path: Path) -> None:
    save_checkpoint(make_model(), TOKENIZER, tmp_path)
    assert load_checkpoint(str(tmp_path))[0].dtype == torch.float32
    assert load_checkpoint(str(tmp_path), "bfloat16")[0].dtype == torch.bfloat16


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path: Path) -> None:
    """Many hub checkpoints have none; ``None`` in a padded batch would crash long after loading."""
    save_checkpoint(make_model(), TOKENIZER, tmp_path)
    (tmp_path / CHECKSUMS).unlink()  # hub checkpoints have none of these either
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["pad_token"]
    path.write_text(json.dumps(config))
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token is None
    assert load_checkpoint(str(tmp_path))[1].pad_token_id == TOKENIZER.eos_token_id


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(tmp_path: Path) -> None:
    """The first unusual word would index beyond the embedding: a crash on a CPU, garbage on some accelerators."""
    bigger = train_tokenizer(["You see a lamp."], 280, phrases=["take lamp", "go east"])
    save_checkpoint(make_model(), bigger, tmp_path)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(str(tmp_path))
    assert str(error.value).startswith(f"{tmp_path}: wrong vocabulary")
    assert f"{len(bigger)} tokens " in str(error.value)
    assert f" only {len(TOKENIZER)}" in str(error.value)


def test_more_embeddings_than_tokens_are_fine(tmp_path: Path) -> None:
    """Hub models pad their embeddings to round numbers."""
    model = make_model()
    model.resize_token_embeddings(320)
    save_checkpoint(model, TOKENIZER, tmp_path)
    assert load_checkpoint(str(tmp_path))[0].get_input_embeddings().weight.shape[0] == 320


def damage(folder: Path, how: str) -> None:
    match how:
        case "empty":
            for path in folder.iterdir():
                path.unlink()
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "torn weights":  # a copy that was cut off
            data = (folder / "model.safetensors").read_bytes()
            (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
        case "no tokenizer":
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (folder / name).unlink()
        case "torn config":
            (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("empty", "no config.json; this folder is not a Hugging Face checkpoint"),
        ("no weights", "not a loadable causal LM"),
        ("torn weights", "not a loadable causal LM"),
        ("no tokenizer", "not a loadable causal LM"),
        ("torn config", "not a loadable causal LM"),
    ],
)
def test_a_broken_folder_is_named_with_the_reason(tmp_path: Path, how: str, reason: str) -> None:
    """The user reads one line that says which folder to look at; anything else is a traceback out of a library."""
    save_checkpoint(make_model(), TOKENIZER, tmp_path)
    (tmp_path / CHECKSUMS).unlink()  # as another program wrote it
    damage(tmp_path, how)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(str(tmp_path))
    assert str(error.value).startswith(f"{tmp_path}: {reason}")
    assert "\n" not in str(error.value)


# --- LoRA ---


def make_lora(model: PreTrainedModel) -> Any:
    """Adapters that do something: peft starts them at zero."""
    pytest.importorskip("peft")
    wrapped = with_lora(model, LoraSettings(rank=2, alpha=4))
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=rng))
    return wrapped.eval()


def test_only_adapters_train() -> None:
    """What LoRA is for: an optimiser over the trainable parameters leaves every weight of the base as it was."""
    model = make_lora(make_model())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=1.0)
    model(IDS).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    adapters = {name for name in before if "lora_" in name}
    assert changed == adapters
    assert len(adapters) == 2 * 2 * 7  # A and B, in two layers, on q, k, v, o and the three of the MLP


def test_a_saved_lora_is_a_plain_merged_model_and_its_adapters_beside_it(tmp_path: Path) -> None:
    """Every reader sees one model, or adapters for the one before; and training goes on with what it had, unmerged."""
    base = make_model()
    base_logits = logits_of(base)
    model = make_lora(base)
    expected = logits_of(model)
    assert (expected - base_logits).abs().max() > 1e-2
    save_checkpoint(model, TOKENIZER, tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(plain.eval()), expected, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in make_model().named_parameters()]
    adapted = pytest.importorskip("peft").PeftModel.from_pretrained(make_model(), tmp_path / "adapter")
    torch.testing.assert_close(logits_of(adapted.eval()), expected, atol=1e-5, rtol=1e-5)

    assert torch.equal(logits_of(model), expected)
    assert any("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    with model.disable_adapter():
        assert torch.equal(logits_of(model), base_logits)
    save_checkpoint(make_model(), TOKENIZER, tmp_path)
    assert not (tmp_path / "adapter").exists(), "they are of the model before"


def test_the_decoder_of_a_peft_model_has_its_adapters() -> None:
    """Else the log-probs that are trained are those of the base, and the adapters get no gradient."""
    plain, model = make_model(), make_lora(make_model())
    for one in (plain, model):
        with torch.no_grad():
            hidden = decoder(one)(input_ids=IDS, use_cache=False).last_hidden_state
            torch.testing.assert_close(token_logits(one, hidden), logits_of(one))
    mask = torch.tensor([[False, True, False, True, True, False]])
    logits = token_logits(model, hidden_before(model, IDS, torch.ones_like(IDS).bool(), mask).states)
    torch.testing.assert_close(logits, logits_of(model)[0, [0, 2, 3]])  # one position earlier: what predicts the token
    logits.logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "lora_" in n)


@pytest.mark.parametrize(
    ("mask", "message"), [([True, False, False], "has no past"), ([False, False, True], "padding")]
)
def test_tokens_without_a_past_or_a_presence_have_no_hidden_state(mask: list[bool], message: str) -> None:
    """Position 0 would be predicted from the last token of the row, and padding from nothing that was said."""
    with pytest.raises(ValueError, match=message):
        hidden_before(
            make_model(), torch.tensor([[5, 6, 0]]), torch.tensor([[True, True, False]]), torch.tensor([mask])
        )
