"""Ten thousand malformed requests over HTTP and sockets, drawn by hypothesis under a seed.

``python -m tests.benchmarks.serving_abuse --seed 0``: none may end in an HTTP status of 500 or more, show a traceback
or put one into the log, or change the episode of a client that plays meanwhile. The first that does is shrunk and
shown.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings

from tests.benchmarks.machine import hardware
from tests.support.abuse import SENDERS, undisturbed
from tests.support.served import measured, sessions_left


@contextmanager
def errors_into(path: Path) -> Iterator[None]:
    """Whatever this process writes on standard error, the server's log among it, goes into a file."""
    kept = os.dup(sys.stderr.fileno())
    with path.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, sys.stderr.fileno())
            os.close(kept)


def drawn(number: int, examples: int) -> Callable[[Any], Any]:
    """So many examples, which the seed decides."""
    rules = settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None,
        phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    return lambda send: seed(number)(rules(send))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=10_000, help="at least, of all kinds together")
    parser.add_argument("--kinds", nargs="+", choices=SENDERS, default=list(SENDERS), help="a part of them at a time")
    options = parser.parse_args()
    each = -(-options.requests // len(SENDERS))
    print(f"{hardware()}, seed {options.seed}")
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        for what in options.kinds:
            send, begun = SENDERS[what], time.perf_counter()
            with errors_into(log), undisturbed() as (address, witness):
                send(address, witness, drawn(options.seed, each))
                played = len(witness.read)
                refused = {key[1]: int(n) for key, n in measured(address).items() if key[0].endswith("refused_total")}
                witness.close()
                left = sessions_left(address, seconds=2)  # those that a request has opened and none has closed
            assert played >= each
            assert "internal" not in refused
            assert "Traceback" not in log.read_text(encoding="utf-8", errors="replace"), log.read_text()[-3000:]
            print(
                f"{what}: {played} times, {time.perf_counter() - begun:.0f} s; refused {refused}; {left} sessions left"
            )
    print("no status of 500 or more, no traceback; the witness' episodes are what they are alone")


if __name__ == "__main__":
    main()
