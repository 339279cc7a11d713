"""Texts that a limit is too low for. If this fails, a newcomer is refused and not told which limit would do."""

from __future__ import annotations

import pytest

from imagination.learning.initial_model import check_texts
from imagination.settings import UserError
from policy.lm.render import ChatFormat
from policy.lm.tokenizer import train_tokenizer


def test_the_limit_that_would_do_is_named() -> None:
    """Of 200 answers two may be longer, as one in a hundred is let through: 195 of 1 word, then 6, 7, 8, 20 and 30."""
    chat = ChatFormat(train_tokenizer(["a " * 30], 300))
    words = [1] * 195 + [6, 7, 8, 20, 30]
    texts = [" ".join("a" * count) for count in words]
    sizes = [len(chat.encode(text)) + 1 for text in texts]
    with pytest.raises(UserError, match=r"logged answers are longer than dream\.max_tokens=2; the longest is") as error:
        check_texts("answers", texts, chat, "dream", 2)
    named = int(str(error.value).rpartition("dream.max_tokens=")[2].partition(" ")[0])
    assert named == sizes[-3]
    check_texts("answers", texts, chat, "dream", named)
    with pytest.raises(UserError):
        check_texts("answers", texts, chat, "dream", named - 1)
