"""Which precision trains faster on this processor: measured, because only some have matrix units for bf16."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from imagination.learning.losses import cross_entropy_loss, token_logprobs
from imagination.runs.run_folder import RunFolder
from policy.lm.batch import TokenBatch
from policy.lm.forward import hidden_before, token_logits

LARGE = 30_000_000  # parameters; below, fp32 wins on CPUs, and a step is too short to measure well
_TOKENS = 128  # of the measured passes


def chosen_precision(
    wanted: Literal["auto", "bf16", "fp32"], model: Any, batch: TokenBatch, run: RunFolder, stage: str
) -> Literal["bf16", "fp32"]:
    """What ``auto`` means here: bf16 on GPUs; on CPUs fp32 for small models, and the faster of both for large ones.

    What was measured is told in a line and kept in the run, so that a stage that was stopped goes on in the same one.
    """
    if wanted != "auto":
        return wanted
    if torch.cuda.is_available():
        return "bf16"
    if sum(p.numel() for p in model.parameters()) < LARGE:
        return "fp32"
    known: dict[str, Literal["bf16", "fp32"]] = run.summary.get("precision", {})
    if stage not in known:
        work = _passes(model, batch)
        both = [work(False), work(True), work(False), work(True)]
        seconds = {"fp32": min(both[::2]), "bf16": min(both[1::2])}
        known = {**known, stage: "bf16" if seconds["bf16"] < seconds["fp32"] else "fp32"}
        told = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        print(f"precision {known[stage]}: {_TOKENS} tokens take {told} (fit.precision, clone.precision)", flush=True)
        run.update({"precision": known})
    return known[stage]


def _passes(model: Any, batch: TokenBatch) -> Callable[[bool], float]:
    """Seconds of one forward and backward pass of a few tokens, in bf16 or not. The gradients are thrown away."""
    row = int((batch.ce_weight != 0).any(1).nonzero()[0])
    last = int((batch.ce_weight[row] != 0).nonzero()[-1]) + 1
    cut = slice(max(0, last - _TOKENS), last)
    ids, weight = batch.input_ids[row : row + 1, cut], batch.ce_weight[row : row + 1, cut].clone()
    weight[:, 0] = 0.0  # nothing stands before it that could predict it
    mask = weight != 0

    def work(half: bool) -> float:
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            found = hidden_before(model, ids, torch.ones_like(ids, dtype=torch.bool), mask)
            logprobs = token_logprobs(token_logits(model, found.states), ids[mask], which=found.which)
            terms = cross_entropy_loss(logprobs[None], weight[mask][None], denominator=float(weight.sum()))
        terms.loss.backward()
        model.zero_grad(set_to_none=True)
        return time.perf_counter() - begin

    return work
