"""TRL's side of ``trl_iteration``: ``GRPOTrainer`` with a ``rollout_func`` that plays all episodes at once.

Each turn is one ``model.generate`` over all episodes, padded on the left. TRL's own loop for tools reads the whole
history again at every turn; with ``reuse_cache`` this one hands ``generate`` the cache of the turn before, which is
about as far as a user gets without writing an engine. Token ids are kept, never encoded again; what the world says is
masked by ``env_mask``. Neither side uses vLLM. Rollout and update share one optimiser step, for which TRL needs no
second pass for old log-probs. Settings are those of ``update_trl``.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.benchmarks.measure import Stopwatch, worker_files
from tests.benchmarks.zoo import MAX_ACTION_TOKENS, TURNS, Zoo, task_seed


class _Chat:
    """The tokenizer with a memory, since the world repeats itself."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.stop = tokenizer, tokenizer.eos_token_id
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self._known[text]


class _Episode:
    """The tokens of one episode; ``mask`` is 1 on those that the policy made, ``new`` is what it has not read yet."""

    def __init__(self, world: int, chat: _Chat) -> None:
        self.zoo, self.chat = Zoo(), chat
        self.prompt = chat.encode(f"<|user|>{self.zoo.reset(world)}<|end|><|assistant|>")
        self.new = self.prompt
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.reward, self.turns = 0.0, 0

    def act(self, made: list[int]) -> None:
        """Takes the sampled ids, the end token included where there is one, and plays them."""
        text = self.chat.tokenizer.decode(made, skip_special_tokens=True)
        observation, reward, done = self.zoo.step(text)
        self.reward += reward
        self.turns += 1
        forced = [] if made[-1] == self.chat.stop else [self.chat.stop]
        seen = [] if done else self.chat.encode(f"<|user|>{observation}<|end|><|assistant|>")
        self.new = forced + seen
        self.ids += made + self.new
        self.mask += [1] * len(made) + [0] * len(self.new)


class _Rollout:
    """TRL's ``rollout_func``: one completion per prompt, where a prompt names the world to play in."""

    def __init__(self, tokenizer: Any, reuse_cache: bool) -> None:
        self.chat, self.reuse_cache = _Chat(tokenizer), reuse_cache
        self.turns: list[int] = []
        self.rewards: list[float] = []
        self.config = GenerationConfig(
            max_new_tokens=MAX_ACTION_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            return_dict_in_generate=True,
            disable_compile=True,
        )

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        episodes = [_Episode(int(prompt), self.chat) for prompt in prompts]
        trainer.model.eval()
        self._play(episodes, trainer.model)
        trainer.model.train()
        self.turns.append(sum(episode.turns for episode in episodes))
        self.rewards.append(sum(episode.reward for episode in episodes) / len(episodes))
        return {
            "prompt_ids": [episode.prompt for episode in episodes],
            "completion_ids": [episode.ids for episode in episodes],
            "env_mask": [episode.mask for episode in episodes],
            "logprobs": None,
            "reward": [episode.reward for episode in episodes],
        }

    @torch.inference_mode()
    def _play(self, episodes: list[_Episode], model: Any) -> None:
        """All episodes of the zoo have the same number of turns, so all stay in the batch until the end.

        With a reused cache, what was padded once stays in the rows as masked gaps; positions count real tokens only.
        """
        empty = torch.zeros(len(episodes), 0, dtype=torch.long)
        ids, mask, cache = empty, empty, None
        for _ in range(TURNS):
            if not self.reuse_cache:
                ids, mask, cache = empty, empty, None
            new = [e.new if self.reuse_cache else e.prompt + e.ids for e in episodes]
            width = max(map(len, new))
            pad = self.config.pad_token_id
            ids = torch.cat([ids, torch.tensor([[pad] * (width - len(x)) + x for x in new])], 1)
            mask = torch.cat([mask, torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in new])], 1)
            out = model.generate(
                input_ids=ids, attention_mask=mask, past_key_values=cache, generation_config=self.config
            )
            made = out.sequences[:, ids.shape[1] :]
            lengths = []
            for episode, row in zip(episodes, made.tolist(), strict=True):
                lengths.append(row.index(self.chat.stop) + 1 if self.chat.stop in row else len(row))
                episode.act(row[: lengths[-1]])
            real = torch.arange(made.shape[1]) < torch.tensor(lengths)[:, None]
            ids, mask, cache = out.sequences, torch.cat([mask, real.long()], 1), out.past_key_values


class _Laps(TrainerCallback):
    def __init__(self) -> None:
        self.clock = Stopwatch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.lap()


def main() -> None:
    spec, out = worker_files()
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    rows, per_device = spec["groups"] * spec["group_size"], spec["per_device"]
    config = GRPOConfig(
        output_dir=spec["scratch"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=0.2,
        delta=3.0,  # our dual clip
        temperature=1.0,
        num_generations=spec["group_size"],
        per_device_train_batch_size=per_device,
        steps_per_generation=rows // per_device,
        gradient_accumulation_steps=rows // per_device,
        num_iterations=1,
        max_steps=spec["updates"],
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=spec["seed"],
    )
    worlds = [str(task_seed(spec["seed"], i, g)) for i in range(spec["updates"]) for g in range(spec["groups"])]
    laps, rollout = _Laps(), _Rollout(tokenizer, spec["reuse_cache"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=lambda reward, **_: reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": worlds}),
        rollout_func=rollout,
        callbacks=[laps],
    )
    laps.clock.start()
    trainer.train()
    out.write_text(json.dumps({"seconds": laps.clock.seconds, "turns": rollout.turns, "rewards": rollout.rewards}))


if __name__ == "__main__":
    main()
