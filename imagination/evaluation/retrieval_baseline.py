"""How much of a task never seen could be answered by looking it up in the log? A forecast from the log alone.

Turns of training tasks are asked one by one. The answer is that of the most similar transition (``TransitionIndex``:
BM25 over start, last observation and action) of any task that is not the turn's own and does not begin nearly like it.
So the share of turns that are answered rightly says how much the tasks of a log have in common, which is what a world
model can carry over to tasks that are held out; of these nothing is read. It is the leave-one-group-out error of a
nearest neighbour (Stone, "Cross-validatory choice and assessment of statistical predictions", 1974).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory
from worldmodel.evaluation.transitions import Judged, outcome_metrics, transition_metrics
from worldmodel.formats.retrieval import TransitionIndex
from worldmodel.world_model import Prediction

EPISODES = 2000  # of a log that are looked at, or fewer where these are long:
CHARACTERS = 16_000_000  # what stands before and after each of their actions, which is what the index is made of
TURNS = 400  # that are asked, at most, chosen by chance, always the same ones


def tasks_to_look_at(episodes: Mapping[str, int], most: int = EPISODES) -> frozenset[str]:
    """Tasks of about ``most`` episodes (or what else is counted) in all: by chance, always the same ones.

    Of two limits, the fewer tasks are among the others.
    """
    chosen: set[str] = set()
    total = 0
    for task in sorted(episodes, key=lambda task: derive_seed(f"looked up: {task}")):
        if chosen and total + episodes[task] > most:
            break
        chosen.add(task)
        total += episodes[task]
    return frozenset(chosen)


def looked_up(
    log: Sequence[Trajectory], groups: Iterable[frozenset[str]], sampled: bool = False
) -> dict[str, Any] | None:
    """What looking up would get right, as estimates of an audit with intervals over groups of tasks.

    ``None`` where there is nothing to ask: fewer than two tasks, or no rewards.

    Args:
        log: episodes of training tasks.
        groups: tasks that begin nearly alike, none of which answers for another. One that holds more than half of
            the tasks is no group: its tasks answer for each other.
        sampled: the log is a sample of a larger one, in which more could be looked up.
    """
    log = [t for t in log if t.turns and not t.stop.is_failure]
    tasks = {t.task_id for t in log}
    of = {task: task for task in tasks}
    for group in groups:
        if 2 * len(group & tasks) <= len(tasks):
            of |= dict.fromkeys(group & tasks, min(group))
    asked = sorted(
        ((t, k) for t in log for k, turn in enumerate(t.turns) if turn.known),
        key=lambda one: derive_seed(f"looked up: {one[0].id}", one[1]),
    )[:TURNS]
    if len(set(of.values())) < 2 or not asked:
        return None
    index = TransitionIndex(log)
    hidden = {
        name: index.hidden_by([t for t in log if of[t.task_id] == name])
        for name in {of[episode.task_id] for episode, _ in asked}
    }
    judged = []
    for episode, k in asked:
        turn, seen = episode.turns[k], episode.turns[k - 1].observation if k else episode.start
        nearest = index.similar(episode.start, seen, turn.action, 1, hidden[of[episode.task_id]])
        answers = [Prediction(t.turn.observation, t.turn.reward or 0.0, t.turn.terminated, 1.0, 1.0) for t in nearest]
        judged.append(Judged(episode.id, k, turn, answers[0] if answers else None, of[episode.task_id], seen))
    words, reward = transition_metrics(judged, seed=0), outcome_metrics(judged, seed=0)["reward"]
    return {
        **{key: words[key] for key in ("exact", "text", "token_f1")},
        "reward": {key: reward[key] for key in ("precision", "recall")},
        "episodes": len(log),
        "turns": sum(len(t.turns) for t in log),
        "tasks": len(tasks),
        "sampled": sampled,
    }
