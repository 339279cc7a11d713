"""If these fail, members of an ensemble judge each other by numbers that are not their log-probs.

The oracle is one full forward pass of transformers; the tolerance is the one that the engine states for fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from policy.lm.engine import (
    Completion,
    ContextFull,
    Engine,
    EngineCannotScore,
    EngineFailure,
    EngineUnavailable,
    Sampling,
    scorer,
)
from policy.lm.engines.inprocess import engine as inprocess
from policy.lm.engines.inprocess.engine import InProcessEngine
from policy.lm.engines.openai import OpenAIEngine
from tests.support.asking import VOCAB, prompt, together
from tests.support.engines import CONTEXT, MODEL, NEVER, assert_scored, make_model


def oracle(model: Any, ids: Sequence[int], start: int) -> list[float]:
    with torch.no_grad():
        table = model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)
    return [float(table[t - 1, ids[t]]) for t in range(start, len(ids))]


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_scores_equal_teacher_forced_logprobs(kv_heads: int) -> None:
    """All places a text can start, from its second token to its last, at the same time."""
    model = make_model(kv_heads)
    engine = InProcessEngine(model, CONTEXT)
    asked = [(prompt(40, seed), start) for seed, start in enumerate((1, 2, 20, 38, 39))]
    got = together(*(engine.score(ids, start) for ids, start in asked))
    for (ids, start), logprobs in zip(asked, got, strict=True):
        assert len(logprobs) == 40 - start
        assert logprobs == pytest.approx(oracle(model, ids, start), abs=1e-4)
    assert engine.counts.scored == sum(40 - start for _, start in asked)
    assert engine.counts.generated == 0


def test_scored_and_sampled_requests_share_steps() -> None:
    """Neither disturbs the other, whatever the sampling; over three turns of one episode each."""
    engine = InProcessEngine(MODEL, CONTEXT)
    sampling = Sampling(7, NEVER, temperature=0.7)
    texts = [prompt(9, 1), prompt(23, 2), prompt(4, 3), prompt(30, 4)]
    alone = [InProcessEngine(MODEL, CONTEXT), InProcessEngine(MODEL, CONTEXT)]
    for turn in range(3):
        starts = [len(text) for text in texts]
        texts[2] += prompt(6, 10 + turn)
        texts[3] += prompt(11, 20 + turn)
        a, b, *scores = together(
            engine.complete(texts[0], sampling, seed=turn, session="a"),
            engine.complete(texts[1], sampling, seed=turn, session="b"),
            engine.score(texts[2], starts[2], session="c"),
            engine.score(texts[3], starts[3], session="d"),
        )
        for row, logprobs in zip((2, 3), scores, strict=True):
            assert logprobs == pytest.approx(oracle(MODEL, texts[row], starts[row]), abs=1e-4)
        for row, completion in enumerate((a, b)):
            assert isinstance(completion, Completion)
            (same,) = together(alone[row].complete(texts[row], sampling, seed=turn))
            assert completion.ids == same.ids
            texts[row] += completion.ids
    assert_scored(MODEL, texts[0], *together(engine.complete(texts[0], Sampling(5, NEVER), 0, session="a")), 1.0)


def test_a_turn_reads_only_what_is_new() -> None:
    """In an ensemble each member follows the episode: its history is in the cache, scored or sampled."""
    engine = InProcessEngine(MODEL, CONTEXT)
    history = prompt(60, 0)
    together(engine.score(history, 50, session="s"))
    before = engine.counts.fed
    longer = [*history, *prompt(5, 1)]
    (found,) = together(engine.score(longer, 62, session="s"))
    assert engine.counts.fed - before <= 6  # the last token of the history and those of the turn
    assert found == pytest.approx(oracle(MODEL, longer, 62), abs=1e-4)
    before = engine.counts.fed
    (again,) = together(engine.score(longer, 30, session="s"))  # an earlier start: the cache is no help beyond it
    assert engine.counts.fed - before == 64 - 29
    assert again == pytest.approx(oracle(MODEL, longer, 30), abs=1e-4)


def test_a_text_that_is_read_in_pieces_is_scored_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inprocess, "_STEP_TOKENS", 16)
    engine = InProcessEngine(MODEL, CONTEXT)
    asked = [(prompt(70, 5), 3), (prompt(50, 6), 40)]
    got = together(*(engine.score(ids, start) for ids, start in asked))
    for (ids, start), logprobs in zip(asked, got, strict=True):
        assert logprobs == pytest.approx(oracle(MODEL, ids, start), abs=1e-4)


def test_a_common_beginning_is_copied_only_as_far_as_it_is_not_scored() -> None:
    engine = InProcessEngine(MODEL, CONTEXT)
    text = prompt(80, 7)
    together(engine.score(text, 70, session="a"))
    (found,) = together(engine.score(text, 40, session="b"))
    assert found == pytest.approx(oracle(MODEL, text, 40), abs=1e-4)
    assert engine.counts.reused == 39


def test_what_cannot_be_scored_says_so() -> None:
    engine = InProcessEngine(MODEL, CONTEXT)
    ids = prompt(10, 0)
    for start in (0, 10, -1):
        assert isinstance(together(engine.score(ids, start))[0], ValueError)
    assert isinstance(together(engine.score([VOCAB, 1], 1))[0], ValueError)
    assert isinstance(together(engine.score(prompt(CONTEXT + 1, 0), 5))[0], ContextFull)
    assert len(together(engine.score(prompt(CONTEXT, 0), 5))[0]) == CONTEXT - 5  # nothing follows: all of it fits


def test_a_score_that_is_not_finite_fails_alone() -> None:
    model = make_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = math.nan
    engine = InProcessEngine(model, CONTEXT)
    good = [i for i in prompt(30, 0) if i != 7]
    bad, fine = together(engine.score([*good[:5], 7, *good[5:]], 3, session="x"), engine.score(good, 3, session="y"))
    assert isinstance(bad, EngineFailure)
    assert fine == pytest.approx(oracle(model, good, 3), abs=1e-4)


def test_an_engine_that_only_samples_is_refused_with_the_way_out() -> None:
    class Samples:
        context, version = 8, 0

        async def complete(self, *_: Any) -> Completion:
            return Completion((1,), (0.0,), True)

        def release(self, session: object) -> None: ...

        def update_weights(self) -> None: ...

    engine: Engine = Samples()  # type: ignore[assignment]
    with pytest.raises(EngineCannotScore, match="engine=inprocess") as caught:
        scorer(engine)
    assert isinstance(caught.value, EngineUnavailable)  # the command shows it as one line
    assert not hasattr(OpenAIEngine, "score")
    assert scorer(InProcessEngine(MODEL, CONTEXT))
