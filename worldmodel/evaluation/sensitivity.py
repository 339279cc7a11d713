"""Does the prediction follow the action? Pairs of actions from one and the same logged state.

A model that has learned what usually comes next may answer well on average and still not listen to what was done. Where
the log holds several continuations of one state, the same question is asked with another action:

- *sensitivity*: of the pairs whose real answers differ, how many predictions differ;
- *specificity*: of the pairs whose real answers are the same, how many predictions are the same.

A model that always says the same has sensitivity 0 and specificity 1. Neither asks whether the answers are right.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from policy.lm.engine import ContextFull, EngineFailure
from real_envs.seeding import derive_seed
from real_envs.trajectory import Trajectory, Turn, same_reward
from worldmodel.evaluation.intervals import clusters, proportion
from worldmodel.rules.refusals import answer
from worldmodel.world_model import Prediction, PredictionInvalid, WorldModel

PER_STATE = 20  # most pairs of each kind from one state: the first states have thousands
# an episode through the state, the index of the turn there, one turn, the other, whether the real answers are the same
TurnPair = tuple[Trajectory, int, Turn, Turn, bool]
_State = tuple[str, str, tuple[str, ...]]  # task, its beginning, actions so far


@dataclass(frozen=True, slots=True)
class ActionPair:
    """Two actions from one state: the real answers and what was predicted (``None``: malformed)."""

    task_id: str
    state: str
    actions: tuple[str, str]
    same: bool
    predicted: tuple[Prediction | None, Prediction | None]


def action_pairs(log: Iterable[Trajectory], fresh: Iterable[Trajectory], seed: int, limit: int) -> list[TurnPair]:
    """Pairs of turns from one state (task, its beginning and actions so far), at most ``limit`` of each kind.

    Args:
        log: episodes that the model was trained on; they may be one side of a pair.
        fresh: episodes that it was not; the other side is a turn that only they hold.
    """
    states: dict[_State, dict[str, tuple[Turn, bool]]] = {}
    way: dict[_State, tuple[Trajectory, int]] = {}
    for episodes, is_fresh in ((log, False), (fresh, True)):
        for trajectory in episodes:
            history: tuple[str, ...] = ()
            for k, turn in enumerate(trajectory.turns):
                if turn.known:
                    key = (trajectory.task_id, trajectory.start, history)
                    way.setdefault(key, (trajectory, k))
                    states.setdefault(key, {}).setdefault(turn.action, (turn, is_fresh))
                history = (*history, turn.action)
    rng = random.Random(derive_seed("action pairs", seed))
    chosen: dict[bool, list[TurnPair]] = {True: [], False: []}
    for key in sorted(states):
        turns = [turn for _, turn in sorted(states[key].items())]
        pairs = [
            (*way[key], a, b, answer(a) == answer(b)) for (a, new), (b, new_b) in combinations(turns, 2) if new or new_b
        ]
        for same, some in chosen.items():
            kind = [pair for pair in pairs if pair[-1] is same]
            some += rng.sample(kind, min(PER_STATE, len(kind)))
    return [pair for same in (False, True) for pair in rng.sample(chosen[same], min(limit, len(chosen[same])))]


async def judge_pairs(model: WorldModel, pairs: Sequence[TurnPair]) -> list[ActionPair]:
    """Asks for each action of each pair; what occurs in several pairs is asked once. Greedy, as in ``judge``.

    Pairs of which one cannot be asked (it does not fit the context, or generation broke) are left out.
    """
    gate = asyncio.Semaphore(64)
    questions: dict[tuple[_State, str], Coroutine[Any, Any, tuple[bool, Prediction | None]]] = {}

    async def ask(trajectory: Trajectory, k: int, action: str, session: object) -> tuple[bool, Prediction | None]:
        """Whether it was answered, and how (``None``: malformed)."""
        async with gate:
            try:
                history = trajectory.turns[:k]
                return True, await model.predict(trajectory.start, history, action, seed=0, session=session)
            except PredictionInvalid:
                return True, None
            except (EngineFailure, ContextFull):
                return False, None
            finally:
                model.release(session)

    keys = []
    for trajectory, k, one, other, _ in pairs:
        state = tuple(turn.action for turn in trajectory.turns[:k])
        both = [((trajectory.task_id, trajectory.start, state), turn.action) for turn in (one, other)]
        keys.append(both)
        for key, turn in zip(both, (one, other), strict=True):
            if key not in questions:
                questions[key] = ask(trajectory, k, turn.action, ("audit-pair", len(questions)))
    answers = dict(zip(questions, await asyncio.gather(*questions.values()), strict=True))
    return [
        ActionPair(t.task_id, str(a[0]), (one.action, other.action), same, (answers[a][1], answers[b][1]))
        for (t, _, one, other, same), (a, b) in zip(pairs, keys, strict=True)
        if answers[a][0] and answers[b][0]
    ]


def alike(a: Prediction, b: Prediction) -> bool:
    """Whether two predictions say the same: text, reward and end."""
    return (
        a.observation.strip() == b.observation.strip()
        and same_reward(a.reward, b.reward)
        and a.terminated == b.terminated
    )


def sensitivity_metrics(pairs: Sequence[ActionPair]) -> dict[str, Any]:
    """Sensitivity and specificity; a pair with a malformed prediction counts against the model in both."""

    def share(some: Sequence[ActionPair], wanted: bool) -> dict[str, Any]:
        hits = [a is not None and b is not None and alike(a, b) is wanted for a, b in (p.predicted for p in some)]
        return proportion(hits, clusters([p.task_id for p in some], [p.state for p in some])).to_json()

    return {
        "states": len({p.state for p in pairs}),
        "sensitivity": share([p for p in pairs if not p.same], False),
        "specificity": share([p for p in pairs if p.same], True),
    }
