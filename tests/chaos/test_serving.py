"""A server under many clients of which some vanish. If this fails, a night of training ends in errors of the server."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")

from tests.benchmarks.serving_soak import MIB, soak
from tests.support.imagine_serve import fit_tiny_run, imagine_serve
from tests.support.served import labelled, measured, sessions_left

pytestmark = pytest.mark.chaos
SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
CLIENTS = 64


def test_64_clients_of_which_a_tenth_vanish_at_each_step_leave_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    fit_tiny_run(folder)
    words = ["serve.sessions=512", "serve.idle_seconds=10"]  # who leaves over HTTP is gone when nobody asks any more
    with imagine_serve(folder, *words, seconds=SECONDS + 300) as run:
        options = argparse.Namespace(
            minutes=SECONDS / 60, clients=CLIENTS, pause=0.3, aborts=0.1, every=SECONDS / 40, show=10
        )
        readings = asyncio.run(soak(run.process.pid, run.address, options))  # an answer of 500 or more ends it
        assert sessions_left(run.address, 60) == 0
        refused = labelled(measured(run.address), "imagination_refused_total")
        assert "Traceback" not in run.log.read_text(encoding="utf-8")
    half = readings[len(readings) // 2 :]
    grown = (half[-1].rss - half[0].rss) / MIB
    print(f"{readings[-1].steps} steps, {grown:+.1f} MiB over the second half, refused {refused}")
    assert readings[-1].steps > CLIENTS
    assert refused.get("internal", 0) == 0
    # half a minute is all warm-up: a slot of every session that was ever open at once. An hour is in docs/serve.md
    assert grown < max(reading.sessions for reading in half)
    assert max(reading.sessions for reading in half) < 4 * CLIENTS
    assert max(reading.threads for reading in half) <= max(reading.threads for reading in readings[:-1])
