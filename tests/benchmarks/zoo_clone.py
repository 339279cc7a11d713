"""The policy that both sides of ``trl_iteration`` start from: a clone of a keeper who sometimes knows the right food.

Written without the stages of either side, in plain PyTorch: what happens here is part of neither measurement.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from policy.lm.backbone import build_model, save_checkpoint
from policy.lm.render import ChatFormat
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer
from tests.benchmarks.measure import worker_files
from tests.benchmarks.zoo import FOODS, Zoo, answer

MODEL = ModelSettings(hidden=192, layers=6, heads=3, kv_heads=3, mlp=512, context=512)
VOCABULARY = 352  # few merges, or whole sentences would be one token each
SKILL = 0.3  # how often the teacher knows


def teacher_episode(seed: int) -> list[tuple[str, str]]:
    """Pairs of an observation and the teacher's answer."""
    zoo, chance = Zoo(), random.Random(f"teacher/{seed}")
    observation, done, found = zoo.reset(-1 - seed), False, []
    while not done:
        action = answer(zoo.animal) if chance.random() < SKILL else chance.choice(FOODS)
        found.append((observation, action))
        observation, _, done = zoo.step(action)
    return found


def tokens(chat: ChatFormat, episode: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """Ids, and labels that are -100 on all but the actions."""
    ids, labels = list(chat.opening), [-100] * len(chat.opening)
    for turn, (observation, action) in enumerate(episode):
        seen = [*(chat.to_user if turn else ()), *chat.encode(observation), *chat.to_assistant]
        said = [*chat.encode(action), chat.stop]
        ids += seen + said
        labels += [-100] * len(seen) + said
    return ids, labels


def make_clone(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """Writes a checkpoint and returns the last loss."""
    episodes = [teacher_episode(seed * 1000 + i) for i in range(600)]
    texts = [text for episode in episodes for pair in episode for text in pair]
    tokenizer = train_tokenizer(texts + 1000 * FOODS, VOCABULARY)  # answers of a few tokens each
    chat = ChatFormat(tokenizer)
    data = [tokens(chat, episode) for episode in episodes]
    model: Any = build_model(MODEL, tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    chance, loss = random.Random(seed), torch.zeros(())
    for _ in range(steps):
        batch = chance.sample(data, 8)
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([[*x, *[0] * (width - len(x))] for x, _ in batch])
        labels = torch.tensor([[*y, *[-100] * (width - len(y))] for _, y in batch])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    save_checkpoint(model, tokenizer, folder)
    lengths = [len(ids) for ids, _ in data]
    return {
        "loss": float(loss),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens per episode": sum(lengths) / len(lengths),
    }


def main() -> None:
    spec, out = worker_files()
    out.write_text(json.dumps(make_clone(Path(spec["model"]), spec["seed"], spec["steps"])))


if __name__ == "__main__":
    main()
