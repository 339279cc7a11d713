"""TRL's side of ``trl_update`` and ``trl_iteration``, in a Python that has TRL: ``GRPOTrainer`` in its own loop.

What a user who knows TRL would set on a CPU: no gradient checkpointing, no reference model (``beta=0``), no mixed
precision, nothing logged or saved, one process. The size of the micro-batches is the fastest of several. Padding to the
longest row of the whole batch, and logits of all tokens after the prompt, are not settings on a CPU.

*Update*: prepared rows enter through a ``rollout_func`` that plays nothing, so that masks, padding, advantages and
micro-batches are TRL's own. That part is not timed, and old log-probs are not recomputed, since the rows bring them
along: the clock runs from the beginning of an optimiser step's first forward pass to the end of the step.

*Iteration*: a ``rollout_func`` plays all episodes at once. Each turn is one ``model.generate`` over all of them, padded
on the left. TRL's own loop for tools reads the whole history again at every turn; with ``reuse_cache`` this one hands
``generate`` the cache of the turn before, which is about as far as a user gets without writing an engine. Token ids are
kept, never encoded again; what the world says is masked by ``env_mask``. Neither side uses vLLM. Rollout and update
share one optimiser step, for which TRL needs no second pass for old log-probs.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.benchmarks.measure import Stopwatch, main_or_worker
from tests.benchmarks.zoo import MAX_ACTION_TOKENS, TURNS, Zoo, task_seed


def _config(spec: dict[str, Any], per_device: int, **more: Any) -> GRPOConfig:
    return GRPOConfig(
        output_dir=spec["scratch"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=0.2,
        delta=3.0,  # our dual clip
        num_generations=spec["group_size"],
        per_device_train_batch_size=per_device,
        num_iterations=1,
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
        **{"seed": 0, **more},
    )


class _Replay(GRPOTrainer):
    """Learns from micro-batches made beforehand, in place of newly generated ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batches: list[dict[str, Any]] = []
        self.losses: list[float] = []

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        return self.micro_batches[self._step % len(self.micro_batches)]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        return loss


class _Clock(TrainerCallback):
    """Seconds of each optimiser step, and its gradient as the optimiser gets it."""

    def __init__(self, keep_gradients: bool) -> None:
        self.seconds: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self._keep, self._start = keep_gradients, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._keep:
            found = kwargs["model"].named_parameters()
            self.gradients.append({name: p.grad.float().clone() for name, p in found if p.grad is not None})


def make_trainer(spec: dict[str, Any], data: list[dict[str, Any]], per_device: int, clock: _Clock) -> _Replay:
    """A trainer that holds the rows as TRL's own scoring has made them."""
    micro = len(data) // per_device
    config = _config(
        spec,
        per_device,
        steps_per_generation=micro,
        gradient_accumulation_steps=micro,
        max_steps=spec["updates"] * spec["epochs"],
    )

    def replay(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        return {
            "prompt_ids": [row["ids"][: row["prompt"]] for row in data],
            "completion_ids": [row["ids"][row["prompt"] :] for row in data],
            "env_mask": [row["made"][row["prompt"] :] for row in data],
            "logprobs": [row["old"][row["prompt"] :] for row in data],
            "reward": [row["reward"] for row in data],
        }

    trainer = _Replay(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        reward_funcs=lambda reward, **_: reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(row["group"]) for row in data]}),
        rollout_func=replay,
        callbacks=[clock],
    )
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": str(row["group"])} for row in data])
    batch["old_per_token_logps"] = batch.pop("sampling_per_token_logps")
    whole = {key: value for key, value in batch.items() if value.ndim}
    for i in range(micro):
        part = {key: value[i * per_device : (i + 1) * per_device] for key, value in whole.items()}
        trainer.micro_batches.append({**batch, **part})
    return trainer


def update(spec: dict[str, Any]) -> dict[str, Any]:
    """The side of ``trl_update``."""
    data = json.loads(Path(spec["rows"]).read_text())
    found: dict[str, Any] = {"runs": {}}
    for per_device in spec["per_device"]:
        clock = _Clock(bool(spec.get("gradients")))
        trainer = make_trainer(spec, data, per_device, clock)
        trainer.train()
        per_step = len(trainer.losses) // len(clock.seconds)
        losses = [sum(trainer.losses[i : i + per_step]) for i in range(0, len(trainer.losses), per_step)]
        per_update = spec["epochs"]
        seconds = [sum(clock.seconds[i : i + per_update]) for i in range(0, len(clock.seconds), per_update)]
        found["runs"][str(per_device)] = {"seconds": seconds, "losses": losses}
        found["advantages"] = [float(a) for micro in trainer.micro_batches for a in micro["advantages"]]
        if spec.get("gradients"):
            torch.save(clock.gradients, spec["gradients"])
    return found


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


def iterate(spec: dict[str, Any]) -> dict[str, Any]:
    """The side of ``trl_iteration``."""
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    rows, per_device = spec["groups"] * spec["group_size"], spec["per_device"]
    config = _config(
        spec,
        per_device,
        steps_per_generation=rows // per_device,
        gradient_accumulation_steps=rows // per_device,
        max_steps=spec["updates"],
        temperature=1.0,
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
    return {"seconds": laps.clock.seconds, "turns": rollout.turns, "rewards": rollout.rewards}


def work(spec: dict[str, Any]) -> dict[str, Any]:
    return update(spec) if "rows" in spec else iterate(spec)


if __name__ == "__main__":
    main_or_worker(lambda: None, work)
