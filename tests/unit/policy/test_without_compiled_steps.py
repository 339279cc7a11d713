"""If this fails, the project needs ``policy/lm/native``, and a machine or a port that leaves it out cannot work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

# A sampled completion and the gradient of its log-probs, in numbers.
PROGRAM = """
import asyncio, sys, torch
from imagination.learning.losses.terms import token_logprobs
from policy.lm.backbone import build_model
from policy.lm.engine import Sampling
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.forward import hidden_before, token_logits
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer

tokenizer = train_tokenizer(["a b c"], 270)
model = build_model(ModelSettings(hidden=64, layers=2, heads=2, kv_heads=1, mlp=96, context=64), tokenizer, seed=0)
prompt = tokenizer.encode("a b c a")
said = asyncio.run(InProcessEngine(model, 64).complete(prompt, Sampling(12, -1, 1.0), seed=1))
ids = torch.tensor([[*prompt, *said.ids]])
mask = torch.arange(ids.shape[1])[None] >= len(prompt)
found = hidden_before(model, ids, torch.ones_like(mask), mask)
logprobs = token_logprobs(token_logits(model, found.states), ids[mask], which=found.which)
logprobs.sum().backward()
print(list(said.ids), "native" in " ".join(m for m in sys.modules if m.startswith("policy.lm.native")))
print([round(x, 4) for x in [*said.logprobs, *logprobs.tolist()]])
print([round(float(p.grad.abs().sum()), 2) for p in model.parameters() if p.grad is not None])
"""


# One process for both folders, as torch takes seconds to load; it computes nothing before it forks.
FORKS = """
import os, sys, torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
program, *roots = sys.argv[1:]
for root in roots:
    if not os.fork():
        os.environ.update({"IMAGINATION_NATIVE": "0"} if root == roots[0] else {})
        sys.path.insert(0, root)
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, root
"""


def numbers(*roots: Path) -> list[list[str]]:
    """What the program prints in each folder; in the first without using its compiled steps."""
    command = [sys.executable, "-c", FORKS, PROGRAM, *map(str, roots)]
    done = subprocess.run(command, cwd=roots[-1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [lines[k : k + 3] for k in range(0, len(lines), 3)]


def test_without_the_folder_of_compiled_steps_the_numbers_are_the_same(tmp_path: Path) -> None:
    for package in ("real_envs", "policy", "worldmodel", "imagination", "configs"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "policy/lm/native")
    with_folder, without = numbers(ROOT, tmp_path)
    assert with_folder[0].endswith("True")
    assert without[0].endswith("False")
    assert without[0].rsplit(" ", 1)[0] == with_folder[0].rsplit(" ", 1)[0]
    assert without[1:] == with_folder[1:]
