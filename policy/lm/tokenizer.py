"""The tokenizer of a model that starts from scratch: byte-level BPE, trained on the log, with a small chat template.

A pretrained model brings its own tokenizer and template; nothing else in the project knows the difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from real_envs.errors import UserError

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
MASK = "<|mask|>"
_PIECE = re.compile("[a-z]{2,8}")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def plain_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that are no special tokens."""
    special = set(tokenizer.all_special_ids)
    return [i for i in range(len(tokenizer)) if i not in special]


def word_pieces(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The words and parts of words, of two to eight lower-case letters, that single tokens write; sorted."""
    texts = (str(tokenizer.decode([i])).strip() for i in plain_tokens(tokenizer))
    return sorted({text for text in texts if _PIECE.fullmatch(text)})


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 1024, phrases: Sequence[str] = (), mask: bool = False
) -> PreTrainedTokenizerFast:
    """Trains byte-level BPE on ``texts``; any text round-trips, seen or not.

    Words are split as GPT-2 splits them (Radford et al. 2019) and merges never cross a space, so that a model can
    compose a command it has not read. Every digit is a token of its own, so that a number is read as its digits.

    Args:
        vocab_size: upper bound of the number of tokens, at least 256 bytes plus the special tokens.
        phrases: strings that become one token each: marks of the format, such as the lines that end a prediction.
        mask: with a token that hides another one, for models that fill in.

    Raises:
        UserError: ``vocab_size`` cannot hold the 256 bytes and the special tokens.
    """
    special = [PAD, SYSTEM, USER, ASSISTANT, END, *([MASK] if mask else [])]
    if vocab_size < 256 + len(special) + len(phrases):
        raise UserError(f"vocab_size={vocab_size} cannot hold 256 bytes, {len(special)} special tokens and phrases")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(phrases),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK if mask else None,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
