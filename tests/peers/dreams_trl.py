"""TRL trains in a served dream: ``GRPOTrainer`` with an ``environment_factory`` whose tool steps a session.

Run by ``tests.peers.dreams`` in an environment that has TRL and ``websockets`` and nothing of ours: ``Dream`` is all
that a user of TRL writes. A policy that never calls a tool never steps, so a small model first copies a few dozen tool
calls, good and bad ones.
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl import __version__ as version
from trl.chat_template_utils import qwen3_chat_template
from websockets.sync.client import connect

MARKS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
ACTIONS = ["go east", "go west", "take lamp", "take book"]
LENGTH = 224  # tokens of a completion, what the world answers included


class Dream:
    """One session of the server; TRL makes one for each rollout of a batch and resets it again and again.

    TRL knows no end of an episode, and shows the policy an exception of a tool as the tool's answer. So both are kept
    here: after the end a call answers one fixed line and takes no step, and a dream that broke is worth nothing.
    """

    address = ""

    def __init__(self) -> None:
        self._socket = ExitStack().enter_context(connect(f"ws://{self.address}/ws"))
        self.steps, self.failures, self.terminated = 0, 0, 0

    def reset(self, seed: int, **row: Any) -> str:
        self._earned, self._over = 0.0, False
        return str(self._ask("reset", seed=seed)["observation"]["text"])

    def act(self, action: str) -> str:
        """
        Does something in the world.

        Args:
            action: What to do, such as "go east".

        Returns:
            What happens.
        """
        if self._over:
            return "The episode is over."
        try:
            data = self._ask("step", message=action)
        except RuntimeError:
            self._over, self.failures = True, self.failures + 1
            return "The episode is over."
        self.steps += 1
        self._earned += data["reward"] or 0.0
        self._over = data["done"]
        self.terminated += data["metadata"]["terminated"]
        return str(data["observation"]["text"])

    def get_reward(self) -> float:
        return self._earned

    def _ask(self, kind: str, **data: object) -> dict[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(self._socket.recv(60))
        if reply["type"] == "error":
            raise RuntimeError(reply["data"]["message"])
        return dict(reply["data"])


def demonstrations(tokenizer: Any, starts: list[str], count: int) -> list[tuple[list[int], list[bool]]]:
    """Token ids of conversations as TRL makes them, and which of them the policy writes.

    Both actions are drawn, so that some win and most do not.
    """
    chance, tools = random.Random(0), [Dream.act]
    told = ["You walk east. Here is a lamp.", "You walk west. Here is a book.", "Nothing new."]
    made = []
    for k in range(count):
        asked = [{"role": "user", "content": starts[k % len(starts)]}]
        begun = tokenizer.apply_chat_template(asked, tools=tools, add_generation_prompt=True, tokenize=False)
        ids, own = tokenizer.encode(begun), []
        own += [False] * len(ids)
        for action in (chance.choice(ACTIONS[:2]), chance.choice(ACTIONS[2:]), ""):
            call = json.dumps({"name": "act", "arguments": {"action": action}})
            said = tokenizer.encode(f"<tool_call>\n{call}\n</tool_call><|im_end|>" if action else "done<|im_end|>")
            answer = f"<tool_response>\n{chance.choice(told)}\n</tool_response>"
            reply = f"\n<|im_start|>user\n{answer}<|im_end|>\n<|im_start|>assistant\n"
            seen = tokenizer.encode(reply) if action else []
            ids, own = [*ids, *said, *seen], [*own, *[True] * len(said), *[False] * len(seen)]
        made.append((ids, own))
    return made


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=800, special_tokens=["<|pad|>"], initial_alphabet=alphabet)
    )
    made.add_tokens([AddedToken(mark, special=mark.startswith("<|"), normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", eos_token="<|im_end|>", padding_side="left",
        chat_template=qwen3_chat_template, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def copy_calls(model: Any, pad: int, rows: list[tuple[list[int], list[bool]]], steps: int) -> float:
    """Cross-entropy on what the policy writes; the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        some = [rows[(8 * step + k) % len(rows)] for k in range(8)]
        width = max(len(ids) for ids, _ in some)
        batch = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in some])
        owned = torch.tensor([own + [False] * (width - len(own)) for _, own in some])
        loss = model(input_ids=batch, labels=batch.masked_fill(~owned, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(loss.detach())


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    Dream.address = spec["address"]
    tokenizer = make_tokenizer([*spec["starts"], *ACTIONS, qwen3_chat_template, json.dumps(get_json_schema(Dream.act))])
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "vocab_size": len(tokenizer)}
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **special))
    rows = demonstrations(tokenizer, spec["starts"], 48)
    loss = copy_calls(model, tokenizer.pad_token_id, rows, spec["copying"])
    print(f"copied tool calls: loss {loss:.3f}", flush=True)
    config = GRPOConfig(
        output_dir=spec["scratch"], use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        num_generations=8, per_device_train_batch_size=16, max_steps=spec["updates"], learning_rate=1e-3, beta=0.0,
        weight_decay=0.0, max_completion_length=LENGTH, max_tool_calling_iterations=3, logging_steps=1,
        save_strategy="no", disable_tqdm=True, seed=0,
    )  # fmt: skip
    made: list[Dream] = []

    def factory() -> Dream:
        made.append(Dream())
        return made[-1]

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * 64, "seed": list(range(64))}),
        environment_factory=factory,
    )
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    after = [weight.detach() for weight in trainer.model.parameters()]
    moved = max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True))
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    found = {
        "version": version,
        "steps": sum(one.steps for one in made),
        "failures": sum(one.failures for one in made),
        "terminated": sum(one.terminated for one in made),
        "sessions": len(made),
        "moved": moved,
        "rewards": [entry["reward"] for entry in logged],
        "spread": [entry["reward_std"] for entry in logged],
        "calls": [entry["tools/call_frequency"] for entry in logged],
        "updates": trainer.state.global_step,
    }
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
