"""If these fail, a token of a branched dream is trained twice or never, or a group is cut to other than its size."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imagination.learning.algorithms import build_algorithm
from imagination.learning.experience import policy_rows, total_reward
from imagination.learning.groups import branch_off, resample_on_correct, split_for_branches
from imagination.rollout.play import Episode
from imagination.settings import AlgorithmSettings
from real_envs.env import Task
from real_envs.trajectory import Owner, Source, StopReason, Trace, Trajectory, Turn
from tests.support.plain import credited

quick = settings(max_examples=60, deadline=None)
STOPS = [StopReason.TERMINATED, StopReason.TURN_LIMIT, StopReason.PREDICTION_INVALID, StopReason.ENV_CRASHED]


@quick
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(STOPS), st.floats(0, 2)), min_size=1, max_size=12), st.data())
def test_a_group_is_cut_to_its_size(drawn, data):
    """In the order in which it was played, each episode once; whoever asks again with the same seed gets the same."""
    keep, seed = data.draw(st.integers(1, len(drawn))), data.draw(st.integers(0, 5))
    group = [
        Trajectory(str(k), "t", "g", Source.REAL, "p", 0, "S", (Turn("a", "o", float(won), True),), stop)
        for k, (won, stop, _) in enumerate(drawn)
    ]
    kept = resample_on_correct(group, keep, [p for _, _, p in drawn], random.Random(seed))
    assert kept == resample_on_correct(group, keep, [p for _, _, p in drawn], random.Random(seed))
    names = [int(t.id) for t in kept]
    assert names == sorted(set(names))
    assert len(names) == keep
    usable = sum(not t.stop.is_outage for t in group)
    assert sum(not t.stop.is_outage for t in kept) == min(keep, usable)
    solved, count = sum(t.solved for t in group), min(keep, usable)
    if count > 1:
        assert abs(sum(t.solved for t in kept) - count * solved / usable) < 1
        assert any(t.solved for t in kept) == (solved > 0)
        assert any(not t.solved and not t.stop.is_outage for t in kept) == (solved < usable)


def acted(episode: Episode, rng: random.Random, logged: int) -> Trajectory:
    """A dream of at most five turns, two tokens each, from wherever it begins."""
    turns = [Turn("a", f"log {k}", 0.5, False) for k in range(logged)] + list(episode.task.dreamed)
    begin, tokens = len(turns), []
    for k in range(begin, rng.randint(begin + 1, max(begin + 1, logged + 5))):
        turns.append(Turn("a", f"o{rng.random()}", rng.choice([0.0, 0.25, 1.0]), False))
        tokens += [(Owner.ENV, None, -1), (Owner.AGENT, -rng.random(), k), (Owner.AGENT, -rng.random(), k)]
    tokens = [(Owner.SCAFFOLD, None, -1)] * (2 * begin) + tokens
    owners, logprobs, index = zip(*tokens, strict=True)
    trace = Trace(tuple(range(5, 5 + len(tokens))), owners, logprobs, index)
    broken = episode.seed > 1 and rng.random() < 0.3  # two of each group are left to compare
    name, stop = episode.group_id, StopReason.ENV_CRASHED if broken else StopReason.TERMINATED
    return Trajectory(
        episode.id, "t", name, Source.DREAM, "p", 0, "S", tuple(turns), stop, prefix_turns=logged, trace=trace
    )


@quick
@given(st.integers(0, 10**6), st.sampled_from([0.25, 0.5, 0.9]), st.integers(0, 2))
def test_each_sampled_token_of_a_tree_of_dreams_is_trained_once(seed, share, logged):
    """Two groups of six. What an episode did not sample has no weight in its row; its return counts all the same."""
    rng = random.Random(seed)
    episodes = [Episode(f"{g}/{k}", Task("t"), f"{g}", k) for g in range(2) for k in range(6)]
    first, rest = split_for_branches(episodes, share)
    assert [len(first), len(rest)] == [12 - 2 * min(round(6 * share), 5), 2 * min(round(6 * share), 5)]
    played = [acted(e, rng, logged) for e in first]
    begun = branch_off(rest, played)
    assert [e.id for e in begun] == [e.id for e in rest]
    played += [acted(e, rng, logged) for e in begun]

    judged = [t for t in played if not t.stop.is_outage]
    rows = policy_rows(played)
    batch = credited(rows, build_algorithm(AlgorithmSettings(name="rloo")))
    dreamed = {e.id: e.task.dreamed for e in begun}
    for k, (episode, row) in enumerate(zip(judged, rows, strict=True)):
        own = logged + len(dreamed.get(episode.id, ()))
        weighed = batch.rl_weight[k] != 0
        assert set(batch.turns[k][weighed].tolist()) == set(range(own, len(episode.turns)))
        assert int(weighed.sum()) == 2 * (len(episode.turns) - own), "each token that it sampled, and no other"
        assert total_reward(row) == pytest.approx(sum(turn.reward for turn in episode.own_turns))
        parent = int(row.parent)
        assert (parent >= 0) == (own > logged)
        if parent >= 0:
            assert judged[parent].group_id == episode.group_id
            assert judged[parent].turns[:own] == episode.turns[:own]
            covered = batch.turns[parent][batch.rl_weight[parent] != 0].tolist()
            assert set(range(logged, own)) <= set(covered), "what it did not sample is trained in its parent's row"
    # the mean over who shares a token, times how many do, adds up to what each episode would have given it
    alone = credited(
        [replace(row, parent=torch.tensor(-1)) for row in rows], build_algorithm(AlgorithmSettings("rloo"))
    )
    whole = [max(values, key=abs) for values in alone.advantages.tolist()]
    for k, values in enumerate(batch.advantages):
        for turn in set(batch.turns[k].tolist()) - {-1}:
            sharing = [k] + [
                c for c, row in enumerate(rows) if int(row.parent) == k and turn < min(t for t in row.turns if t >= 0)
            ]
            expected = sum(whole[c] for c in sharing) / len(sharing)
            assert values[batch.turns[k] == turn].tolist() == pytest.approx([expected] * 2, abs=1e-6)
