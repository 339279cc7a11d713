"""Tests that need a CUDA card, a minute at most; elsewhere they are skipped.

python -m pytest tests/gpu                          on a card
GPU_TESTS_DEVICE=cpu python -m pytest tests/gpu     tries their code on a CPU
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# read when CUDA starts: without it some matrix products are not the same twice, and a resume cannot be bit for bit
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def full_fp32() -> Iterator[None]:
    """No TF32, whose products have ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was measured (``record_property``), a line each."""
    for report in terminalreporter.getreports("passed"):
        if report.when == "call" and "tests/gpu/" in report.nodeid:
            for name, value in report.user_properties:
                terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {name} {value}")
