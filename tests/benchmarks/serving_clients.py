"""A hundred episodes at a time through OpenEnv's own client, against ``imagine serve`` of a fitted run.

``python -m tests.benchmarks.serving_clients`` fits a tiny world model and serves it. Each client has a seed and plays
actions drawn by it; all begin before any steps. A second pass, and then every episode alone, must read the same text:
the dream of a seed hangs neither on when nor beside whom it is asked for. The same follows with a planted world whose
text recites all that was done, and with actions that no other client takes: whoever read of another would show it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from imagination.commands.serve import open_world
from imagination.serving.sessions import DreamWorld
from imagination.settings.dreams import ServeSettings
from tests.benchmarks.machine import hardware
from tests.support.imagine_serve import fit_tiny_run, imagine_serve
from tests.support.many_clients import Played, own_words, play_alone, play_together
from tests.support.served import Telling, measured, planted_world, served, sessions_left
from tests.support.tiny import tiny_settings

ACTIONS = ("look", "go east", "go west", "take lamp", "take book")


def corridor_actions(seed: int, turns: int = 5) -> list[str]:
    return random.Random(seed).choices(ACTIONS, k=turns)


def two_passes(address: str, episodes: Sequence[list[str]]) -> list[Played]:
    """Plays twice and says what was found.

    Raises:
        AssertionError: an episode did not end, the passes differ, or a session is left.
    """

    async def all_are_there() -> None:
        there = int((await asyncio.to_thread(measured, address))["imagination_sessions",])
        assert there == len(episodes), f"{there} sessions for {len(episodes)} clients"

    passes = []
    for number in (1, 2):
        begun = time.perf_counter()
        passes.append(asyncio.run(play_together(address, episodes, all_are_there)))
        seconds, turns = time.perf_counter() - begun, sum(len(one.texts) - 1 for one in passes[-1])
        print(f"  pass {number}: {len(episodes)} clients, {turns} turns, {seconds:.1f} s")
    first, again = passes
    different = [seed for seed, (a, b) in enumerate(zip(first, again, strict=True)) if a != b]
    assert not different, f"seeds {different} read something else in the second pass"
    left = sessions_left(address)
    assert left == 0, f"{left} sessions are left"
    ends = Counter(re.sub(r"[^a-z_].*", "", one.end.removeprefix("Server error: ")) or one.end for one in first)
    print(
        f"  equal passes; no session left; ends: {dict(ends)}; {len({one.texts for one in first})} different episodes"
    )
    return first


def check_alone(world: DreamWorld, played: Sequence[Played], episodes: Sequence[list[str]]) -> None:
    """
    Raises:
        AssertionError: an episode reads something else where nothing else is dreamed.
    """

    async def run() -> list[int]:
        return [
            seed
            for seed, (one, actions) in enumerate(zip(played, episodes, strict=True))
            if list(one.texts) != await play_alone(world, seed, actions)
        ]

    different = asyncio.run(run())
    assert not different, f"seeds {different} are dreamed otherwise alone"
    print("  every episode is what it is alone, in process")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    clients: int = parser.parse_args().clients
    print(f"{hardware()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        folder.mkdir()
        fit_tiny_run(folder)
        episodes = [corridor_actions(seed) for seed in range(clients)]
        with imagine_serve(folder, f"serve.sessions={clients}", seconds=1200) as run:
            print(f"imagine serve of a fitted run, at {run.address}")
            played = two_passes(run.address, episodes)
            assert "Traceback" not in run.log.read_text(encoding="utf-8")
        check_alone(open_world(tiny_settings(), folder), played, episodes)
    world, episodes = planted_world(Telling(), max_turns=20), [own_words(client) for client in range(clients)]
    with served(world, ServeSettings(sessions=clients)) as address:
        print("a planted world that recites all that was done")
        played = two_passes(address, episodes)
    check_alone(world, played, episodes)
    for seed, one in enumerate(played):
        read = set(re.findall(r"client-(\d+)", " ".join(one.texts)))
        assert read == {str(seed)}, f"client {seed} read of {sorted(read)}"
        assert one.end == "done", f"client {seed}: {one.end}"
    print("  nobody read of another")


if __name__ == "__main__":
    main()
