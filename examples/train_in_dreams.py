"""Train a policy in the dreams of a world model: the library's parts in one file, some minutes on one CPU core."""

import asyncio
import random
import tempfile
from pathlib import Path

import torch

from imagination.data.batches import epoch_batches
from imagination.data.examples import imitation_row
from imagination.learning.advantages.group import group_relative
from imagination.learning.experience import policy_rows
from imagination.learning.losses.auxiliary import cross_entropy_loss
from imagination.learning.losses.policy import ppo_clip_loss
from imagination.learning.losses.terms import LossInputs, token_logprobs
from imagination.rollout.dream_env import DreamEnv, Start
from imagination.rollout.play import Provenance, plan, play_all
from imagination.settings.algorithm_parts import PpoClip
from policy.agent import LanguageModelAgent
from policy.lm.backbone import BASE_FOLDER, load_checkpoint
from policy.lm.batch import collate
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.forward import hidden_before, token_logits
from policy.lm.render import ChatFormat
from real_envs.env import Task
from real_envs.scripted_agents import deal
from real_envs.trajectory import Source
from real_envs.worlds.textworld_express import ExpressSettings, TextWorldExpress
from worldmodel.rules.mine import mine_rules
from worldmodel.rules.world_model import RuledWorldModel
from worldmodel.text import TextWorldModel

# Three rooms and a map of them: a coin from the room that the task names belongs into a box.
GAME = ExpressSettings("mapreader", "numLocations=3,maxDistanceApart=2,includeDoors=0,maxDistractorItemsPerLocation=0")
REAL, DREAM, TURNS = Provenance(Source.REAL), Provenance(Source.DREAM), 14


def logprobs_of(model, batch, mask):
    """Log-probs ``[n]`` of the tokens under ``mask`` ``[batch, time]``."""
    predictors = hidden_before(model, batch.ids, batch.attention_mask, mask)
    return token_logprobs(token_logits(model, predictors.states), batch.ids[mask], which=predictors.which)


def step(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def imitate(model, rows, steps):  # cross-entropy on the actions of logged episodes
    optimizer, rng, batches = torch.optim.AdamW(model.parameters(), 5e-4), random.Random(0), []
    for _ in range(steps):
        batches = batches or epoch_batches(rows, 2048, rng)
        batch = collate(batches.pop(), pad=0)
        mask = batch.ce_weight > 0
        loss = cross_entropy_loss(logprobs_of(model, batch, mask), batch.ce_weight[mask], denominator=mask.sum()).loss
        step(model, optimizer, loss)


def improve(model, optimizer, episodes):
    """GRPO: an episode counts by how much better it did than the others that began in the same state."""
    batch = collate(policy_rows(episodes), pad=0)  # only tokens that the policy sampled have a weight
    returns = batch.rewards.sum(1)
    advantages, counts = group_relative(returns, batch.group, torch.ones_like(returns, dtype=torch.bool))
    mask = (batch.rl_weight > 0) & counts[:, None]
    logprobs, per_token = logprobs_of(model, batch, mask), advantages[:, None].expand_as(mask)[mask]
    inputs = LossInputs(logprobs, batch.behavior_logprobs[mask], per_token, batch.rl_weight[mask])
    step(model, optimizer, ppo_clip_loss(inputs, PpoClip(), denominator=mask.sum().clamp(min=1)).loss)


async def train(real, behaviours, imitation_steps, updates, groups=12, group_size=6):
    # 1. A log: agents of all skills play the training games.
    episodes = plan(real.tasks("train"), 4, "log", 0)
    agents = dict(zip([e.id for e in episodes], deal(behaviours, len(episodes), 0), strict=True))
    log = await play_all(episodes, real.make_env, lambda e: agents[e.id], REAL, TURNS, concurrency=1)

    # 2. A world model: the base model as it is. A prediction that breaks a rule mined from the log is sampled again.
    base, tokenizer = load_checkpoint(str(BASE_FOLDER))
    chat = ChatFormat(tokenizer)
    written = TextWorldModel(InProcessEngine(base, 2048), chat, "base", temperature=1.0)
    world_model = RuledWorldModel(written, mine_rules(log), "repair", 8)

    # 3. A policy: the base model imitates the mediocre agents of the log.
    model, _ = load_checkpoint(str(BASE_FOLDER))
    imitate(model, [imitation_row(chat, t) for t in log if t.agent.startswith("noisy-0.2")], imitation_steps)
    policy = LanguageModelAgent(InProcessEngine(model, 2048), chat)

    async def play(episodes, make_env, provenance, concurrency):
        policy.engine.update_weights()
        played = await play_all(episodes, make_env, policy, provenance, TURNS, concurrency)
        return played, sum(t.solved for t in played) / len(played)

    # 4. Dreams begin as logged games do. What counts is success in games that are in no log, before and after.
    starts, unseen = {t.task_id: Start(t.task_id, t.start) for t in log}, plan(real.tasks("heldout"), 2, "real", 1)
    optimizer, rng = torch.optim.AdamW(model.parameters(), 3e-4), random.Random(0)
    _, before = await play(unseen, real.make_env, REAL, 1)
    print(f"the policy solves {before:.2f} of the unseen games", flush=True)
    for update in range(updates):
        tasks = [Task(name, {"start": name}) for name in rng.sample(sorted(starts), groups)]
        dreams = plan(tasks, group_size, f"{update}", update)
        dreamed, rate = await play(dreams, lambda: DreamEnv(world_model, starts), DREAM, len(dreams))
        improve(model, optimizer, dreamed)
        print(f"update {update + 1}: it solved {rate:.2f} of {len(dreamed)} dreams", flush=True)
    _, after = await play(unseen, real.make_env, REAL, 1)
    print(f"the policy solves {after:.2f} of the unseen games", flush=True)
    await real.close()
    return before, after


def main(games=200, unseen=50, imitation_steps=100, updates=20):
    world = TextWorldExpress()
    with tempfile.TemporaryDirectory() as folder:
        world.generate(Path(folder), {"train": games, "heldout": unseen}, 0, GAME, lambda done, total: None, 1)
        return asyncio.run(train(world.open(Path(folder), True, 1), world.behaviours([]), imitation_steps, updates))


if __name__ == "__main__":
    main()
