"""TRL 1.16.0, ``GRPOTrainer``: its own ``_compute_loss`` and its own advantages, on a real trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from imagination.learning.advantages.group import group_relative
from imagination.learning.losses.auxiliary import kl_k3, kl_loss
from imagination.learning.losses.policy import cispo_loss, gspo_loss, ppo_clip_loss
from imagination.learning.losses.terms import LossInputs, token_weights
from imagination.settings.algorithm_parts import GroupRelative, Kl, PpoClip, SequenceClip, WeightClip
from policy.lm.tokenizer import train_tokenizer
from tests.peers.rows import Rows, assert_agree, make_rows, with_gradient

SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])
LENGTH = 40  # max_completion_length


class Given(GRPOTrainer):
    """A trainer whose model says what the test wants it to say."""

    said: Any = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return self.said, torch.zeros_like(self.said), None


def make_trainer(tmp_path: Any, kind: type[GRPOTrainer] = Given, rollout: Any = None, **settings: Any) -> Any:
    tokenizer = train_tokenizer(["a"], 264)
    tokenizer.padding_side = "left"
    sizes = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    config = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        num_generations=4, per_device_train_batch_size=8, max_completion_length=LENGTH, logging_strategy="no",
        save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    LlamaForCausalLM(sizes).save_pretrained(tmp_path / "model")  # a reference model is loaded from the same folder
    return kind(
        model=str(tmp_path / "model"),
        processing_class=tokenizer,
        reward_funcs=lambda reward, **_: reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        rollout_func=rollout,
    )


def theirs(trainer: Any, r: Rows, advantages: torch.Tensor) -> Any:
    """Value and gradient of TRL's loss, on agent tokens given by TRL's mask of tool answers."""
    width = r.mask.shape[1]
    blank = torch.zeros(len(r.mask), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": blank,
        "prompt_mask": torch.ones_like(blank),
        "completion_ids": torch.zeros(len(r.mask), width, dtype=torch.long),
        "completion_mask": torch.ones(len(r.mask), width),
        "tool_mask": r.mask.double(),
        "advantages": advantages,
        "old_per_token_logps": r.old,
        "ref_per_token_logps": r.reference,
        "num_items_in_batch": r.mask.sum(),
    }
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1

    def loss(x: torch.Tensor) -> torch.Tensor:
        trainer.said = x
        return trainer._compute_loss(trainer.model, inputs)

    return with_gradient(loss, r.logprobs)


@SEEDS
@pytest.mark.parametrize(
    ("loss_type", "average", "length"),
    [("dapo", "token_mean", None), ("bnpo", "token_mean", None), ("grpo", "sequence_mean", None),
     ("dr_grpo", "constant", LENGTH)],
)  # fmt: skip
def test_clipped_losses_and_their_averages(tmp_path, seed, loss_type, average, length):
    """TRL's ``delta`` bounds the ratio, which for negative advantages is our dual clip."""
    r = make_rows(seed, spread=1.0)
    trainer = make_trainer(tmp_path, loss_type=loss_type, epsilon=0.2, epsilon_high=0.28, delta=3.0, beta=0.0,
                           steps_per_generation=1)  # fmt: skip
    weights, denominator = token_weights(r.mask, average, max_tokens=length)
    got = with_gradient(
        lambda x: ppo_clip_loss(LossInputs(x, r.old, r.advantages, weights), PpoClip(0.2, 0.28, 3.0), denominator).loss,
        r.logprobs,
    )
    assert_agree(got, theirs(trainer, r, r.advantages))


@SEEDS
def test_kl_as_a_loss(tmp_path, seed):
    """TRL by default multiplies the KL of a token by its ratio, with the gradient of both; without that, they agree."""
    r = make_rows(seed)
    trainer = make_trainer(tmp_path, loss_type="dapo", beta=0.3, steps_per_generation=1, use_bias_correction_kl=False)
    weights, denominator = token_weights(r.mask, "token_mean")
    got = with_gradient(
        lambda x: (
            ppo_clip_loss(LossInputs(x, r.old, r.advantages, weights), PpoClip(dual_clip=None), denominator).loss
            + kl_loss(x, r.reference, weights, Kl(0.3, "k3"), denominator=denominator).loss
        ),
        r.logprobs,
    )
    assert_agree(got, theirs(trainer, r, r.advantages))


