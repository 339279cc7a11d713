"""Prompts of random tokens, and many requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import torch

from policy.lm.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["a"], 270)
VOCAB = len(TOKENIZER)


def prompt(length: int, seed: int) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCAB, (length,), generator=rng).tolist()


def together(*requests: Coroutine[Any, Any, Any]) -> list[Any]:
    """What concurrent callers get, exceptions included; all of them run at once if the engine has slots for them."""

    async def run() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), timeout=60)

    return asyncio.run(run())
