from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch

from real_envs.check import check_env, wrong_with_step
from real_envs.env import EnvFailure, StepResult, Task
from real_envs.trajectory import Observation, StopReason


class Good:
    """Counts to three; ``fault`` breaks one clause of the protocol."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.count = -1
        self.total = 0  # over all episodes

    async def reset(self, task: Task, seed: int) -> Observation:
        if self.fault == "resets once" and self.count >= 0:
            raise EnvFailure(StopReason.ENV_CRASHED, "used up")
        if not (self.fault == "keeps state" and self.count >= 3):
            self.count = 0
        return Observation("" if self.fault == "empty reset" else "count to three")

    async def step(self, action: str) -> StepResult:
        if self.count < 0 and self.fault != "steps unreset":
            raise RuntimeError("reset first")
        if self.count >= 3 and self.fault not in ("steps on", "keeps state"):
            raise RuntimeError("it is over")
        if "\x00" in action and self.fault == "odd":
            raise UnicodeError("NUL")
        self.count += 1
        self.total += 1
        reward = math.nan if self.fault == "nan" else 1.0 if self.count == 3 else None
        text = str(self.total if self.fault == "remembers" else self.count)
        stop = StopReason.ENV_CRASHED if self.fault == "hides failure" else None
        done = self.count >= 3
        return StepResult(Observation(text), reward, done, done and self.fault == "both", stop=stop)

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("steps unreset", "first reset"),
        ("steps on", "after the end"),
        ("empty reset", "without text"),
        ("resets once", "used up"),
        ("odd", "odd action"),
        ("nan", "nan"),
        ("both", "both true"),
        ("hides failure", "raised as EnvFailure"),
        ("remembers", "step 0"),
        ("keeps state", "different results"),
    ],
)
def test_each_breach_is_found(fault: str, words: str) -> None:
    findings = asyncio.run(check_env(Good(fault), Task("t"), ["a", "b", "c"]))
    assert any(words in finding for finding in findings), findings


def test_a_conforming_environment_has_no_findings() -> None:
    assert asyncio.run(check_env(Good(), Task("t"), ["a", "b", "c", "never reached"])) == []


def test_sampled_worlds_need_not_repeat_themselves() -> None:
    assert asyncio.run(check_env(Good("remembers"), Task("t"), ["a", "b"], deterministic=False)) == []


def test_scalars_of_numpy_and_torch_are_plain_numbers() -> None:
    result = StepResult(Observation("x"), np.float32(0.5), np.bool_(True), torch.tensor(False))  # type: ignore[arg-type]
    assert (result.reward, result.terminated, result.truncated) == (0.5, True, False)
    assert wrong_with_step(result) == []
    assert wrong_with_step(StepResult(Observation("x"), np.array([1.0]), False, False)) != []  # type: ignore[arg-type]
