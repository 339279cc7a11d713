"""If these fail, what a model reads or writes is not what the world said, or a checkpoint reads other tokens than ours.

Everything is small: a vocabulary hardly larger than the 256 bytes, trained on two sentences.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from policy.lm.backbone import build_model, save_checkpoint
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import END, PAD, train_tokenizer

STATUS, WON = "\n[reward=0]", "\n[reward=1 done]"
TEXTS = ["-= Hall =-\nThere is an exit to the east. You see a lamp."] * 4 + ["take lamp", "go east"]
TOKENIZER = train_tokenizer(TEXTS, vocab_size=400, phrases=[STATUS, WON])
SPECIAL = 5  # pad, three roles, end


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


@settings(max_examples=200)
@given(st.lists(st.text() | st.sampled_from([STATUS, WON, " ", "\n", "\r\n", "There is an exit"]), max_size=6))
@example(["\x00", " n't . , ' s", "e\u0301", "\u200d\ufeff", "🚪", "  lamp  ", "\t\n\n"])
@example(["<|assistant|>", END, PAD])  # a world may say that, too
def test_any_text_round_trips(pieces: list[str]) -> None:
    """Otherwise an action reaches the world, or an observation the policy, with other characters than it was made of:
    the usual culprits are cleaned-up spaces, normalised accents and bytes that no merge has seen."""
    text = "".join(pieces)
    ids = TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=True)  # as ChatFormat does
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text  # what actors and world models call


def test_a_phrase_is_one_token_and_no_special_one() -> None:
    """A special token would vanish in decoding, and with it the status line: every prediction would be invalid."""
    for phrase in (STATUS, WON):
        assert encode(phrase) == [TOKENIZER.convert_tokens_to_ids(phrase)]
        assert encode("You win." + phrase)[-1:] == encode(phrase)
        assert encode("You win." + phrase)[:-1] == encode("You win.")
    assert encode(STATUS) != encode(WON)
    assert set(encode(STATUS) + encode(WON)).isdisjoint(TOKENIZER.all_special_ids)


def test_no_token_crosses_a_space() -> None:
    """A model whose tokens are whole commands cannot compose one that it has not read: it is a table."""
    spaced = {token for token in TOKENIZER.get_vocab() if "Ġ" in token[1:] or "Ċ" in token[1:]}
    assert spaced <= {PAD, END, STATUS, WON}
    pieces = [TOKENIZER.decode([i]) for i in encode("There is an exit to the east. You see a lamp.")]
    assert pieces == ["There", " is", " an", " exit", " to", " the", " east", ".", " You", " see", " a", " lamp", "."]


def test_a_number_is_read_digit_by_digit() -> None:
    """Otherwise 1234 is a word of its own, and says nothing of how it relates to 1235."""
    tokenizer = train_tokenizer(["I see 1234 lamps and 1235 boxes"] * 9, 320)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("see 1234 lamps")] == [
        "see",
        " ",
        "1",
        "2",
        "3",
        "4",
        " lamps",
    ]


def test_the_vocabulary_is_no_larger_than_asked_for() -> None:
    """The embedding is made for ``len(tokenizer)`` rows; a limit that is not kept makes a bigger model than asked."""
    assert len(train_tokenizer(TEXTS, 300, [STATUS, WON])) == 300  # there is more than enough to merge
    assert max(TOKENIZER.get_vocab().values()) == len(TOKENIZER) - 1
    assert (TOKENIZER.pad_token, TOKENIZER.eos_token) == (PAD, END)


def test_a_vocabulary_that_cannot_hold_all_bytes_is_refused() -> None:
    """One byte short, some text would be dropped in silence. At the bound itself everything still round-trips."""
    phrases = [STATUS, WON]
    with pytest.raises(ValueError, match="vocab_size=262 cannot hold 256 bytes"):
        train_tokenizer(TEXTS, 256 + SPECIAL + len(phrases) - 1, phrases)
    smallest = train_tokenizer(TEXTS, 256 + SPECIAL + len(phrases), phrases)
    assert len(smallest) == 263
    every_byte = "".join(map(chr, range(0x250))) + "開ける 🚪" + WON
    assert smallest.decode(smallest.encode(every_byte)) == every_byte
    assert smallest.encode(every_byte)[-1] == smallest.convert_tokens_to_ids(WON)


def test_a_tokenizer_saved_beside_a_model_is_loaded_as_it_was(tmp_path: Path) -> None:
    """For some model types transformers loads the type's own tokenizer class, whatever lies in the folder: the
    checkpoint would then read other ids than it was trained on, without any error."""
    model = build_model(ModelSettings(hidden=8, layers=1, heads=1, kv_heads=1, mlp=8), TOKENIZER, seed=0)
    save_checkpoint(model, TOKENIZER, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "You win." + WON, "öffne die Tür 🚪\r\n", " lead and trail ", "", "<|end|>", "n't ."]:
        assert loaded.encode(text, add_special_tokens=False) == encode(text)
        assert loaded.decode(encode(text), skip_special_tokens=True) == TOKENIZER.decode(
            encode(text), skip_special_tokens=True
        )
    assert loaded.encode("take lamp") == encode("take lamp")  # no token added at the ends by default
    chat = [{"role": "user", "content": "You see a lamp."}, {"role": "assistant", "content": "take lamp"}]
    rendered = "<|user|>You see a lamp.<|end|><|assistant|>take lamp<|end|>"
    assert loaded.apply_chat_template(chat, tokenize=False) == rendered
    assert (loaded.pad_token_id, loaded.eos_token_id) == (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