def test_differs_the_kl_is_times_the_ratio_there(tmp_path):
    r = make_rows(0)
    trainer = make_trainer(tmp_path, loss_type="dapo", beta=0.3, steps_per_generation=1)
    weights, denominator = token_weights(r.mask, "token_mean")

    def loss(x):
        inputs = LossInputs(x, r.old, r.advantages, weights)
        policy = ppo_clip_loss(inputs, PpoClip(dual_clip=None), denominator).loss
        weighted = (x - r.old).exp() * kl_k3(x, r.reference)
        return policy + 0.3 * weighted[r.mask].sum() / denominator

    assert_agree(with_gradient(loss, r.logprobs), theirs(trainer, r, r.advantages))


@SEEDS
def test_gspo(tmp_path, seed):
    r = make_rows(seed, spread=0.3)
    one = r.advantages[:, 0]
    trainer = make_trainer(tmp_path, loss_type="grpo", importance_sampling_level="sequence", epsilon=0.05, beta=0.0)
    weights, denominator = token_weights(r.mask, "sequence_mean")
    got = with_gradient(
        lambda x: gspo_loss(
            LossInputs(x, r.old, one[:, None].expand_as(r.old), weights, r.ids), SequenceClip(0.05, 0.05), denominator
        ).loss,
        r.logprobs,
    )  # fmt: skip
    assert_agree(got, theirs(trainer, r, one))


@SEEDS
def test_cispo(tmp_path, seed):
    """Both without a lower bound."""
    r = make_rows(seed, spread=1.5)
    trainer = make_trainer(tmp_path, loss_type="cispo", epsilon_high=5.0, beta=0.0, steps_per_generation=1)
    n = float(r.mask.sum())
    got = with_gradient(
        lambda x: cispo_loss(LossInputs(x, r.old, r.advantages, r.mask.double()), WeightClip(0.0, 5.0), n).loss,
        r.logprobs,
    )
    assert_agree(got, theirs(trainer, r, r.advantages))


def test_differs_a_row_without_trained_tokens_counts_as_an_episode_there(tmp_path):
    """Seven rows and one that trains nothing: TRL divides the sequence mean by eight, we by seven."""
    r = make_rows(0)
    r.mask[-1] = False
    trainer = make_trainer(tmp_path, loss_type="grpo", delta=3.0, beta=0.0)
    weights, denominator = token_weights(r.mask, "sequence_mean")
    ours = ppo_clip_loss(LossInputs(r.logprobs, r.old, r.advantages, weights), PpoClip(), denominator).loss
    assert denominator == 7
    assert_agree(ours * 7 / 8, theirs(trainer, r, r.advantages)[0])


@pytest.mark.parametrize(("scale", "normalise_std"), [("group", True), ("none", False)])
def test_group_advantages(tmp_path, scale, normalise_std):
    rewards = [1.0, 0.0, 0.25, 0.5, 0.0, 0.0, 0.0, 1.0]

    def replay(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [[5]] * 8,
            "completion_ids": [[6, 7]] * 8,
            "logprobs": [[-1.0, -1.0]] * 8,
            "reward": rewards,
        }

    trainer = make_trainer(tmp_path, GRPOTrainer, replay, scale_rewards=scale, beta=0.0)
    trainer.model.train()
    found = trainer._generate_and_score_completions([{"prompt": "a"} for _ in range(8)])["advantages"]
    groups = torch.tensor([0] * 4 + [1] * 4)
    ours, _ = group_relative(torch.tensor(rewards), groups, torch.ones(8).bool(), GroupRelative(normalise_std))
    assert_agree(ours, found)
