"""If this fails, what is served from actors is another dream, or an experiment on a cluster loses a job's result."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from imagination.scale.ray_jobs import run_jobs
from imagination.settings import UserError
from imagination.settings.scale import ScaleSettings
from tests.scale.trained import cluster
from tests.support.imagine_serve import fit_tiny_run, imagine_serve

pytestmark = pytest.mark.scale


async def episode(address: str, seed: int) -> list[str]:
    from websockets.asyncio.client import connect

    async with connect(f"ws://{address}/ws") as socket:
        texts = []
        for kind, data in [("reset", {"seed": seed}), *(("step", {"message": a}) for a in ("look", "go east"))]:
            await socket.send(json.dumps({"type": kind, "data": data}))
            texts.append(json.loads(await socket.recv())["data"].get("observation", {}).get("text", ""))
        return texts


def test_dreams_from_actors_are_those_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="pip install 'imagination[serve]'")
    folder = tmp_path / "tiny"
    folder.mkdir()
    fit_tiny_run(folder)

    async def play(address: str) -> list[list[str]]:
        return await asyncio.gather(*(episode(address, seed) for seed in range(8)))

    played = []
    for words in ((), ("scale=ray", "scale.players=2")):
        with imagine_serve(folder, *words) as served:
            played.append(asyncio.run(play(served.address)))
    assert played[0] == played[1]
    assert all(texts[0] for texts in played[0])


def work(number: int, folder: Path) -> int:
    if number < 0:
        raise UserError("no such job")
    (folder / str(number)).touch()
    return number + 1


def test_jobs_run_on_a_cluster(tmp_path: Path) -> None:
    with cluster() as machines:
        settings = ScaleSettings(name="ray", address=machines.address)
        jobs = {name: (number, tmp_path) for name, number in (("a", 1), ("b", 5))}
        assert run_jobs(settings, work, jobs, tmp_path / "logs", 0) == {"a": 2, "b": 6}
        assert (tmp_path / "5").exists()
        with pytest.raises(UserError, match="no such job"):
            run_jobs(settings, work, {"a": (1, tmp_path), "c": (-1, tmp_path)}, tmp_path / "logs", 0)


def test_jobs_want_a_cluster_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match="RAY_ADDRESS"):
        run_jobs(ScaleSettings(name="ray"), work, {"a": (1, tmp_path)}, tmp_path, 0)
