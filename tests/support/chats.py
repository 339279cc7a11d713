"""Tokenizers with chat templates, and an episode in which every content is a token of its own."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Source, StopReason, Trajectory, Turn

WORDS = ["ATTIC", "HALL", "THE END", "go east", "take lamp", "\n> ", "\n[reward=0]", "\n[reward=1 done]"]
EPISODE = Trajectory(
    id="e", task_id="t", group_id="g", source=Source.EXPERT, agent="expert", seed=0, start="ATTIC",
    turns=(Turn("go east", "HALL", 0.0, False), Turn("take lamp", "THE END", 1.0, True)),
    stop=StopReason.TERMINATED,
)  # fmt: skip

CHATML = (  # Qwen2's: a system message of its own where there is none
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def ours(template: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(["You see a lamp. There is an exit to the east."] * 2, 300, WORDS)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def qwen2() -> PreTrainedTokenizerFast:
    """The mechanics of Qwen2's tokenizer: byte-level BPE on its own split, ChatML marks as special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["system\nYou are a helpful assistant.", "user\nYou see a lamp.\n\n", "\n"] * 3, trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


OURS, QWEN2 = ours(), qwen2()
OUR_CHAT, QWEN2_CHAT = ChatFormat(OURS), ChatFormat(QWEN2)


def ids(*words: str) -> list[int]:
    """Ids of words that have to be one token each."""
    found = [OURS.encode(word, add_special_tokens=False) for word in words]
    assert all(len(one) == 1 for one in found), found
    return [one[0] for one in found]
