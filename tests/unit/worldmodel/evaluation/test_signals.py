"""If these fail, a signal that tells nothing looks good, or the one that tells false turns is not chosen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from policy.lm.backbone import build_model
from policy.lm.render import ChatFormat
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Source, StopReason, Trajectory, Turn
from tests.support.rooms_world import rooms_log
from worldmodel.evaluation.signals import (
    AnswerStates,
    Discriminator,
    DreamedTurn,
    Nearest,
    Recorded,
    Support,
    Violations,
    auroc,
    average_precision,
    judge_signals,
)
from worldmodel.evaluation.transitions import Judged
from worldmodel.formats.full import FullObservation
from worldmodel.formats.retrieval import TransitionIndex
from worldmodel.rules.mine import mine_rules
from worldmodel.world_model import Prediction


def counted(scores: Sequence[float], labels: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    at = sorted(set(scores))
    pairs = list(zip(scores, labels, strict=True))
    return tuple(np.array([float(pairs.count((s, kind))) for s in at]) for kind in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(5))
def test_auroc_and_average_precision_are_those_of_plain_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = [True, False, *(rng.random(30) < 0.3)]
    scores = [float(s) for s in rng.integers(0, 6, len(labels))]  # with many ties
    positive = [s for s, y in zip(scores, labels, strict=True) if y]
    negative = [s for s, y in zip(scores, labels, strict=True) if not y]
    above = sum((p > n) + 0.5 * (p == n) for p, n in itertools.product(positive, negative))
    assert auroc(*counted(scores, labels)) == pytest.approx(above / (len(positive) * len(negative)))
    total = recalled = 0.0
    for threshold in sorted(set(scores), reverse=True):
        shown = [y for s, y in zip(scores, labels, strict=True) if s >= threshold]
        recall = sum(shown) / len(positive)
        total, recalled = total + (recall - recalled) * sum(shown) / len(shown), recall
    assert average_precision(*counted(scores, labels)) == pytest.approx(total)


def dream(name: str, *turns: Turn, start: str = "A hall.") -> Trajectory:
    return Trajectory(
        id=name, task_id=name, group_id=name, source=Source.DREAM, agent="policy", seed=0, start=start,
        turns=turns, stop=StopReason.TURN_LIMIT,
    )  # fmt: skip


def test_a_signal_that_knows_ranks_perfectly_and_one_that_says_nothing_has_no_row_of_numbers() -> None:
    turns = []
    for k in range(12):
        true = Turn("look", "A hall.", 0.0, False, {"confidence": 0.9 - 0.01 * k})
        false = Turn("look", "A fall.", 0.0, False, {"confidence": 0.2})
        turns += [DreamedTurn(dream(f"d{k}", true, false), at, at == 1) for at in (0, 1)]
    sure, silent = judge_signals([Recorded("likelihood", "confidence"), Recorded("nothing", "disagreement")], turns, 0)
    assert sure["auroc"] == {"value": 1.0, "n": 24, "ci95": [1.0, 1.0]}
    assert sure["average_precision"]["value"] == pytest.approx(1.0)
    assert (sure["false"], sure["n"]) == (12, 24)
    assert silent["n"] == 0
    assert silent["auroc"]["value"] is None
    upside_down = judge_signals([Recorded("wrong way", "confidence", sure=False)], turns, 0)[0]
    assert upside_down["auroc"]["value"] == pytest.approx(0.0)


def test_support_and_nearest_transition_doubt_what_the_log_never_says() -> None:
    log = [dream("log", Turn("go west", "You are in the red room.", 0.0, False))]
    known = dream("known", Turn("go west", "You are in the red room.", 0.0, False))
    new = dream("new", Turn("go west", "A dragon eats seven lamps!", 0.0, False))
    turns = [DreamedTurn(known, 0, False), DreamedTurn(new, 0, True)]
    for signal in (Support(log), Nearest(TransitionIndex(log))):
        low, high = signal.scores(turns)
        assert low == 0.0
        assert high is not None
        assert high > 0.5


def test_violations_are_found_by_rules_of_the_log() -> None:
    log = rooms_log(80)
    real = rooms_log(1, episodes=1, first=900)[0]
    rules = mine_rules(log)
    k, turn = next((k, t) for k, t in enumerate(real.turns) if rules.answer(real.start, real.turns[:k], t.action))
    wrong = Turn(turn.action, "A dragon.", turn.reward, turn.terminated)
    told = dream("d", *real.turns[:k], wrong, start=real.start)
    scores = Violations(rules).scores([*(DreamedTurn(told, at, False) for at in range(k)), DreamedTurn(told, k, True)])
    assert scores == [0.0] * k + [1.0]


def _right(turn: Turn) -> Prediction:
    return Prediction(turn.observation, turn.reward or 0.0, turn.terminated, 1.0, 1.0)


def test_a_discriminator_tells_made_up_answers_from_logged_ones() -> None:
    log = rooms_log(12, episodes=2)
    texts = {t.start for t in log} | {text for t in log for turn in t.turns for text in (turn.action, turn.observation)}
    tokenizer = train_tokenizer(sorted(texts), vocab_size=400)
    sizes = ModelSettings(hidden=32, layers=2, heads=2, kv_heads=1, mlp=64, context=1024)
    model = build_model(sizes, tokenizer, seed=0)
    states = AnswerStates(model, ChatFormat(tokenizer), FullObservation())
    made = Prediction("word word word", 0.0, False, 0.5, 0.5)
    judged = [Judged(t.id, k, turn, made, t.task_id) for t in log[:16] for k, turn in enumerate(t.turns)]
    judged += [replace(judged[0], predicted=None), replace(judged[1], predicted=_right(judged[1].turn))]
    head = Discriminator.fit(states, log[:16], judged)
    assert head is not None
    true = log[-1]
    false = dream("d", Turn(true.turns[0].action, "word word word", 0.0, False), start=true.start)
    first, made_up = head.scores([DreamedTurn(true, 0, False), DreamedTurn(false, 0, True)])
    assert first is not None
    assert made_up is not None
    assert made_up > 0 > first
