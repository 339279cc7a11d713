"""Which signal tells where a dream parts from the real world? The signals of a run, judged on its pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from imagination.evaluation.compare.pairs import Pair
from imagination.rollout.world_models import rules_of
from imagination.runs.models import load_model
from imagination.session import Session
from real_envs.trajectory import Trajectory
from worldmodel.evaluation.signals import (
    AnswerStates,
    Discriminator,
    DreamedTurn,
    Nearest,
    Recorded,
    Signal,
    Support,
    Violations,
    answered,
    judge_signals,
)
from worldmodel.evaluation.transitions import Judged, judge
from worldmodel.formats.full import FullObservation
from worldmodel.formats.retrieval import TransitionIndex
from worldmodel.rewards import GoalWorldModel
from worldmodel.rules.refusals import Refusals, learn_refusals
from worldmodel.world_model import LanguageWorldModel, WorldModelWrapper

EPISODES = 150  # at most, whose actions are answered


def dreamed_turns(pairs: Sequence[Pair]) -> list[DreamedTurn]:
    """The policy's dreamed turns up to the first that the real world answered differently, in more than wording."""
    turns = []
    for pair in pairs:
        if pair.source != "dream" or not pair.comparable:
            continue
        first, both = pair.alignment.first_in_substance, min(len(pair.dream.turns), len(pair.real.turns))
        end = both if first is None else min(first + 1, both)
        turns += [DreamedTurn(pair.dream, k, k == first) for k in range(pair.dream.prefix_turns, end)]
    return turns


async def signal_table(
    session: Session, pairs: Sequence[Pair], unseen: Sequence[Trajectory], world: LanguageWorldModel
) -> list[dict[str, Any]]:
    """``judge_signals`` of all signals that the run can have, with ``on``: what they are judged on.

    ``replays`` are the policy's dreams up to where the real world answers differently; ``answers`` those of ``world``
    to the actions of ``unseen`` tasks, given the real history; ``refusals`` the same, false only where they refuse
    what was done, or the other way round.
    """
    run, settings, log = session.run, session.config.worldmodel, session.log
    goal = settings.goal
    train, held, unseen = map(goal.relabel_log, (log.train, log.held, unseen))
    signals: list[Signal] = [
        Recorded("likelihood", "confidence"),
        Recorded("outcome likelihood", "outcome_confidence"),
        Recorded("ensemble disagreement", "disagreement", sure=False),
        Support(train),
        Nearest(TransitionIndex(train)),
    ]
    if (rules := rules_of(run)) is not None:
        signals.append(Violations(rules))
    plain = world
    while isinstance(plain, WorldModelWrapper):
        plain = plain.model
    plain = GoalWorldModel(plain, goal) if goal.declared else plain
    if held and settings.kind == "text" and not settings.facts and not settings.reasoning_tokens:
        model, chat = load_model(run.model("worldmodel"), "fit-world-model", settings)
        states = AnswerStates(model, chat, FullObservation())
        taught = await judge(plain.at_temperature(1.0), held[:EPISODES])
        head = Discriminator.fit(states, held, taught)
        signals += [head] if head is not None else []
    answers, refusals = _answers(unseen, await judge(world, unseen[:EPISODES]), learn_refusals(train))
    judged_on = {"replays": dreamed_turns(pairs), "answers": answers, "refusals": refusals}
    rows = [
        {"on": on, **row}
        for on, turns in judged_on.items()
        for row in judge_signals(signals, turns, session.config.seed)
    ]
    return [row for row in rows if row["n"]]


def _answers(
    log: Sequence[Trajectory], judged: Sequence[Judged], refusals: Refusals
) -> tuple[list[DreamedTurn], list[DreamedTurn]]:
    """The turns that were answered, false where they are not exact, and where they refuse or accept wrongly."""
    by_id = {t.id: t for t in log}
    exact, accepted = [], []
    for j in judged:
        if j.predicted is None:
            continue
        dream, action = answered(by_id[j.trajectory_id], j), j.turn.action
        predicted, real = (refusals.refuses(action, text) for text in (j.predicted.observation, j.turn.observation))
        exact.append(DreamedTurn(dream, j.index, not j.exact))
        accepted.append(DreamedTurn(dream, j.index, predicted != real))
    return exact, accepted
