"""If these fail, an ensemble is sure where its members are apart, or is one model that calls itself several."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from policy.lm.backbone import build_model
from policy.lm.engine import Engine, EngineCannotScore
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.engines.inprocess.slot_engine import DeviceScheduler
from policy.lm.render import ChatFormat
from policy.lm.settings import ModelSettings
from policy.lm.tokenizer import train_tokenizer
from real_envs.trajectory import Turn
from tests.support.engines import shake
from worldmodel.ensemble import EnsembleWorldModel, disagreement, log_mean
from worldmodel.formats.full import FullObservation, prompt_tokens, status_line
from worldmodel.text import ParsedPrediction, TextWorldModel
from worldmodel.world_model import Prediction, PredictionInvalid

SIZES = ModelSettings(hidden=16, layers=2, heads=2, kv_heads=1, mlp=32, context=512)
CHAT = ChatFormat(train_tokenizer(["HALL"], 270, [status_line(0, False)]))
STATUS = CHAT.encode(status_line(0, False))[0]


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) if p else -math.inf for p in probabilities]


@pytest.mark.parametrize(
    ("probabilities", "nats"),
    [
        ((0.5, 0.5), 0.0),
        ((0.01, 0.01, 0.01), 0.0),  # all unsure: chance in the world, nothing to learn
        ((1.0, 0.0), math.log(2)),  # one alone finds it possible
        ((0.2, 0.0, 0.0), math.log(3)),
        # posterior 3/4, 1/4 against 1/2, 1/2
        ((0.9, 0.3), 0.75 * math.log(1.5) + 0.25 * math.log(0.5)),
        ((0.0, 0.0), 0.0),
    ],
)
def test_disagreement_by_hand(probabilities: tuple[float, ...], nats: float) -> None:
    assert disagreement(logs(*probabilities)) == pytest.approx(nats, abs=1e-12)


def test_its_mean_over_predictions_is_the_mutual_information() -> None:
    """BALD, by its other definition: entropy of the mean less the mean entropy, for two members and three answers."""
    p, q = (0.7, 0.2, 0.1), (0.1, 0.3, 0.6)
    mean = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

    def entropy(dist: Any) -> float:
        return -sum(x * math.log(x) for x in dist)

    expected = entropy(mean) - (entropy(p) + entropy(q)) / 2
    found = sum(m * disagreement(logs(a, b)) for m, a, b in zip(mean, p, q, strict=True))
    assert found == pytest.approx(expected)


def test_log_mean_by_hand() -> None:
    assert log_mean(logs(0.5, 0.1)) == pytest.approx(math.log(0.3))
    assert log_mean([-1000.0, -1001.0]) == pytest.approx(-1000 + math.log((1 + math.exp(-1)) / 2))
    assert log_mean([-math.inf, -math.inf]) == -math.inf


# --- real models in real engines


def make_model(seed: int) -> Any:
    """Random weights that end an answer soon, and with the status line before it."""
    model = build_model(SIZES, CHAT.tokenizer, seed)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model = shake(model, seed)
    with torch.no_grad():  # a table of what follows what: after the status comes the end
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(len(CHAT.tokenizer)))
        model.lm_head.bias[STATUS] = 6.0
        model.lm_head.bias[CHAT.stop] = 5.0
    return model


def members(temperature: float = 1.0, seeds: tuple[int, ...] = (0, 1, 2)) -> list[TextWorldModel]:
    scheduler = DeviceScheduler()
    return [
        TextWorldModel(
            InProcessEngine(make_model(s), SIZES.context, scheduler=scheduler), CHAT, f"w{s}", 60, temperature
        )
        for s in seeds
    ]


def teacher_forced(member: TextWorldModel, written: ParsedPrediction) -> list[float]:
    ids = torch.tensor([[*written.prompt, *written.completion.ids]])
    with torch.no_grad():
        table = member.engine.model(ids).logits[0].float().log_softmax(-1)  # type: ignore[attr-defined]
    n = len(written.prompt)
    return [float(table[t - 1, ids[0, t]]) for t in range(n, ids.shape[1])]


def valid_turns(model: EnsembleWorldModel, count: int) -> list[tuple[str, int, Prediction]]:
    """Predictions of seeds whose leading member wrote something that can be read."""
    found = []
    for seed in range(200):
        try:
            told = asyncio.run(model.predict("HALL", [], f"go {seed}", seed, session=seed))
        except PredictionInvalid:
            continue
        found.append((f"go {seed}", seed, told))
        if len(found) == count:
            return found
    raise AssertionError("the random members write nothing that can be read")


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_confidence_is_that_of_the_mixture_on_the_written_tokens(temperature: float) -> None:
    """Against one forward pass of each member by transformers, and probabilities averaged by a plain loop."""
    model = EnsembleWorldModel(members(temperature))
    for action, seed, told in valid_turns(model, 4):
        leader = model.members[model.leader(seed)]
        written = asyncio.run(leader.write("HALL", [], action, seed))
        assert written.prediction.observation == told.observation
        scores = [teacher_forced(member, written) for member in model.members]
        whole = [math.exp(sum(s)) for s in scores]
        words = [math.exp(sum(s[: written.status_start])) for s in scores]
        assert told.confidence == pytest.approx(sum(whole) / 3, rel=1e-3)
        assert told.outcome_confidence == pytest.approx(sum(whole) / sum(words), rel=1e-3)
        posterior = [p / sum(whole) for p in whole]
        expected = sum(r * math.log(3 * r) for r in posterior if r > 0)
        assert told.disagreement == pytest.approx(expected, abs=1e-3)
        assert 0 <= told.disagreement <= math.log(3) + 1e-9
        assert told.outcome_by == "model"


def test_members_with_the_same_weights_agree() -> None:
    model = EnsembleWorldModel(members(seeds=(4, 4)))
    alone = model.members[0]
    for action, seed, told in valid_turns(model, 3):
        single = asyncio.run(alone.predict("HALL", [], action, seed))
        assert told.disagreement == pytest.approx(0.0, abs=1e-6)
        assert told.confidence == pytest.approx(single.confidence, rel=1e-3)
        assert told.outcome_confidence == pytest.approx(single.outcome_confidence, rel=1e-3)
        assert single.disagreement is None  # one model is no agreement


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_a_given_opening_tells_nobody_apart(temperature: float) -> None:
    model, answered = EnsembleWorldModel(members(temperature, seeds=(4, 4))), 0
    for seed in range(200):
        try:
            alone = asyncio.run(model.members[0].write("HALL", [], "go", seed, opening="HALL"))
            prediction = asyncio.run(model.predict("HALL", [], "go", seed, opening="HALL"))
        except PredictionInvalid:
            continue
        answered += 1
        assert prediction.disagreement == pytest.approx(0.0, abs=1e-6)
        rest = teacher_forced(model.members[0], alone)[len(CHAT.encode("HALL")) :]
        assert prediction.confidence == pytest.approx(math.exp(sum(rest)), rel=1e-3)
    assert answered


def test_a_seed_draws_the_member_and_all_are_drawn() -> None:
    model = EnsembleWorldModel(members())
    drawn = [model.leader(seed) for seed in range(300)]
    assert drawn == [model.leader(seed) for seed in range(300)]
    assert all(70 <= drawn.count(m) <= 130 for m in range(3))
    assert {EnsembleWorldModel(model.members, member_selection="first").leader(seed) for seed in range(50)} == {0}
    assert {model.at_temperature(0.0).leader(seed) for seed in range(50)} == {0}  # a greedy world is one world
    assert model.at_temperature(0.0).engines == model.engines
    assert model.version == "w0+w1+w2"


def test_a_turn_costs_each_member_only_its_new_tokens() -> None:
    """Those of the last answer and the action, and what is scored; not the long start, nor earlier turns."""
    model = EnsembleWorldModel(members(), member_selection="first")
    start, turns = "HALL " * 40, [Turn(f"go {k}", "HALL", 0.0, False) for k in range(4)]
    others = [engine.counts for engine in model.engines[1:]]  # type: ignore[attr-defined]
    lengths = [len(prompt_tokens(CHAT, FullObservation(), start, turns[:k], turns[k].action).ids) for k in range(4)]
    for k in range(4):
        before = [(counts.fed, counts.scored) for counts in others]
        for seed in range(50):
            try:
                asyncio.run(model.predict(start, turns[:k], turns[k].action, seed, session="s"))
                break
            except PredictionInvalid:  # scored by nobody
                continue
        for (fed, scored), counts in zip(before, others, strict=True):
            new, written = counts.fed - fed, counts.scored - scored
            assert written > 0
            if k:
                assert new <= lengths[k] - lengths[k - 1] + written < lengths[k]
    model.release("s")


def test_members_that_cannot_be_compared_are_refused() -> None:
    first, second = members(seeds=(0, 1))
    with pytest.raises(ValueError, match="at least two"):
        EnsembleWorldModel([first])
    other = ChatFormat(train_tokenizer(["ATTIC and more"], 280))
    with pytest.raises(ValueError, match="same tokenizer"):
        EnsembleWorldModel([first, TextWorldModel(second.engine, other, "w")])

    class Samples:
        context, version = 100, 0

    engine: Engine = Samples()  # type: ignore[assignment]
    with pytest.raises(EngineCannotScore, match=r"worldmodel\.members=1"):
        EnsembleWorldModel([first, TextWorldModel(engine, CHAT, "w")])


def test_an_unreadable_prediction_is_scored_by_nobody() -> None:
    short = [TextWorldModel(m.engine, CHAT, m.version, 1, 1.0) for m in members()]
    model = EnsembleWorldModel(short, member_selection="first")
    with pytest.raises(PredictionInvalid):
        asyncio.run(model.predict("HALL", [], "go", 0))
    assert all(engine.counts.scored == 0 for engine in model.engines)  # type: ignore[attr-defined]
    assert sum(model.members[0].rejected.values()) == 1
