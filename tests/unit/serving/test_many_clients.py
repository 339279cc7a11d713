"""Clients that play at the same time. If these fail, one trainer's episodes read another's."""

from __future__ import annotations

import asyncio
import re

import pytest

pytest.importorskip("openenv", reason="pip install 'imagination[openenv]'")
pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")

from imagination.settings.dreams import ServeSettings
from tests.support.many_clients import own_words, play_alone, play_together
from tests.support.served import Telling, measured, planted_world, served, sessions_left

CLIENTS = 16


def test_sixteen_episodes_at_a_time_are_what_each_is_alone() -> None:
    model = Telling()
    world = planted_world(model, max_turns=20)
    episodes = [own_words(client) for client in range(CLIENTS)]
    with served(world, ServeSettings(sessions=CLIENTS)) as address:

        async def all_are_there() -> None:
            assert (await asyncio.to_thread(measured, address))["imagination_sessions",] == CLIENTS

        first = asyncio.run(play_together(address, episodes, all_are_there))
        again = asyncio.run(play_together(address, episodes))
        assert sessions_left(address) == 0
        assert measured(address)["imagination_sessions_opened_total",] == 2 * CLIENTS
    assert first == again, "the same seeds and actions, the same dreams"
    for seed, (played, actions) in enumerate(zip(first, episodes, strict=True)):
        assert (played.end, sum(played.rewards), len(played.texts)) == ("done", 1.0, len(actions) + 1)
        assert list(played.texts) == asyncio.run(play_alone(world, seed, actions))
        assert set(re.findall(r"client-(\d+)", " ".join(played.texts))) == {str(seed)}, "what another client did"
    assert len(set(model.released)) == 2 * CLIENTS, "the engine still keeps something for a client that is gone"
