"""Which signal tells where a dream parts from the real world? The signals of a run, judged on its pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from imagination.dreaming.world_models import rules_of
from imagination.runs.models import load_model
from imagination.runs.run_folder import RunFolder
from imagination.settings import WorldModelSettings
from imagination.trust.compare.pairs import Pair
from real_envs.streams import stream_seed
from real_envs.trajectory import Trajectory
from worldmodel.fidelity.discriminator import AnswerStates, Discriminator
from worldmodel.fidelity.signals import DreamedTurn, Nearest, Recorded, Signal, Support, Violations, judge_signals
from worldmodel.form import WholeText
from worldmodel.retrieval import TransitionIndex
from worldmodel.rules.world_model import RuledWorldModel
from worldmodel.world_model import LanguageWorldModel

TAUGHT = 2000  # turns that the discriminator learns from


def dreamed_turns(pairs: Sequence[Pair]) -> list[DreamedTurn]:
    """The policy's dreamed turns up to the first that the real world answered differently, in more than wording."""
    found = []
    for pair in pairs:
        if pair.source != "dream" or not pair.comparable:
            continue
        first, both = pair.alignment.first_in_substance, min(len(pair.dream.turns), len(pair.real.turns))
        end = both if first is None else min(first + 1, both)
        found += [DreamedTurn(pair.dream, k, k == first) for k in range(pair.dream.prefix_turns, end)]
    return found


async def signal_table(
    pairs: Sequence[Pair],
    run: RunFolder,
    settings: WorldModelSettings,
    world: LanguageWorldModel,
    train: Sequence[Trajectory],
    held: Sequence[Trajectory],
    seed: int,
) -> list[dict[str, Any]]:
    """``judge_signals`` of all signals that the run can have.

    Args:
        world: whose dreams the pairs are.
        train: the log, whose words and transitions are known.
        held: episodes of it that the world model was not trained on, from which the discriminator learns.
    """
    turns = dreamed_turns(pairs)
    signals: list[Signal] = [
        Recorded("likelihood", "confidence"),
        Recorded("outcome likelihood", "outcome_confidence"),
        Recorded("ensemble disagreement", "disagreement", sure=False),
        Support(train),
        Nearest(TransitionIndex(train)),
    ]
    if (rules := rules_of(run)) is not None:
        signals.append(Violations(rules))
    plain = world.model if isinstance(world, RuledWorldModel) else world
    if held and settings.kind == "text" and not settings.facts and not settings.reasoning_tokens:
        model, chat = load_model(run.model("worldmodel"), "fit-world-model", settings)
        states, taught = AnswerStates(model, chat, WholeText()), stream_seed("signals", seed)
        head = await Discriminator.fit(states, plain.at_temperature(1.0), held, TAUGHT, taught)
        signals += [head] if head is not None else []
    return [row for row in judge_signals(signals, turns, seed) if row["n"]]
