"""TRL's side of ``trl_update``: ``GRPOTrainer`` learns from prepared rows, in TRL's own training loop.

The rows enter through a ``rollout_func`` that plays nothing, so that masks, padding, advantages and micro-batches are
TRL's own. That part is not timed, and old log-probs are not recomputed, since the rows bring them along: the clock runs
from the beginning of an optimiser step's first forward pass to the end of the step.

What a user who knows TRL would set on a CPU: no gradient checkpointing, no reference model (``beta=0``), no mixed
precision, nothing logged or saved, one process. The size of the micro-batches is the fastest of several. Padding to the
longest row of the whole batch, and logits of all tokens after the prompt, are not settings on a CPU.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.benchmarks.measure import worker_files


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
    steps = spec["updates"] * spec["epochs"] * spec["minibatches"]
    micro = len(data) // per_device
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
        num_generations=spec["group_size"],
        per_device_train_batch_size=per_device,
        steps_per_generation=micro,
        gradient_accumulation_steps=micro // spec["minibatches"],
        num_iterations=1,
        max_steps=steps,
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
        seed=0,
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
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"])),
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


def main() -> None:
    spec, out = worker_files()
    data = json.loads(Path(spec["rows"]).read_text())
    found: dict[str, Any] = {"runs": {}}
    for per_device in spec["per_device"]:
        clock = _Clock(bool(spec.get("gradients")))
        trainer = make_trainer(spec, data, per_device, clock)
        trainer.train()
        per_step = len(trainer.losses) // len(clock.seconds)
        losses = [sum(trainer.losses[i : i + per_step]) for i in range(0, len(trainer.losses), per_step)]
        per_update = spec["epochs"] * spec["minibatches"]
        seconds = [sum(clock.seconds[i : i + per_update]) for i in range(0, len(clock.seconds), per_update)]
        found["runs"][str(per_device)] = {"seconds": seconds, "losses": losses}
        found["advantages"] = [float(a) for micro in trainer.micro_batches for a in micro["advantages"]]
        if spec.get("gradients"):
            torch.save(clock.gradients, spec["gradients"])
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
