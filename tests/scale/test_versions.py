"""If this fails, updates learn from episodes that are too old, or from tokens under the wrong policy's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from imagination.learning.ahead import GroupsAhead
from imagination.runs.models import adapted
from imagination.runs.run_folder import RunFolder
from imagination.scale import ray_players
from imagination.scale.ray_players import RayPlayers
from imagination.session import Session
from real_envs.trajectory import Trace, Trajectory
from tests.scale.faulty import FaultyPlayer, plant
from tests.scale.trained import Trained, Trainings, config
from tests.support.killing import metrics_of
from tests.support.plain import scored

pytestmark = pytest.mark.scale


@pytest.mark.parametrize("most", [1, 3])
def test_no_update_learns_from_tokens_that_are_too_old(
    trainings: Trainings, run_name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the players holds back what it played for two seconds, in which the others learn on."""
    learned: list[list[Trajectory]] = []
    weights: dict[int, dict[str, torch.Tensor]] = {}
    take, publish = GroupsAhead.take, RayPlayers.publish

    def watched_take(self: GroupsAhead) -> Any:
        taken = take(self)
        learned.append(taken[0])
        return taken

    def watched_publish(self: RayPlayers, version: int, model: torch.nn.Module, wait: bool) -> str:
        weights[version] = {name: w.detach().clone() for name, w in model.state_dict().items()}
        return publish(self, version, model, wait)

    monkeypatch.setattr(GroupsAhead, "take", watched_take)
    monkeypatch.setattr(RayPlayers, "publish", watched_publish)
    monkeypatch.setattr(ray_players, "_PlayerActor", FaultyPlayer)
    done = trainings.copy(run_name, seconds=0.1)
    plant(done.run, "slow")
    words = ("scale=ray", "train.updates=10", f"train.max_staleness={most}", "scale.players=3", "collect.workers=8")
    trainings.run(done, *words)

    assert len(learned) == 10
    ages = [
        update - version
        for update, episodes in enumerate(learned)
        for episode in episodes
        for version in versions(episode)
    ]
    assert min(ages) >= 0
    assert 1 <= max(ages) <= most
    ids = [episode.id for episodes in learned for episode in episodes]
    assert len(set(ids)) == len(ids) == 10 * 16
    dropped = sum(row["dropped_groups"] for row in metrics_of(done.run, "train"))
    print(f"max_staleness={most}: ages { ({age: ages.count(age) for age in set(ages)}) }, {dropped:.0f} groups dropped")
    mixed = [episode for episodes in learned for episode in episodes if len(set(versions(episode))) > 1]
    assert mixed, "no episode met an update"
    check_logprobs(done, weights, [*mixed[:10], *learned[-1][:4], *learned[len(learned) // 2][:4]])
    assert done.counted() == done.sent()


def versions(episode: Trajectory) -> tuple[int, ...]:
    return episode.trace.versions if episode.trace is not None else ()


def check_logprobs(done: Trained, weights: dict[int, dict[str, torch.Tensor]], episodes: list[Trajectory]) -> None:
    """What a token was sampled with is the log-prob of the weights whose version it bears, and of no others."""
    settings = config()
    model = adapted(Session(settings, RunFolder(done.run, 0)).policy("policy-clone").model, settings.policy)
    others = 0
    for episode in episodes:
        assert episode.trace is not None
        trace: Trace = episode.trace
        actions = sorted({turn for turn in trace.turns if turn >= 0})
        assert len(actions) == len(trace.versions)
        by_version: dict[int, list[float]] = {}
        for version in weights:
            model.load_state_dict(weights[version])
            with torch.no_grad():
                by_version[version] = [float(score) for score in scored(model, trace.ids, trace.temperature)]
        for t, (turn, logprob) in enumerate(zip(trace.turns, trace.logprobs, strict=True)):
            if logprob is not None:
                version = trace.versions[actions.index(turn)]
                assert abs(by_version[version][t] - logprob) < 1e-4, (episode.id, turn, version)
                others += any(abs(by_version[v][t] - logprob) > 1e-3 for v in weights if v != version)
    assert others, "all versions have the same log-probs: the check says nothing"
