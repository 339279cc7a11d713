"""What the benchmarks share: options, workers in processes of their own, and how much work a batch of rows is."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from imagination.runs.machine import cores
from tests.benchmarks.machine import MUCH_STOLEN, StolenTime

disable_progress_bar()  # models load in a moment
ROOT = Path(__file__).resolve().parents[2]
_TURN, _TURN_HANDLE = b"x", "BENCHMARK_TURN"  # what is handed on, and the variable that names a worker's socket
_PATIENCE = 0.2  # seconds


def arguments(description: str | None, opponent: str = "") -> argparse.ArgumentParser:
    """The options that the benchmarks share; an opponent, such as ``trl``, lives in a Python of its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder for the result")
    parser.add_argument("--threads", type=int, default=cores(), help="of torch, for all sides")
    parser.add_argument("--quick", action="store_true", help="everything once and small, to see that it works")
    if opponent:
        default = Path(f".venv-{opponent}/bin/python")
        parser.add_argument(f"--{opponent}-python", type=Path, default=default, help=f"a Python that has {opponent}")
    return parser


def run_worker(python: Path | str, module: str, spec: Mapping[str, Any], folder: Path, threads: int) -> dict[str, Any]:
    """Runs ``python -m tests.benchmarks.<module> SPEC OUT`` and returns what it wrote.

    Raises:
        RuntimeError: it failed; the message ends with what it said last.
    """
    with _watched(module):
        worker = _Worker(python, module, spec, folder, threads)
        try:
            return worker.result()
        finally:
            worker.stop()


def run_in_turns(
    sides: Sequence[tuple[Path | str, str]], spec: Mapping[str, Any], folder: Path, threads: int
) -> list[dict[str, Any]]:
    """Runs two workers (each a Python and a module) that take their laps in turns, see ``Stopwatch``.

    So what the host does to this machine from minute to minute does the same to both.

    Raises:
        RuntimeError: one of them failed; the message ends with what it said last.
    """
    ends = socket.socketpair()
    ends[1].send(_TURN)  # the first side begins
    workers: list[_Worker] = []
    try:
        with _watched(" and ".join(module for _, module in sides)):
            for (python, module), end in zip(sides, ends, strict=True):
                workers.append(_Worker(python, module, spec, folder, threads, turn=end))
            for end in ends:
                end.close()  # only the workers hold them now, so that one notices when the other is gone
            while any(worker.running() for worker in workers):
                time.sleep(_PATIENCE)
                for worker in workers:
                    if not worker.running():
                        worker.result()  # raises at once what the other could only wait for
            return [worker.result() for worker in workers]
    finally:
        for end in ends:
            end.close()
        for worker in workers:
            worker.stop()


class Stopwatch:
    """A worker's clock of laps, such as updates, which it takes in turns with another worker where there is one."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        handle = os.environ.get(_TURN_HANDLE)
        self._other = socket.socket(fileno=int(handle)) if handle else None
        self._begin = 0.0

    def start(self) -> None:
        """The first lap begins, as soon as it is this worker's turn."""
        if self._other is not None:
            with contextlib.suppress(ConnectionResetError):  # it has ended; mostly nothing comes then, at once
                self._other.recv(1)
        self._begin = time.perf_counter()

    def lap(self) -> None:
        """A lap ends; the next begins after one of the other worker."""
        self.seconds.append(time.perf_counter() - self._begin)
        if self._other is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended
                self._other.send(_TURN)
        self.start()


class _Worker:
    """A process that runs a module of benchmarks; what it says goes to ``<module>.log``."""

    def __init__(
        self,
        python: Path | str,
        module: str,
        spec: Mapping[str, Any],
        folder: Path,
        threads: int,
        turn: socket.socket | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        spec_path, self._out = folder / f"{module}.spec.json", folder / f"{module}.out.json"
        self._module, self._log = module, folder / f"{module}.log"
        spec_path.write_text(json.dumps(spec))
        self._out.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            **({} if spec.get("device") == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}),
            _TURN_HANDLE: str(turn.fileno()) if turn else "",
        }
        command = [os.path.abspath(python), "-m", f"tests.benchmarks.{module}", str(spec_path), str(self._out)]
        handles = [turn.fileno()] if turn else []
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, pass_fds=handles
            )

    def result(self) -> dict[str, Any]:
        """Waits for what it writes."""
        code = self._process.wait()
        if code or not self._out.exists():
            raise RuntimeError(f"{self._module} ended with {code}:\n{self._log.read_text(errors='replace')[-4000:]}")
        found: dict[str, Any] = json.loads(self._out.read_text())
        return found

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends the process if it has not ended."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def _watched(what: str) -> Iterator[None]:
    """Says afterwards whether the host gave much of this machine to others meanwhile."""
    clock = StolenTime()
    yield
    stolen = clock.share()
    if stolen > MUCH_STOLEN:
        print(f"note: other virtual machines took {stolen:.0%} of this one's time during {what}", flush=True)


def main_or_worker(main: Callable[[], None], work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """``main``, or in a process of ``run_worker`` its side: what ``work`` makes of the spec is written."""
    if len(sys.argv) == 3 and sys.argv[1].endswith(".spec.json"):
        found = work(json.loads(Path(sys.argv[1]).read_text()))
        Path(sys.argv[2]).write_text(json.dumps(found))
    else:
        main()


def forward_operations(config: Any, rows: Sequence[Sequence[int]], predicted: int) -> float:
    """Multiplications and additions of one forward pass over distinct tokens, each prefix computed once.

    Args:
        config: of a Llama or Qwen2 of transformers.
        rows: token ids; what two rows have in common from their start on counts once.
        predicted: for how many tokens logits are needed.
    """
    hidden, dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    projections = 2 * hidden * hidden + 2 * hidden * config.num_key_value_heads * dim
    weights = config.num_hidden_layers * (projections + 3 * hidden * config.intermediate_size)
    tokens, pairs = 0, 0
    before: Sequence[int] = ()
    for row in sorted(map(list, rows)):
        shared = shared_prefix(before, row)
        tokens += len(row) - shared
        pairs += (len(row) * (len(row) + 1) - shared * (shared + 1)) // 2  # a token attends to itself and its past
        before = row
    attention = 4 * config.num_hidden_layers * hidden * pairs
    return float(2 * weights * tokens + attention + 2 * predicted * hidden * config.vocab_size)


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two rows have in common."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
